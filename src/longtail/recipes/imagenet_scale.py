"""The paper's large data sets -> Config. A row has a network and an augmentation beside its method, and one of three settings:

released  as the method's own released code ran it on these images, where that is known (`others.py`); else PaCo's;
paper     as the PaCo paper's text has it: no warm-up, centers at tau and without bias, no batch norm in G, 128 images at 0.02
          on every data set, weight decay 5e-4 as the text names none;
equal     PaCo's released setting for every method: so the paper's authors reimplemented their baselines.

PaCo's authors ran 4 processes of 32 images, each with batch norm of its own: here one process of 128 whose batch norm takes
groups of 32 (--model.norm ghost). It differs in that an anchor meets all 128 images of the batch, not the 32 of its process.

Published figures are in `rows.py`. None of these recipes was trained to its end by us.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from longtail.config import Config, DataConfig, ModelConfig, OptimConfig, PaCo, SupCon, TrainConfig, ViewsConfig
from longtail.recipes.author_settings import AUTHORS, PLAIN
from longtail.recipes.method_presets import AuthorSettings, entry, require_choice

SETTINGS = ("released", "paper", "equal")

NETWORKS = {
    "resnet50": "resnet50",
    "resnet101": "resnet101",
    "resnet152": "resnet152",
    "resnet200": "resnet200",
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x4d",
}

SIM = replace(PLAIN, policy="sim")
RAND = replace(PLAIN, policy="rand")
STACKED = replace(PLAIN, policy="stacked-rand", rand_ops=3)

AUGMENTS = {
    "plain": (PLAIN, SIM),
    "sim": (SIM, SIM),
    "rand": (RAND, SIM),
    "rand-rand": (RAND, RAND),
    "stacked": (STACKED, SIM),
}
"""The view of the query network, and that of the key network where there is one. All crops are of 0.08 to 1 of the area."""

# What methods have on large images, whoever's schedule it is.
VALUES: dict[str, dict[str, Any]] = {
    "reslt": {"weight": 0.99, "medium": 0.825, "few": 0.22},
    "mislas": {"mixup": 0.2, "smooth_head": 0.3, "smooth_tail": 0.0, "classifier_lr": 0.05},
}


def _sgd(lr: float, weight_decay: float, warmup_epochs: float = 10) -> OptimConfig:
    """Up by the epoch, then along a cosine; released code lowers the rate by the epoch, here it falls by the step."""
    return OptimConfig(lr=lr, weight_decay=weight_decay, warmup_epochs=warmup_epochs, warmup_by="epoch")


@dataclass(frozen=True)
class LargeRecipe:
    """How released PaCo ran on one data set."""

    name: str
    data: DataConfig
    networks: tuple[str, ...]
    """The first is the recipe's own."""
    augment: str
    optim: OptimConfig
    epochs: int = 400
    batch_size: int = 128
    normalize: Any = "imagenet"
    model: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Of the method."""

    def as_in_the_text(self) -> "LargeRecipe":
        return replace(self, optim=_sgd(0.02, 5e-4, 0), batch_size=128, model=self.model | {"trainable": "all"})

    def with_author_settings(self, authors: AuthorSettings) -> "LargeRecipe":
        """With the schedule of a method's own code."""
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


def imagenet_lt(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """ImageNet-LT with ResNet-50, ResNeXt-50 or ResNeXt-101 (32x4d): the paper's Tables 1 to 3.

    Paper: PaCo 57.0 / 58.2 / 60.0, Balanced Softmax 55.0 / 56.2 / 58.0; PaCo without RandAugment and rebalance 51.0.
    400 epochs of 128 images at 0.02, tau 0.2, alpha 0.05, queue 8,192. Released code has ResNeXt-101 at 0.03 and with stacked
    RandAugment, where the text has 0.02 and RandAugment. One process with batch norm in groups of 32 stands in for 4 x 32.
    """
    frame = IMAGENET_LT
    if (setting, network) == ("released", "resnext101"):
        frame = replace(frame, optim=_sgd(0.03, 5e-4), augment="stacked")
    return _large(frame, method, imbalance, setting, network, augment)


def inat2018(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """iNaturalist 2018 with ResNet-50 or ResNet-152: the paper's Table 5.

    Paper: PaCo 73.2 (73.0 without RandAugment; ResNet-152 75.2, and 75.3 in the text), Balanced Softmax 71.8 (71.7).
    ImageNet-LT's settings "without any change" but for a weight decay of 1e-4 in released code. One process with batch norm in
    groups of 32 stands in for 4 x 32.
    """
    return _large(INAT2018, method, imbalance, setting, network, augment)


def places_lt(
    method: str = "paco",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """Places-LT with ResNet-152 from torchvision's ImageNet weights: the paper's Table 4.

    Paper: PaCo 41.2 with SimAugment and with RandAugment alike, Balanced Softmax 38.6. 30 epochs, 5 of them warm-up. Released
    code leaves the convolutions before the last block as they are, of which the text says nothing, and scores itself on
    Places_LT_val.txt; here as elsewhere in the field it is Places_LT_test.txt. One process with batch norm in groups of 32
    stands in for 4 x 32.
    """
    return _large(PLACES_LT, method, imbalance, setting, network, augment)


def imagenet(
    method: str = "paco-no-rebalance",
    imbalance: float = 1,
    setting: str = "released",
    network: str | None = None,
    augment: str | None = None,
) -> Config:
    """Full ImageNet with ResNet-50, ResNet-101 or ResNet-200: the paper's Table 7.

    Paper: PaCo 78.7 with SimAugment, 79.3 with RandAugment, 80.9 and 81.8 for the deeper two with stacked RandAugment.
    Balanced data: the centers are not rebalanced. Released code has 256 images at 0.04 and a weight decay of 1e-4, where the
    text says that nothing was changed from ImageNet-LT; multi-task has the text's weight, 0.05. Stacked: 3 operations at the
    highest level, as released for ResNet-200. How many processes shared the 256 is not known: one with batch norm in groups of
    32 stands in for 8 x 32.
    """
    frame = replace(IMAGENET, augment="stacked") if network in ("resnet101", "resnet200") else IMAGENET
    config = _large(frame, method, imbalance, setting, network, augment)
    query = config.views.query
    if query.policy == "stacked-rand":  # magnitude 12, spread 0.5, cut at 10: always 10
        config = replace(config, views=replace(config.views, query=replace(query, rand_std=0.0)))
    return config


def _large(
    frame: LargeRecipe, method: str, imbalance: float, setting: str, network: str | None, augment: str | None
) -> Config:
    network = network or frame.networks[0]
    require_choice(frame.name, "setting", setting, SETTINGS)
    require_choice(frame.name, "network", network, frame.networks, ", or any timm model by --model.name")
    require_choice(
        frame.name,
        "augment",
        augment or frame.augment,
        tuple(AUGMENTS),
        ", or your own by --views.query and --views.key",
    )
    query, key = AUGMENTS[augment or frame.augment]
    authors = AUTHORS.get(frame.name, {}).get(method)
    if setting == "released" and authors:
        frame, query = frame.with_author_settings(authors), authors.view if augment in (None, "plain") else query
    elif setting == "paper":
        frame = frame.as_in_the_text()
    views = ViewsConfig(query=query, key=key, normalize=frame.normalize, test_crop=0.875)
    return _framed(frame, method, imbalance, setting, network, views)


def _framed(
    frame: LargeRecipe, method: str, imbalance: float, setting: str, network: str, views: ViewsConfig
) -> Config:
    chosen, text = entry(method), setting == "paper"
    known: dict[str, Any] = {"tau": 0.2, "alpha": 0.05, "queue": 8192, "projection_dim": 128, "diversity": 0.2}
    known |= {"center_tau": 0.2, "projection_norm": False} if text else {}
    known |= {"linear_epochs": frame.epochs} if chosen.kind is SupCon else {}
    model: dict[str, Any] = {"name": NETWORKS[network], "norm": "ghost", "ghost": 32} | frame.model
    own: Any = VALUES.get(method, {}) | frame.values
    return Config(
        recipe=f"{frame.name}/{setting}",
        data=replace(frame.data, imbalance=imbalance, **chosen.data),
        views=views,
        model=ModelConfig(bias=not (text and chosen.kind is PaCo), **model),
        method=replace(chosen.settings(frame.batch_size, **known), **own),
        optim=frame.optim,
        train=TrainConfig(epochs=frame.epochs, batch_size=frame.batch_size),
    )
