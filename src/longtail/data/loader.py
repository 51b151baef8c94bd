"""Loaders of images and labels, in an order that depends on seed and epoch only, so that resuming needs no saved state.

`ResidentLoader` keeps the whole split on the device as uint8 and indexes it; `StreamLoader` reads images from disk, some
batches ahead. In both, `seek` does the work of the host and `take` that of the device, which can be captured in a CUDA graph.

`BatchReader` reads batches from disk ahead of time, in threads, with decoding on the CPU or on the GPU. Images keep their
aspect ratio. Each lies in the upper left corner of a square canvas, so that a batch is one tensor; the heights and widths are
returned with it, and the rest of the canvas is never read.
"""

import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.config import Sampler
from longtail.data.decode import (
    Decoder,
    available_cores,
    available_memory,
    bad_image_as_error,
    decode_to_fit,
    is_plain,
    make_decoder,
)
from longtail.data.lazy_images import ImageArray, IntArray, StreamedImages
from longtail.data.samplers import epoch_order
from longtail.data.sources import Split
from longtail.distributed import rank_and_world_size
from longtail.errors import UserError
from longtail.kernels.views import compile_kernel, copy_to_canvases

PREFETCHED_BATCHES = 4
BUFFERED_BATCHES = (
    PREFETCHED_BATCHES + 4
)  # in memory at most: also the current one, two that are copied, and one in use
IMAGES_PER_TASK = 8  # images that a thread reads before it takes other work
CONCURRENT_READS = 4  # threads that read at a time if the GPU decodes; more of them slow each other down


class Frames(NamedTuple):
    """A batch of images."""

    images: Tensor
    """(N, 3, H, W), uint8."""
    size_N2: Tensor | None = None
    """Height and width of each image, if they can be less than H and W."""


class PinnedBatch(NamedTuple):
    """Host memory for a batch; it is page-locked if batches are copied to a GPU."""

    images: Tensor
    size_N2: Tensor
    copied: torch.cuda.Event | None
    """The end of the last copy from this memory."""


class DeviceBatch(NamedTuple):
    """A batch that is being copied to the device."""

    frames: Frames
    ready: torch.cuda.Event | None
    """The end of the copy, on a GPU."""


def check_buffer_memory(n: int, side: int) -> None:
    """Raise UserError if the buffers for reading `n` images of `side` pixels at a time do not fit into the memory."""
    needed, available = BUFFERED_BATCHES * n * 3 * side**2, available_memory()
    if needed > available:
        buffers = f"{BUFFERED_BATCHES} buffers of {n:,} images of {side}x{side} pixels need {needed / 2**30:.1f} GiB of memory"
        fix = "lower --data.resolution, --train.batch_size or --train.accumulate"
        raise UserError(f"{buffers}, but only {available / 2**30:.1f} GiB are available: {fix}", kind="out-of-memory")


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream for copying images, the same for all readers.

    torch has 32 streams per priority and returns them in turn, so that code that asks for many of them would share them
    unknowingly. Images are copied some batches ahead, so the training step has priority.
    """
    return torch.cuda.Stream(device, priority=0)


@functools.cache
def _suppress_read_only_warning() -> None:
    """Trigger torch's warning about tensors over read-only bytes, which it shows once; no such tensor is written to here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"-", dtype=torch.uint8)


class BatchReader:
    """Reads batches of images from disk to a device.

    Args:
        images: The images.
        device: The device that batches are put on.
        decoder: A decoder for plain JPEGs; other files, and all files if it is None, are decoded on the CPU.
    """

    def __init__(self, images: StreamedImages, device: torch.device, decoder: Decoder | None = None) -> None:
        self.images, self.device, self.decoder = images, device, decoder
        self.stream = copy_stream(device) if device.type == "cuda" else None
        self.free_buffers: list[PinnedBatch] = []
        self.workers = images.workers or available_cores()
        self.reading = threading.Semaphore(images.workers or CONCURRENT_READS) if decoder else contextlib.nullcontext()
        if decoder:
            compile_kernel(device)
        _suppress_read_only_warning()

    def read_batches(self, plan: Iterable[IntArray]) -> Generator[Frames]:
        """Yield a batch for each array of indices, in order. An image that cannot be read raises an error that names it.

        `plan` is consumed some batches ahead. Threads read and decode the images, and one more thread copies them to the
        device, while the device works on earlier batches.
        """
        pending: deque[Future[DeviceBatch]] = deque()
        readers = ThreadPoolExecutor(self.workers, "longtail-read")
        with readers, ThreadPoolExecutor(1, "longtail-copy") as copier:
            try:
                for indices in _append_none(plan, PREFETCHED_BATCHES):
                    if indices is not None:
                        pending.append(self._submit(indices, readers, copier))
                    if pending and (indices is None or len(pending) > PREFETCHED_BATCHES):
                        yield self._wait_for_copy(pending.popleft().result())
            finally:
                for executor in (readers, copier):
                    executor.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, indices: IntArray, readers: ThreadPoolExecutor, copier: ThreadPoolExecutor
    ) -> "Future[DeviceBatch]":
        """Start reading a batch."""
        buffer, encoded = self._get_buffer(len(indices)), dict[int, Tensor]()
        images, sizes = buffer.images.numpy(), buffer.size_N2.numpy()

        def read(positions: range) -> None:
            with self.reading:
                files = [self._read_file(int(indices[i])) for i in positions]
            for i, file in zip(positions, files, strict=True):
                if self.decoder and is_plain(file, self.images.side):
                    encoded[i] = torch.frombuffer(file, dtype=torch.uint8)
                    continue
                image = self._decode_on_cpu(file, int(indices[i]))
                sizes[i] = height, width = image.shape[1:]
                np.copyto(images[i, :, :height, :width], image)

        positions = range(len(indices))
        tasks = [readers.submit(read, positions[i : i + IMAGES_PER_TASK]) for i in positions[::IMAGES_PER_TASK]]
        return copier.submit(self._copy_to_device, buffer, encoded, indices, tasks)

    def _read_file(self, index: int) -> bytes:
        with bad_image_as_error(self.images, index):
            return self.images.read_encoded(index)

    def _decode_on_cpu(self, file: bytes, index: int) -> ImageArray:
        with bad_image_as_error(self.images, index):
            return decode_to_fit(file, self.images.side)

    def _get_buffer(self, n: int) -> PinnedBatch:
        """Return a buffer of an earlier batch that has been copied, or a new one.

        On the CPU there is no copy: each batch is returned in the buffer that it was read into.
        """
        for i, buffer in enumerate(self.free_buffers):
            if len(buffer.images) == n and buffer.copied is not None and buffer.copied.query():
                return self.free_buffers.pop(i)
        pinned, side = self.stream is not None, self.images.side
        images = torch.empty(n, 3, side, side, dtype=torch.uint8, pin_memory=pinned)
        return PinnedBatch(images, torch.empty(n, 2, dtype=torch.int64, pin_memory=pinned), None)

    def _copy_to_device(
        self, buffer: PinnedBatch, encoded: dict[int, Tensor], indices: IntArray, tasks: list["Future[None]"]
    ) -> DeviceBatch:
        """Wait until the images are read, decode the rest on the device, and start the copy."""
        for task in tasks:
            task.result()
        with torch.cuda.stream(self.stream):  # None on the CPU, which changes nothing
            decoded = self._decode_on_device(encoded, indices)
            if decoded:
                buffer.size_N2[list(decoded)] = torch.tensor([image.shape[1:] for image in decoded.values()])
            size_N2 = buffer.size_N2.to(self.device, non_blocking=True)
            if len(decoded) < len(indices):
                images = buffer.images.to(self.device, non_blocking=True)
            else:  # nothing to copy
                images = torch.empty_like(buffer.images, device=self.device, pin_memory=False)
            if decoded:
                copy_to_canvases(decoded, images)
            if self.stream is None:
                return DeviceBatch(Frames(images, size_N2), None)
            ready = torch.cuda.Event()
            ready.record()
        self.free_buffers.append(buffer._replace(copied=ready))
        return DeviceBatch(Frames(images, size_N2), ready)

    def _decode_on_device(self, encoded: dict[int, Tensor], indices: IntArray) -> dict[int, Tensor]:
        """Decode the files that were left to the device.

        If it fails, all of them are decoded on the CPU, which also finds out which of them is damaged.
        """
        if not encoded:
            return {}
        assert self.decoder is not None
        try:
            return dict(zip(encoded, self.decoder(list(encoded.values())), strict=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            files = {i: file.numpy().tobytes() for i, file in encoded.items()}
            return {i: torch.tensor(self._decode_on_cpu(file, int(indices[i]))) for i, file in files.items()}

    def _wait_for_copy(self, batch: DeviceBatch) -> Frames:
        """Make the current stream wait until a batch has been copied."""
        if batch.ready is not None:
            current = torch.cuda.current_stream()
            current.wait_event(batch.ready)
            for tensor in batch.frames:
                assert tensor is not None
                tensor.record_stream(current)
        return batch.frames


def _append_none(plan: Iterable[IntArray], times: int) -> Generator[IntArray | None]:
    """Yield the items of `plan`, followed by None as many times as given."""
    yield from plan
    for _ in range(times):
        yield None


# Loaders


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
