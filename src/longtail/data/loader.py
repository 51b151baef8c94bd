"""The resident loader: the whole set lives on the device as uint8, and taking images is a gather of its rows."""

import hashlib

import torch
from torch import Tensor

from longtail.data.sources import Source


def derive_seed(purpose: str, *parts: int) -> int:
    """63 bits that depend on what they are for and on all parts (run seed, stage, step, …), and resemble no neighbour's."""
    digest = hashlib.sha256(f"{purpose} {parts}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def put(source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as N,3,H,W and labels, on the device."""
    images_N = torch.from_numpy(source.images).permute(0, 3, 1, 2).contiguous().to(device)
    return images_N, torch.from_numpy(source.labels).to(device)


class ResidentLoader:
    """Images and labels in an order that is a function of seed and epoch alone: nothing to save for a resume.

    `twin` is a loader of the same source: runs side by side keep one copy of the images.
    """

    def __init__(
        self, source: Source, batch_size: int, seed: int, device: torch.device, twin: "ResidentLoader | None" = None
    ) -> None:
        self.images_N, self.y_N = twin.resident if twin else put(source, device)
        # A smaller last batch is left out, so that every step has one shape; a set below one batch is one batch.
        self.batch_size = min(batch_size, len(source.labels))
        self.batches = len(source.labels) // self.batch_size
        self.seed, self.epoch = seed, -1
        # Where the next images lie is known to the device, so that captured work finds them without the host.
        self.order_N = torch.zeros_like(self.y_N)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def resident(self) -> tuple[Tensor, Tensor]:
        return self.images_N, self.y_N

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch."""
        if epoch != self.epoch:
            self.order_N.copy_(self.order(epoch))
            self.epoch = epoch
        self.cursor.fill_(batch * self.batch_size)

    def take(self, batches: int) -> tuple[Tensor, Tensor]:
        """The next images, uint8 N,3,H,W, and their labels; past the end of the epoch come those of its beginning."""
        ahead = torch.arange(batches * self.batch_size, device=self.y_N.device)
        rows = self.order_N[(self.cursor + ahead) % len(self.y_N)]
        return self.images_N[rows], self.y_N[rows]

    def order(self, epoch: int) -> Tensor:
        """The shuffle of an epoch, drawn on the CPU so that all devices agree."""
        rng = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(len(self.y_N), generator=rng)
