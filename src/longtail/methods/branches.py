"""Methods with several branches: BBN (Zhou et al., 2020) and ResLT (Cui et al., 2022)."""

import torch
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss
from longtail.methods.base import Batch, Method, Stage, accuracy, uniform_prior
from longtail.models.heads import Classifier, make_linear_head
from longtail.models.split_resnets import LightBranches, TwinBlock

BRANCHES = 3
"""The number of branches of ResLT."""


class BBN(Method, settings="bbn"):
    """BBN (Zhou et al., 2020): one branch for uniform sampling, and one for sampling by inverse class frequency.

    The weight `a` of the first branch falls from 1 to 0 along a parabola. In evaluation both branches have the same weight.
    """

    a: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("a", torch.ones(()), persistent=False)

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        return TwinBlock(net, config.model.name, config.model.pretrained)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        """Return a linear classifier with torch's default initialization, as in the authors' code.

        The weights of the second branch hardly change before the learning rate has decreased, so large ones would remain.
        """
        return nn.Linear(width, classes, bias=config.model.bias)

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return (self.first_stage(config, partner="reversed"),)

    def prior(self) -> Tensor:
        """Return uniform frequencies: one branch assumes the frequencies, and the other their inverse."""
        return uniform_prior(super().prior())

    def on_epoch_start(self, epoch: int, epochs: int) -> None:
        self.a.fill_(1 - (epoch / epochs) ** 2)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.partner is not None
        left_BF, right_BF = self.net.trunk(batch.query, "left"), self.net.trunk(batch.partner.query, "right")
        return self.loss_from_features(torch.cat([left_BF, right_BF], 1), batch.y_B, batch.partner.y_B)

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *partner: Tensor) -> dict[str, Tensor]:
        (other_B,), a = partner, self.a
        left_BF, right_BF = x_BF.chunk(2, 1)
        logits_BC = self.classify(torch.cat([2 * a * left_BF, 2 * (1 - a) * right_BF], 1))
        loss = a * cross_entropy_loss(logits_BC, y_B) + (1 - a) * cross_entropy_loss(logits_BC, other_B)
        right = a * accuracy(logits_BC, y_B) + (1 - a) * accuracy(logits_BC, other_B)
        return {"loss": loss, "accuracy": right}


class SharedHead(nn.Module):
    """One linear classifier for all branches, whose logits are summed."""

    def __init__(self, width: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.linear = make_linear_head(width // BRANCHES, classes, bias)

    def branch_logits(self, x_BF: Tensor) -> Tensor:
        """Return the logits of each branch, (branches, B, C)."""
        return self.linear(torch.stack(x_BF.chunk(BRANCHES, 1)))

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.branch_logits(x_BF).sum(0)


class ResLT(Method, settings="reslt"):
    """ResLT (Cui et al., 2022): branches for all classes, for all but the frequent ones, and for the rare ones."""

    config: cfg.ResLTSettings
    is_trained_RC: Tensor  # True where a branch is trained on a class

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        C, rank_C = len(counts_C), counts_C.argsort(stable=True, descending=True).argsort()  # 0: the most frequent
        shares = torch.tensor([1.0, self.config.medium, self.config.few])
        first_R = C - (shares * C).round().long().clamp(min=1)
        self.register_buffer("is_trained_RC", rank_C >= first_R[:, None], persistent=False)

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
        """Return uniform frequencies, which the sum of branches aims at; the losses do not imply them."""
        return uniform_prior(super().prior())

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_RBC = self.net.head.branch_logits(x_BF)  # type: ignore[operator]
        fused_BC = logits_RBC.sum(0)
        fused, own = cross_entropy_loss(fused_BC, y_B), self.own_loss(logits_RBC, y_B)
        w = self.config.weight
        return {"loss": w * own + (1 - w) * fused, "accuracy": accuracy(fused_BC, y_B)}

    def own_loss(self, logits_RBC: Tensor, y_B: Tensor) -> Tensor:
        """Return the mean over all pairs of a branch and an image of its classes."""
        log_p_RB = logits_RBC.log_softmax(2).gather(2, y_B.expand(BRANCHES, -1)[:, :, None])[:, :, 0]
        is_trained_RB = self.is_trained_RC[:, y_B]
        return -torch.where(is_trained_RB, log_p_RB, 0.0).sum() / is_trained_RB.sum()
