"""Images that are not held in memory: read ahead in threads, decoded there or on the device, and there when it asks for them.

An image keeps its shape. It lies in the upper left corner of a square canvas, so that a batch is one tensor; its own height and
width stand beside it, and what is right of and below it is never looked at.
"""

import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.data.decode import cores, decode_whole, memory, naming
from longtail.data.jpeg import is_plain
from longtail.data.lazy_images import ImageArray, IntArray, StreamedImages
from longtail.errors import UserError
from longtail.kernels.canvas import compile_kernel, copy_to_canvases

AHEAD = 4  # batches that are read before they are asked for
HELD = AHEAD + 4  # batches in memory at most: those, the one asked for, up to two being copied, one that is worked on
AT_ONCE = 8  # images that a thread reads before it looks for other work
READING = 4  # threads that read at a time where a device decodes: more of them only keep each other from going on

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""Of encoded JPEGs (bytes, uint8) their pixels, each (3, height, width) on the device; RuntimeError: not with these."""


class Frames(NamedTuple):
    """Images as a batch."""

    images: Tensor
    """(N, 3, H, W), uint8."""
    size_N2: Tensor | None = None
    """Height and width of each, where they are less than H and W."""


class PinnedBatch(NamedTuple):
    """Room in memory for a batch, page-locked where it goes to a GPU, and what was copied from it last."""

    images: Tensor
    size_N2: Tensor
    copied: torch.cuda.Event | None


class DeviceBatch(NamedTuple):
    frames: Frames
    there: torch.cuda.Event | None
    """On a GPU: when they will be."""


def check_room(n: int, side: int) -> None:
    """Refuse canvases that memory would not hold, before the first is made; `n` images are read at a time."""
    need, there = HELD * n * 3 * side**2, memory()
    if need > there:
        have = f"{HELD} times {n:,} images read ahead at {side}x{side} pixels take {need / 2**30:.1f} GiB of memory"
        fix = "lower --data.resolution, --train.batch_size or --train.accumulate"
        raise UserError(f"{have}, and a process has {there / 2**30:.1f}: {fix}", kind="out-of-memory")


@functools.cache
def way_to(device: torch.device) -> torch.cuda.Stream:
    """The stream that images come on, the same for all readers: torch has 32 of a priority and hands them out in turn, and who
    asks for many makes others share theirs unknowingly. They come batches ahead of the step, which goes first."""
    return torch.cuda.Stream(device, priority=0)


@functools.cache
def _hush() -> None:
    """torch says once that bytes had better not be written to, which nobody does here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"-", dtype=torch.uint8)


class Reader:
    """Batches of images from disk, on the device; where there is a `decoder`, plain JPEGs are decoded by it."""

    def __init__(self, images: StreamedImages, device: torch.device, decoder: Decoder | None = None) -> None:
        self.images, self.device, self.decoder = images, device, decoder
        self.stream = way_to(device) if device.type == "cuda" else None
        self.free: list[PinnedBatch] = []
        self.workers = images.workers or cores()
        self.reading = threading.Semaphore(images.workers or READING) if decoder else contextlib.nullcontext()
        if decoder:
            compile_kernel(device)
        _hush()

    def batches(self, plan: Iterable[IntArray]) -> Generator[Frames]:
        """Of each array of indices its images, in order; the first that cannot be read is an error that names it.

        The plan is asked for some batches before they are due. What threads have read, one more thread brings to the device
        while that works on the batches before.
        """
        under_way: deque[Future[DeviceBatch]] = deque()
        readers = ThreadPoolExecutor(self.workers, "longtail-read")
        with readers as threads, ThreadPoolExecutor(1, "longtail-bring") as carrier:
            try:
                for indices in _then_nothing(plan, AHEAD):
                    if indices is not None:
                        under_way.append(self._begin(indices, threads, carrier))
                    if under_way and (indices is None or len(under_way) > AHEAD):
                        yield self._here(under_way.popleft().result())
            finally:
                for each in (threads, carrier):
                    each.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, indices: IntArray, threads: ThreadPoolExecutor, carrier: ThreadPoolExecutor
    ) -> "Future[DeviceBatch]":
        room, encoded = self._room(len(indices)), dict[int, Tensor]()
        images, sizes = room.images.numpy(), room.size_N2.numpy()

        def read(part: range) -> None:
            with self.reading:
                files = [self._file(int(indices[i])) for i in part]
            for i, file in zip(part, files, strict=True):
                if self.decoder and is_plain(file, self.images.side):
                    encoded[i] = torch.frombuffer(file, dtype=torch.uint8)
                    continue
                image = self._decoded(file, int(indices[i]))
                sizes[i] = height, width = image.shape[1:]
                np.copyto(images[i, :, :height, :width], image)

        every = range(len(indices))
        parts = [threads.submit(read, every[first : first + AT_ONCE]) for first in every[::AT_ONCE]]
        return carrier.submit(self._bring, room, encoded, indices, parts)

    def _file(self, index: int) -> bytes:
        with naming(self.images, index):
            return self.images.encoded(index)

    def _decoded(self, file: bytes, index: int) -> ImageArray:
        with naming(self.images, index):
            return decode_whole(file, self.images.side)

    def _room(self, n: int) -> PinnedBatch:
        """What an earlier batch has left, once it has been copied; on the CPU batches are handed over as they are."""
        for i, room in enumerate(self.free):
            if len(room.images) == n and room.copied is not None and room.copied.query():
                return self.free.pop(i)
        pinned, side = self.stream is not None, self.images.side
        images = torch.empty(n, 3, side, side, dtype=torch.uint8, pin_memory=pinned)
        return PinnedBatch(images, torch.empty(n, 2, dtype=torch.int64, pin_memory=pinned), None)

    def _bring(
        self, room: PinnedBatch, encoded: dict[int, Tensor], indices: IntArray, parts: list["Future[None]"]
    ) -> DeviceBatch:
        for part in parts:
            part.result()
        with torch.cuda.stream(self.stream):  # of a CPU None, which is none
            decoded = self._decode(encoded, indices)
            if decoded:
                room.size_N2[list(decoded)] = torch.tensor([image.shape[1:] for image in decoded.values()])
            size_N2 = room.size_N2.to(self.device, non_blocking=True)
            if len(decoded) < len(indices):
                images = room.images.to(self.device, non_blocking=True)
            else:  # nothing to copy
                images = torch.empty_like(room.images, device=self.device, pin_memory=False)
            if decoded:
                copy_to_canvases(decoded, images)
            if self.stream is None:
                return DeviceBatch(Frames(images, size_N2), None)
            there = torch.cuda.Event()
            there.record()
        self.free.append(room._replace(copied=there))
        return DeviceBatch(Frames(images, size_N2), there)

    def _decode(self, encoded: dict[int, Tensor], indices: IntArray) -> dict[int, Tensor]:
        """Those that were left to the device. Where it refuses, the CPU reads them all, or names the one at fault."""
        if not encoded:
            return {}
        assert self.decoder is not None
        try:
            return dict(zip(encoded, self.decoder(list(encoded.values())), strict=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            files = {i: file.numpy().tobytes() for i, file in encoded.items()}
            return {i: torch.tensor(self._decoded(file, int(indices[i]))) for i, file in files.items()}

    def _here(self, brought: DeviceBatch) -> Frames:
        """Known to the stream that will work on them."""
        if brought.there is not None:
            here = torch.cuda.current_stream()
            here.wait_event(brought.there)
            for tensor in brought.frames:
                assert tensor is not None
                tensor.record_stream(here)
        return brought.frames


def _then_nothing(plan: Iterable[IntArray], times: int) -> Generator[IntArray | None]:
    yield from plan
    for _ in range(times):
        yield None
