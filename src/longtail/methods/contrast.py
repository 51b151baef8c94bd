"""What contrastive methods share: the projection G, the queue, who meets whom; and the MoCo frame of SupCon and PaCo.

Query view -> trunk -> x -> G -> q; key view -> momentum trunk and G -> k; A(i) is every q but the anchor's own, every k, and
the queue. The queue is read before this step's keys are pushed, or they would stand in A(i) twice. With several processes the q
and k are a process's own (`local`) or those of all (`global`); then the gradient also flows through those that went elsewhere.
Every anchor has its own key for a positive, so that all count in SupCon's mean, and the mean of processes is the anchors'.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.data.samplers import rank_and_world_size
from longtail.methods.base import Batch, Method, compiled
from longtail.models.collective import gather, gather_with_gradient
from longtail.models.heads import Classifier, projection
from longtail.models.momentum import EMPTY, LabeledQueue, MomentumNetwork, Shuffle
from longtail.models.side_stream import SideStream


class Meeting(NamedTuple):
    """The samples that the anchors meet: raw products z·G(x), labels, and which are not in A(i)."""

    contrast_BM: Tensor
    y_M: Tensor
    drop_BM: Tensor


class Met(NamedTuple):
    """All z that anchors meet, their labels, and which of them anchor 0 is; anchor i is the i-th after it."""

    z_MD: Tensor
    y_M: Tensor
    first: int

    def with_anchors(self, q_BD: Tensor) -> Meeting:
        itself_BM = torch.eye(self.first + len(q_BD), len(self.z_MD), dtype=torch.bool, device=self.y_M.device)
        return Meeting(q_BD @ self.z_MD.T, self.y_M, itself_BM[self.first :] | (self.y_M == EMPTY))


def meet(q_BD: Tensor, k_BD: Tensor, y_B: Tensor, queue: LabeledQueue, contrast: str) -> Met:
    """Who stands in A(i), and the anchor itself. `k_BD` has as many rows as there are keys of this step: none, where queries
    alone meet."""
    samples, labels, first = [q_BD, k_BD], [y_B, y_B[: len(k_BD)]], 0
    if contrast == "global":
        first = rank_and_world_size()[0] * (len(q_BD) + len(k_BD))
        samples, labels = [gather_with_gradient(torch.cat(samples))], [gather(torch.cat(labels))]
    return Met(torch.cat([*samples, queue.keys_KD]), torch.cat([*labels, queue.labels_K]), first)


class Contrast(Method):
    """Samples projected by G, and a queue of past ones."""

    two_views = True
    G_layers: ClassVar[int] = 2
    config: cfg.Contrast

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c, width = self.config, net.trunk.width
        self.G = projection(width, c.projection_hidden or width, c.projection_dim, c.projection_norm, self.G_layers)
        self.queue = LabeledQueue(c.queue, c.projection_dim)
        self.fresh: list[tuple[Tensor, Tensor]] = []  # keys of the step under way

    def project(self, G: nn.Module, x_BF: Tensor) -> Tensor:
        return F.normalize(G(x_BF))

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """The terms of the loss from the trunk's features, the queries and the keys; as `after_trunk`, which see."""
        raise NotImplementedError

    def samples(self, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> Met:
        return meet(q_BD, k_BD, y_B, self.queue, self.config.contrast)

    def contrast(self, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> Meeting:
        return self.samples(q_BD, k_BD, y_B).with_anchors(q_BD)

    def compile(self, *_: Any, **__: Any) -> None:
        super().compile()
        self.project = compiled(self.project)  # type: ignore[method-assign]
        self.after_projections = compiled(self.after_projections)  # type: ignore[method-assign]

    def after_backward(self, beside: SideStream) -> None:
        for keys_BD, y_B in self.fresh:
            beside.run(self.queue.push, keys_BD, y_B)
        self.fresh = []


class MomentumContrast(Contrast):
    """The MoCo frame."""

    config: cfg.MomentumContrast

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.key = MomentumNetwork(self.query_network(), self.config.momentum, self.config.key_norm)
        self.shuffle = Shuffle() if self.config.key_norm == "shuffled" else None

    def query_network(self) -> nn.Sequential:
        return nn.Sequential(self.net.trunk, self.G)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        beside = SideStream(batch.key.device)  # queries and keys meet only in the loss
        k_BD = beside.run(self.shuffled_keys if self.shuffle else self.keys, batch.key)
        x_BF = self.features(batch.query)
        q_BD = self.project(self.G, x_BF)
        beside.join()
        self.fresh.append((k_BD, batch.y_B))
        return self.after_projections(x_BF, q_BD, k_BD, batch.y_B)

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        trunk, G = self.key.net.children()
        return self.project(G, trunk(images))

    def shuffled_keys(self, images: Tensor) -> Tensor:
        assert self.shuffle is not None
        return self.shuffle(self.keys, images)

    def after_step(self) -> None:
        self.key.follow(self.query_network())
