"""NCL (Li et al., CVPR 2022): networks that are trained together on different views of the same images; the first is deployed.

Shapes: E networks, B images, F features, C classes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtail.losses.ncl import ncl_loss
from longtail.methods.base import Batch, Method, Stage, accuracy
from longtail.models.heads import Classifier

if TYPE_CHECKING:
    from longtail import config as cfg


class NCL(Method, settings="ncl"):
    """Every network has a view of its own. Pretrained backbones begin with the same weights, others with random ones."""

    compiled_functions = ("loss_from_logits",)
    config: cfg.NCLSettings
    log_counts_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("log_counts_C", counts_C.double().log().float(), persistent=False)
        others = range(1, self.config.networks)
        self.others = nn.ModuleList(self.make_other_network(config) for _ in others)

    def make_other_network(self, config: cfg.Config) -> Classifier:
        """Return a network like the deployed one. Stored features, which have no backbone, are its input as well."""
        trunk, classes = self.net.trunk, len(self.counts_C)
        has_weights = any(True for _ in trunk.parameters())
        is_new = has_weights and not config.model.pretrained
        trunk = self.build_trunk(config, False, classes) if is_new else copy.deepcopy(trunk)
        return Classifier(trunk, self.head(trunk.width, classes, config))

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return (self.first_stage(config, extra_views=("query",) * (self.config.networks - 1)),)

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        for other in self.others:
            assert isinstance(other, Classifier)
            other.trunk.requires_grad_(not stage.frozen)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        views = zip((self.net, *self.others), (batch.query, *batch.extra), strict=True)
        return self.loss_from_logits(torch.stack([net(view) for net, view in views]), batch.y_B)

    def loss_from_logits(self, logits_EBC: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns. `compile` fuses the operations of this part."""
        individual, mutual = ncl_loss(logits_EBC, y_B, self.log_counts_C, self.config.hard)
        return {
            "loss": individual + self.config.weight * mutual,
            "accuracy": accuracy(logits_EBC[0], y_B),
            "individual": individual,
            "mutual": mutual,
        }

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C)
