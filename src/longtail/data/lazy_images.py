"""What every source hands over: a Pool knows its labels and reads images when asked; a Source holds them in memory."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.config import Decoding
from longtail.data.long_tail import validation_split
from longtail.errors import UserError
from longtail.text import preview

# Shapes: N images, H x W pixels. Data classes of arrays compare by identity (eq=False): arrays have no single ==.
ImageArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]

MEMORY_LIMIT = 16 * 2**30  # bytes of decoded images; the whole set is held in memory
NAMES_LIMIT = 2**30  # bytes of an array of names, unless their characters need more
MOST_ABSENT = 1_000_000  # numbers that labels may leave out


class Skipped(NamedTuple):
    """An image that could not be read, and is left out."""

    id: str
    why: str


@dataclass(frozen=True, eq=False)
class StreamedImages:
    """Images that are read when they are needed."""

    encoded: Callable[[int], bytes]  # the image file, by its number in the source
    place: Callable[[int], object]  # what an error calls it
    side: int  # pixels: of the square that an image is made to fit in
    workers: int  # threads that read; 0: as there are cores
    decode: Decoding = "auto"  # where those that are trained on become pixels


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled images, in memory or on disk."""

    images: ImageArray | StreamedImages  # (N, H, W, 3)
    labels: IntArray  # (N,)
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]  # (N,) index in the official file; path below the root; shard and row
    skipped: tuple[Skipped, ...] = ()

    @property
    def counts(self) -> IntArray:
        return class_counts(self.labels, self.class_names)


class Read(NamedTuple):
    images: ImageArray  # (n, H, W, 3)
    bad: dict[int, str]  # place among them -> why it could not be read; only where such are to be skipped


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Labeled images that are read, and decoded, only once they are chosen."""

    labels: IntArray
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]
    read: Callable[[IntArray], Read]  # by indices (n,)
    encoded: Callable[[int], bytes]  # the image file of one index
    sizes: IntArray | None = None
    """(N,) bytes of each file, or of a shard's row group: they tell that images are others now. None: they are no files."""
    place: Callable[[int], object] | None = None
    """What an error calls an image; its id, if not said."""

    @property
    def counts(self) -> IntArray:
        return class_counts(self.labels, self.class_names)

    def take(self, indices: IntArray) -> Split:
        images, bad = self.read(indices)
        skipped = tuple(Skipped(str(self.ids[indices[place]]), why) for place, why in bad.items())
        if bad:
            good = np.setdiff1d(np.arange(len(indices)), list(bad))
            images, indices = images[good], indices[good]
        return Split(images, self.labels[indices], self.class_names, self.ids[indices], skipped)

    def stream(self, indices: IntArray, side: int, workers: int, decode: Decoding, skipped: dict[int, str]) -> Split:
        """These images, which stay where they are; without those that are known to be `skipped`, and why."""
        bad = tuple(Skipped(str(self.ids[i]), skipped[i]) for i in indices.tolist() if i in skipped)
        kept = np.array([i for i in indices.tolist() if i not in skipped], np.int64) if bad else indices
        part = self.subset(kept)
        images = StreamedImages(part.encoded, part.place or part.ids.__getitem__, side, workers, decode)
        return Split(images, part.labels, part.class_names, part.ids, bad)

    def subset(self, indices: IntArray) -> "LazyImages":
        sizes, place = None if self.sizes is None else self.sizes[indices], self.place
        return LazyImages(
            self.labels[indices],
            self.class_names,
            self.ids[indices],
            lambda chosen: self.read(indices[chosen]),
            lambda index: self.encoded(int(indices[index])),
            sizes,
            None if place is None else lambda index: place(int(indices[index])),
        )


def array_pool(
    labels: IntArray, class_names: tuple[str, ...], ids: npt.NDArray[Any], read: Callable[[IntArray], ImageArray]
) -> LazyImages:
    """Of images that are no files: as a file each of them is a PNG."""

    def encoded(index: int) -> bytes:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(read(np.array([index]))[0]).save(file, "PNG")
        return file.getvalue()

    return LazyImages(labels, class_names, ids, lambda indices: Read(read(indices), {}), encoded)


@dataclass(frozen=True, eq=False)
class RawDataset:
    """A data set before anything is drawn from it."""

    name: str
    train: LazyImages
    test: LazyImages
    largest: int  # images of the head class in a long-tailed draw
    notes: tuple[str, ...] = ()


def name_array(names: Sequence[str], kind: str) -> npt.NDArray[np.str_]:
    """Return names as an array, in which each takes the room of the longest.

    Raises UserError where a few long names would take far more memory than all names have characters.
    """
    longest = max(names, key=len, default="")
    room, mean = 4 * len(longest) * len(names), sum(map(len, names)) / max(len(names), 1)
    if room > NAMES_LIMIT and len(longest) > 8 * mean:
        raise UserError(
            f"a {kind} has {len(longest):,} characters ({longest[:40]}…), the {len(names):,} others {mean:.0f}: shorten it",
            kind="bad-list",
        )
    return np.array(names, dtype=np.str_)


def check_last_label(place: object, last: int, classes: int) -> None:
    """Raise UserError where labels are numbers that leave out so many that a class for each would exhaust the memory."""
    if last > 1000 * classes or last > 2 * classes + MOST_ABSENT:
        raise UserError(f"{place} has labels up to {last} for {classes} classes: number them from 0", kind="bad-labels")


def class_counts(labels: IntArray, class_names: tuple[str, ...]) -> IntArray:
    return np.bincount(labels, minlength=len(class_names)).astype(np.int64)


def check_classes(name: str, train: LazyImages) -> None:
    """A classifier needs two, and each an image to learn from."""
    names, absent = train.class_names, np.where(train.counts == 0)[0]
    if len(names) < 2:
        raise UserError(
            f"{name} has a single class, {names[0]!r}: a classifier needs at least two", kind="too-few-data"
        )
    if len(absent):
        fix = "number labels without gaps from 0, or take these classes out of the data"
        which = f"{len(absent)} of its {len(names)} classes ({preview(names[c] for c in absent)})"
        raise UserError(f"{name} has no training image of {which}: {fix}", kind="too-few-data")


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


def split_files(pool: LazyImages, fraction: float) -> tuple[IntArray, IntArray]:
    """The validation split, by files: all lines of one are on one side, and they train where their classes differ."""
    if not fraction:  # names of a million files take seconds
        return np.arange(len(pool.labels)), np.array([], np.int64)
    lines, labels = dict[str, list[int]](), pool.labels.tolist()
    for i, file in enumerate(files_of(pool)):
        lines.setdefault(file, []).append(i)
    plain = [same for same in lines.values() if len({labels[i] for i in same}) == 1]
    _, chosen = validation_split(pool.labels[[same[0] for same in plain]], fraction)
    held = np.sort(np.array([i for c in chosen for i in plain[c]], np.int64))
    return np.setdiff1d(np.arange(len(labels)), held), held


def files_of(pool: LazyImages) -> list[str]:
    """The files themselves, however lists spell them; of images that are none, their ids."""
    if pool.place is None:
        return [str(i) for i in pool.ids]
    return [os.path.abspath(str(pool.place(i))) for i in range(len(pool.labels))]


def fit_in_memory(images: int, size: int) -> bool:
    return images * size * size * 3 <= MEMORY_LIMIT


def check_memory(images: int, size: int, has: int) -> None:
    """Refuse a set that would not fit, before the first image of it is decoded; the machine has so many bytes."""
    needed = images * size * size * 3
    if not fit_in_memory(images, size) or needed > has:
        have = f"{images:,} images of {size}x{size} pixels take {needed / 2**30:.1f} GiB of memory"
        limit = f"{MEMORY_LIMIT / 2**30:.0f} GiB allowed" if has >= MEMORY_LIMIT else f"{has / 2**30:.1f} GiB there are"
        raise UserError(
            f"{have}, above the {limit}: add --data.load stream, or lower --data.image_size", kind="out-of-memory"
        )


def resized(images: ImageArray, size: int) -> ImageArray:
    """Square images at another side length (bilinear)."""
    from PIL import Image

    if images.shape[1] == size:
        return images
    out = np.empty((len(images), size, size, 3), np.uint8)
    for i, image in enumerate(images):
        out[i] = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    return out
