"""Contrast among samples, with class centers or without."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from longtail.config.methods.base import Chunked, LinearStage, MethodConfig
from longtail.config.section import require

MAX_QUEUE = 2**22
MAX_WIDTH = 2**16
MAX_QUEUE_NUMBERS = 2**30  # 4 GiB in float32


@dataclass(frozen=True, kw_only=True)
class Contrast(MethodConfig):
    """Samples projected by G, a temperature, and a queue of past ones."""

    tau: float = 0.2
    """Temperature of the sample logits."""
    queue: int = 8192
    """Length of the labeled queue of past keys."""
    projection_dim: int = 128
    """Output width of the projection G."""
    projection_hidden: int = 0
    """Hidden width of G; 0: the trunk's feature width."""
    projection_norm: bool = True
    """Batch norm inside G, as released; MoCo v2's G, which the paper names, has none."""
    contrast: Literal["local", "global"] = "local"
    """With several processes (torchrun), whose samples of this step meet: a process's own, as released, or those of all, as
    the paper's A(i) has it. The queue has the keys of all either way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau > 0, "method.tau", self.tau, "above 0: try 0.05 to 0.2")
        require(0 <= self.queue <= MAX_QUEUE, "method.queue", self.queue, f"between 0 and {MAX_QUEUE:,}")
        rule = f"between 1 and {MAX_WIDTH:,}"
        require(1 <= self.projection_dim <= MAX_WIDTH, "method.projection_dim", self.projection_dim, rule)
        rule = f"between 0 and {MAX_WIDTH:,}"
        require(0 <= self.projection_hidden <= MAX_WIDTH, "method.projection_hidden", self.projection_hidden, rule)
        rule = f"at most {MAX_QUEUE_NUMBERS // self.projection_dim:,} with projection_dim {self.projection_dim}"
        require(self.queue * self.projection_dim <= MAX_QUEUE_NUMBERS, "method.queue", self.queue, rule)


@dataclass(frozen=True, kw_only=True)
class MomentumContrast(Contrast):
    """The MoCo frame that SupCon, multi-task and PaCo share."""

    momentum: float = 0.999
    """The key network keeps this share of itself at each step."""
    key_norm: Literal["batch", "ema", "shuffled"] = "batch"
    """Batch norm of the key network: statistics of its own batch, as released; the query's running averages; or of batches
    mixed across processes (torchrun) or across the groups of --model.norm ghost, as MoCo has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1: try 0.999")


@dataclass(frozen=True, kw_only=True)
class SupCon(MomentumContrast, LinearStage):
    """Khosla et al., 2020."""

    name: ClassVar[str] = "supcon"
    title: ClassVar[str] = "SupCon"

    linear_epochs: int = 100
    """Epochs of the second stage: a linear classifier on the frozen trunk."""
    linear_lr: float = 1.25
    """Learning rate of the second stage (cosine to zero); its authors' 5 at 512 images is 1.25 at 128."""
    linear_decay: float = 0.0
    """L2 penalty in the second stage."""


@dataclass(frozen=True, kw_only=True)
class MultiTask(MomentumContrast):
    """The paper's baseline: a softmax loss plus a weighted SupCon."""

    name: ClassVar[str] = "multi-task"
    title: ClassVar[str] = "Multi-task"

    weight: float = 0.05
    """Of the contrastive loss, where the softmax loss has weight 1."""
    rebalance: bool = False
    """Balanced Softmax in the softmax loss, instead of cross-entropy."""
    supcon: Literal["plain", "reweighted", "balanced"] = "plain"
    """SupCon as it is; its anchors weighted by the effective number of images; or Balanced Softmax among its samples."""
    beta: float = 0.999
    """`reweighted`: a class of n images weighs (1 - beta) / (1 - beta^n), scaled to a mean of 1."""

    @property
    def label(self) -> str:
        softmax = "Balanced Softmax" if self.rebalance else "CE"
        how = {"plain": "", "reweighted": "re-weighted ", "balanced": "balanced "}[self.supcon]
        return f"{softmax} + {how}SupCon"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.weight >= 0, "method.weight", self.weight, "0 or more: try 0.05 to 1")
        require(0 <= self.beta < 1, "method.beta", self.beta, "in [0, 1): try 0.999")


@dataclass(frozen=True, kw_only=True)
class Centers(Chunked):
    """Class centers as further contrast partners."""

    alpha: float | Literal["auto"] = 0.05
    """Weight of a positive sample, where the class's own center has weight 1; `auto`: by the paper's theory, from class counts,
    queue and batch, so that at the optimum the centers have the share P_sup = 0.71 (`longtail theory`)."""
    center_tau: float = 1.0
    """Temperature of the center logits: 1 as released, `tau` as the text has it."""
    rebalance: bool = True
    """Multiply the centers by class frequency (Eq. 8); without, Eq. 4."""
    smoothing: float = 0.0
    """Of the centers' targets: this share goes to all classes alike (GPaCo's choice)."""

    @property
    def label(self) -> str:
        return self.title if self.rebalance else f"{self.title}, no rebalance"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "in [0, 1), or auto: try 0.01 to 0.05"
        require(self.alpha == "auto" or 0 <= self.alpha < 1, "method.alpha", self.alpha, rule)
        require(self.center_tau > 0, "method.center_tau", self.center_tau, "above 0")
        require(0 <= self.smoothing < 1, "method.smoothing", self.smoothing, "in [0, 1): try 0.1")


@dataclass(frozen=True, kw_only=True)
class PaCo(MomentumContrast, Centers):
    name: ClassVar[str] = "paco"
    title: ClassVar[str] = "PaCo"


@dataclass(frozen=True, kw_only=True)
class GPaCo(Contrast, Centers):
    """Cui et al., 2023: no key network, both views are anchors."""

    name: ClassVar[str] = "gpaco"
    title: ClassVar[str] = "GPaCo"

    projection_norm: bool = False
    """Batch norm inside G."""
