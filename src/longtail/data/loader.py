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
        self.seed, self.epoch = seed, -1
        # Where the next batch lies is known to the device, so that a captured step finds it without the host.
        self.order_N = torch.zeros_like(self.y_N)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.rows_B = torch.arange(self.batch_size, device=device)

    def seek(self, epoch: int, index: int) -> None:
        """Go to batch `index` of an epoch."""
        if epoch != self.epoch:
            self.order_N.copy_(self.order(epoch))
            self.epoch = epoch
        self.cursor.fill_(index * self.batch_size)

    def next(self) -> tuple[Tensor, Tensor]:
        """The batch at the cursor, which moves on: uint8 images N,3,H,W and their labels."""
        rows = self.order_N[self.cursor + self.rows_B]
        self.cursor += self.batch_size
        return self.images_N[rows], self.y_N[rows]

    def order(self, epoch: int) -> Tensor:
        """The shuffle of an epoch, drawn on the CPU so that all devices agree."""
        rng = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(len(self.y_N), generator=rng)
