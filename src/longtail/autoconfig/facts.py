"""What choices are made from: facts about the images, which their labels and a few file headers tell, and about the machine."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.data.decode import BadImage, opened
from longtail.data.lazy_images import LazyImages
from longtail.data.sources import long_tail, open_data
from longtail.engine.device import choose_device
from longtail.errors import UserError
from longtail.models.weights import WeightSource, find_weights

LOOKED_AT = 256  # files whose headers are read
GRAY = ("1", "L", "LA", "I;16", "I;16B", "I;16L")


@dataclass(frozen=True)
class Facts:
    counts: tuple[int, ...]
    """Training images of each class."""
    side: int
    """Median of the images' shorter sides, in pixels."""
    gray: bool
    """No image that was looked at has colors."""
    gpu: bool
    memory: int
    """Bytes of the GPU, or of the machine where there is none."""
    weights: Callable[[str], WeightSource | None]
    """Where pretrained weights of a name can be had, if anywhere."""

    @property
    def images(self) -> int:
        return sum(self.counts)

    @property
    def imbalance(self) -> float:
        return max(self.counts) / min(self.counts)


def inspect_data(data: DataConfig, device: str = "auto") -> Facts:
    """At images and machine: at labels and some headers, and no pixel."""
    found = open_data(replace(data, on_error="skip"))  # what cannot be read is told of when it is needed
    drawn, _ = long_tail(found, data)
    pool = found.train.subset(drawn)
    side, gray = headers(pool)
    gpu = choose_device(device).type == "cuda"
    return Facts(tuple(pool.counts.tolist()), side, gray, gpu, memory_of(gpu), find_weights)


def headers(pool: LazyImages) -> tuple[int, bool]:
    """The median shorter side, and whether all are gray, of some images from the first to the last."""
    some = np.unique(np.linspace(0, len(pool.labels) - 1, LOOKED_AT).round().astype(np.int64))
    seen = [header for index in some.tolist() if (header := header_of(pool, index))]
    if not seen:
        raise UserError(
            f"none of the {len(some)} images looked at can be read: try `longtail data inspect`", kind="bad-image"
        )
    return round(float(np.median([side for side, _ in seen]))), all(mode in GRAY for _, mode in seen)


def header_of(pool: LazyImages, index: int) -> tuple[int, str] | None:
    try:
        with opened(pool.encoded(index)) as image:
            return min(image.size), image.mode
    except BadImage:
        return None


def memory_of(gpu: bool) -> int:
    if gpu:
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
