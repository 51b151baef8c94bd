"""Causal Norm, or De-confound-TDE (Tang et al., 2020), which removes the effect of momentum from the features."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.errors import UserError
from longtail.methods.base import Batch, uniform_prior
from longtail.methods.softmax import CrossEntropy
from longtail.models.heads import Classifier
from longtail.models.side_stream import SideStream
from longtail.models.split_resnets import TwinBlock


class CausalHead(nn.Module):
    """A classifier with H heads: scale/H · sum over heads of <x_h/|x_h|, w_h/(|w_h| + gamma)>.

    In evaluation, the component of x_h/|x_h| along the drift is removed. The drift is a moving sum of the batch means of the
    features; only its direction is used.
    """

    drift_F: Tensor

    def __init__(self, width: int, classes: int, config: cfg.CausalNormSettings) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(classes, width)))
        self.register_buffer("drift_F", torch.zeros(width))

    def forward(self, x_BF: Tensor) -> Tensor:
        c = self.config
        x_BHP, w_CHP = split_heads(x_BF, c.heads), split_heads(self.weight, c.heads)
        x_BHP = F.normalize(x_BHP, dim=2)
        if not self.training:
            d_HP = F.normalize(split_heads(self.drift_F[None], c.heads), dim=2)[0]
            x_BHP = x_BHP - c.removal * (x_BHP * d_HP).sum(2, keepdim=True) * d_HP
        w_CHP = w_CHP / (w_CHP.norm(dim=2, keepdim=True) + c.gamma)
        return c.scale / c.heads * x_BHP.flatten(1) @ w_CHP.flatten(1).T


def split_heads(x: Tensor, number: int) -> Tensor:
    """Split the features (N, F) into heads (N, H, P)."""
    return x.unflatten(1, (number, -1))


class CausalNorm(CrossEntropy, settings="causal-norm"):
    """Cross-entropy with a `CausalHead`, whose drift is updated after each step."""

    config: cfg.CausalNormSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.means: list[Tensor] = []  # the feature means of the batches of the current step

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.CausalNormSettings)
        return TwinBlock(net, config.model.name, config.model.pretrained) if config.method.twin_block else net

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.CausalNormSettings)
        if width % config.method.heads:
            raise UserError(
                f"--method.heads {config.method.heads}: it must divide the width of the features, {width}",
                kind="conflict",
            )
        return CausalHead(width, classes, config.method)

    def prior(self) -> Tensor:
        """Return uniform frequencies, which the removal of the drift aims at; the loss does not imply them."""
        return uniform_prior(super().prior())

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        x_BF = self.features(batch.query)
        self.means.append(x_BF.detach().mean(0))
        return self.loss_from_features(x_BF, batch.y_B)

    def waiting_lists(self) -> tuple[list[Any], ...]:
        return (self.means,)

    def after_backward(self, side: SideStream) -> None:
        drift_F = self.net.get_buffer("head.drift_F")
        for mean_F in self.means:
            drift_F.mul_(self.config.drift).add_(mean_F)
        self.means = []
