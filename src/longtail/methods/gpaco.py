"""GPaCo (Cui et al., 2023): PaCo without a key encoder. Both views are anchors, and the queue stores the second ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtail.losses.paco import paco_objective
from longtail.methods.base import Batch, Method
from longtail.methods.contrast import gather_contrast_set, make_loss_params
from longtail.models.heads import ProjectionHead
from longtail.models.momentum import LabeledQueue
from longtail.models.side_stream import SideStream

if TYPE_CHECKING:
    from longtail import config as cfg


class GPaCo(Method, settings="gpaco"):
    """Both views go through the same network, so that there are twice as many anchors as images."""

    two_views = True
    compiled_functions = ("loss_from_features", "loss_from_projections")
    config: cfg.GPaCoSettings

    def __init__(self, net: Any, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c = self.config
        self.G = ProjectionHead(net.trunk.width, c.projection_hidden, c.projection_dim, c.projection_norm, layers=3)
        self.queue = LabeledQueue(c.queue, c.projection_dim)
        self.params = make_loss_params(config, counts_C)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        x_BF = self.features(torch.cat([batch.query, batch.key]))
        q_BD = self.G(x_BF)
        self.queue.waiting.append((q_BD[len(batch.y_B) :].detach(), batch.y_B))
        return self.loss_from_projections(x_BF, q_BD, batch.y_B.repeat(2))

    def loss_from_projections(self, x_BF: Tensor, q_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns, from the features, projections and labels of all anchors."""
        c = self.config
        contrast = gather_contrast_set(q_BD, q_BD[:0], y_B, self.queue, c.contrast)
        log_prior_C = self.log_prior_C if c.rebalance else None
        return paco_objective(x_BF, y_B, contrast, self.linear, log_prior_C, self.params, c.chunk)

    def waiting_lists(self) -> tuple[list[Any], ...]:
        return (self.queue.waiting,)

    def after_backward(self, side: SideStream) -> None:
        self.queue.push_waiting(side)

    def compiled_modules(self) -> tuple[nn.Module, ...]:
        return (self.G,)

    def resolved_settings(self) -> dict[str, float]:
        return {"alpha": self.params.alpha} if self.config.alpha == "auto" else {}

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C) if self.config.rebalance else super().prior()
