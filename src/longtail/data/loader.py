"""Loaders of images and labels, in an order that depends on seed and epoch only, so that resuming needs no saved state.

`ResidentLoader` keeps the whole split on the device as uint8 and indexes it; `StreamLoader` reads images from disk, some
batches ahead. In both, `seek` does the work of the host and `take` that of the device, which can be captured in a CUDA graph.
"""

from collections import deque
from collections.abc import Generator, Iterator

import numpy as np
import torch
from torch import Tensor

from longtail.config import Sampler
from longtail.data.jpeg import make_decoder
from longtail.data.lazy_images import IntArray, StreamedImages
from longtail.data.samplers import epoch_order
from longtail.data.sources import Split
from longtail.data.stream import BatchReader, Frames, check_buffer_memory
from longtail.distributed import rank_and_world_size
from longtail.errors import UserError

NO_POSITION = (-1, 0)


class Loader:
    """The base class of loaders.

    Args:
        split: The images and labels.
        batch_size: The number of images per batch; a split with fewer images is one batch.
        seed: The seed of the run.
        device: The device that batches are put on.
        purpose: A name that distinguishes loaders of the same run, which draw different orders.
    """

    def __init__(self, split: Split, batch_size: int, seed: int, device: torch.device, purpose: str = "order") -> None:
        self.split, self.seed, self.device, self.purpose = split, seed, device, purpose
        self.rank, self.world_size = rank_and_world_size()
        self.num_images = len(split.labels) // self.world_size  # images of this process per epoch
        if not self.num_images:
            n = len(split.labels)
            raise UserError(
                f"{self.world_size} processes are too many for {n} training images: use --nproc-per-node {n} at most",
                kind="too-few-data",
            )
        # A smaller last batch is dropped, so that every step has the same shape.
        self.batch_size = min(batch_size, self.num_images)
        self.num_batches = self.num_images // self.batch_size
        self.set_stage("uniform", 0, 1)

    def set_stage(self, sampler: Sampler, first_epoch: int, epochs: int) -> None:
        """Start a stage of training.

        Args:
            sampler: The sampler of this stage.
            first_epoch: The first epoch of the stage, counted over all stages.
            epochs: The number of epochs of the stage.
        """
        self.sampler: Sampler = sampler
        self.first_epoch, self.epochs, self.epoch = first_epoch, epochs, -1

    def clone(self, purpose: str) -> "Loader":
        """Return a second loader of the same images, with an order of its own."""
        raise NotImplementedError

    def set_chunks(self, batches: int, batches_per_epoch: int) -> None:
        """Set how many batches each `take` returns, and how many batches of an epoch are used."""

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch; epochs are counted over all stages."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading ahead."""

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        """Return the images and labels of the next batches; after the end of the epoch, those of its beginning follow."""
        raise NotImplementedError

    def order(self, epoch: int) -> Tensor:
        """Return the indices of the images of an epoch, in their order."""
        done = (epoch - self.first_epoch) / max(self.epochs - 1, 1)  # 0 in the first epoch of a stage, 1 in its last
        labels = torch.from_numpy(self.split.labels)
        return epoch_order(self.sampler, labels, self.seed, epoch, done, self.purpose, self.rank, self.world_size)


class ResidentLoader(Loader):
    """A loader that keeps all images in the memory of the device.

    Args:
        split: The images and labels.
        batch_size: The number of images per batch.
        seed: The seed of the run.
        device: The device.
        share_with: A loader of the same split, whose copy of the images is used instead of another one.
        purpose: A name that distinguishes loaders of the same run.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        device: torch.device,
        share_with: "ResidentLoader | None" = None,
        purpose: str = "order",
    ) -> None:
        super().__init__(split, batch_size, seed, device, purpose)
        if share_with is not None:
            self.images_N: Tensor = share_with.images_N
            self.y_N: Tensor = share_with.y_N
        else:
            assert isinstance(split.images, np.ndarray)
            self.images_N = torch.from_numpy(split.images).permute(0, 3, 1, 2).contiguous().to(device)
            self.y_N = torch.from_numpy(split.labels).to(device)
        # Order and position are on the device, so that a captured graph finds the next images without the host.
        self.order_N = torch.zeros_like(self.y_N[: self.num_images])
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)

    def clone(self, purpose: str) -> "ResidentLoader":
        return ResidentLoader(self.split, self.batch_size, self.seed, self.device, self, purpose)

    def seek(self, epoch: int, batch: int) -> None:
        if epoch != self.epoch:
            self.order_N.copy_(self.order(epoch))
            self.epoch = epoch
        self.cursor.fill_(batch * self.batch_size)

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        offsets = torch.arange(batches * self.batch_size, device=self.device)
        rows = self.order_N[(self.cursor + offsets) % len(self.order_N)]
        return Frames(self.images_N[rows]), self.y_N[rows]


class StreamLoader(Loader):
    """A loader that reads images from disk ahead of time.

    It reads sequentially; a `seek` to any other position than the next one starts reading again from there.
    """

    def __init__(self, split: Split, batch_size: int, seed: int, device: torch.device, purpose: str = "order") -> None:
        super().__init__(split, batch_size, seed, device, purpose)
        assert isinstance(split.images, StreamedImages)
        decoder = make_decoder(device, split.images.decode)
        self.reader, self.y_N = BatchReader(split.images, device, decoder), torch.from_numpy(split.labels)
        self.reading: Generator[Frames] | None = None
        self.pending_rows: deque[Tensor] = deque()  # the indices of the images of each chunk that is being read
        self.set_chunks(1, self.num_batches)

    def clone(self, purpose: str) -> "StreamLoader":
        return StreamLoader(self.split, self.batch_size, self.seed, self.device, purpose)

    def set_stage(self, sampler: Sampler, first_epoch: int, epochs: int) -> None:
        super().set_stage(sampler, first_epoch, epochs)
        self.next_position = NO_POSITION  # chunks that were read ahead belong to another stage

    def set_chunks(self, batches: int, batches_per_epoch: int) -> None:
        """Allocate the tensors that a captured graph reads from; they are black until images are read into them."""
        self.chunk, self.batches_per_epoch, self.next_position = batches, batches_per_epoch, NO_POSITION
        n, side = batches * self.batch_size, self.reader.images.side
        check_buffer_memory(n, side)
        self.images_n = torch.zeros(n, 3, side, side, dtype=torch.uint8, device=self.device)
        self.size_n2 = torch.full((n, 2), side, device=self.device)
        self.y_n = torch.zeros(n, dtype=torch.int64, device=self.device)

    def seek(self, epoch: int, batch: int) -> None:
        if (epoch, batch) != self.next_position or self.reading is None:
            self.close()
            self.reading = self.reader.read_batches(self.plan(epoch, batch))
        frames, rows = next(self.reading), self.pending_rows.popleft()
        assert frames.size_N2 is not None
        self.images_n.copy_(frames.images)
        self.size_n2.copy_(frames.size_N2)
        y_n = self.y_N[rows]
        self.y_n.copy_(y_n.pin_memory() if self.device.type == "cuda" else y_n, non_blocking=True)
        following = batch + self.chunk
        self.next_position = (epoch, following) if following < self.batches_per_epoch else (epoch + 1, 0)

    def take(self, batches: int) -> tuple[Frames, Tensor]:
        assert batches == self.chunk
        return Frames(self.images_n, self.size_n2), self.y_n

    def plan(self, epoch: int, batch: int) -> Iterator[IntArray]:
        """Yield the indices of the images of each chunk, from this position to the end of the stage."""
        offsets = torch.arange(self.chunk * self.batch_size)
        for each_epoch in range(epoch, self.first_epoch + self.epochs):
            order = self.order(each_epoch)
            for first in range(batch if each_epoch == epoch else 0, self.batches_per_epoch, self.chunk):
                rows = order[(first * self.batch_size + offsets) % len(order)]
                self.pending_rows.append(rows)
                yield rows.numpy()

    def close(self) -> None:
        if self.reading is not None:
            self.reading.close()
        self.reading = None
        self.pending_rows.clear()


def make_loader(
    split: Split, batch_size: int, seed: int, device: torch.device, share_with: Loader | None = None
) -> Loader:
    """Return a loader for a split in memory or on disk.

    Args:
        split: The images and labels.
        batch_size: The number of images per batch.
        seed: The seed of the run.
        device: The device that batches are put on.
        share_with: A loader of the same split, whose copy of the images is used if it is resident.
    """
    if isinstance(split.images, StreamedImages):
        return StreamLoader(split, batch_size, seed, device)
    shared = share_with if isinstance(share_with, ResidentLoader) else None
    return ResidentLoader(split, batch_size, seed, device, shared)


def iterate_frames(split: Split, indices: IntArray, batch_size: int, device: torch.device) -> Generator[Frames]:
    """Yield images of a split in batches; the last batch may be smaller. Files are always decoded on the CPU.

    Args:
        split: The images.
        indices: The indices of the images to return, in this order.
        batch_size: The number of images per batch.
        device: The device that batches are put on.
    """
    batches = (indices[first : first + batch_size] for first in range(0, len(indices), batch_size))
    if isinstance(split.images, StreamedImages):
        yield from BatchReader(split.images, device).read_batches(batches)
        return
    for batch in batches:
        yield Frames(torch.from_numpy(split.images[batch]).permute(0, 3, 1, 2).to(device))
