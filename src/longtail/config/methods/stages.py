"""A trunk learned first, and then what stands on it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from longtail.config.methods.base import LinearStage, MethodConfig
from longtail.config.section import require


@dataclass(frozen=True, kw_only=True)
class CRT(LinearStage):
    """Kang et al., 2020: classifier re-training."""

    name: ClassVar[str] = "crt"
    title: ClassVar[str] = "cRT"


@dataclass(frozen=True, kw_only=True)
class LWS(LinearStage):
    """Kang et al., 2020: learnable weight scaling, a factor per class."""

    name: ClassVar[str] = "lws"
    title: ClassVar[str] = "LWS"

    linear_epochs: int = 5
    """Epochs of the second stage."""


@dataclass(frozen=True, kw_only=True)
class TauNorm(MethodConfig):
    """Kang et al., 2020: the classifier's rows divided by a power of their length."""

    name: ClassVar[str] = "tau-norm"
    title: ClassVar[str] = "tau-norm"

    power: float | None = None
    """The power; none: the best of 0, 0.1, …, 2 on the validation split (--data.val_fraction), scored class-balanced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.power is None or self.power >= 0, "method.power", self.power, "0 or more: try 0.5 to 1")


@dataclass(frozen=True, kw_only=True)
class NCM(MethodConfig):
    """Kang et al., 2020: the nearest class mean."""

    name: ClassVar[str] = "ncm"
    title: ClassVar[str] = "NCM"

    distance: Literal["cosine", "l2"] = "cosine"
    """Between a feature and a mean of the training images' features."""


@dataclass(frozen=True, kw_only=True)
class MiSLAS(LinearStage):
    """Zhong et al., 2021: mixup first, then label-aware smoothing with shifted batch norm."""

    name: ClassVar[str] = "mislas"
    title: ClassVar[str] = "MiSLAS"

    mixup: float = 1.0
    """Of the first stage: two images are mixed by shares from Beta(mixup, mixup)."""
    smooth_head: float = 0.4
    """Label smoothing of the largest class."""
    smooth_tail: float = 0.1
    """Label smoothing of the smallest class."""
    classifier_lr: float = 0.2
    """Second stage: the classifier's rate as a share of that of the factors per class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mixup >= 0, "method.mixup", self.mixup, "0 (none) or more: try 1")
        for field in ("smooth_head", "smooth_tail"):
            require(0 <= getattr(self, field) < 1, f"method.{field}", getattr(self, field), "in [0, 1)")
        require(self.classifier_lr >= 0, "method.classifier_lr", self.classifier_lr, "0 or more: try 0.2")
