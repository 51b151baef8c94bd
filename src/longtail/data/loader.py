"""The resident loader: the whole set lives on the device as uint8, and a batch is a gather of its rows."""

import hashlib

import torch
from torch import Tensor

from longtail.data.sources import Source


def derive_seed(purpose: str, *parts: int) -> int:
    """63 bits that depend on what they are for and on all parts (run seed, stage, step, …), and resemble no neighbour's."""
    digest = hashlib.sha256(f"{purpose} {parts}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


class ResidentLoader:
    """Batches of (images, labels) in an order that is a function of seed and epoch alone: nothing to save for a resume."""

    def __init__(self, source: Source, batch_size: int, seed: int, device: torch.device) -> None:
        self.images_N = torch.from_numpy(source.images).permute(0, 3, 1, 2).contiguous().to(device)
        self.y_N = torch.from_numpy(source.labels).to(device)
        # A smaller last batch is left out, so that every step has one shape; a set below one batch is one batch.
        self.batch_size = min(batch_size, len(source.labels))
        self.batches = len(source.labels) // self.batch_size
        self.seed = seed
        self._epoch, self._order_N = -1, self.y_N

    def batch(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Batch `index` of an epoch: uint8 images N,3,H,W and their labels."""
        rows = self.order(epoch)[index * self.batch_size : (index + 1) * self.batch_size]
        return self.images_N[rows], self.y_N[rows]

    def order(self, epoch: int) -> Tensor:
        """The shuffle of an epoch, drawn on the CPU so that all devices agree, and kept while it lasts."""
        if epoch != self._epoch:
            rng = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
            self._order_N = torch.randperm(len(self.y_N), generator=rng).to(self.y_N.device)
            self._epoch = epoch
        return self._order_N
