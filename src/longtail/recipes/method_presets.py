"""All methods by their names on the command line: settings, the authors' training setup on CIFAR-100-LT, published accuracy.

Published values are top-1 percentages on CIFAR-100-LT by imbalance factor, from the PaCo paper unless a comment names another
source. Our own measurements are in results/.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from longtail import config as cfg
from longtail.config import MethodConfig, OptimConfig, ViewConfig
from longtail.errors import UserError, unknown_name

AUTO_CUTOUT = ViewConfig(crop="pad", policy="auto", cutout=16)
SIM_AUGMENT = ViewConfig(crop="resized", crop_scale=(0.2, 1.0), policy="sim")
PAD_CROP = ViewConfig(crop="pad")
SMALL_SIM_CROPS = replace(SIM_AUGMENT, crop_scale=(0.08, 1.0))

# Released PaCo on CIFAR-LT: decay at epochs 321 and 361 of 400, and a warm-up that overshoots by one epoch.
PACO_SGD = OptimConfig(
    lr=0.05,
    schedule="step",
    milestones=(0.8025, 0.9025),
    warmup_epochs=10,
    warmup_by="epoch-overshoot",
    weight_decay=5e-4,
)
# Released Balanced Softmax: 13,000 steps with batch size 512; warm-up from 0.05 to 0.1 in 800 steps, then cosine to zero.
BALANCED_SGD = OptimConfig(lr=0.1, warmup_start=0.5, weight_decay=5e-4)


def _steps(*milestones: float, **changes: Any) -> OptimConfig:
    """Return the common step schedule of 200 epochs, with an author's changes."""
    common: dict[str, Any] = {"lr": 0.1, "gamma": 0.01, "warmup_epochs": 5, "warmup_by": "epoch", "weight_decay": 2e-4}
    return OptimConfig(schedule="step", milestones=milestones or (0.8, 0.9), **common | changes)


@dataclass(frozen=True)
class AuthorSettings:
    """The training setup of a method's own code on one dataset."""

    optim: OptimConfig
    epochs: int = 200
    batch_size: int = 128
    steps: int = 0
    """Length of the training in steps; if set, it is used instead of `epochs`."""
    warmup_steps: int = 0
    """Length of the warm-up, if the length of the training is given in steps."""
    view: ViewConfig = PAD_CROP
    key_view: ViewConfig | None = None
    """The key view; None for that of the recipe."""
    values: dict[str, Any] = field(default_factory=dict)
    """Settings of the method that differ from those of the `equal` setting."""


@dataclass(frozen=True)
class MethodPreset:
    """A method under its name on the command line: the class of its settings, and their values."""

    settings_class: type[MethodConfig]
    values: dict[str, Any] = field(default_factory=dict)
    by_imbalance: dict[float, dict[str, Any]] = field(default_factory=dict)
    """Settings that the authors chose for each imbalance factor of CIFAR-100-LT."""
    rates_at_512: dict[str, float] = field(default_factory=dict)
    """Learning rates of second stages for batch size 512; they are scaled linearly with the batch size."""
    data: dict[str, Any] = field(default_factory=dict)
    """Settings of the data that the method requires, such as the validation split of tau-norm."""
    authors: AuthorSettings | None = None
    """None for methods without released code for CIFAR-LT; they use PaCo's setup."""
    published: dict[float, float] = field(default_factory=dict)
    """Published top-1 accuracy on CIFAR-100-LT, by imbalance factor."""

    def make_settings(
        self, batch_size: int, imbalance: float = 0, released: bool = False, **defaults: Any
    ) -> MethodConfig:
        """Return the settings of the method.

        Args:
            batch_size: Batch size that learning rates are scaled to.
            imbalance: Imbalance factor, for settings that depend on it.
            released: Use the values of the authors' code.
            defaults: Values of the recipe, used for the settings that the method has and does not define itself.
        """
        values = {k: v for k, v in defaults.items() if k in self.settings_class.__dataclass_fields__}
        values |= {k: rate * batch_size / 512 for k, rate in self.rates_at_512.items()}
        values |= self.values | self.by_imbalance.get(imbalance, {})
        return self.settings_class(**values | (self.authors.values if released and self.authors else {}))


LDAM_DRW_SETTINGS = AuthorSettings(_steps())  # from LDAM-DRW's code, on which most baselines are based


def _bbn_steps(*drop_epochs: int, **changes: Any) -> OptimConfig:
    """Return BBN's schedule, which other methods adopted: the warm-up starts at one third of the learning rate.

    It counts epochs from 1, so that the learning rate drops one epoch before each of the given ones.
    """
    return _steps(*((epoch - 1) / 200 for epoch in drop_epochs), warmup_start=1 / 3, **changes)


def _bag_of_tricks(**values: Any) -> AuthorSettings:
    """Return the setup of decoupling methods in the Bag of Tricks code; the published values are from its README."""
    return AuthorSettings(_bbn_steps(160, 180, nesterov=True), values=values)


# The values that BCL and ProCo have in common, in place of those that recipes choose for PaCo.
THREE_VIEWS = {"tau": 0.1, "projection_dim": 128, "projection_hidden": 512}
RETRAINING = {"linear_epochs": 30, "linear_lr": 0.1, "linear_milestones": (1 / 3, 2 / 3)}

METHODS: dict[str, MethodPreset] = {
    "ce": MethodPreset(cfg.CrossEntropySettings, authors=LDAM_DRW_SETTINGS),
    "focal": MethodPreset(cfg.FocalSettings, authors=LDAM_DRW_SETTINGS, published={100: 38.4, 50: 44.3, 10: 55.8}),
    # The published values are from a leaderboard: the best of several class-balanced losses, beta and gamma. This beta is the
    # best one at imbalance 100 on images that no run is trained on (results/paco_factors.json).
    "cb-focal": MethodPreset(
        cfg.ClassBalancedFocalSettings,
        authors=AuthorSettings(_steps(), values={"beta": 0.9}),
        published={100: 39.6, 50: 45.3, 10: 58.0},
    ),
    "ldam-drw": MethodPreset(
        cfg.LDAMSettings, {"drw_from": 0.8}, authors=LDAM_DRW_SETTINGS, published={100: 42.0, 50: 46.6, 10: 58.7}
    ),
    "balanced-softmax": MethodPreset(
        cfg.BalancedSoftmaxSettings,
        authors=AuthorSettings(BALANCED_SGD, batch_size=512, steps=13_000, warmup_steps=800, view=AUTO_CUTOUT),
        published={100: 50.8, 50: 54.2, 10: 63.0},
    ),
    "logit-adjustment": MethodPreset(cfg.LogitAdjustmentSettings, authors=LDAM_DRW_SETTINGS),
    "logit-adjustment-post-hoc": MethodPreset(
        cfg.LogitAdjustmentSettings, {"post_hoc": True}, authors=LDAM_DRW_SETTINGS
    ),
    "crt": MethodPreset(cfg.CRTSettings, authors=_bag_of_tricks(**RETRAINING), published={100: 40.26}),
    "lws": MethodPreset(cfg.LWSSettings, authors=_bag_of_tricks(**RETRAINING), published={100: 40.16}),
    "tau-norm": MethodPreset(
        cfg.TauNormSettings, data={"val_fraction": 0.1}, authors=_bag_of_tricks(power=1.0), published={100: 40.96}
    ),
    "ncm": MethodPreset(cfg.NCMSettings, authors=LDAM_DRW_SETTINGS),
    "logistic-regression": MethodPreset(cfg.LogisticRegressionSettings, authors=LDAM_DRW_SETTINGS),
    "mislas": MethodPreset(
        cfg.MiSLASSettings,
        by_imbalance={
            100: {"smooth_head": 0.4, "smooth_tail": 0.1, "classifier_lr": 0.2},
            50: {"smooth_head": 0.3, "smooth_tail": 0.0, "classifier_lr": 0.1},
            10: {"smooth_head": 0.2, "smooth_tail": 0.0, "classifier_lr": 0.1},
        },
        # from the configuration files of the published values; the README recommends 5e-4 for better results
        authors=AuthorSettings(_steps(gamma=0.1), values={"linear_decay": 2e-4}),
        published={100: 47.0, 50: 52.3, 10: 63.2},
    ),
    "bbn": MethodPreset(
        cfg.BBNSettings,
        authors=AuthorSettings(_bbn_steps(120, 160, nesterov=True)),
        published={100: 42.6, 50: 47.0, 10: 59.1},
    ),
    "causal-norm": MethodPreset(
        cfg.CausalNormSettings,
        authors=AuthorSettings(
            _bbn_steps(120, 160, lr=0.2, weight_decay=5e-4), batch_size=256, values={"twin_block": True}
        ),
        published={100: 44.1, 50: 50.3, 10: 59.6},
    ),
    "reslt": MethodPreset(
        cfg.ResLTSettings,
        by_imbalance={100: {"weight": 0.995}, 50: {"weight": 0.99}, 10: {"weight": 0.72}},
        authors=AuthorSettings(
            _steps(gamma=0.1, weight_decay=5e-4, nesterov=True, warmup_start=1 / 3),
        ),
        published={100: 45.3, 50: 50.0, 10: 60.8},
    ),
    "oltr": MethodPreset(cfg.OLTRSettings, authors=LDAM_DRW_SETTINGS),  # no released code for CIFAR-LT
    **{
        f"ride-{experts}": MethodPreset(
            cfg.RIDESettings,
            {"experts": experts},
            rates_at_512={"router_lr": 0.01},
            authors=AuthorSettings(_steps(weight_decay=5e-4, nesterov=True), view=ViewConfig(crop="pad", rotate=15)),
            published={100: 48.6} if experts == 3 else {},  # from the README, without distillation
        )
        for experts in (1, 2, 3, 4)
    },
    "supcon": MethodPreset(cfg.SupConSettings, rates_at_512={"linear_lr": 5.0}),  # from the authors' README, for CIFAR
    "ce-supcon": MethodPreset(cfg.MultiTaskSettings),
    "ce-supcon-reweighted": MethodPreset(cfg.MultiTaskSettings, {"supcon": "reweighted"}),
    "ce-supcon-balanced": MethodPreset(cfg.MultiTaskSettings, {"supcon": "balanced"}),
    "balanced-softmax-supcon": MethodPreset(cfg.MultiTaskSettings, {"rebalance": True, "supcon": "reweighted"}),
    "paco": MethodPreset(cfg.PaCoSettings, published={100: 52.0, 50: 56.0, 10: 64.2}),
    "paco-no-rebalance": MethodPreset(cfg.PaCoSettings, {"rebalance": False}),
    "gpaco": MethodPreset(cfg.GPaCoSettings),
    # Published for one of three networks. The code is based on the Bag of Tricks code, whose epochs count from 1.
    "ncl": MethodPreset(
        cfg.NCLSettings,
        authors=AuthorSettings(
            _steps(319 / 400, 359 / 400, gamma=0.1, warmup_start=1 / 3), epochs=400, batch_size=64, view=AUTO_CUTOUT
        ),
        published={100: 53.3, 50: 56.8},
    ),
    # No code for CIFAR was released. The schedule is the default of the code for ImageNet-LT; the other values are those of
    # ConCutMix, whose code for CIFAR is based on BCL. Published for 200 epochs; the paper also has 53.9 for 400.
    "bcl": MethodPreset(
        cfg.BCLSettings,
        THREE_VIEWS,
        by_imbalance={factor: {"softmax_weight": 2.0, "weight": 0.6} for factor in (100, 50, 10)},
        authors=AuthorSettings(
            _steps(lr=0.15, gamma=0.1, weight_decay=5e-4),
            batch_size=256,
            view=AUTO_CUTOUT,
            key_view=SMALL_SIM_CROPS,
        ),
        published={100: 51.9, 50: 56.6, 10: 64.9},
    ),
    # Published for 200 epochs; the authors also have 54.2 for 400.
    "proco": MethodPreset(
        cfg.ProCoSettings,
        THREE_VIEWS,
        authors=AuthorSettings(_steps(lr=0.3, gamma=0.1), batch_size=256, view=AUTO_CUTOUT, key_view=SMALL_SIM_CROPS),
        published={100: 52.8, 50: 57.1, 10: 65.5},
    ),
}


def find_preset(name: str) -> MethodPreset:
    """Return a method by its name on the command line; raise a UserError that suggests a similar name if there is
    none."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def require_choice(recipe: str, kind: str, given: str, known: tuple[str, ...], further: str = "") -> None:
    """Raise a UserError unless an option of a recipe has one of the known values.

    Args:
        recipe: Name of the recipe.
        kind: Name of the option, such as "setting".
        given: The value.
        known: The known values.
        further: Added to the message after the known values, such as ", or any timm model by --model.name".
    """
    if given not in known:
        message = f"{recipe} has no {kind} {given!r}: choose {' or '.join(known)}{further}"
        raise UserError(message, kind="unknown-name")
