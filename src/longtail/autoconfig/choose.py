"""The choices, in the order in which they depend on one another: method, network, views, batch and length, contrast, rates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longtail import recipes
from longtail.autoconfig.config_choices import YOURS, Choice, ConfigChoices, with_values
from longtail.autoconfig.facts import Facts
from longtail.autoconfig.networks import Network, choose_network
from longtail.config import Config
from longtail.theory import auto_alpha

LEVEL = 1.5  # largest over smallest class up to which there is no tail to speak of
SPARE = 1_000  # training images from which some are spared for validation
HEADROOM = 4  # of memory: gradients, the key network, views under way, and what the estimate leaves out
SLOW = 10_000  # steps up to which a key network that keeps 0.999 of itself at each would lag behind


class Chosen(NamedTuple):
    config: Config
    choices: list[Choice]
    cautions: list[str]

    def lines(self, without: str = "", width: int | None = None) -> list[str]:
        """As a person reads it, on so many columns; where reasons do not fit beside the choices they stand below them."""
        shown = [c for c in self.choices if c.flag != without]
        wide, value = max(len(c.flag) for c in shown), max(len(c.value) for c in shown)
        rows = [f"  {c.flag:{wide}}  {c.value:{value}}  {c.why}" for c in shown]
        if width and max(map(len, rows)) > width:
            rows = [line for c in shown for line in (f"  {c.flag}  {c.value}", f"      {c.why}")]
        return ["chosen for these images on this machine; the flags change it:", *rows, *self.cautions]


def choose(
    images: str | Path,
    facts: Facts,
    method: str | None = None,
    given: Mapping[str, Any] | None = None,
    imbalance: float | None = None,
) -> Chosen:
    """The configuration for a folder, list or shards of images. `given` are the user's own values, by flag ("optim.lr")."""
    book = ConfigChoices(given or {})
    name = choose_method(facts, method, book)
    base = recipes.make(images, method=name, imbalance=imbalance)
    network = choose_network(facts, book)
    choose_views(facts, network, book)
    choose_length(facts, network, book)
    choose_contrast(facts, set(type(base.method).__dataclass_fields__), book)
    choose_rates(facts, network, book)
    choose_validation(facts, base, book)
    config = with_values(base, {"recipe": "folder/chosen"} | book.values)
    config = with_values(recipes.with_epochs(config, config.train.epochs, base.train.epochs), book.given)
    return Chosen(config, book.choices, cautions(facts, config))


def choose_method(facts: Facts, asked: str | None, book: ConfigChoices) -> str:
    times = f"the largest class has {facts.imbalance:.3g} times the images of the smallest"
    name, why = "paco", f"{times}: its centers are rebalanced"
    if facts.imbalance <= LEVEL:
        name, why = "paco-no-rebalance", "the classes have about as many images each: there is no tail to rebalance"
    book.choices.append(Choice("--method", asked or name, YOURS if asked else why))
    return asked or name


def choose_views(facts: Facts, network: Network, book: ConfigChoices) -> None:
    """Crops as strong as the images can bear; signs are not mirrored."""
    small = network.side < 24
    for view in ("query", "key"):
        book.set(f"views.{view}.crop", "resized")
        book.set(f"views.{view}.crop_scale", (0.6, 1.0) if small else (0.2, 1.0))
    book.set("views.key.policy", "none" if small else "sim")
    book.set("views.normalize", network.normalize)
    strong = "RandAugment for the query network, SimAugment for the key network: the paper's"
    why = "images this small bear soft crops only" if small else strong
    book.pick("views.query.policy", "none" if small else "rand", why)
    flag = "views.query.flip"
    mirrored = book.given.get(flag, not facts.gray)
    color = "left and right look alike in photographs"
    why = "gray images may be signs or scans, where left is not right" if facts.gray else color
    book.pick(flag, mirrored, why)
    book.set("views.key.flip", mirrored)
    book.set("views.test_crop", 0.875 if facts.side >= 1.1 * network.side and network.side > 96 else 1.0)


def choose_length(facts: Facts, network: Network, book: ConfigChoices) -> None:
    """Batch and epochs, by images, memory, and what the machine can do in a sitting."""
    n, batch = facts.images, 128 if facts.gpu else 32
    why = "what the recipes of the paper have" if facts.gpu else "small steps suit a CPU"
    if n < 8 * batch:
        batch, why = max(power_below(n / 8), min(power_below(n), 16)), f"few images: {n:,}"
    fits = power_below(facts.memory / HEADROOM / (network.bytes_per_pixel * network.side**2))
    if fits < batch:
        batch, why = max(fits, 2), f"what {facts.memory / 2**30:.0f} GiB of memory hold, by a careful estimate"
    book.pick("train.batch_size", batch, why)
    batch = batch_of(facts, book)
    steps, least, most = LENGTHS[network.pretrained, facts.gpu]
    epochs = min(max(round(steps * batch / n), least), most)
    start = "pretrained weights need few" if network.pretrained else "from scratch takes long"
    where = "" if facts.gpu else ", and a CPU is slow"
    why = f"{start}{where}: about {max(n // batch, 1) * epochs:,} steps"
    short = book.given.get("train.epochs", epochs) < epochs / 2
    yours = f"{YOURS}; {epochs} would be: after fewer PaCo may still be behind" if short else YOURS
    epochs = book.pick("train.epochs", epochs, why, yours=yours)
    book.set("optim.warmup_epochs", min(5.0, round(epochs / 10, 1)))
    book.set("train.checkpoint_every", max(1, min(10, epochs // 5)))


# Steps to aim at, and the fewest and most epochs, by (pretrained, on a GPU).
LENGTHS = {
    (True, True): (3_000, 10, 50),
    (True, False): (500, 5, 30),
    (False, True): (20_000, 90, 400),
    (False, False): (2_000, 10, 100),
}


def batch_of(facts: Facts, book: ConfigChoices) -> int:
    """Images of a step: all of them at most, whatever was asked for."""
    return min(book.values["train.batch_size"], facts.images)


def choose_contrast(facts: Facts, settings: set[str], book: ConfigChoices) -> None:
    """Of methods that have a queue, centers, a key network."""
    if "queue" not in settings:
        return
    n, batch = facts.images, batch_of(facts, book)
    queue = min(max(power_below(n / 10), min(power_below(n), 64)), 8192)
    why = "the paper's longest" if queue == 8192 else "about a tenth of the images, as on CIFAR-100-LT"
    why = why if queue <= n / 8 else "the shortest worth having"
    queue = book.pick("method.queue", queue, f"{why}: past keys to contrast with")
    if "alpha" in settings:
        alpha = book.given.get("method.alpha", "auto")
        share = auto_alpha(facts.counts, queue, batch)
        why = "by the paper's theory: at the optimum the centers have 0.71 of the mean softmax (longtail theory)"
        book.pick("method.alpha", alpha, why, f"auto = {share:g}" if alpha == "auto" else "{}")
    if "momentum" in settings:
        short = max(n // batch, 1) * book.values["train.epochs"] < SLOW
        why = "few steps: a slower key network would lag behind" if short else "MoCo's, as in the paper"
        book.pick("method.momentum", 0.99 if short else 0.999, why)


def choose_rates(facts: Facts, network: Network, book: ConfigChoices) -> None:
    """SGD as the paper has it; AdamW with rates by layer for networks that are trained by it."""
    modern, share = network.modern, (batch_of(facts, book) / 128) ** 0.5
    why = "what transformers and ConvNeXts are trained by" if modern else "what ResNets and the paper have"
    name = book.pick("optim.name", "adamw" if modern else "sgd", why)
    frozen = book.values.get("model.trainable") == "head"
    if name == "adamw":
        rate, decay = (1e-3, 0.05) if not network.pretrained or frozen else (2.5e-4, 0.05)
        book.set("optim.decay_norms", False)
        book.set("optim.layer_decay", 0.75 if network.pretrained and modern and not frozen else 1.0)
        book.set("optim.clip", 1.0)
    else:
        rate, decay = (0.05, 5e-4) if not network.pretrained else (0.02 if frozen else 0.01, 1e-4)
    start = "on a frozen trunk" if frozen else "from pretrained weights" if network.pretrained else "from scratch"
    why = f"{rate:g} at 128 images, {start}, by the root of the batch"
    book.pick("optim.lr", float(f"{rate * share:.3g}"), why)
    book.set("optim.weight_decay", decay)
    book.set("optim.head_lr", 10.0 if network.pretrained and not frozen else 1.0)


def choose_validation(facts: Facts, base: Config, book: ConfigChoices) -> None:
    share, why = 0.1, "of each class's training images, never its last two: what you tune is not chosen on the test set"
    if facts.images < SPARE and base.data.val_fraction == 0:
        why = f"{facts.images:,} images are too few to spare some: probabilities stay uncalibrated, and nothing can be tuned"
        share = 0.0
    book.pick("data.val_fraction", max(share, base.data.val_fraction), why)


def cautions(facts: Facts, config: Config) -> list[str]:
    """What these images or this machine will not give, however one chooses."""
    said, single = [], sum(n == 1 for n in facts.counts)
    if single:
        said.append(
            f"classes of a single training image: {single:,}; contrast has nothing but its other views to offer them"
        )
    if not facts.gpu and facts.images * config.train.epochs > 500_000:
        said.append("without a GPU this takes days: try --train.epochs 1 for the time, or a GPU")
    return said


def power_below(number: float) -> int:
    """The largest power of two that is not above it; at least 1."""
    return 1 << max(int(number), 1).bit_length() - 1
