"""The data structures of data sets: `LazyImages` has labels and reads images on demand; `Split` has the images of a run.

The module also contains what all sources share: checks of labels and names, notes about small classes, and memory limits.
"""

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.config import Decoding
from longtail.data.long_tail import validation_split
from longtail.errors import UserError
from longtail.text import pluralize, preview

# Shapes: N images, H x W pixels. Data classes with arrays compare by identity (eq=False), since == of arrays is elementwise.
ImageArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]

MEMORY_LIMIT = 16 * 2**30  # bytes of decoded images that are kept in memory
NAMES_LIMIT = 2**30  # bytes of an array of names, unless their characters need more
MAX_UNUSED_LABELS = 1_000_000  # label numbers below the largest one that no image has
# NUL, and surrogates except for those by which Python represents the bytes of a file name that is not UTF-8.
UNUSABLE_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


class SkippedImage(NamedTuple):
    """An image that cannot be read and is left out."""

    id: str
    why: str


@dataclass(frozen=True, eq=False)
class StreamedImages:
    """Images that are read from disk whenever they are used."""

    read_encoded: Callable[[int], bytes]
    """Returns the content of the image file with this index."""
    describe: Callable[[int], object]
    """Returns what error messages call the image with this index, usually its path."""
    side: int
    """The side of the square, in pixels, that images are shrunk to fit into."""
    workers: int
    """The number of threads that read; 0 means one per core."""
    decode: Decoding = "auto"
    """The device that decodes training images."""


@dataclass(frozen=True, eq=False)
class Split:
    """Labeled images for training, validation or testing, in memory or on disk."""

    images: ImageArray | StreamedImages  # (N, H, W, 3)
    labels: IntArray  # (N,)
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]  # (N,): index in the official file, path relative to the root, or shard and row
    skipped: tuple[SkippedImage, ...] = ()

    @property
    def counts(self) -> IntArray:
        """The number of images of each class."""
        return class_counts(self.labels, self.class_names)


class DecodedImages(NamedTuple):
    """Decoded images, and those that could not be read."""

    images: ImageArray  # (n, H, W, 3)
    unreadable: dict[int, str]  # position -> reason; empty unless unreadable images are skipped


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Labeled images that are read and decoded only when they are selected."""

    labels: IntArray
    class_names: tuple[str, ...]
    ids: npt.NDArray[Any]
    read: Callable[[IntArray], DecodedImages]
    """Decodes the images with these indices."""
    read_encoded: Callable[[int], bytes]
    """Returns the content of the image file with this index."""
    sizes: IntArray | None = None
    """(N,) the bytes of each file, or of a shard's row group, which detect changed data; None if there are no files."""
    describe: Callable[[int], object] | None = None
    """Returns what error messages call the image with this index; the default is its id."""
    digests: npt.NDArray[np.str_] | None = None
    """(N,) a digest of the content of each image, which detects changed data if images are not files."""

    @property
    def counts(self) -> IntArray:
        """The number of images of each class."""
        return class_counts(self.labels, self.class_names)

    def take(self, indices: IntArray) -> Split:
        """Return the images with these indices, decoded into memory."""
        images, bad = self.read(indices)
        skipped = tuple(SkippedImage(str(self.ids[indices[i]]), reason) for i, reason in bad.items())
        if bad:
            good = np.setdiff1d(np.arange(len(indices)), list(bad))
            images, indices = images[good], indices[good]
        return Split(images, self.labels[indices], self.class_names, self.ids[indices], skipped)

    def stream(self, indices: IntArray, side: int, workers: int, decode: Decoding, unreadable: dict[int, str]) -> Split:
        """Return the images with these indices as a split that is read from disk when it is used.

        Args:
            indices: The indices of the images.
            side: The side of the square, in pixels, that images are shrunk to fit into.
            workers: The number of threads that read; 0 means one per core.
            decode: The device that decodes training images.
            unreadable: Images to leave out: index -> reason.
        """
        skipped = tuple(SkippedImage(str(self.ids[i]), unreadable[i]) for i in indices.tolist() if i in unreadable)
        kept = np.array([i for i in indices.tolist() if i not in unreadable], np.int64) if skipped else indices
        part = self.subset(kept)
        images = StreamedImages(part.read_encoded, part.describe or part.ids.__getitem__, side, workers, decode)
        return Split(images, part.labels, part.class_names, part.ids, skipped)

    def subset(self, indices: IntArray) -> "LazyImages":
        """Return the images with these indices, still unread."""
        sizes, describe = None if self.sizes is None else self.sizes[indices], self.describe
        return LazyImages(
            self.labels[indices],
            self.class_names,
            self.ids[indices],
            lambda chosen: self.read(indices[chosen]),
            lambda index: self.read_encoded(int(indices[index])),
            sizes,
            None if describe is None else lambda index: describe(int(indices[index])),
            None if self.digests is None else self.digests[indices],
        )


def lazy_array_images(
    labels: IntArray, class_names: tuple[str, ...], ids: npt.NDArray[Any], read: Callable[[IntArray], ImageArray]
) -> LazyImages:
    """Return lazy images of arrays; the file of each is a PNG.

    Args:
        labels: The label of each image.
        class_names: The names of the classes.
        ids: The id of each image.
        read: Returns the images (n, H, W, 3) with the given indices.
    """

    def encoded(index: int) -> bytes:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(read(np.array([index]))[0]).save(file, "PNG")
        return file.getvalue()

    return LazyImages(labels, class_names, ids, lambda indices: DecodedImages(read(indices), {}), encoded)


@dataclass(frozen=True, eq=False)
class RawDataset:
    """A data set before a long-tailed subset or a validation split is drawn from it."""

    name: str
    train: LazyImages
    test: LazyImages
    largest_class: int  # images of the largest class of a long-tailed subset
    notes: tuple[str, ...] = ()


def to_path_array(names: Sequence[str]) -> npt.NDArray[np.str_]:
    """Return paths as an array, whose items are all as large as the longest path.

    A few long paths among many short ones, which would need far more memory than there are characters, raise UserError.
    """
    longest = max(names, key=len, default="")
    array_bytes, mean = 4 * len(longest) * len(names), sum(map(len, names)) / max(len(names), 1)
    if array_bytes > NAMES_LIMIT and len(longest) > 8 * mean:
        raise UserError(
            f"a path has {len(longest):,} characters ({longest[:40]}…), but the mean is {mean:.0f}: shorten it",
            kind="bad-list",
        )
    return np.array(names, dtype=np.str_)


def check_text(text: str, location: object, kind: str) -> str:
    """Return `text` unless it has characters that cannot be stored or printed, which raise UserError.

    Args:
        text: A path or a class name.
        location: The file and line of the text, for the message.
        kind: The meaning of the text, for the message.
    """
    if found := UNUSABLE_TEXT.search(text):
        what = "a NUL character" if found[0] == "\0" else "an unpaired surrogate"
        raise UserError(f"{location}: the {kind} {text[:80]!a} contains {what}: remove it", kind="bad-list")
    return text


def check_last_label(location: object, last: int, classes: int) -> None:
    """Raise UserError if so many label numbers are unused that a class for each number would exhaust the memory.

    Args:
        location: The list or folder, for the message.
        last: The largest label.
        classes: The number of distinct labels.
    """
    if last > 1000 * classes or last > 2 * classes + MAX_UNUSED_LABELS:
        raise UserError(
            f"{location} has labels up to {last} for {classes} classes: number the classes from 0", kind="bad-labels"
        )


def class_counts(labels: IntArray, class_names: tuple[str, ...]) -> IntArray:
    """Return the number of images of each class."""
    return np.bincount(labels, minlength=len(class_names)).astype(np.int64)


def check_classes(name: str, train: LazyImages) -> None:
    """Raise UserError unless there are at least two classes and each has a training image."""
    names, absent = train.class_names, np.where(train.counts == 0)[0]
    if len(names) < 2:
        raise UserError(
            f"{name} has only one class, {names[0]!r}: a classifier needs at least two", kind="too-few-data"
        )
    if len(absent):
        fix = "number labels from 0 without gaps, or remove these classes from the data"
        which = f"{len(absent)} of its {len(names)} classes ({preview(names[c] for c in absent)})"
        raise UserError(f"{name} has no training image of {which}: {fix}", kind="too-few-data")


def empty_class_notes(
    class_names: tuple[str, ...], counts: IntArray, split_counts: IntArray, split: str, is_separate: bool = False
) -> list[str]:
    """Return a note for each class that has no image in a split, or one note for all if there are more than five.

    Args:
        class_names: The names of the classes.
        counts: The number of training images of each class, including those that the split was drawn from.
        split_counts: The number of images of each class in the split.
        split: The purpose of the split, such as "evaluation".
        is_separate: The split was not drawn from the training images.
    """
    empty = [(class_names[c], int(counts[c])) for c in np.where(split_counts == 0)[0]]
    end = f"but none for {split}" if is_separate else f"used for training, none left for {split}"
    noun, comma = ("training image", ",") if is_separate else ("image", ":")
    if len(empty) > 5:
        low, high = min(n for _, n in empty), max(n for _, n in empty)
        sizes = f"{low} to {high} {noun}s" if low < high else pluralize(low, noun)
        return [f"{len(empty)} classes have {sizes} each{comma} {end} ({preview(c for c, _ in empty)})"]
    return [f"class {c!r} has {pluralize(n, noun)}{comma} {end}" for c, n in empty]


def split_by_file(images: LazyImages, fraction: float) -> tuple[IntArray, IntArray]:
    """Return sorted indices (train, validation) such that no file is in both; see `validation_split`.

    A list may name a file several times; if it does so in several classes, the file is used for training.
    """
    if not fraction:  # listing the files of a million images takes seconds
        return np.arange(len(images.labels)), np.array([], np.int64)
    indices_of, labels = dict[str, list[int]](), images.labels.tolist()
    for i, file in enumerate(file_paths(images)):
        indices_of.setdefault(file, []).append(i)
    unambiguous = [indices for indices in indices_of.values() if len({labels[i] for i in indices}) == 1]
    _, chosen = validation_split(images.labels[[indices[0] for indices in unambiguous]], fraction)
    held = np.sort(np.array([i for c in chosen for i in unambiguous[c]], np.int64))
    return np.setdiff1d(np.arange(len(labels)), held), held


def file_paths(images: LazyImages) -> list[str]:
    """Return the path of each image, or its id if it is not a file. Different spellings of a path give the same result."""
    if images.describe is None:
        return [str(i) for i in images.ids]
    return [os.path.abspath(str(images.describe(i))) for i in range(len(images.labels))]


def fits_in_memory(images: int, size: int) -> bool:
    """Return whether so many images of `size` pixels are within MEMORY_LIMIT."""
    return images * size * size * 3 <= MEMORY_LIMIT


def check_memory(images: int, size: int, available: int) -> None:
    """Raise UserError, before anything is decoded, if images would not fit into memory.

    Args:
        images: The number of images.
        size: Their height and width in pixels.
        available: The memory of the machine in bytes.
    """
    needed = images * size * size * 3
    if not fits_in_memory(images, size) or needed > available:
        limit = "allowed" if available >= MEMORY_LIMIT else "available"
        raise UserError(
            f"{images:,} images of {size}x{size} pixels need {needed / 2**30:.1f} GiB of memory, but only "
            f"{min(available, MEMORY_LIMIT) / 2**30:.1f} GiB are {limit}: use --data.load stream, or lower --data.image_size",
            kind="out-of-memory",
        )


def resize_images(images: ImageArray, size: int) -> ImageArray:
    """Return square images resized to `size` pixels (bilinear)."""
    from PIL import Image

    if images.shape[1] == size:
        return images
    out = np.empty((len(images), size, size, 3), np.uint8)
    for i, image in enumerate(images):
        out[i] = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    return out
