"""OLTR (Liu et al., 2019): features are enhanced by a memory of class centroids, and scaled down far from all centroids."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss
from longtail.methods.base import Method, Stage, StageData, accuracy
from longtail.methods.decouple import second_stage
from longtail.models.head_init import class_means
from longtail.models.heads import make_linear_head
from longtail.models.split_resnets import AttentionResNet

REACHABILITY = 10.0
"""The reachability of a feature at distance 1 from its nearest centroid."""
REPULSION_WEIGHT = 0.01
"""The weight of the distance to the centroids of other classes in the loss."""


class MemoryHead(nn.Module):
    """A cosine classifier of v = reach · (x + e ⊙ m).

    m is the memory feature of x, e selects its components, and reach decreases with the distance to the nearest centroid. In
    the first stage only the linear classifier is used.
    """

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale, self.uses_memory = scale, False
        self.linear = make_linear_head(
            width, classes
        )  # the classifier of the first stage, which later weights the memory
        self.select = nn.Linear(width, width)
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(classes, width)))
        self.centroid_CF = nn.Parameter(torch.zeros(classes, width))

    def forward(self, x_BF: Tensor) -> Tensor:
        logits_BC = self.linear(x_BF)
        if not self.uses_memory:
            return logits_BC
        centroid_CF = self.centroid_CF.detach()  # centroids are trained by `distance_loss` only
        memory_BF = logits_BC.softmax(1) @ centroid_CF
        nearest_B = squared_distance(x_BF, centroid_CF).amin(1).clamp(min=1e-6).sqrt()
        v_BF = REACHABILITY / nearest_B[:, None] * (x_BF + self.select(x_BF).tanh() * memory_BF)
        length_B1 = v_BF.norm(dim=1, keepdim=True)
        return self.scale * F.linear(v_BF / (1 + length_B1), F.normalize(self.weight))


def squared_distance(x_BF: Tensor, m_CF: Tensor) -> Tensor:
    """Return the squared distance of each feature to each centroid, (B, C)."""
    return ((x_BF**2).sum(1, keepdim=True) - 2 * x_BF @ m_CF.T + (m_CF**2).sum(1)).clamp(min=0)


class OLTR(Method, settings="oltr"):
    """Stage 1: cross-entropy. Stage 2, with class-balanced sampling: attention, memory and cosine classifier."""

    config: cfg.OLTRSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), second_stage(config, "memory", "memory_lr", sampler="balanced")

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        return AttentionResNet(net, config.model.name, config.data.image_size)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.OLTRSettings)
        return MemoryHead(width, classes, config.method.scale)

    @property
    def parts(self) -> tuple[AttentionResNet, MemoryHead]:
        assert isinstance(self.net.trunk.body, AttentionResNet) and isinstance(self.net.head, MemoryHead)
        return self.net.trunk.body, self.net.head

    @property
    def class_weights(self) -> nn.Parameter:
        return self.net.get_parameter("head.weight" if self.parts[1].uses_memory else "head.linear.weight")

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        second = stage.name == "memory"
        body, head = self.parts
        body.uses_attention = head.uses_memory = second
        for part in (body.attention, head.select, head.weight, head.centroid_CF):
            part.requires_grad_(second)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; in the second stage the backbone has a lower rate than the new parts."""
        if self.stage.name != "memory":
            return super().param_groups()
        trunk = list(self.parts[0].shared.parameters())
        known = {id(p) for p in trunk}
        new = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        return [{"params": new}, {"params": trunk, "lr_scale": self.config.trunk_lr}]

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        """Initialize the memory with the class means of the features of the first stage."""
        if self.stage.name == "memory":
            means_CF = class_means(*start.train(), len(self.log_prior_C))
            self.net.get_parameter("head.centroid_CF").copy_(means_CF)

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        loss = cross_entropy_loss(logits_BC, y_B)
        if self.stage.name == "memory":
            loss = loss + self.config.weight * self.distance_loss(x_BF, y_B)
        return {"loss": loss, "accuracy": accuracy(logits_BC, y_B)}

    def distance_loss(self, x_BF: Tensor, y_B: Tensor) -> Tensor:
        """Return a loss that pulls features to their centroid and pushes them away from the others up to a margin."""
        distance_BC = squared_distance(x_BF, self.net.get_parameter("head.centroid_CF"))
        own_B = distance_BC.gather(1, y_B[:, None])[:, 0]
        others_B = (distance_BC.sum(1) - own_B) / max(distance_BC.shape[1] - 1, 1)
        return own_B.mean() / 2 + REPULSION_WEIGHT * (self.config.margin - others_B).clamp(min=0).mean()
