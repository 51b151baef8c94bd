"""Recipes for the ImageNet-scale datasets of the paper.

A configuration is determined by the method, the network, the augmentation and one of three settings:

released  the setup of the method's own released code on the dataset if it is known (`AUTHOR_SETTINGS`), otherwise PaCo's;
paper     the setup in the text of the PaCo paper: no warm-up, center temperature tau, no classifier bias, no batch norm in the
          projection head, and on all datasets batch size 128, learning rate 0.02 and weight decay 5e-4 (not named in the text);
equal     PaCo's released setup for every method, as the authors of the paper reimplemented their baselines.

The PaCo authors used 4 processes with 32 images each and separate batch-norm statistics. Here one process has batch size
128 and batch norm in groups of 32 (--model.norm ghost). The difference is that an anchor is contrasted with all 128 images
of the batch instead of the 32 of its process.

`PUBLISHED` has the results that the paper prints. We have not trained any of these recipes to the end.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from longtail.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PaCoSettings,
    SupConSettings,
    TrainConfig,
    ViewConfig,
    ViewsConfig,
)
from longtail.recipes.method_presets import AuthorSettings, find_preset, require_choice

SETTINGS = ("released", "paper", "equal")

NETWORKS = {
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnet152": "resnet152",
    "resnet200": "resnet200",
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x4d",
}
"""timm's names of the networks."""

# All crops cover 0.08 to 1 of the area, as in the code of OLTR, on which most baselines are based.
PLAIN_VIEW = ViewConfig(crop="resized", jitter=0.4)
SIM_VIEW = replace(PLAIN_VIEW, policy="sim")
RAND_VIEW = replace(PLAIN_VIEW, policy="rand")
STACKED_VIEW = replace(PLAIN_VIEW, policy="stacked-rand", rand_ops=3)

AUGMENTS = {
    "plain": (PLAIN_VIEW, SIM_VIEW),
    "sim": (SIM_VIEW, SIM_VIEW),
    "rand": (RAND_VIEW, SIM_VIEW),
    "rand-rand": (RAND_VIEW, RAND_VIEW),
    "stacked": (STACKED_VIEW, SIM_VIEW),
}
"""Augmentations: the view of the query network, and the view of the key network of methods that have one."""

METHOD_VALUES: dict[str, dict[str, Any]] = {
    "reslt": {"weight": 0.99, "medium": 0.825, "few": 0.22},
    "mislas": {"mixup": 0.2, "smooth_head": 0.3, "smooth_tail": 0.0, "classifier_lr": 0.05},
}
"""Settings of methods that differ from those on CIFAR, in all settings of a recipe."""


# The setups of the authors of other methods, if their released configurations contain them. Group sizes for batch norm are not
# known, so that batch norm uses the whole batch.


def _decoupling(epochs: int, retraining_epochs: int, decay: float) -> dict[str, AuthorSettings]:
    """Kang et al., 2020: batch size 512, learning rate 0.2 with a cosine schedule in both stages."""
    optim = OptimConfig(lr=0.2, weight_decay=decay)
    one_stage = AuthorSettings(optim, epochs, 512, view=PLAIN_VIEW)

    def two_stages(linear_epochs: int) -> AuthorSettings:
        values = {"linear_epochs": linear_epochs, "linear_lr": 0.2, "linear_decay": decay}
        return AuthorSettings(optim, epochs, 512, view=PLAIN_VIEW, values=values)

    return {
        "ce": one_stage,
        "tau-norm": one_stage,
        "ncm": one_stage,
        "crt": two_stages(retraining_epochs),
        "lws": two_stages(5),
    }


def _ride(batch_size: int, lr: float) -> dict[str, AuthorSettings]:
    """Wang et al., 2021: 100 epochs with a step schedule. The results in the PaCo paper are for 400 epochs."""
    optim = OptimConfig(
        lr=lr,
        weight_decay=2e-4,
        nesterov=True,
        schedule="step",
        milestones=(0.6, 0.8),
        warmup_epochs=5,
        warmup_by="epoch",
    )
    return {f"ride-{n}": AuthorSettings(optim, 100, batch_size, view=PLAIN_VIEW) for n in (1, 2, 3, 4)}


def _mislas(epochs: int, decay: float, **values: Any) -> dict[str, AuthorSettings]:
    """Zhong et al., 2021: batch size 256, learning rate 0.1 with a cosine schedule in both stages."""
    optim = OptimConfig(lr=0.1, weight_decay=decay)
    return {"mislas": AuthorSettings(optim, epochs, 256, view=PLAIN_VIEW, values=values | {"linear_decay": decay})}


AUTHOR_SETTINGS: dict[str, dict[str, AuthorSettings]] = {
    "imagenet-lt": {
        **_decoupling(90, 10, 5e-4),
        "causal-norm": AuthorSettings(OptimConfig(lr=0.2), 90, 512, view=PLAIN_VIEW, values={"removal": 3.0}),
        "reslt": AuthorSettings(OptimConfig(lr=0.1), 180, 256, view=PLAIN_VIEW),  # schedule unknown; cosine assumed
        **_mislas(180, 5e-4),
        **_ride(256, 0.1),
    },
    "inat2018": {
        **_decoupling(200, 30, 1e-4),
        "bbn": AuthorSettings(
            OptimConfig(lr=0.05, weight_decay=1e-4, schedule="step", milestones=(119 / 180, 159 / 180)),
            180,
            128,
            view=ViewConfig(crop="resized"),
        ),
        **_mislas(200, 1e-4),
        **_ride(512, 0.2),
    },
    "places-lt": _mislas(90, 5e-4, smooth_head=0.4, smooth_tail=0.1),
}
"""Setups of other authors, by recipe and method."""


# Released PaCo


def _sgd(lr: float, weight_decay: float, warmup_epochs: float = 10) -> OptimConfig:
    """Return a warm-up by epoch and a cosine schedule by step. Released code also updates the cosine by epoch."""
    return OptimConfig(lr=lr, weight_decay=weight_decay, warmup_epochs=warmup_epochs, warmup_by="epoch")


@dataclass(frozen=True)
class LargeRecipe:
    """The setup of released PaCo on one dataset."""

    name: str
    data: DataConfig
    networks: tuple[str, ...]
    """The networks of the paper; the first is the default."""
    augment: str
    optim: OptimConfig
    epochs: int = 400
    batch_size: int = 128
    normalize: Any = "imagenet"
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the network that differ from those of the other recipes."""
    values: dict[str, Any] = field(default_factory=dict)
    """Settings of the method that differ from those of the other recipes."""

    def with_paper_settings(self) -> "LargeRecipe":
        """Return the setup in the text of the paper."""
        return replace(self, optim=_sgd(0.02, 5e-4, 0), batch_size=128, model=self.model | {"trainable": "all"})

    def with_author_settings(self, authors: AuthorSettings) -> "LargeRecipe":
        """Return the setup of another method's own code."""
        return replace(
            self,
            optim=authors.optim,
            epochs=authors.epochs,
            batch_size=authors.batch_size,
            model=self.model | {"norm": "batch"},
            values=authors.values,
        )


IMAGENET_LT = LargeRecipe(
    "imagenet-lt",
    DataConfig(name="imagenet-lt", image_size=224),
    ("resnet50", "resnext50", "resnext101"),
    "rand",
    _sgd(0.02, 5e-4),
)
INAT2018 = LargeRecipe(
    "inat2018",
    DataConfig(name="inat2018", image_size=224),
    ("resnet50", "resnet152"),
    "rand",
    _sgd(0.02, 1e-4),
    normalize="inaturalist",
)
PLACES_LT = LargeRecipe(
    "places-lt",
    DataConfig(name="places-lt", image_size=224),
    ("resnet152",),
    "sim",
    _sgd(0.02, 5e-4, 5),
    epochs=30,
    model={"name": "resnet152.tv_in1k", "pretrained": True, "trainable": "last-block"},
)
IMAGENET = LargeRecipe(
    "imagenet",
    DataConfig(name="folder", image_size=224),
    ("resnet50", "resnet101", "resnet200"),
    "rand",
    _sgd(0.04, 1e-4),
    batch_size=256,
)


# The arguments of the following functions are described in `longtail.recipes.make`.


def imagenet_lt(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """ImageNet-LT with ResNet-50, ResNeXt-50 or ResNeXt-101 (32x4d): Tables 1 to 3 of the paper.

    Published: PaCo 57.0 / 58.2 / 60.0, Balanced Softmax 55.0 / 56.2 / 58.0; PaCo without RandAugment and rebalancing 51.0.
    400 epochs, batch size 128, learning rate 0.02, tau 0.2, alpha 0.05, queue 8,192. For ResNeXt-101, released code uses
    learning rate 0.03 and stacked RandAugment; the text has 0.02 and RandAugment. One process with batch norm in groups of 32
    replaces 4 processes with 32 images.
    """
    recipe = IMAGENET_LT
    if (setting, network) == ("released", "resnext101"):
        recipe = replace(recipe, optim=_sgd(0.03, 5e-4), augment="stacked")
    return _make_config(recipe, method, imbalance, setting, network, augment)


def inat2018(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """iNaturalist 2018 with ResNet-50 or ResNet-152: Table 5 of the paper.

    Published: PaCo 73.2 (73.0 without RandAugment; ResNet-152 75.2, or 75.3 in the text), Balanced Softmax 71.8 (71.7). The
    settings are those of ImageNet-LT "without any change", except for a weight decay of 1e-4 in released code. One process with
    batch norm in groups of 32 replaces 4 processes with 32 images.
    """
    return _make_config(INAT2018, method, imbalance, setting, network, augment)


def places_lt(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """Places-LT with ResNet-152, starting from torchvision's ImageNet weights: Table 4 of the paper.

    Published: PaCo 41.2 with SimAugment and also with RandAugment, Balanced Softmax 38.6. 30 epochs, of which 5 are warm-up.
    Released code freezes the convolutions before the last block, which the text does not mention, and evaluates on
    Places_LT_val.txt; this recipe evaluates on Places_LT_test.txt, as is usual. One process with batch norm in groups of 32
    replaces 4 processes with 32 images.
    """
    return _make_config(PLACES_LT, method, imbalance, setting, network, augment)


def imagenet(
    method: str = "paco-no-rebalance",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """Full ImageNet with ResNet-50, ResNet-101 or ResNet-200: Table 7 of the paper.

    Published: PaCo 78.7 with SimAugment, 79.3 with RandAugment, and 80.9 and 81.8 for the deeper networks with stacked
    RandAugment. The data are balanced, so that the centers are not rebalanced. Released code uses batch size 256, learning
    rate 0.04 and weight decay 1e-4, although the text says that nothing was changed from ImageNet-LT. The multi-task
    baseline has weight 0.05, as in the text. Stacked RandAugment has 3 operations with the highest magnitude, as released
    for ResNet-200. The number of processes that shared the batch of 256 is not known; one process with batch norm in groups
    of 32 replaces 8 processes with 32 images.
    """
    recipe = replace(IMAGENET, augment="stacked") if network in ("resnet101", "resnet200") else IMAGENET
    config = _make_config(recipe, method, imbalance, setting, network, augment)
    query = config.views.query
    if query.policy == "stacked-rand":  # magnitude 12 with standard deviation 0.5, clipped at 10, is always 10
        config = replace(config, views=replace(config.views, query=replace(query, rand_std=0.0)))
    return config


def _make_config(
    recipe: LargeRecipe, method: str, imbalance: float, setting: str, network: str | None, augment: str | None
) -> Config:
    network, given_augment, augment = network or recipe.networks[0], augment, augment or recipe.augment
    require_choice(recipe.name, "setting", setting, SETTINGS)
    require_choice(recipe.name, "network", network, recipe.networks, ", or any timm model by --model.name")
    require_choice(recipe.name, "augment", augment, tuple(AUGMENTS), ", or your own by --views.query and --views.key")
    query, key = AUGMENTS[augment]
    authors = AUTHOR_SETTINGS.get(recipe.name, {}).get(method)
    is_paper = setting == "paper"
    if setting == "released" and authors:
        recipe, query = (
            recipe.with_author_settings(authors),
            authors.view if given_augment in (None, "plain") else query,
        )
    elif is_paper:
        recipe = recipe.with_paper_settings()

    preset = find_preset(method)
    values: dict[str, Any] = {"tau": 0.2, "alpha": 0.05, "queue": 8192, "projection_dim": 128, "diversity": 0.2}
    if is_paper:
        values |= {"center_tau": 0.2, "projection_norm": False}
    if preset.settings_class is SupConSettings:
        values |= {"linear_epochs": recipe.epochs}
    overrides: Any = METHOD_VALUES.get(method, {}) | recipe.values
    model: dict[str, Any] = {"name": NETWORKS[network], "norm": "ghost", "ghost": 32} | recipe.model
    return Config(
        recipe=f"{recipe.name}/{setting}",
        data=replace(recipe.data, imbalance=imbalance, **preset.data),
        views=ViewsConfig(query=query, key=key, normalize=recipe.normalize, test_crop=0.875),
        model=ModelConfig(bias=not (is_paper and preset.settings_class is PaCoSettings), **model),
        method=replace(preset.make_settings(recipe.batch_size, **values), **overrides),
        optim=recipe.optim,
        train=TrainConfig(epochs=recipe.epochs, batch_size=recipe.batch_size),
    )


# Published results. Our own measurements are in results/.


class PublishedRow(NamedTuple):
    """A row of a table, identified by values of command-line options."""

    method: str
    network: str
    augment: str
    setting: str
    """Setting of the recipe that trains this row; empty if the paper quotes the row from another paper with unknown
    settings."""

    def flags(self) -> str:
        """Return the flags that select this row in its recipe; for a quoted row, the flags of its method and
        network."""
        given = {"method": self.method, "network": self.network, "augment": self.augment, "setting": self.setting}
        return " ".join(f"--{name} {value}" for name, value in given.items() if value)


class PublishedAccuracy(NamedTuple):
    """Top-1 accuracy in percent: of all classes, and of those with more than 100, 20 to 100 and fewer than 20 training
    images."""

    top1: float
    many: float | None = None
    medium: float | None = None
    few: float | None = None


PublishedRows = dict[PublishedRow, PublishedAccuracy]
QUOTED_ONLY = ("", "")
"""Augmentation and setting of rows that the paper quotes from other papers."""


def _row(method: str, augment: str, setting: str, **by_network: float | tuple[float, ...]) -> PublishedRows:
    """Return the rows of a method with one augmentation and setting: accuracy by network, either total or in four
    values."""
    return {
        PublishedRow(method, network, augment, setting): PublishedAccuracy(*figures)
        if isinstance(figures, tuple)
        else PublishedAccuracy(figures)
        for network, figures in by_network.items()
    }


PUBLISHED: dict[str, PublishedRows] = {
    "imagenet-lt": {
        # Table 3, and the supplement for many, medium and few
        **_row("ce", "plain", "released", resnet50=41.6, resnext50=44.4, resnext101=44.8),
        **_row("crt", "plain", "released", resnet50=47.3, resnext50=49.6, resnext101=49.4),
        **_row("tau-norm", "plain", "released", resnet50=46.7, resnext50=49.4, resnext101=49.6),
        **_row("causal-norm", "plain", "released", resnet50=51.7, resnext50=51.8, resnext101=53.3),
        **_row("reslt", "plain", "released", resnext50=52.9, resnext101=54.1),
        **_row("mislas", "plain", "released", resnet50=52.7),
        **_row("tau-norm", "rand", "equal", resnet50=(54.5, 65.0, 52.2, 32.3), resnext50=(56.0, 66.4, 53.4, 38.2)),
        **_row("tau-norm", "rand", "equal", resnext101=(57.9, 69.0, 55.1, 36.9)),
        **_row(
            "balanced-softmax", "rand", "equal", resnet50=(55.0, 66.7, 52.9, 33.0), resnext50=(56.2, 67.7, 53.8, 34.2)
        ),
        **_row("balanced-softmax", "rand", "equal", resnext101=(58.0, 69.2, 55.8, 36.3)),
        **_row("paco", "rand", "released", resnet50=(57.0, 65.0, 55.7, 38.2), resnext50=(58.2, 67.5, 56.9, 36.7)),
        **_row("paco", "stacked", "released", resnext101=(60.0, 68.2, 58.7, 41.0)),
        # RIDE, run by the authors of the paper (supplement)
        **_row("ride-1", "rand", "equal", resnet50=(52.8, 64.8, 49.8, 29.6), resnext50=(53.2, 67.2, 49.0, 28.1)),
        **_row("ride-2", "rand", "equal", resnet50=(56.0, 67.7, 53.5, 31.5), resnext50=(56.4, 70.4, 52.6, 30.3)),
        **_row("ride-3", "rand", "equal", resnet50=(57.0, 69.0, 54.7, 32.5), resnext50=(57.8, 71.8, 53.9, 32.0)),
        # Table 1, and the re-weighting baselines of the supplement: 400 epochs without RandAugment
        **_row("ce", "plain", "equal", resnet50=(48.4, 67.5, 42.6, 13.7)),
        **_row("supcon", "sim", "equal", resnet50=(22.0, 53.4, 2.9, 0.0)),
        **_row("ce-supcon-reweighted", "sim", "equal", resnet50=49.0),
        **_row("ce-supcon-balanced", "sim", "equal", resnet50=48.6),
        **_row("paco-no-rebalance", "sim", "released", resnet50=(51.0, 69.6, 45.8, 16.0)),
        # Table 2: augmentation strategies (1) and (2); (3) is the row of PaCo above
        **_row("paco", "sim", "released", resnet50=55.0),
        **_row("paco", "rand-rand", "released", resnet50=56.5),
        # The multi-task baseline of the supplement, with weight 0.05
        **_row("balanced-softmax-supcon", "rand", "equal", resnext50=57.0),
    },
    "inat2018": {
        # Table 5 and the supplement
        **_row("cb-focal", *QUOTED_ONLY, resnet50=61.1),
        **_row("ldam-drw", *QUOTED_ONLY, resnet50=68.0),
        **_row("reslt", *QUOTED_ONLY, resnet50=70.2),
        **_row("tau-norm", "plain", "released", resnet50=69.3),
        **_row("lws", "plain", "released", resnet50=69.5),
        **_row("bbn", "plain", "released", resnet50=69.6),
        **_row("mislas", "plain", "released", resnet50=71.6),
        **_row("ride-1", "rand", "equal", resnet50=(65.2, 56.0, 66.3, 66.0)),
        **_row("ride-2", "rand", "equal", resnet50=(69.5, 62.2, 70.5, 70.0)),
        **_row("ride-3", "rand", "equal", resnet50=(71.3, 66.5, 72.1, 71.5)),
        **_row("tau-norm", "rand", "equal", resnet50=(71.5, 74.1, 72.1, 70.4)),
        **_row("balanced-softmax", "plain", "equal", resnet50=(71.7, 72.5, 72.3, 71.4)),
        **_row("balanced-softmax", "rand", "equal", resnet50=(71.8, 72.3, 72.6, 71.7)),
        **_row("paco", "sim", "released", resnet50=(73.0, 69.5, 73.4, 73.0)),
        **_row("paco", "rand", "released", resnet50=(73.2, 70.3, 73.2, 73.6), resnet152=(75.2, 75.0, 75.5, 74.7)),
    },
    "places-lt": {
        # Table 4
        **_row("ce", *QUOTED_ONLY, resnet152=(30.2, 45.7, 27.3, 8.2)),
        **_row("oltr", *QUOTED_ONLY, resnet152=(35.9, 44.7, 37.0, 25.3)),
        **_row("tau-norm", *QUOTED_ONLY, resnet152=(37.9, 37.8, 40.7, 31.8)),
        **_row("balanced-softmax", *QUOTED_ONLY, resnet152=(38.6, 42.0, 39.3, 30.5)),
        **_row("reslt", *QUOTED_ONLY, resnet152=(39.8, 39.8, 43.6, 31.4)),
        **_row("mislas", "plain", "released", resnet152=(40.4, 39.6, 43.3, 36.1)),
        **_row("paco", "sim", "released", resnet152=(41.2, 37.5, 47.2, 33.9)),
        **_row("paco", "rand", "released", resnet152=(41.2, 36.1, 47.9, 35.3)),
    },
    "imagenet": {
        # Table 7; the values of SupCon are from its own paper
        **_row("supcon", "sim", "", resnet50=77.9),
        **_row("supcon", "rand", "", resnet50=78.4),
        **_row("supcon", "stacked", "", resnet101=80.2),
        **_row("ce-supcon", "rand", "equal", resnet50=78.1),
        **_row("paco-no-rebalance", "sim", "released", resnet50=78.7),
        **_row("paco-no-rebalance", "rand", "released", resnet50=79.3),
        **_row("paco-no-rebalance", "stacked", "released", resnet101=80.9, resnet200=81.8),
    },
}
"""The results that the PaCo paper prints for each recipe."""
