"""Networks of their own: branches, experts, memories."""

from dataclasses import dataclass
from typing import ClassVar

from longtail.config.methods.base import Deferred, MethodConfig
from longtail.config.section import require


@dataclass(frozen=True, kw_only=True)
class BBN(MethodConfig):
    """Zhou et al., 2020: two branches with a sampler each, and a weight that wanders from the one to the other."""

    name: ClassVar[str] = "bbn"
    title: ClassVar[str] = "BBN"


@dataclass(frozen=True, kw_only=True)
class CausalNorm(MethodConfig):
    """Tang et al., 2020 (De-confound-TDE): a multi-head normalized classifier, the features' drift removed at test."""

    name: ClassVar[str] = "causal-norm"
    title: ClassVar[str] = "Causal Norm"

    heads: int = 2
    """Parts that features and weights are cut into and normalized by."""
    scale: float = 16.0
    """What the mean over the heads is multiplied by."""
    gamma: float = 1 / 32
    """Added to the length of a class's weights."""
    drift: float = 0.9
    """The moving direction keeps this share of itself at each batch."""
    removal: float = 1.0
    """How much of a feature's part along the drift is removed at test: 0 nothing, 1 all; its authors have 1.5 on CIFAR and 3
    on ImageNet-LT."""
    twin_block: bool = False
    """Double the last block, as the authors' CIFAR network does: features twice as wide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.heads >= 1, "method.heads", self.heads, "at least 1")
        require(self.scale > 0, "method.scale", self.scale, "above 0: try 16")
        require(self.gamma >= 0, "method.gamma", self.gamma, "0 or more: try 0.03")
        require(0 <= self.drift < 1, "method.drift", self.drift, "in [0, 1): try 0.9")
        require(self.removal >= 0, "method.removal", self.removal, "0 or more: try 1")


@dataclass(frozen=True, kw_only=True)
class ResLT(MethodConfig):
    """Cui et al., 2022: three light branches, for all classes, for all but the frequent, and for the rare alone."""

    name: ClassVar[str] = "reslt"
    title: ClassVar[str] = "ResLT"

    weight: float = 0.995
    """Of the branches' own losses; the rest is that of their sum."""
    medium: float = 0.65
    """The second branch's share of the classes, from the rarest."""
    few: float = 0.30
    """The third branch's share of the classes, from the rarest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.weight <= 1, "method.weight", self.weight, "between 0 and 1")
        require(
            0 < self.few <= self.medium <= 1, "method.few", self.few, "a share of the classes, at most --method.medium"
        )


@dataclass(frozen=True, kw_only=True)
class OLTR(MethodConfig):
    """Liu et al., 2019: modulated attention, a memory of class centroids, a cosine classifier."""

    name: ClassVar[str] = "oltr"
    title: ClassVar[str] = "OLTR"
    second_stage_epochs_field: ClassVar[str] = "memory_epochs"

    memory_epochs: int = 30
    """Epochs of the second stage, which learns attention, memory and classifier on images drawn class-balanced."""
    memory_lr: float = 0.1
    """Its learning rate (cosine to zero)."""
    trunk_lr: float = 0.1
    """In the second stage, the trunk's rate as a share of it; at 0 its weights stay."""
    scale: float = 16.0
    """Of the cosine classifier."""
    weight: float = 0.01
    """Of the loss that draws features to their centroid and away from others."""
    margin: float = 10.0
    """Squared distance to other centroids from which on these do not matter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.memory_epochs >= 1, "method.memory_epochs", self.memory_epochs, "at least 1")
        require(self.memory_lr > 0, "method.memory_lr", self.memory_lr, "above 0: try 0.1")
        require(self.trunk_lr >= 0, "method.trunk_lr", self.trunk_lr, "0 or more: try 0.1")
        require(self.scale > 0, "method.scale", self.scale, "above 0: try 16")
        for field in ("weight", "margin"):
            require(getattr(self, field) >= 0, f"method.{field}", getattr(self, field), "0 or more")


@dataclass(frozen=True, kw_only=True)
class RIDE(Deferred):
    """Wang et al., 2021: experts on a shared stem, a term that keeps them diverse, and a router that asks few of them."""

    name: ClassVar[str] = "ride"
    title: ClassVar[str] = "RIDE"
    second_stage_epochs_field: ClassVar[str] = "router_epochs"

    experts: int = 3
    """How many; each owns the last two stages of the network."""
    width: float = 0.75
    """Of an expert's layers, as a share of the plain network's."""
    margin: float = 0.5
    """LDAM's, of the rarest class."""
    scale: float = 30.0
    """Of the cosine classifiers."""
    diversity: float = 0.45
    """Weight of the divergence of an expert from the mean of all, which is made large."""
    temperature: float = 1.0
    """Of that divergence."""
    router_epochs: int = 5
    """Epochs of the second stage, which learns the router alone on images drawn class-balanced; 0: all experts, always."""
    router_lr: float = 0.01
    """Its learning rate (cosine to zero)."""
    drw_from: float = 0.8
    """Share of the training after which classes are weighted; 0: from the start, 1: never."""

    @property
    def label(self) -> str:
        return f"{self.title}, {self.experts} expert{'s' * (self.experts > 1)}"

    @property
    def second_epochs(self) -> int:
        """One expert needs no router."""
        return self.router_epochs if self.experts > 1 else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.experts <= 8, "method.experts", self.experts, "between 1 and 8: try 3")
        require(0 < self.width <= 1, "method.width", self.width, "above 0, at most 1: try 0.75")
        require(self.margin >= 0, "method.margin", self.margin, "0 or more: try 0.5")
        require(self.scale > 0, "method.scale", self.scale, "above 0: try 30")
        require(self.temperature > 0, "method.temperature", self.temperature, "above 0: try 1")
        require(self.router_epochs >= 0, "method.router_epochs", self.router_epochs, "0 (no router) or more")
        require(self.router_lr > 0, "method.router_lr", self.router_lr, "above 0: try 0.01")
