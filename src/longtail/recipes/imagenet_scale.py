"""Recipes for the ImageNet-scale datasets of the paper.

A configuration is determined by the method, the network, the augmentation and one of three settings:

released  the setup of the method's own released code on the dataset if it is known (`AUTHOR_SETTINGS`), otherwise PaCo's;
paper     the setup in the text of the PaCo paper: no warm-up, center temperature tau, no classifier bias, no batch norm in the
          projection head, and on all datasets batch size 128, learning rate 0.02 and weight decay 5e-4 (not named in the text);
equal     PaCo's released setup for every method, as the authors of the paper reimplemented their baselines.

The PaCo authors used 4 processes with 32 images each and separate batch-norm statistics. Here one process has batch size
128 and batch norm in groups of 32 (--model.norm ghost). The difference is that an anchor is contrasted with all 128 images
of the batch instead of the 32 of its process.

The published results are in `published_rows.py`. We have not trained any of these recipes to the end.
"""

from dataclasses import dataclass, field, replace
from typing import Any

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
