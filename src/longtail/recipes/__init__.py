"""Recipes: functions that return the configuration of a dataset of the paper, or of the user's images.

A recipe has one or more settings, which say whose training setup is followed:

released  the setup of the method's own released code on CIFAR-LT (SupCon has none and uses PaCo's);
paper     the setup in the text of the PaCo paper ("strictly follow" Balanced Softmax: batch size 512, cosine schedule, 400
          epochs). On CIFAR-LT, PaCo does not train well with it, see docs/log.md;
equal     the same budget for every method: 400 epochs, AutoAugment and Cutout, PaCo's optimizer.

`make` returns the configuration of a recipe by its name, `RECIPES` lists the recipes, and `METHODS` the methods. The
recipes of the ImageNet-scale datasets are in `imagenet_scale.py`.

Published results are top-1 percentages from the PaCo paper unless another source is named. Our own measurements are in
results/.
"""

import mimetypes
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from longtail import files
from longtail.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    PaCoSettings,
    SupConSettings,
    TrainConfig,
    ViewConfig,
    ViewsConfig,
)
from longtail.deprecated import find_renamed
from longtail.errors import UserError
from longtail.recipes.imagenet_scale import (
    AUGMENTS,
    IMAGENET,
    IMAGENET_LT,
    INAT2018,
    PLACES_LT,
    PUBLISHED,
    SETTINGS,
    PublishedRows,
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
    PAD_CROP,
    SIM_AUGMENT,
    AuthorSettings,
    find_preset,
    require_choice,
)
from longtail.text import did_you_mean

__getattr__ = find_renamed(
    __name__,
    {
        "Authors": "AuthorSettings",
        "CIFAR": "CIFAR_SIZES",
        "LISTS": "LIST_SUFFIXES",
        "PLAIN": "PAD_CROP",
        "SIM": "SIM_AUGMENT",
        "entry": "find_preset",
        "is_own": "is_user_data",
        "one_budget": "equal_budget",
        "only": "require_choice",
    },
)

ALL_METHODS = "all"  # in place of the names of methods

CIFAR_SIZES = {"cifar10": (10, 5000), "cifar100": (100, 500)}
"""Number of classes, and of training images per class."""

STRATEGIES = {1: ("sim", "sim"), 2: ("rand", "rand"), 3: ("rand", "sim")}
"""Augmentation strategies of the paper: policy of the query view and of the key view."""

LIST_SUFFIXES = (".txt", ".csv", ".tsv", ".json")
"""Suffixes of files that list images."""

OTHER_ARCHIVES = (".7z", ".rar")  # archives that Python cannot unpack

IN_MEMORY = "<memory>"
"""Stands for images that are passed from Python, in place of a path."""


# Recipes. Their arguments are described in `make`.


def cifar100_lt(method: str = "paco", imbalance: float = 100, setting: str = "released") -> Config:
    """CIFAR-100-LT with ResNet-32: Table 6 of the paper.

    Published for imbalance factors 100 / 50 / 10: PaCo 52.0 / 56.0 / 64.2, Balanced Softmax 50.8 / 54.2 / 63.0.
    """
    return _cifar_lt("cifar100", method, imbalance, setting)


def cifar10_lt(method: str = "paco", imbalance: float = 100, setting: str = "released") -> Config:
    """CIFAR-10-LT with ResNet-32 and the settings of CIFAR-100-LT. The paper has no results for it."""
    return _cifar_lt("cifar10", method, imbalance, setting)


def cifar100(method: str = "paco-no-rebalance", imbalance: float = 1, setting: str = "paper") -> Config:
    """Full CIFAR-100 with the CIFAR ResNet-50: Table 8 of the paper.

    Published: cross-entropy 77.9, SupCon 76.5, PaCo 79.1. The data are balanced, so that the centers are not rebalanced.
    SimAugment only, batch size 256, learning rate 0.1, weight decay 5e-4, tau 0.07, alpha 0.008. The queue length and the
    schedule are not published; 1,024 and cosine are our choice.
    """
    require_choice("cifar100", "setting", setting, ("paper",))
    return Config(
        recipe=f"cifar100/{setting}",
        data=DataConfig(name="cifar100", imbalance=imbalance, **find_preset(method).data),
        views=ViewsConfig(query=SIM_AUGMENT, key=SIM_AUGMENT, normalize="cifar100"),
        model=ModelConfig(name="resnet50_cifar"),
        method=_make_method(method, 256, 400, tau=0.07, alpha=0.008, queue=1024, projection_dim=128),
        optim=OptimConfig(lr=0.1, weight_decay=5e-4, warmup_epochs=10),
        train=TrainConfig(epochs=400, batch_size=256),
    )


def digits_lt(method: str = "paco", imbalance: float = 40, setting: str = "equal") -> Config:
    """Long-tailed subset of scikit-learn's handwritten digits (1,797 images of 8x8 pixels), used by the demo."""
    require_choice("digits-lt", "setting", setting, ("equal",))
    view = ViewConfig(crop="resized", crop_scale=(0.6, 1.0), flip=False)  # a flipped digit is another character
    return Config(
        recipe=f"digits-lt/{setting}",
        data=DataConfig(name="digits", imbalance=imbalance, image_size=8, **find_preset(method).data),
        views=ViewsConfig(query=view, key=view, normalize="half"),
        model=ModelConfig(name="resnet8_cifar"),
        method=_make_method(
            method, 64, 20, tau=0.1, alpha=0.05, queue=256, projection_dim=32, momentum=0.99, memory_epochs=10
        ),
        optim=OptimConfig(lr=0.1, weight_decay=5e-4, warmup_epochs=2),
        train=TrainConfig(epochs=40, batch_size=64),
    )


def tiny_imagenet_lt(method: str = "paco", imbalance: float = 1, setting: str = "equal") -> Config:
    """Tiny-ImageNet-LT: 200 classes with 250 to 2 images of 64x64 pixels, in the image folder --data.root.

    The settings are those of any image folder. The paper has no results for it.
    """
    return _small_images("tiny-imagenet-lt", {"name": "folder"}, method, imbalance, setting)


def folder(root: Path, method: str = "paco", imbalance: float = 1, setting: str = "equal") -> Config:
    """The user's images, at 64 pixels with the small-image ResNet-18; their class counts are the long tail.

    `root` is an image folder, a folder of parquet shards, or a file that lists images. These settings are the same for all
    images and train from scratch; `longtail.choose_config` returns settings that are chosen for the images and the machine.
    """
    return _small_images("folder", _detect_source(root), method, imbalance, setting)


def _small_images(recipe: str, source: dict[str, Any], method: str, imbalance: float, setting: str) -> Config:
    require_choice("a folder or list of images" if recipe == "folder" else recipe, "setting", setting, ("equal",))
    query = ViewConfig(crop="resized", crop_scale=(0.2, 1.0), policy="rand")
    return Config(
        recipe=f"{recipe}/{setting}",
        data=DataConfig(**source, imbalance=imbalance, image_size=64, **find_preset(method).data),
        views=ViewsConfig(query=query, key=SIM_AUGMENT, normalize="imagenet"),
        model=ModelConfig(name="resnet18_cifar"),
        method=_make_method(method, 128, 50, tau=0.1, alpha=0.02, queue=1024, projection_dim=128),
        optim=OptimConfig(lr=0.05, weight_decay=5e-4, warmup_epochs=5),
        train=TrainConfig(epochs=100, batch_size=128),
    )


def _detect_source(path: Path) -> dict[str, Any]:
    """Return the settings of the data for a path. A folder with parquet files and without subfolders contains
    shards."""
    if str(path) == IN_MEMORY:
        return {"name": "memory"}
    if path.is_file():
        return {"name": "list", "train_list": path}
    try:
        content = [f for f in path.iterdir() if not f.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"cannot list {path} ({error.strerror}): check its permissions", kind="unreadable-file"
        ) from error
    has_shards = any(f.suffix.lower() == ".parquet" for f in content) and not any(f.is_dir() for f in content)
    return {"name": "shards" if has_shards else "folder", "root": path}


def _cifar_lt(data: Any, method: str, imbalance: float, setting: str) -> Config:
    require_choice(f"{data}-lt", "setting", setting, SETTINGS)
    preset, is_released, is_paper = find_preset(method), setting == "released", setting == "paper"
    values: dict[str, Any] = {"tau": 0.05, "alpha": 0.01, "queue": 1024, "projection_dim": 32, "removal": 1.5}
    if is_paper:
        values |= {"alpha": 0.02, "center_tau": 0.05, "projection_norm": False}
    if preset.settings_class is SupConSettings:
        values |= {"linear_epochs": 400 if is_paper else 100}
    config = Config(
        recipe=f"{data}-lt/{setting}",
        # Released code holds out no validation images.
        data=DataConfig(name=data, imbalance=imbalance, **({} if is_released and preset.authors else preset.data)),
        views=ViewsConfig(query=AUTO_CUTOUT, key=SIM_AUGMENT),
        model=ModelConfig(name="resnet32_cifar"),
        method=preset.make_settings(512 if is_paper else 128, imbalance, is_released, **values),
        optim=PACO_SGD,
        train=TrainConfig(epochs=400, batch_size=128),
    )
    if is_released and preset.authors:
        return _with_author_settings(config, preset.authors)
    return _with_paper_settings(config) if is_paper else config


def _with_author_settings(config: Config, authors: AuthorSettings) -> Config:
    """Return a configuration for CIFAR-LT with the setup of the method's own code."""
    optim, epochs = authors.optim, authors.epochs
    if authors.steps:
        # For 13,000 steps with batch size 512: 619, 542 and 342 epochs for imbalance factors 100, 50 and 10.
        steps_per_epoch = _long_tailed_size(config.data.name, config.data.imbalance) // authors.batch_size
        epochs = round(authors.steps / steps_per_epoch)
        optim = replace(optim, warmup_epochs=round(epochs * authors.warmup_steps / authors.steps, 1))
    view = authors.view
    key_view = authors.key_view or (view if view == PAD_CROP else config.views.key)
    return replace(
        config,
        views=replace(config.views, query=view, key=key_view),
        optim=optim,
        train=replace(config.train, epochs=epochs, batch_size=authors.batch_size),
    )


def _with_paper_settings(config: Config) -> Config:
    """Return a configuration for CIFAR-LT with the setup in the text of the paper.

    The warm-up has the same share of the 400 epochs as the 800 of 13,000 steps of Balanced Softmax. Centers have no bias.
    """
    return replace(
        config,
        optim=replace(BALANCED_SGD, warmup_epochs=24.6),
        train=replace(config.train, batch_size=512),
        model=replace(config.model, bias=not isinstance(config.method, PaCoSettings)),
    )


def _long_tailed_size(data: str, imbalance: float) -> int:
    """Return the number of images in the exponential long-tailed subset of a CIFAR dataset."""
    classes, largest = CIFAR_SIZES[data]
    return sum(int(largest * imbalance ** (-c / (classes - 1))) for c in range(classes))


def _make_method(name: str, batch_size: int, supcon_epochs: int, **values: Any) -> MethodConfig:
    """Return the settings of a method.

    Args:
        name: Name of the method.
        batch_size: Batch size, to which some learning rates are scaled.
        supcon_epochs: Number of epochs of SupCon's second stage. Other second stages have the length that their authors use.
        values: Settings of the recipe, for the methods that have them.
    """
    preset = find_preset(name)
    if preset.settings_class is SupConSettings:
        values |= {"linear_epochs": supcon_epochs}
    return preset.make_settings(batch_size, **values)


# All recipes by name


class Recipe(NamedTuple):
    """A recipe, and what the paper published about it."""

    build: Callable[..., Config]
    settings: tuple[str, ...]
    published: dict[tuple[str, float], float]
    """Published top-1 accuracy in percent, by method and imbalance factor."""
    networks: tuple[str, ...] = ()
    """Values of --network, the default first; empty if the network can only be changed by --model.name."""
    augments: tuple[str, ...] = ()
    """Values of --augment."""
    rows: PublishedRows = {}  # noqa: RUF012
    """Published results of recipes with several networks and augmentations."""


RECIPES: dict[str, Recipe] = {
    "cifar100-lt": Recipe(
        cifar100_lt,
        SETTINGS,
        {(name, factor): top1 for name, preset in METHODS.items() for factor, top1 in preset.published.items()},
    ),
    "cifar10-lt": Recipe(cifar10_lt, SETTINGS, {}),
    "cifar100": Recipe(
        cifar100,
        ("paper",),
        {("ce", 1): 77.9, ("supcon", 1): 76.5, ("ce-supcon", 1): 78.0, ("paco-no-rebalance", 1): 79.1},
    ),
    "digits-lt": Recipe(digits_lt, ("equal",), {}),
    "tiny-imagenet-lt": Recipe(tiny_imagenet_lt, ("equal",), {}),
    "imagenet-lt": Recipe(imagenet_lt, SETTINGS, {}, IMAGENET_LT.networks, tuple(AUGMENTS), PUBLISHED["imagenet-lt"]),
    "inat2018": Recipe(inat2018, SETTINGS, {}, INAT2018.networks, tuple(AUGMENTS), PUBLISHED["inat2018"]),
    "places-lt": Recipe(places_lt, SETTINGS, {}, PLACES_LT.networks, tuple(AUGMENTS), PUBLISHED["places-lt"]),
    "imagenet": Recipe(imagenet, SETTINGS, {}, IMAGENET.networks, tuple(AUGMENTS), PUBLISHED["imagenet"]),
}


def is_user_data(name: str | Path) -> bool:
    """Return whether a name is the path of the user's images, and not the name of a recipe."""
    path = Path(name)
    try:
        exists = path.is_dir() or (path.is_file() and path.suffix.lower() in LIST_SUFFIXES)
        return (exists and str(name) not in RECIPES) or str(name) == IN_MEMORY
    except OSError:  # not a valid path
        return False


def make(name: str | Path, **choices: Any) -> Config:
    """Return the configuration of a recipe, or fixed settings for the user's images, which train from scratch at 64 pixels.

    `longtail train` chooses settings for the user's images instead; `longtail.choose_config` returns these.

    Args:
        name: Name of a recipe, or path of an image folder, of a folder of shards or of a file that lists images.
        **choices: `method`, `imbalance` (imbalance factor) and `setting`; for ImageNet-scale recipes also `network` and
            `augment`. None stands for the default of the recipe.

    Raises:
        UserError: The recipe does not exist, or does not have one of the choices.
    """
    given = {k: v for k, v in choices.items() if v is not None}
    recipe = RECIPES.get(str(name))
    for choice, flags in (("network", "--model.name"), ("augment", "--views.query and --views.key")):
        if choice in given and not (recipe and recipe.networks):
            raise UserError(f"{name} has no option --{choice}: use {flags}", kind="unsupported")
    if recipe:
        return recipe.build(**given)
    if is_user_data(name):
        return folder(Path(name), **given)
    raise wrong_data_error(Path(name))


def wrong_data_error(path: Path) -> UserError:
    """Return the error for a name that is neither a recipe nor a path to images: what it is instead, or the closest name."""
    if os.path.isfile(path):
        return UserError(f"{path} {describe_file(path.name.lower())}", kind="missing-file")
    if os.path.lexists(path):  # a FIFO, a socket, a device, or a link to nothing
        return UserError(
            f"{path} is not a folder, and not a regular file: name a folder, shards or a list of images",
            kind="missing-file",
        )
    similar = files.find_similar_path(path)
    if len(path.parts) > 1:
        hint = f"did you mean {similar!r}?" if similar else "check the path"
        return UserError(f"{path} does not exist: {hint}", kind="missing-file")
    hint = did_you_mean(path, [*filter(None, [similar]), *RECIPES]) or f"the recipes are {', '.join(RECIPES)}"
    return UserError(f"{str(path)!r} is neither a folder nor a recipe: {hint}", kind="unknown-name")


def describe_file(name: str) -> str:
    """Return the rest of a sentence that says what a file is, given its name in lower case, and what to do instead."""
    archives = [suffix for _, suffixes, _ in shutil.get_unpack_formats() for suffix in suffixes]
    if name.endswith((*archives, *OTHER_ARCHIVES)):
        return "is an archive: unpack it first, and name the folder"
    if (mimetypes.guess_type(name)[0] or "").startswith("image/"):
        return "is a single image: name a folder with one subfolder of images for each class"
    if name.endswith(".parquet"):
        return "is a single shard: name the folder that contains it"
    return f"is not a list of images ({' '.join(LIST_SUFFIXES)}): name a list, or a folder of images"


def select_methods(names: Sequence[str] | str) -> list[str]:
    """Return names of methods without duplicates; "all" stands for all methods. An unknown name is a UserError."""
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    if not names:
        raise UserError("--methods needs at least one name, or all")
    for name in names:
        if "," in name:
            raise UserError(f"--methods {name}: separate names by spaces, as in --methods {name.replace(',', ' ')}")
        if name != ALL_METHODS:
            find_preset(name)
    return list(METHODS) if ALL_METHODS in names else names


# Changes of a configuration


def equal_budget(name: str | Path, method: str = "ce", imbalance: float | None = None) -> Config:
    """Return the configuration for comparing methods with each other.

    Args:
        name: Name of a recipe, or path of the user's images.
        method: Name of the method.
        imbalance: Imbalance factor; by default that of the recipe.

    Returns:
        The setting `equal` of the recipe if it exists, with three seeds, the minimum for significance tests.
    """
    recipe = RECIPES.get(str(name))
    setting = "equal" if recipe and "equal" in recipe.settings else None
    config = make(name, method=method, imbalance=imbalance, setting=setting)
    return replace(config, train=replace(config.train, seeds=(0, 1, 2)))


def with_epochs(config: Config, epochs: int, usual: int | None = None) -> Config:
    """Return a configuration with another number of epochs.

    The second stage of a method is scaled in proportion, and milestones are fractions of the training. The length of the
    warm-up does not change.

    Args:
        config: The configuration.
        epochs: Number of epochs of the first stage.
        usual: Number of epochs that the length of the second stage was chosen for; by default that of the configuration.
    """
    if epochs < 1:
        raise UserError(f"--epochs {epochs}: it must be at least 1")
    method, before = config.method, usual or config.train.epochs
    if method.second_epochs and epochs != before:
        scaled: Any = {method.second_stage_epochs_field: max(round(method.second_epochs * epochs / before), 1)}
        method = replace(method, **scaled)
    return replace(config, method=method, train=replace(config.train, epochs=epochs))


def with_strategy(config: Config, strategy: int) -> Config:
    """Return a configuration with an augmentation strategy of the paper: a resized crop, then the policy, and no
    Cutout."""
    if strategy not in STRATEGIES:
        raise UserError(f"--strategy must be 1 (sim/sim), 2 (rand/rand) or 3 (rand/sim), got {strategy}")
    policies: tuple[Any, Any] = STRATEGIES[strategy]
    views = (config.views.query, config.views.key)
    query, key = (replace(v, policy=p, crop="resized", cutout=0) for v, p in zip(views, policies, strict=True))
    return replace(config, views=replace(config.views, query=query, key=key))
