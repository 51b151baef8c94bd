"""OLTR (Liu et al., 2019): features enhanced by a memory of class centroids, and damped far from all of these."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss
from longtail.methods.base import Method, Stage, StageData, accuracy
from longtail.methods.decouple import class_means
from longtail.methods.stages import second_stage
from longtail.models.heads import linear_head
from longtail.models.split_resnets import AttentionResNet

REACHABILITY = 10.0  # the reachability of a feature at distance 1 from its nearest centroid
REPULSION_WEIGHT = 0.01  # weight of the distance to other centroids, beside that to the own


class MemoryHead(nn.Module):
    """v = reach · (x + e ⊙ m): m is what the memory recalls of x, e selects, and reach falls with the distance to the nearest
    centroid; a cosine classifier follows. In the first stage it is its linear part alone."""

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale, self.uses_memory = scale, False
        self.linear = linear_head(width, classes)  # the first stage's classifier, and then what recalls
        self.select = nn.Linear(width, width)
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(classes, width)))
        self.centroid_CF = nn.Parameter(torch.zeros(classes, width))

    def forward(self, x_BF: Tensor) -> Tensor:
        recall_BC = self.linear(x_BF)
        if not self.uses_memory:
            return recall_BC
        centroid_CF = self.centroid_CF.detach()  # they learn by the distance alone
        memory_BF = recall_BC.softmax(1) @ centroid_CF
        nearest_B = squared_distance(x_BF, centroid_CF).amin(1).clamp(min=1e-6).sqrt()
        v_BF = REACHABILITY / nearest_B[:, None] * (x_BF + self.select(x_BF).tanh() * memory_BF)
        length_B1 = v_BF.norm(dim=1, keepdim=True)
        return self.scale * F.linear(v_BF / (1 + length_B1), F.normalize(self.weight))


def squared_distance(x_BF: Tensor, m_CF: Tensor) -> Tensor:
    return ((x_BF**2).sum(1, keepdim=True) - 2 * x_BF @ m_CF.T + (m_CF**2).sum(1)).clamp(min=0)


class OLTR(Method, settings="oltr"):
    """Stage 1: cross-entropy. Stage 2, on images drawn class-balanced: attention, memory and cosine classifier."""

    config: cfg.OLTR

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), second_stage(config, "memory", "memory_lr", sampler="balanced")

    @classmethod
    def body(cls, net: nn.Module, config: cfg.Config) -> nn.Module:
        return AttentionResNet(net, config.model.name, config.data.image_size)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.OLTR)
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
        """In the second stage the trunk moves more slowly than what is new."""
        if self.stage.name != "memory":
            return super().param_groups()
        trunk = list(self.parts[0].shared.parameters())
        known = {id(p) for p in trunk}
        new = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        return [{"params": new}, {"params": trunk, "lr_scale": self.config.trunk_lr}]

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        """The memory is what the first stage has learned: its class means, and its classifier to recall them by."""
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
        """Near to the own centroid, and from the others a margin away on average."""
        distance_BC = squared_distance(x_BF, self.net.get_parameter("head.centroid_CF"))
        own_B = distance_BC.gather(1, y_B[:, None])[:, 0]
        others_B = (distance_BC.sum(1) - own_B) / max(distance_BC.shape[1] - 1, 1)
        return own_B.mean() / 2 + REPULSION_WEIGHT * (self.config.margin - others_B).clamp(min=0).mean()
