"""Loaders: images and labels in an order that is a function of seed and epoch alone, so that a resume has nothing to save.

The resident one has the whole set on the device as uint8, and taking images is a gather of its rows; the streaming one reads
them from disk, some batches ahead. With both, `seek` is the host's part and `take` the device's, which can be captured.
"""

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np
import torch
from torch import Tensor

from longtail.config import Sampler
from longtail.data.lazy_images import IntArray, StreamedImages
from longtail.data.nvjpeg import decoder_for
from longtail.data.samplers import epoch_order, place
from longtail.data.sources import Split
from longtail.data.stream import Frames, Reader, check_room
from longtail.errors import UserError

NOWHERE = (-1, 0)


class Loader:
    """What both have in common; `purpose` tells loaders of the same run apart."""

    def __init__(self, source: Split, batch_size: int, seed: int, device: torch.device, purpose: str = "order") -> None:
        self.source, self.seed, self.device, self.purpose = source, seed, device, purpose
        self.rank, self.world = place()  # each process has its part of an epoch
        self.images = len(source.labels) // self.world
        if not self.images:
            n = len(source.labels)
            raise UserError(
                f"{self.world} processes share {n} training images: torchrun --nproc-per-node {n} at most",
                kind="too-few-data",
            )
        # A smaller last batch is left out, so that every step has one shape; a set below one batch is one batch.
        self.batch_size = min(batch_size, self.images)
        self.batches = self.images // self.batch_size
        self.enter("uniform", 0, 1)

    def enter(self, sampler: Sampler, first_epoch: int, epochs: int) -> None:
        """Begin a stage: how images are drawn in the epochs from `first_epoch` on."""
        self.sampler: Sampler = sampler
        self.first_epoch, self.epochs, self.epoch = first_epoch, epochs, -1

    def beside(self, purpose: str) -> "Loader":
        """A second loader of the same images, which draws on its own."""
        raise NotImplementedError

    def in_parts(self, part: int, used: int) -> None:
        """Batches will be taken `part` at a time, the first `used` of every epoch."""

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch (counted over all stages)."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing more will be asked for."""

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        """The next images and their labels; past the end of the epoch come those of its beginning."""
        raise NotImplementedError

    def order(self, epoch: int) -> Tensor:
        done = (epoch - self.first_epoch) / max(self.epochs - 1, 1)  # 0 in a stage's first epoch, 1 in its last
        labels = torch.from_numpy(self.source.labels)
        return epoch_order(self.sampler, labels, self.seed, epoch, done, self.purpose, self.rank, self.world)


class ResidentLoader(Loader):
    """`twin` is a loader of the same source, which shares its copy of the images: of a run side by side, or of the same run."""

    def __init__(
        self,
        source: Split,
        batch_size: int,
        seed: int,
        device: torch.device,
        twin: "ResidentLoader | None" = None,
        purpose: str = "order",
    ) -> None:
        super().__init__(source, batch_size, seed, device, purpose)
        self.images_N, self.y_N = twin.resident if twin else put(source, device)
        # Where the next images lie is known to the device, so that captured work finds them without the host.
        self.order_N = torch.zeros_like(self.y_N[: self.images])
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def resident(self) -> tuple[Tensor, Tensor]:
        return self.images_N, self.y_N

    def beside(self, purpose: str) -> "ResidentLoader":
        return ResidentLoader(self.source, self.batch_size, self.seed, self.device, self, purpose)

    def seek(self, epoch: int, batch: int) -> None:
        if epoch != self.epoch:
            self.order_N.copy_(self.order(epoch))
            self.epoch = epoch
        self.cursor.fill_(batch * self.batch_size)

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        ahead = torch.arange(batches * self.batch_size, device=self.device)
        rows = self.order_N[(self.cursor + ahead) % len(self.order_N)]
        return Frames(self.images_N[rows]), self.y_N[rows]


def put(source: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as N,3,H,W and labels, on the device."""
    assert isinstance(source.images, np.ndarray)
    images_N = torch.from_numpy(source.images).permute(0, 3, 1, 2).contiguous().to(device)
    return images_N, torch.from_numpy(source.labels).to(device)


class StreamLoader(Loader):
    """Reads on from where it was last asked for; asked for another place, it begins there anew."""

    def __init__(self, source: Split, batch_size: int, seed: int, device: torch.device, purpose: str = "order") -> None:
        super().__init__(source, batch_size, seed, device, purpose)
        assert isinstance(source.images, StreamedImages)
        decoder = decoder_for(device, source.images.decode)
        self.reader, self.y_N = Reader(source.images, device, decoder), torch.from_numpy(source.labels)
        self.reading: Generator[Frames] | None = None
        self.planned: deque[Tensor] = deque()  # the images that are being read, part by part
        self.in_parts(1, self.batches)

    def beside(self, purpose: str) -> "StreamLoader":
        return StreamLoader(self.source, self.batch_size, self.seed, self.device, purpose)

    def enter(self, sampler: Sampler, first_epoch: int, epochs: int) -> None:
        super().enter(sampler, first_epoch, epochs)
        self.due = NOWHERE  # what was read ahead belongs to another stage

    def in_parts(self, part: int, used: int) -> None:
        """Makes room for a part, where captured work will look for it: at first for black images, since it is tried out before
        any are read."""
        self.part, self.used, self.due = part, used, NOWHERE
        n, side = part * self.batch_size, self.reader.images.side
        check_room(n, side)
        self.images_n = torch.zeros(n, 3, side, side, dtype=torch.uint8, device=self.device)
        self.size_n2 = torch.full((n, 2), side, device=self.device)
        self.y_n = torch.zeros(n, dtype=torch.int64, device=self.device)

    def seek(self, epoch: int, batch: int) -> None:
        if (epoch, batch) != self.due or self.reading is None:
            self.close()
            self.reading = self.reader.batches(self.plan(epoch, batch))
        frames, rows = next(self.reading), self.planned.popleft()
        assert frames.size_N2 is not None
        self.images_n.copy_(frames.images)
        self.size_n2.copy_(frames.size_N2)
        y_n = self.y_N[rows]
        self.y_n.copy_(y_n.pin_memory() if self.device.type == "cuda" else y_n, non_blocking=True)
        self.due = (epoch, batch + self.part) if batch + self.part < self.used else (epoch + 1, 0)

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        assert batches == self.part
        return Frames(self.images_n, self.size_n2), self.y_n

    def plan(self, epoch: int, batch: int) -> Iterator[IntArray]:
        """What to read from here on, to the end of the stage."""
        ahead = torch.arange(self.part * self.batch_size)
        for later in range(epoch, self.first_epoch + self.epochs):
            order = self.order(later)
            for first in range(batch if later == epoch else 0, self.used, self.part):
                rows = order[(first * self.batch_size + ahead) % len(order)]
                self.planned.append(rows)
                yield rows.numpy()

    def close(self) -> None:
        """What is under way is given up."""
        if self.reading is not None:
            self.reading.close()
        self.reading = None
        self.planned.clear()


def make_loader(source: Split, batch_size: int, seed: int, device: torch.device, twin: Loader | None = None) -> Loader:
    if isinstance(source.images, StreamedImages):
        return StreamLoader(source, batch_size, seed, device)
    return ResidentLoader(source, batch_size, seed, device, twin if isinstance(twin, ResidentLoader) else None)


def frames_of(source: Split, chosen: IntArray, batch: int, device: torch.device) -> Iterator[Frames]:
    """The chosen images of a source in their order: batch after batch, the last one smaller; always decoded on the CPU."""
    parts = (chosen[first : first + batch] for first in range(0, len(chosen), batch))
    if isinstance(source.images, StreamedImages):
        yield from Reader(source.images, device).batches(parts)
        return
    for part in parts:
        yield Frames(torch.from_numpy(source.images[part]).permute(0, 3, 1, 2).to(device))
