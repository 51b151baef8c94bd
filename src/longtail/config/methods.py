"""The settings of each method; its equations are in `longtail.methods` and `longtail.losses`."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from longtail.config.section import Section, require
from longtail.errors import unknown


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    """What every method has: a name in JSON and on the command line, and a label in tables."""

    section: ClassVar[str] = "method"
    name: ClassVar[str] = ""
    title: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return self.title

    @classmethod
    def chosen_by(cls, tree: dict[str, Any]) -> type[Section]:
        name = tree.pop("name", None)
        if not isinstance(name, str) or name not in METHODS:
            raise unknown("method", name, METHODS)
        return METHODS[name]

    def tag(self) -> dict[str, Any]:
        return {"name": self.name}


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(MethodConfig):
    name: ClassVar[str] = "ce"
    title: ClassVar[str] = "Cross-entropy"


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmax(MethodConfig):
    name: ClassVar[str] = "balanced-softmax"
    title: ClassVar[str] = "Balanced Softmax"


@dataclass(frozen=True, kw_only=True)
class MomentumContrast(MethodConfig):
    """The MoCo frame that SupCon and PaCo share."""

    tau: float = 0.2
    """Temperature of the sample logits."""
    queue: int = 8192
    """Length of the labelled queue of past keys."""
    momentum: float = 0.999
    """The key network keeps this share of itself at each step."""
    projection_dim: int = 128
    """Output width of the projection G."""
    projection_hidden: int = 0
    """Hidden width of G; 0: the trunk's feature width."""
    projection_norm: bool = True
    """Batch norm inside G, as released; MoCo v2's G, which the paper names, has none."""
    key_norm: Literal["batch", "ema"] = "batch"
    """Batch norm of the key network: statistics of its own batch, as released, or the query's running averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau > 0, "method.tau", self.tau, "above 0: try 0.05 to 0.2")
        require(self.queue >= 0, "method.queue", self.queue, "0 or more")
        require(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1: try 0.999")
        require(self.projection_dim >= 1, "method.projection_dim", self.projection_dim, "at least 1")
        require(self.projection_hidden >= 0, "method.projection_hidden", self.projection_hidden, "0 or more")


@dataclass(frozen=True, kw_only=True)
class SupCon(MomentumContrast):
    name: ClassVar[str] = "supcon"
    title: ClassVar[str] = "SupCon"

    linear_epochs: int = 100
    """Epochs of the second stage: a linear classifier on the frozen trunk."""
    linear_lr: float = 0.1
    """Learning rate of the second stage (cosine to zero)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.linear_epochs >= 1, "method.linear_epochs", self.linear_epochs, "at least 1")
        require(self.linear_lr > 0, "method.linear_lr", self.linear_lr, "above 0")


@dataclass(frozen=True, kw_only=True)
class PaCo(MomentumContrast):
    name: ClassVar[str] = "paco"
    title: ClassVar[str] = "PaCo"

    alpha: float = 0.05
    """Weight of a positive sample, where the class's own centre has weight 1."""
    centre_tau: float = 1.0
    """Temperature of the centre logits: 1 as released, `tau` as the text has it."""
    rebalance: bool = True
    """Multiply the centres by class frequency (Eq. 8); without, Eq. 4."""

    @property
    def label(self) -> str:
        return self.title if self.rebalance else f"{self.title}, no rebalance"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha < 1, "method.alpha", self.alpha, "in [0, 1): try 0.01 to 0.05")
        require(self.centre_tau > 0, "method.centre_tau", self.centre_tau, "above 0")


METHODS: dict[str, type[MethodConfig]] = {m.name: m for m in (CrossEntropy, BalancedSoftmax, SupCon, PaCo)}
