"""ResLT (Cui et al., 2022): light branches for all classes, for all but the frequent, and for the rare, with one classifier."""

import torch
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss
from longtail.methods.base import Method, accuracy, uniform_prior
from longtail.models.heads import Classifier, linear_head
from longtail.models.split_resnets import LightBranches

BRANCHES = 3


class SharedHead(nn.Module):
    """The sum over branches of one linear classifier's logits."""

    def __init__(self, width: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.linear = linear_head(width // BRANCHES, classes, bias)

    def each(self, x_BF: Tensor) -> Tensor:
        """(branches, B, C)"""
        return self.linear(torch.stack(x_BF.chunk(BRANCHES, 1)))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.each(x_BF).sum(0)


class ResLT(Method, settings="reslt"):
    config: cfg.ResLT
    learns_RC: Tensor  # which branch learns which class

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        C, rank_C = len(counts_C), counts_C.argsort(stable=True, descending=True).argsort()  # 0: the most frequent
        shares = torch.tensor([1.0, self.config.medium, self.config.few])
        first_R = C - (shares * C).round().long().clamp(min=1)
        self.register_buffer("learns_RC", rank_C >= first_R[:, None], persistent=False)

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        return LightBranches(net, config.model.name, BRANCHES)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return SharedHead(width, classes, config.model.bias)

    @property
    def class_weights(self) -> nn.Parameter:
        return self.net.get_parameter("head.linear.weight")

    def prior(self) -> Tensor:
        """What its sum of branches aims at; the losses do not imply it."""
        return uniform_prior(super().prior())

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_RBC = self.net.head.each(x_BF)  # type: ignore[operator]
        fused_BC = logits_RBC.sum(0)
        fused, own = cross_entropy_loss(fused_BC, y_B), self.own_loss(logits_RBC, y_B)
        w = self.config.weight
        return {"loss": w * own + (1 - w) * fused, "accuracy": accuracy(fused_BC, y_B)}

    def own_loss(self, logits_RBC: Tensor, y_B: Tensor) -> Tensor:
        """The mean over all pairs of a branch and an image that it learns."""
        log_p_RB = logits_RBC.log_softmax(2).gather(2, y_B.expand(BRANCHES, -1)[:, :, None])[:, :, 0]
        learns_RB = self.learns_RC[:, y_B]
        return -torch.where(learns_RB, log_p_RB, 0.0).sum() / learns_RB.sum()
