"""PaCo, and the momentum contrast (MoCo) that it shares with SupCon and the multi-task baselines.

    query view -> backbone -> features x -> projection G -> query q
    key view   -> key encoder, a moving average of backbone and G -> key k

The features are compared with the class centers, which are the rows of the linear classifier `net.head`. The queries are
compared with the other queries, the keys, and the queue of past keys. `losses/paco.py` has the equation.

A step of the training loop (`engine/loop.py`) is: `loss`, backward pass, `after_backward`, optimizer step, `after_step`.
If gradients are accumulated, the first two are repeated for each batch, and then the keys of all batches enter the queue.

Shapes: B images, F features, D projected width, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longtail.losses.paco import paco_objective
from longtail.methods.base import Batch, Method
from longtail.methods.contrast import gather_contrast_set, make_loss_params
from longtail.models.heads import ProjectionHead
from longtail.models.momentum import LabeledQueue, MomentumNetwork
from longtail.models.side_stream import SideStream

if TYPE_CHECKING:
    from longtail import config as cfg


class MomentumContrast(Method):
    """The step that methods with a key encoder and a queue share. Subclasses define `loss_from_projections`."""

    two_views = True
    compiled_functions = ("loss_from_features", "loss_from_projections")
    config: cfg.MomentumContrastSettings

    def __init__(self, net: Any, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c = self.config
        self.G = ProjectionHead(net.trunk.width, c.projection_hidden, c.projection_dim, c.projection_norm)
        self.queue = LabeledQueue(c.queue, c.projection_dim)
        self.key = MomentumNetwork(self.query_network(), c.momentum, c.key_norm)
        self.shuffle = self.key.make_shuffle()  # None, or the shuffling BN of MoCo

    def query_network(self) -> nn.Sequential:
        """Return the network that the key encoder follows."""
        return nn.Sequential(self.net.trunk, self.G)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return the "loss" of a batch, and values for the log. The keys will enter the queue after the backward pass."""
        assert batch.key is not None
        side = SideStream(batch.key.device)  # on a GPU, keys are computed in parallel to queries, until `join`
        k_BD = side.run(self.key, batch.key, self.shuffle)
        x_BF = self.net.trunk(batch.all_views())
        q_BD = self.G(x_BF)
        side.join()
        self.queue.waiting.append((k_BD, batch.y_B))  # until `after_backward`
        return self.loss_from_projections(x_BF, q_BD, k_BD, batch.all_labels())

    def loss_from_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns. `compile` fuses the operations of this part.

        Args:
            x_BF: The features of the query views.
            q_BD: Their projections.
            k_BD: The keys of the key views, without gradient.
            y_B: The labels of the query views. The keys have those of the first ones.
        """
        raise NotImplementedError

    def waiting_lists(self) -> tuple[list[Any], ...]:
        return (self.queue.waiting,)

    def after_backward(self, side: SideStream) -> None:
        """Push the keys of the step into the queue."""
        self.queue.push_waiting(side)

    def after_step(self) -> None:
        """Move the key encoder toward the query network."""
        self.key.follow(self.query_network())

    def compiled_modules(self) -> tuple[nn.Module, ...]:
        return self.G, self.key.net.get_submodule("1")  # the projections of the query network and of the key encoder


class PaCo(MomentumContrast, settings="paco"):
    """Parametric contrastive learning (Cui et al., 2021): Eq. 8, or Eq. 4 without `rebalance`."""

    config: cfg.PaCoSettings

    def __init__(self, net: Any, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.params = make_loss_params(config, counts_C)

    def loss_from_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c, centers = self.config, self.net.head
        assert isinstance(centers, nn.Linear)
        contrast = gather_contrast_set(q_BD, k_BD, y_B, self.queue, c.contrast)
        log_prior_C = self.log_prior_C if c.rebalance else None  # the log of the class frequencies (`Method.__init__`)
        terms = paco_objective(x_BF, y_B, contrast, centers, log_prior_C, self.params, c.chunk)
        if not c.consistency:
            return terms
        return self.with_consistency(terms, centers(x_BF) / c.center_tau, log_prior_C)

    def resolved_settings(self) -> dict[str, float]:
        return {"alpha": self.params.alpha} if self.config.alpha == "auto" else {}

    def prior(self) -> Tensor:
        """Return uniform frequencies if the loss rebalances the centers, and otherwise those of training."""
        return self.prior_after(self.log_prior_C) if self.config.rebalance else super().prior()
