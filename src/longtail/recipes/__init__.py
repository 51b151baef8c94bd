"""One function per data set of the paper -> Config. The settings say whose numbers are followed:

released  as the method's own released code ran it on CIFAR-LT (SupCon has no such code: it takes PaCo's frame);
paper     as the PaCo paper's text has it ("strictly follow" Balanced Softmax: batch 512, cosine, 400 epochs); on CIFAR-LT PaCo
          does not train so, as docs/log.md tells;
equal     one budget for every method: 400 epochs, AutoAugment and Cutout, PaCo's optimizer.

Published figures are top-1 percentages, from the PaCo paper unless another source is named. None is a measurement of ours:
those stand in results/.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from longtail.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    PaCo,
    SupCon,
    TrainConfig,
    ViewConfig,
    ViewsConfig,
)
from longtail.deprecated import find_renamed
from longtail.errors import UserError, unknown_name
from longtail.recipes import published_rows
from longtail.recipes.imagenet_scale import (
    AUGMENTS,
    IMAGENET,
    IMAGENET_LT,
    INAT2018,
    PLACES_LT,
    imagenet,
    imagenet_lt,
    inat2018,
    places_lt,
)
from longtail.recipes.method_presets import (
    AUTO_CUTOUT,
    BALANCED_SGD,
    METHODS,
    PACO_SGD,
    PLAIN,
    SIM,
    AuthorSettings,
    entry,
    require_choice,
)
from longtail.recipes.published_rows import Rows

__getattr__ = find_renamed(
    __name__,
    {"Authors": "AuthorSettings", "is_own": "is_user_data", "one_budget": "equal_budget", "only": "require_choice"},
)

SETTINGS = ("released", "paper", "equal")

CIFAR = {"cifar10": (10, 5000), "cifar100": (100, 500)}  # classes, and training images of each

# The paper's augmentation strategies: (view of the query network, view of the key network).
STRATEGIES = {1: ("sim", "sim"), 2: ("rand", "rand"), 3: ("rand", "sim")}


def cifar100_lt(method: str = "paco", imbalance: float = 100, setting: str = "released") -> Config:
    """CIFAR-100-LT with ResNet-32: the paper's Table 6.

    Paper, at imbalance 100 / 50 / 10: PaCo 52.0 / 56.0 / 64.2, Balanced Softmax 50.8 / 54.2 / 63.0.
    """
    return _cifar_lt("cifar100", method, imbalance, setting)


def cifar10_lt(method: str = "paco", imbalance: float = 100, setting: str = "released") -> Config:
    """CIFAR-10-LT with ResNet-32, by the settings of CIFAR-100-LT: the paper prints no figure for it."""
    return _cifar_lt("cifar10", method, imbalance, setting)


def cifar100(method: str = "paco-no-rebalance", imbalance: float = 1, setting: str = "paper") -> Config:
    """Full CIFAR-100 with the CIFAR ResNet-50: the paper's Table 8. Paper: CE 77.9, SupCon 76.5, PaCo 79.1.

    Balanced data: the prior says nothing, so the centers are not rebalanced. SimAugment only, batch 256, lr 0.1, weight
    decay 5e-4, tau 0.07, alpha 0.008. The queue's length is not published: 1,024 is our choice, and so is the cosine.
    """
    require_choice("cifar100", "setting", setting, ("paper",))
    chosen = _method(method, 256, 400, tau=0.07, alpha=0.008, queue=1024, projection_dim=128)
    return Config(
        recipe=f"cifar100/{setting}",
        data=DataConfig(name="cifar100", imbalance=imbalance, **entry(method).data),
        views=ViewsConfig(query=SIM, key=SIM, normalize="cifar100"),
        model=ModelConfig(name="resnet50_cifar"),
        method=chosen,
        optim=OptimConfig(lr=0.1, weight_decay=5e-4, warmup_epochs=10),
        train=TrainConfig(epochs=400, batch_size=256),
    )


def digits_lt(method: str = "paco", imbalance: float = 40, setting: str = "equal") -> Config:
    """Handwritten digits of 8x8 pixels (1,797 images, inside scikit-learn), long-tailed: the demo's data."""
    require_choice("digits-lt", "setting", setting, ("equal",))
    soft = ViewConfig(crop="resized", crop_scale=(0.6, 1.0), flip=False)  # a mirrored digit is another sign
    return Config(
        recipe=f"digits-lt/{setting}",
        data=DataConfig(name="digits", imbalance=imbalance, image_size=8, **entry(method).data),
        views=ViewsConfig(query=soft, key=soft, normalize="half"),
        model=ModelConfig(name="resnet8_cifar"),
        method=_method(
            method, 64, 20, tau=0.1, alpha=0.05, queue=256, projection_dim=32, momentum=0.99, memory_epochs=10
        ),
        optim=OptimConfig(lr=0.1, weight_decay=5e-4, warmup_epochs=2),
        train=TrainConfig(epochs=40, batch_size=64),
    )


def tiny_imagenet_lt(method: str = "paco", imbalance: float = 1, setting: str = "equal") -> Config:
    """Tiny-ImageNet-LT, 200 classes with 250 down to 2 images of 64x64 pixels: a folder, and the settings of any folder.

    `--data.root` names it. The paper prints no figure for it.
    """
    return _small_photographs("tiny-imagenet-lt", {"name": "folder"}, method, imbalance, setting)


def folder(root: Path, method: str = "paco", imbalance: float = 1, setting: str = "equal") -> Config:
    """Any images of the user's, at 64 pixels with the small-image ResNet-18; their own counts are the long tail.

    `root` is an image folder, a folder of parquet shards, or a list of files.
    """
    return _small_photographs("folder", _where(root), method, imbalance, setting)


def _small_photographs(recipe: str, where: dict[str, Any], method: str, imbalance: float, setting: str) -> Config:
    require_choice("a folder or list of images" if recipe == "folder" else recipe, "setting", setting, ("equal",))
    query = ViewConfig(crop="resized", crop_scale=(0.2, 1.0), policy="rand")
    return Config(
        recipe=f"{recipe}/{setting}",
        data=DataConfig(**where, imbalance=imbalance, image_size=64, **entry(method).data),
        views=ViewsConfig(query=query, key=SIM, normalize="imagenet"),
        model=ModelConfig(name="resnet18_cifar"),
        method=_method(method, 128, 50, tau=0.1, alpha=0.02, queue=1024, projection_dim=128),
        optim=OptimConfig(lr=0.05, weight_decay=5e-4, warmup_epochs=5),
        train=TrainConfig(epochs=100, batch_size=128),
    )


LISTS = (".txt", ".csv", ".tsv", ".json")


def _where(path: Path) -> dict[str, Any]:
    """What kind of source a path is. Shards lie in a folder without class folders."""
    if path.is_file():
        return {"name": "list", "train_list": path}
    try:
        there = [f for f in path.iterdir() if not f.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"cannot list {path} ({error.strerror}): check its permissions", kind="unreadable-file"
        ) from error
    shards = any(f.suffix.lower() == ".parquet" for f in there) and not any(f.is_dir() for f in there)
    return {"name": "shards" if shards else "folder", "root": path}


def is_user_data(name: str | Path) -> bool:
    """Whether it is the path of a user's images, and no recipe's name."""
    path = Path(name)
    try:
        there = path.is_dir() or (path.is_file() and path.suffix.lower() in LISTS)
        return there and str(name) not in RECIPES
    except OSError:  # no path at all
        return False


class Recipe(NamedTuple):
    build: Callable[..., Config]
    settings: tuple[str, ...]
    published: dict[tuple[str, float], float]
    """(method, imbalance) -> top-1 percentage of the PaCo paper."""
    networks: tuple[str, ...] = ()
    """The choices of --network, the recipe's own first; none: there is one, by --model.name."""
    augments: tuple[str, ...] = ()
    """Those of --augment."""
    rows: Rows = {}  # noqa: RUF012
    """What the paper prints, where a data set has several networks and augmentations."""


RECIPES: dict[str, Recipe] = {
    "cifar100-lt": Recipe(
        cifar100_lt,
        SETTINGS,
        {(m, factor): figure for m, e in METHODS.items() for factor, figure in e.published.items()},
    ),
    "cifar10-lt": Recipe(cifar10_lt, SETTINGS, {}),
    "cifar100": Recipe(
        cifar100,
        ("paper",),
        {("ce", 1): 77.9, ("supcon", 1): 76.5, ("ce-supcon", 1): 78.0, ("paco-no-rebalance", 1): 79.1},
    ),
    "digits-lt": Recipe(digits_lt, ("equal",), {}),
    "tiny-imagenet-lt": Recipe(tiny_imagenet_lt, ("equal",), {}),
    "imagenet-lt": Recipe(imagenet_lt, SETTINGS, {}, IMAGENET_LT.networks, tuple(AUGMENTS), published_rows.IMAGENET_LT),
    "inat2018": Recipe(inat2018, SETTINGS, {}, INAT2018.networks, tuple(AUGMENTS), published_rows.INAT2018),
    "places-lt": Recipe(places_lt, SETTINGS, {}, PLACES_LT.networks, tuple(AUGMENTS), published_rows.PLACES_LT),
    "imagenet": Recipe(imagenet, SETTINGS, {}, IMAGENET.networks, tuple(AUGMENTS), published_rows.IMAGENET),
}


def make(name: str | Path, **choices: Any) -> Config:
    """The configuration of a recipe by its command-line name, or of the user's images by their path."""
    given = {k: v for k, v in choices.items() if v is not None}
    recipe = RECIPES.get(str(name))
    for choice, instead in (("network", "--model.name"), ("augment", "--views.query and --views.key")):
        if choice in given and not (recipe and recipe.networks):
            raise UserError(f"{name} has no choice of --{choice}: it is set by {instead}", kind="unsupported")
    if recipe:
        return recipe.build(**given)
    if is_user_data(name):
        return folder(Path(name), **given)
    lists = " ".join(LISTS)
    if len(Path(name).parts) > 1:
        advice = "check the path, or name a recipe (`longtail recipes` lists them)"
        raise UserError(f"{name} is no folder of images, and no list of them ({lists}): {advice}", kind="missing-file")
    raise UserError(
        f"no {name} is here, images or a list of them ({lists}): {unknown_name('recipe', name, RECIPES)}",
        kind="unknown-name",
    )


def equal_budget(name: str | Path, method: str = "ce", imbalance: float | None = None) -> Config:
    """The configuration under which methods are compared on a recipe's data, or on a folder's."""
    recipe = RECIPES.get(str(name))
    setting = "equal" if recipe and "equal" in recipe.settings else None
    config = make(name, method=method, imbalance=imbalance, setting=setting)
    return replace(config, train=replace(config.train, seeds=(0, 1, 2)))  # as many as a verdict needs


def with_epochs(config: Config, epochs: int, usual: int | None = None) -> Config:
    """A longer or shorter run: its stages keep their proportion, milestones are shares, the warm-up stays as it is.

    `usual` is the length that its second stage was meant for; the recipe's own, if not said.
    """
    if epochs < 1:
        raise UserError(f"--epochs {epochs}: it must be at least 1")
    method, before = config.method, usual or config.train.epochs
    if method.second_epochs and epochs != before:
        scaled: Any = {method.second_stage_epochs_field: max(round(method.second_epochs * epochs / before), 1)}
        method = replace(method, **scaled)
    return replace(config, method=method, train=replace(config.train, epochs=epochs))


def with_strategy(config: Config, strategy: int) -> Config:
    """The same run under one of the paper's augmentation strategies: a resized crop, then the policy, and no Cutout."""
    if strategy not in STRATEGIES:
        raise UserError(f"--strategy must be 1 (sim/sim), 2 (rand/rand) or 3 (rand/sim), got {strategy}")
    policies: tuple[Any, Any] = STRATEGIES[strategy]
    views = (config.views.query, config.views.key)
    query, key = (replace(v, policy=p, crop="resized", cutout=0) for v, p in zip(views, policies, strict=True))
    return replace(config, views=replace(config.views, query=query, key=key))


def _cifar_lt(data: Any, method: str, imbalance: float, setting: str) -> Config:
    require_choice(f"{data}-lt", "setting", setting, SETTINGS)
    chosen, released = entry(method), setting == "released"
    known: dict[str, Any] = {"tau": 0.05, "alpha": 0.01, "queue": 1024, "projection_dim": 32, "removal": 1.5}
    if setting == "paper":
        known |= {"alpha": 0.02, "center_tau": 0.05, "projection_norm": False}
    if chosen.kind is SupCon:
        known |= {"linear_epochs": 400 if setting == "paper" else 100}
    config = Config(
        recipe=f"{data}-lt/{setting}",
        # its authors held nothing out
        data=DataConfig(name=data, imbalance=imbalance, **({} if released and chosen.authors else chosen.data)),
        views=ViewsConfig(query=AUTO_CUTOUT, key=SIM),
        model=ModelConfig(name="resnet32_cifar"),
        method=chosen.settings(512 if setting == "paper" else 128, imbalance, released, **known),
        optim=PACO_SGD,
        train=TrainConfig(epochs=400, batch_size=128),
    )
    if released and chosen.authors:
        return _as_released(config, chosen.authors)
    return _as_in_the_paper(config) if setting == "paper" else config


def _as_released(config: Config, authors: AuthorSettings) -> Config:
    """In the setting of the method's own code."""
    optim, epochs = authors.optim, authors.epochs
    if authors.steps:
        # 619 epochs at imbalance 100, 542 at 50, 342 at 10, for 13,000 steps of 512
        epochs = round(authors.steps / (_images(config.data.name, config.data.imbalance) // authors.batch_size))
        optim = replace(optim, warmup_epochs=round(epochs * authors.warmup_steps / authors.steps, 1))
    view = authors.view
    return replace(
        config,
        views=replace(config.views, query=view, key=view if view == PLAIN else config.views.key),
        optim=optim,
        train=replace(config.train, epochs=epochs, batch_size=authors.batch_size),
    )


def _as_in_the_paper(config: Config) -> Config:
    """800 of 13,000 steps warm up: the same share of 400 epochs. Centers without bias."""
    return replace(
        config,
        optim=replace(BALANCED_SGD, warmup_epochs=24.6),
        train=replace(config.train, batch_size=512),
        model=replace(config.model, bias=not isinstance(config.method, PaCo)),
    )


def _images(data: str, imbalance: float) -> int:
    """How many images the exponential draw keeps."""
    classes, largest = CIFAR[data]
    return sum(int(largest * imbalance ** (-c / (classes - 1))) for c in range(classes))


def _method(name: str, batch_size: int, supcon_epochs: int, **values: Any) -> MethodConfig:
    """`supcon_epochs`: of SupCon's linear stage; other second stages are as short as their authors have them."""
    chosen = entry(name)
    linear: dict[str, Any] = {"linear_epochs": supcon_epochs} if chosen.kind is SupCon else {}
    return chosen.settings(batch_size, **values, **linear)
