"""What every source hands over: a Pool knows its labels and reads images when asked; a Source holds them in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.errors import UserError

# Shapes: N images, H x W pixels. Data classes of arrays compare by identity (eq=False): arrays have no single ==.
ImageArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]

MEMORY_LIMIT = 16 * 2**30  # bytes of decoded images; the whole set is held in memory


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled images in memory."""

    images: ImageArray  # (N, H, W, 3)
    labels: IntArray  # (N,)
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]  # (N,) index in the official file, or path relative to the image folder

    @property
    def counts(self) -> IntArray:
        return class_counts(self.labels, self.class_names)


@dataclass(frozen=True, eq=False)
class Pool:
    """Labelled images that are read, and decoded, only once they are chosen."""

    labels: IntArray
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]
    read: Callable[[IntArray], ImageArray]  # indices (n,) -> images (n, H, W, 3)
    sizes: IntArray | None = None  # (N,) bytes of each file, where images are files

    @property
    def counts(self) -> IntArray:
        return class_counts(self.labels, self.class_names)

    def take(self, indices: IntArray) -> Source:
        return Source(self.read(indices), self.labels[indices], self.class_names, self.ids[indices])


@dataclass(frozen=True, eq=False)
class Opened:
    """A data set before anything is drawn from it."""

    name: str
    train: Pool
    test: Pool
    largest: int  # images of the head class in a long-tailed draw
    notes: tuple[str, ...] = ()


def class_counts(labels: IntArray, class_names: tuple[str, ...]) -> IntArray:
    return np.bincount(labels, minlength=len(class_names)).astype(np.int64)


def no_image_notes(class_names: tuple[str, ...], counts: IntArray, held: IntArray, split: str) -> list[str]:
    """A line for each class too small to give an image to the split, or one line for all if they are many."""
    small = [(class_names[c], int(counts[c])) for c in np.where(held == 0)[0]]
    if len(small) > 5:
        sizes = sorted({n for _, n in small})
        span = f"{sizes[0]} to {sizes[-1]} images" if len(sizes) > 1 else _images(sizes[0])
        return [f"{len(small)} classes ({span} each) train, but have no {split} image, such as {small[0][0]}"]
    return [f"class {c} has {_images(n)}: it trains, but has no {split} image" for c, n in small]


def _images(n: int) -> str:
    return f"{n} image" if n == 1 else f"{n} images"


def check_memory(images: int, size: int) -> None:
    """Refuse a set that would not fit, before the first image of it is decoded."""
    need = images * size * size * 3
    if need > MEMORY_LIMIT:
        have = f"{images:,} images of {size}x{size} pixels take {need / 2**30:.1f} GiB of memory"
        raise UserError(f"{have}, above the {MEMORY_LIMIT / 2**30:.0f} GiB allowed: lower --data.image_size")


def resized(images: ImageArray, size: int) -> ImageArray:
    """Square images at another side length (bilinear)."""
    from PIL import Image

    if images.shape[1] == size:
        return images
    out = np.empty((len(images), size, size, 3), np.uint8)
    for i, image in enumerate(images):
        out[i] = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    return out
