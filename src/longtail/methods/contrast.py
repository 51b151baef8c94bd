"""The MoCo frame that SupCon and PaCo share.

Query view -> trunk -> x -> G -> q; key view -> momentum trunk and G -> k; A(i) is every q but the anchor's own, every k, and
the queue. The queue is read before this step's keys are pushed, or they would stand in A(i) twice.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.methods.base import Batch, Method
from longtail.models.beside import Beside
from longtail.models.heads import Classifier, projection
from longtail.models.momentum import EMPTY, LabelledQueue, MomentumNetwork


class Contrast(NamedTuple):
    """The samples that the anchors meet: raw products z·G(x), labels, and which are not in A(i)."""

    contrast_BM: Tensor
    y_M: Tensor
    drop_BM: Tensor


class MomentumContrast(Method):
    two_views = True
    config: cfg.MomentumContrast

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        assert isinstance(config.method, cfg.MomentumContrast)
        c, width = config.method, net.trunk.width
        self.config = c
        self.G = projection(width, c.projection_hidden or width, c.projection_dim, c.projection_norm)
        self.key = MomentumNetwork(self.query_network(), c.momentum, c.key_norm)
        self.queue = LabelledQueue(c.queue, c.projection_dim)
        self.fresh: list[tuple[Tensor, Tensor]] = []  # keys of the step under way, pushed when it is done

    def query_network(self) -> nn.Sequential:
        return nn.Sequential(self.net.trunk, self.G)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        beside = Beside(batch.key.device)  # queries and keys meet only in the loss
        k_BD = beside.run(self.keys, batch.key)
        x_BF = self.features(batch.query)
        beside.join()
        self.fresh.append((k_BD, batch.y_B))
        return self.after_trunks(x_BF, k_BD, batch.y_B)

    def after_trunks(self, x_BF: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """The terms of the loss from the query trunk's features and the keys; as `after_trunk`, which see."""
        raise NotImplementedError

    def contrast(self, x_BF: Tensor, k_BD: Tensor, y_B: Tensor) -> Contrast:
        q_BD = F.normalize(self.G(x_BF))
        z_MD = torch.cat([q_BD, k_BD, self.queue.keys_KD])
        y_M = torch.cat([y_B, y_B, self.queue.labels_K])
        drop_BM = (y_M == EMPTY).repeat(len(q_BD), 1)
        drop_BM.fill_diagonal_(True)  # the anchor itself: q_i is column i
        return Contrast(q_BD @ z_MD.T, y_M, drop_BM)

    def keys(self, images: Tensor) -> Tensor:
        return self.after_key_trunk(self.key.trunk(images))

    def after_key_trunk(self, key_BF: Tensor) -> Tensor:
        return F.normalize(self.key.project(key_BF))

    def compile(self, *_: Any, **__: Any) -> None:
        super().compile()
        self.after_key_trunk = torch.compile(self.after_key_trunk, dynamic=False)  # type: ignore[method-assign]
        self.after_trunks = torch.compile(self.after_trunks, dynamic=False)  # type: ignore[method-assign]

    def after_step(self) -> None:
        beside = Beside(self.queue.keys_KD.device)
        for keys_BD, y_B in self.fresh:
            beside.run(self.queue.push, keys_BD, y_B)
        self.key.follow(self.query_network())
        beside.join()
        self.fresh = []
