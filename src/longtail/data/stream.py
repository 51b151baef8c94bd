"""Images that are not held in memory: read and decoded ahead in threads, and brought to the device while it works on others.

An image keeps its shape. It lies in the upper left corner of a square canvas, so that a batch is one tensor; its own height and
width stand beside it, and what is right of and below it is never looked at.
"""

import functools
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.data.decode import cores, decode_from, memory
from longtail.data.pool import IntArray, OnDisk
from longtail.errors import UserError

AHEAD = 4  # batches that are read before they are asked for
HELD = AHEAD + 4  # batches in memory: those, the one asked for, two on their way to the device, one that is worked on
AT_ONCE = 8  # images that a thread reads before it looks for other work


class Frames(NamedTuple):
    """Images as a batch."""

    images: Tensor
    """(N, 3, H, W), uint8."""
    size_N2: Tensor | None = None
    """Height and width of each, where they are less than H and W."""


class Canvases(NamedTuple):
    """Room in memory for a batch, page-locked where it goes to a GPU, and what was copied from it last."""

    images: Tensor
    size_N2: Tensor
    copied: torch.cuda.Event | None


def check_room(n: int, side: int) -> None:
    """Refuse canvases that memory would not hold, before the first is made; `n` images are read at a time."""
    need, there = HELD * n * 3 * side**2, memory()
    if need > there:
        have = f"{HELD} times {n:,} images read ahead at {side}x{side} pixels take {need / 2**30:.1f} GiB of memory"
        fix = "lower --data.resolution, --train.batch_size or --train.accumulate"
        raise UserError(f"{have}, and a process has {there / 2**30:.1f}: {fix}")


@functools.cache
def way_to(device: torch.device) -> torch.cuda.Stream:
    """The stream that images come on, the same for all readers: torch has 32 and hands them out in turn, and who asks for many
    makes others share theirs unknowingly."""
    return torch.cuda.Stream(device)


class Reader:
    """Batches of images from disk, on the device."""

    def __init__(self, images: OnDisk, device: torch.device) -> None:
        self.images, self.device = images, device
        self.stream = way_to(device) if device.type == "cuda" else None
        self.free: list[Canvases] = []

    def batches(self, plan: Iterable[IntArray]) -> Generator[Frames]:
        """Of each array of indices its images, in order; the first that cannot be read is an error that names it.

        The plan is asked for some batches before they are due. A batch is on its way to the device while the one before it is
        worked on.
        """
        under_way: deque[tuple[Canvases, list[Future[None]]]] = deque()
        brought: Frames | None = None
        with ThreadPoolExecutor(self.images.workers or cores()) as threads:
            try:
                for indices in _then_nothing(plan, AHEAD):
                    if indices is not None:
                        under_way.append(self._begin(indices, threads))
                    if under_way and (indices is None or len(under_way) > AHEAD):
                        before, brought = brought, self._bring(*under_way.popleft())
                        if before is not None:
                            yield self._here(before)
                if brought is not None:
                    yield self._here(brought)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, indices: IntArray, threads: ThreadPoolExecutor) -> tuple[Canvases, list["Future[None]"]]:
        room = self._room(len(indices))
        images, sizes = room.images.numpy(), room.size_N2.numpy()

        def read(first: int) -> None:
            for i in range(first, min(first + AT_ONCE, len(indices))):
                image = decode_from(self.images, int(indices[i]), self.images.side)
                sizes[i] = height, width = image.shape[1:]
                np.copyto(images[i, :, :height, :width], image)

        return room, [threads.submit(read, first) for first in range(0, len(indices), AT_ONCE)]

    def _room(self, n: int) -> Canvases:
        """What an earlier batch has left, once it has been copied; on the CPU batches are handed over as they are."""
        for i, room in enumerate(self.free):
            if len(room.images) == n and room.copied is not None and room.copied.query():
                return self.free.pop(i)
        pinned, side = self.stream is not None, self.images.side
        images = torch.empty(n, 3, side, side, dtype=torch.uint8, pin_memory=pinned)
        return Canvases(images, torch.empty(n, 2, dtype=torch.int64, pin_memory=pinned), None)

    def _bring(self, room: Canvases, parts: list["Future[None]"]) -> Frames:
        for part in parts:
            part.result()
        if self.stream is None:
            return Frames(room.images, room.size_N2)
        with torch.cuda.stream(self.stream):
            images, size_N2 = (t.to(self.device, non_blocking=True) for t in (room.images, room.size_N2))
            copied = torch.cuda.Event()
            copied.record()
        self.free.append(room._replace(copied=copied))
        return Frames(images, size_N2)

    def _here(self, frames: Frames) -> Frames:
        """Known to the stream that will work on them. Batches are brought in order: to wait for the last is to wait for it."""
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for tensor in frames:
                assert tensor is not None
                tensor.record_stream(here)
        return frames


def _then_nothing(plan: Iterable[IntArray], times: int) -> Generator[IntArray | None]:
    yield from plan
    for _ in range(times):
        yield None
