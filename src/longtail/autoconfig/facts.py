"""The facts on which automatic choices depend: labels, image headers, and the machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.data.decode import BadImage, machine_memory, open_image
from longtail.data.lazy_images import LazyImages
from longtail.data.sources import draw_long_tail, open_data
from longtail.engine.device import choose_device
from longtail.errors import UserError
from longtail.models.weights import WeightSource, find_weights

HEADERS_READ = 256  # images whose headers are read
GRAYSCALE_MODES = ("1", "L", "LA", "I;16", "I;16B", "I;16L")


@dataclass(frozen=True)
class Facts:
    """Properties of the images and of the machine."""

    counts: tuple[int, ...]
    """Number of training images of each class."""
    shorter_side: int
    """Median length of the shorter side of the images, in pixels."""
    is_grayscale: bool
    """True if none of the images whose headers were read has colors."""
    has_gpu: bool
    """True if the training runs on a GPU."""
    memory: int
    """Memory of the GPU in bytes, or that of the machine if there is no GPU."""
    find_weights: Callable[[str], WeightSource | None]
    """Returns where the pretrained weights of a network are available, or None if they are not."""

    @property
    def images(self) -> int:
        """Number of training images."""
        return sum(self.counts)

    @property
    def imbalance(self) -> float:
        """Size of the largest class divided by that of the smallest class."""
        return max(self.counts) / min(self.counts)


def inspect_data(data: DataConfig, device: str = "auto") -> Facts:
    """Collect facts about images and machine. Only labels and some image headers are read.

    Args:
        data: The `data` section of a configuration.
        device: The device to train on: auto, cpu or cuda.
    """
    raw = open_data(replace(data, on_error="skip"))  # unreadable images are reported when they are loaded
    rows, _ = draw_long_tail(raw, data)
    images = raw.train.subset(rows)
    shorter_side, is_grayscale = read_headers(images)
    has_gpu = choose_device(device).type == "cuda"
    counts = tuple(images.counts.tolist())
    return Facts(counts, shorter_side, is_grayscale, has_gpu, find_memory_size(has_gpu), find_weights)


def read_headers(images: LazyImages) -> tuple[int, bool]:
    """Return the median of the shorter sides, and whether all are grayscale, of evenly spaced images."""
    rows = np.unique(np.linspace(0, len(images.labels) - 1, HEADERS_READ).round().astype(np.int64))
    headers = [header for row in rows.tolist() if (header := read_header(images, row))]
    if not headers:
        raise UserError(
            f"none of {len(rows)} images could be read: see `longtail data inspect` for the reasons", kind="bad-image"
        )
    return round(float(np.median([side for side, _ in headers]))), all(mode in GRAYSCALE_MODES for _, mode in headers)


def read_header(images: LazyImages, row: int) -> tuple[int, str] | None:
    """Return the shorter side and the color mode of an image, or None if it cannot be read."""
    try:
        with open_image(images.read_encoded(row)) as image:
            return min(image.size), image.mode
    except BadImage:
        return None


def find_memory_size(has_gpu: bool) -> int:
    """Return the memory of the GPU, or of the machine, in bytes."""
    if has_gpu:
        return torch.cuda.get_device_properties(0).total_memory
    return machine_memory()
