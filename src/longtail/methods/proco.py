"""ProCo (Du et al., TPAMI 2024): contrast with the distribution of each class, which is estimated from a running mean.

Shapes: V key views, D projected width, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtail.distributed import all_gather
from longtail.losses.proco import proco_loss
from longtail.methods.three_views import ThreeViewContrast
from longtail.models.heads import Classifier

if TYPE_CHECKING:
    from longtail import config as cfg


class ClassMeans(nn.Module):
    """The mean of the features of each class since the start of the previous epoch, over all processes.

    Two sums are kept: one since the start of the previous epoch, and one since the start of the present epoch. At the start of
    an epoch the second replaces the first and is reset. All state is in buffers, so that a checkpoint contains it.
    """

    sum_CD: Tensor
    count_C: Tensor
    new_sum_CD: Tensor
    new_count_C: Tensor
    epoch: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        for name in ("", "new_"):
            self.register_buffer(f"{name}sum_CD", torch.zeros(classes, width))
            self.register_buffer(f"{name}count_C", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("epoch", torch.full((), -1))  # the epoch that was started last

    @torch.no_grad()
    def start_epoch(self, epoch: int) -> None:
        """Start the sums of a new epoch, unless this was done for the epoch already, as in a run that was resumed within it."""
        if int(self.epoch) == epoch:
            return
        self.sum_CD.copy_(self.new_sum_CD), self.count_C.copy_(self.new_count_C)
        self.new_sum_CD.zero_(), self.new_count_C.zero_()
        self.epoch.fill_(epoch)

    @torch.no_grad()
    def update(self, z_VD: Tensor, y_V: Tensor) -> None:
        """Take in the features of a step. Products in float64 are exact enough, and their order of summation is fixed."""
        z_VD, y_V = all_gather(z_VD), all_gather(y_V)
        is_class_CV = torch.arange(len(self.count_C), device=y_V.device)[:, None] == y_V
        sum_CD, count_C = (is_class_CV.double() @ z_VD.double()).to(self.sum_CD.dtype), is_class_CV.sum(1)
        self.sum_CD.add_(sum_CD), self.count_C.add_(count_C)
        self.new_sum_CD.add_(sum_CD), self.new_count_C.add_(count_C)

    def forward(self) -> Tensor:
        """Return the means (C, D) in float64. That of a class without features is zero."""
        return self.sum_CD.double() / self.count_C.clamp(min=1)[:, None]


class ProCo(ThreeViewContrast, settings="proco"):
    """The running means contain the features of the present step, as in the authors' code."""

    config: cfg.ProCoSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.means = ClassMeans(len(counts_C), self.config.projection_dim)

    def on_epoch_start(self, epoch: int, epochs: int) -> None:
        self.means.start_epoch(epoch)

    def observe(self, z_VD: Tensor, y_V: Tensor) -> None:
        self.means.update(z_VD, y_V)

    def contrast_loss(self, z_VD: Tensor, y_V: Tensor) -> Tensor:
        return proco_loss(z_VD, y_V, self.means(), self.log_prior_C, self.config.tau)
