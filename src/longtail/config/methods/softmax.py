"""One network, one view, one loss on its logits."""

from dataclasses import dataclass
from typing import ClassVar

from longtail.config.methods.base import Chunked, Deferred, MethodConfig
from longtail.config.section import require


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Chunked):
    name: ClassVar[str] = "ce"
    title: ClassVar[str] = "Cross-entropy"


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmax(Chunked):
    """Ren et al., 2020."""

    name: ClassVar[str] = "balanced-softmax"
    title: ClassVar[str] = "Balanced Softmax"


@dataclass(frozen=True, kw_only=True)
class LogitAdjustment(Chunked):
    """Menon et al., 2021."""

    name: ClassVar[str] = "logit-adjustment"
    title: ClassVar[str] = "Logit adjustment"

    strength: float = 1.0
    """What log q(y) is multiplied by; 1 in the loss is Balanced Softmax."""
    post_hoc: bool = False
    """Train by cross-entropy and take strength · log q(y) from the logits afterwards, instead of adding it in the loss."""

    @property
    def label(self) -> str:
        return f"{self.title}, post hoc" if self.post_hoc else self.title

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.strength >= 0, "method.strength", self.strength, "0 or more: try 1")


@dataclass(frozen=True, kw_only=True)
class Focal(Deferred):
    """Lin et al., 2017, on the softmax."""

    name: ClassVar[str] = "focal"
    title: ClassVar[str] = "Focal"

    gamma: float = 1.0
    """An image counts by (1 - p)^gamma, where p is the probability of its class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma >= 0, "method.gamma", self.gamma, "0 or more: try 1")


@dataclass(frozen=True, kw_only=True)
class ClassBalancedFocal(MethodConfig):
    """Cui et al., 2019: a sigmoid per class, focal, weighted by the effective number of images."""

    name: ClassVar[str] = "cb-focal"
    title: ClassVar[str] = "CB-Focal"

    gamma: float = 1.0
    """Of the focal term."""
    beta: float = 0.9999
    """A class of n images weighs (1 - beta) / (1 - beta^n), scaled to a mean of 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma >= 0, "method.gamma", self.gamma, "0 or more: try 1")
        require(0 <= self.beta < 1, "method.beta", self.beta, "in [0, 1): try 0.9999")


@dataclass(frozen=True, kw_only=True)
class LDAM(Deferred):
    """Cao et al., 2019: a cosine classifier whose margins grow toward the tail."""

    name: ClassVar[str] = "ldam"
    title: ClassVar[str] = "LDAM"

    margin: float = 0.5
    """Of the rarest class; others by n^(-1/4)."""
    scale: float = 30.0
    """What the cosines are multiplied by."""

    @property
    def label(self) -> str:
        return f"{self.title} + DRW" if self.drw_from < 1 else self.title

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.margin >= 0, "method.margin", self.margin, "0 or more: try 0.5")
        require(self.scale > 0, "method.scale", self.scale, "above 0: try 30")
