"""BBN (Zhou et al., 2020): one branch for images as they come, one for images drawn by the inverse of their class's size."""

import torch
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss
from longtail.methods.base import Batch, Method, Stage, accuracy, uniform_prior
from longtail.models.heads import Classifier
from longtail.models.split_resnets import TwinBlock


class BBN(Method, settings="bbn"):
    """The weight a of the first branch falls from 1 to 0 along a parabola; at test both count alike."""

    a: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("a", torch.ones(()), persistent=False)

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        return TwinBlock(net, config.model.name, config.model.pretrained)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        """As its authors have it, with torch's own small weights: those of the second branch hardly learn before the rate has
        fallen, and what they begin with would stay."""
        return nn.Linear(width, classes, bias=config.model.bias)

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return (self.first_stage(config, partner="reversed"),)

    def prior(self) -> Tensor:
        """One branch has the frequencies and one their inverse: their sum has none."""
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
