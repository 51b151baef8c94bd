"""Reading batches of images from disk ahead of time, in threads, with decoding on the CPU or on the GPU.

Images keep their aspect ratio. Each lies in the upper left corner of a square canvas, so that a batch is one tensor; the
heights and widths are returned with it, and the rest of the canvas is never read.
"""

import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.data.decode import available_cores, available_memory, bad_image_as_error, decode_to_fit
from longtail.data.jpeg import Decoder, is_plain
from longtail.data.lazy_images import ImageArray, IntArray, StreamedImages
from longtail.errors import UserError
from longtail.kernels.canvas import compile_kernel, copy_to_canvases

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
        raise UserError(f"{buffers}, but a process has {available / 2**30:.1f} GiB: {fix}", kind="out-of-memory")


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
