"""Every method by the name a user gives it: its settings, how its authors ran it on CIFAR-100-LT, and what was published.

Published figures are top-1 percentages on CIFAR-100-LT by imbalance, from the PaCo paper unless a comment names another source.
None is a measurement of ours: those stand in results/.
"""

from dataclasses import dataclass, field
from typing import Any

from longtail import config as cfg
from longtail.config import MethodConfig, OptimConfig, ViewConfig
from longtail.errors import UserError, unknown_name

AUTO_CUTOUT = ViewConfig(crop="pad", policy="auto", cutout=16)
SIM = ViewConfig(crop="resized", crop_scale=(0.2, 1.0), policy="sim")
PLAIN = ViewConfig(crop="pad")

# Released PaCo on CIFAR-LT: lowered from epochs 321 and 361 of 400, and a warm-up whose last epoch overshoots.
PACO_SGD = OptimConfig(
    lr=0.05,
    schedule="step",
    milestones=(0.8025, 0.9025),
    warmup_epochs=10,
    warmup_by="epoch-overshoot",
    weight_decay=5e-4,
)
# Balanced Softmax's released schedule: 13,000 steps of 512, 0.05 -> 0.1 over the first 800 of them, then cosine to zero.
BALANCED_SGD = OptimConfig(lr=0.1, warmup_start=0.5, weight_decay=5e-4)


def _steps(*milestones: float, **changes: Any) -> OptimConfig:
    """The field's usual 200-epoch schedule, in the variants that its authors had."""
    usual: dict[str, Any] = {"lr": 0.1, "gamma": 0.01, "warmup_epochs": 5, "warmup_by": "epoch", "weight_decay": 2e-4}
    return OptimConfig(schedule="step", milestones=milestones or (0.8, 0.9), **usual | changes)


@dataclass(frozen=True)
class AuthorSettings:
    """A method's own setting on CIFAR-LT."""

    optim: OptimConfig
    epochs: int = 200
    batch_size: int = 128
    steps: int = 0
    """Where the length is given in steps, instead of epochs; the warm-up then too."""
    warmup_steps: int = 0
    view: ViewConfig = PLAIN
    values: dict[str, Any] = field(default_factory=dict)
    """Of its settings, where they are not those of the equal budget."""


@dataclass(frozen=True)
class MethodPreset:
    """A method as a user names it."""

    kind: type[MethodConfig]
    values: dict[str, Any] = field(default_factory=dict)
    by_imbalance: dict[float, dict[str, Any]] = field(default_factory=dict)
    """Settings that its authors chose by the imbalance of CIFAR-100-LT."""
    rates_at_512: dict[str, float] = field(default_factory=dict)
    """Learning rates of second stages that are known for 512 images a step; they go with the batch."""
    data: dict[str, Any] = field(default_factory=dict)
    """What it needs of the data: tau-norm, a validation split."""
    authors: AuthorSettings | None = None
    """None: PaCo's frame, for methods without released CIFAR-LT code."""
    published: dict[float, float] = field(default_factory=dict)

    def settings(self, batch_size: int, imbalance: float = 0, authors: bool = False, **given: Any) -> MethodConfig:
        """Its configuration: of the `given` values those that it has, and then its own."""
        values = {k: v for k, v in given.items() if k in self.kind.__dataclass_fields__}
        values |= {k: rate * batch_size / 512 for k, rate in self.rates_at_512.items()}
        values |= self.values | self.by_imbalance.get(imbalance, {})
        return self.kind(**values | (self.authors.values if authors and self.authors else {}))


LDAM_PROTOCOL = AuthorSettings(_steps())  # of LDAM-DRW's code, which most baselines of the field come from


def _from_a_third(*drops_before: int, **changes: Any) -> OptimConfig:
    """BBN's scheduler, and of those who took it over: up from a third; it counts from 1, so that drops come an epoch early."""
    return _steps(*((epoch - 1) / 200 for epoch in drops_before), warmup_start=1 / 3, **changes)


def _bag_of_tricks(**values: Any) -> AuthorSettings:
    """Decoupling on CIFAR-LT is known from the Bag of Tricks code; figures: its README."""
    return AuthorSettings(_from_a_third(160, 180, nesterov=True), values=values)


RETRAINED = {"linear_epochs": 30, "linear_lr": 0.1, "linear_milestones": (1 / 3, 2 / 3)}

METHODS: dict[str, MethodPreset] = {
    "ce": MethodPreset(cfg.CrossEntropy, authors=LDAM_PROTOCOL),
    "focal": MethodPreset(cfg.Focal, authors=LDAM_PROTOCOL, published={100: 38.4, 50: 44.3, 10: 55.8}),
    # Published by a leaderboard: the best of several class-balanced losses, beta and gamma. Ours is the beta that does best at
    # imbalance 100 on images that no run trains on (results/paco_factors.json).
    "cb-focal": MethodPreset(
        cfg.ClassBalancedFocal,
        authors=AuthorSettings(_steps(), values={"beta": 0.9}),
        published={100: 39.6, 50: 45.3, 10: 58.0},
    ),
    "ldam-drw": MethodPreset(
        cfg.LDAM, {"drw_from": 0.8}, authors=LDAM_PROTOCOL, published={100: 42.0, 50: 46.6, 10: 58.7}
    ),
    "balanced-softmax": MethodPreset(
        cfg.BalancedSoftmax,
        authors=AuthorSettings(BALANCED_SGD, batch_size=512, steps=13_000, warmup_steps=800, view=AUTO_CUTOUT),
        published={100: 50.8, 50: 54.2, 10: 63.0},
    ),
    "logit-adjustment": MethodPreset(cfg.LogitAdjustment, authors=LDAM_PROTOCOL),
    "logit-adjustment-post-hoc": MethodPreset(cfg.LogitAdjustment, {"post_hoc": True}, authors=LDAM_PROTOCOL),
    "crt": MethodPreset(cfg.CRT, authors=_bag_of_tricks(**RETRAINED), published={100: 40.26}),
    "lws": MethodPreset(cfg.LWS, authors=_bag_of_tricks(**RETRAINED), published={100: 40.16}),
    "tau-norm": MethodPreset(
        cfg.TauNorm, data={"val_fraction": 0.1}, authors=_bag_of_tricks(power=1.0), published={100: 40.96}
    ),
    "ncm": MethodPreset(cfg.NCM, authors=LDAM_PROTOCOL),
    "mislas": MethodPreset(
        cfg.MiSLAS,
        by_imbalance={
            100: {"smooth_head": 0.4, "smooth_tail": 0.1, "classifier_lr": 0.2},
            50: {"smooth_head": 0.3, "smooth_tail": 0.0, "classifier_lr": 0.1},
            10: {"smooth_head": 0.2, "smooth_tail": 0.0, "classifier_lr": 0.1},
        },
        # its configuration files, below which its README prints the figures; it advises 5e-4 for better ones
        authors=AuthorSettings(_steps(gamma=0.1), values={"linear_decay": 2e-4}),
        published={100: 47.0, 50: 52.3, 10: 63.2},
    ),
    "bbn": MethodPreset(
        cfg.BBN,
        authors=AuthorSettings(_from_a_third(120, 160, nesterov=True)),
        published={100: 42.6, 50: 47.0, 10: 59.1},
    ),
    "causal-norm": MethodPreset(
        cfg.CausalNorm,
        authors=AuthorSettings(
            _from_a_third(120, 160, lr=0.2, weight_decay=5e-4), batch_size=256, values={"twin_block": True}
        ),
        published={100: 44.1, 50: 50.3, 10: 59.6},
    ),
    "reslt": MethodPreset(
        cfg.ResLT,
        by_imbalance={100: {"weight": 0.995}, 50: {"weight": 0.99}, 10: {"weight": 0.72}},
        authors=AuthorSettings(
            _steps(gamma=0.1, weight_decay=5e-4, nesterov=True, warmup_start=1 / 3),
        ),
        published={100: 45.3, 50: 50.0, 10: 60.8},
    ),
    "oltr": MethodPreset(cfg.OLTR, authors=LDAM_PROTOCOL),  # its authors ran no CIFAR-LT
    **{
        f"ride-{experts}": MethodPreset(
            cfg.RIDE,
            {"experts": experts},
            rates_at_512={"router_lr": 0.01},
            authors=AuthorSettings(_steps(weight_decay=5e-4, nesterov=True), view=ViewConfig(crop="pad", rotate=15)),
            published={100: 48.6} if experts == 3 else {},  # its README, without distillation
        )
        for experts in (1, 2, 3, 4)
    },
    "supcon": MethodPreset(cfg.SupCon, rates_at_512={"linear_lr": 5.0}),  # its authors' README, for CIFAR
    "ce-supcon": MethodPreset(cfg.MultiTask),
    "ce-supcon-reweighted": MethodPreset(cfg.MultiTask, {"supcon": "reweighted"}),
    "ce-supcon-balanced": MethodPreset(cfg.MultiTask, {"supcon": "balanced"}),
    "balanced-softmax-supcon": MethodPreset(cfg.MultiTask, {"rebalance": True, "supcon": "reweighted"}),
    "paco": MethodPreset(cfg.PaCo, published={100: 52.0, 50: 56.0, 10: 64.2}),
    "paco-no-rebalance": MethodPreset(cfg.PaCo, {"rebalance": False}),
    "gpaco": MethodPreset(cfg.GPaCo),
}


def entry(name: str) -> MethodPreset:
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def require_choice(recipe: str, kind: str, given: str, known: tuple[str, ...], further: str = "") -> None:
    if given not in known:
        raise UserError(f"{recipe} has no {kind} {given!r}: choose {' or '.join(known)}{further}", kind="unknown-name")
