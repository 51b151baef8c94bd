"""Loading data sets: CIFAR archives, scikit-learn's digits, image folders, lists of files, shards, and images in memory.

The long-tailed subset and the validation split are drawn from the labels, so that only the selected images are read.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail import files
from longtail.config import DataConfig
from longtail.data.cifar import open_cifar
from longtail.data.decode import available_memory, find_unreadable
from longtail.data.folder import open_folder
from longtail.data.in_memory import find_memory
from longtail.data.lazy_images import (
    ImageArray,
    IntArray,
    LazyImages,
    RawDataset,
    SkippedImage,
    Split,
    StreamedImages,
    check_classes,
    check_memory,
    class_counts,
    empty_class_notes,
    fits_in_memory,
    lazy_array_images,
    resize_images,
    split_by_file,
)
from longtail.data.lists import BENCHMARKS, open_benchmark, open_lists
from longtail.data.long_tail import PROFILES, checksum, draw_subset
from longtail.data.shards import open_shards
from longtail.errors import UserError
from longtail.metrics import shot_groups
from longtail.progress import log_info
from longtail.text import escape_nonprintable, pluralize

__all__ = ["DataSet", "Split", "load", "load_cached"]

RunOnce = Callable[..., Any]
"""A function that is called with a function and its arguments, and returns the result."""
DIGITS_TEST_PER_CLASS = 40  # test images per class of `digits`, which do not depend on the imbalance
MAX_RESIDENT_SIDE = 96  # pixels; larger images are streamed, so that views are cut from whole images


@dataclass(frozen=True, eq=False)
class DataSet:
    """The training, validation and test images of a run."""

    name: str
    train: Split
    val: Split | None
    test: Split
    checksum: str  # of the training images before the validation split
    notes: tuple[str, ...] = ()
    drawn_counts: IntArray | None = None
    """The number of training images of each class before the validation split; the default is that of `train`."""

    @property
    def counts(self) -> IntArray:
        """The class counts that define many-, medium- and few-shot classes, which do not depend on the validation split."""
        return self.train.counts if self.drawn_counts is None else self.drawn_counts

    @property
    def skipped(self) -> tuple[SkippedImage, ...]:
        """The images that could not be read and are in no split."""
        return tuple(image for split in (self.train, self.val, self.test) if split for image in split.skipped)

    def describe(self) -> list[str]:
        """Return the lines that describe the data set at the start of a run."""
        counts = self.train.counts
        many, medium, few = (int(mask.sum()) for mask in shot_groups(self.counts).values())
        validation = f"{len(self.val.labels):,} images" if self.val else "none"
        included = ", including validation" if self.val else ""
        return [
            f"{escape_nonprintable(self.name)}: {counts.sum():,} training images of {len(counts)} classes, "
            f"{_describe_size(self.train)}",
            f"images per class: {_preview_counts(counts)}",
            f"classes by training images{included}: {many} many (>100), {medium} medium (20-100), {few} few (<20)",
            f"validation: {validation}; test: {len(self.test.labels):,} images",
            *map(escape_nonprintable, self.notes),
        ]


def load(config: DataConfig, run_once: RunOnce = lambda work, *args: work(*args)) -> DataSet:
    """Load a data set: open it, draw the long-tailed subset and the validation split, and read the images.

    Args:
        config: The settings of the data set.
        run_once: Calls a function in one of several processes and returns its result in all of them.

    Raises:
        UserError: The data or the settings are invalid.
    """
    opened = open_data(config)
    images, names = opened.train, opened.train.class_names
    drawn, notes = draw_long_tail(opened, config)
    all_test = np.arange(len(opened.test.labels))
    take = _choose_reader(config, opened, len(drawn) + len(all_test), run_once)
    kept, held = split_by_file(images.subset(drawn), config.val_fraction)
    if config.val_fraction > 0:
        drawn_counts, held_counts = (class_counts(images.labels[indices], names) for indices in (drawn, drawn[held]))
        notes += empty_class_notes(names, drawn_counts, held_counts, "validation")
    train, val = take(images, drawn[kept]), take(images, drawn[held]) if len(held) else None
    data = DataSet(
        name=opened.name,
        train=train,
        val=val,
        test=take(opened.test, all_test),
        checksum=_checksum(images, drawn, opened.test),
        notes=(*opened.notes, *notes),
        drawn_counts=train.counts + val.counts if val else train.counts,
    )
    return _report_skipped(data) if data.skipped else data


def _choose_reader(
    config: DataConfig, opened: RawDataset, count: int, run_once: RunOnce
) -> Callable[[LazyImages, IntArray], Split]:
    """Return the function that selects images: into memory, or to be streamed from disk.

    Args:
        config: The settings of the data set.
        opened: The data set.
        count: The number of images that will be selected.
        run_once: See `load`.
    """
    are_files, are_small = opened.train.sizes is not None, config.image_size <= MAX_RESIDENT_SIDE
    should_stream = are_files and not (are_small and fits_in_memory(count, config.image_size))
    if config.load == "stream" or (config.load == "auto" and should_stream):
        return lambda images, indices: _stream(images, indices, config, run_once)
    check_memory(count, config.image_size, available_memory())
    return LazyImages.take


def _stream(images: LazyImages, indices: IntArray, config: DataConfig, run_once: RunOnce) -> Split:
    """Return images that are streamed from disk.

    Unreadable images that are to be skipped are searched for now, since class counts and the order of images depend on them.
    """
    unreadable = run_once(find_unreadable, images.read_encoded, indices) if config.on_error == "skip" else {}
    return images.stream(indices, max_stream_side(config), config.workers, config.decode, unreadable)


def max_stream_side(config: DataConfig) -> int:
    """Return the side, in pixels, of the square that streamed images are shrunk to fit into."""
    return config.resolution or round(config.image_size * 16 / 7)


def _describe_size(split: Split) -> str:
    if isinstance(split.images, StreamedImages):
        return f"read during training, longer side at most {split.images.side} px"
    return "x".join(str(side) for side in split.images.shape[1:3]) + " px"


def _report_skipped(data: DataSet) -> DataSet:
    """Return the data set with a note about skipped images, and a checksum that depends on them.

    A class or a split without readable images raises UserError.
    """
    empty = [name for name, n in zip(data.train.class_names, data.train.counts, strict=True) if not n]
    if empty:
        raise UserError(
            f"no selected training image of class {empty[0]!r} can be read: repair its files, or remove the class",
            kind="bad-image",
        )
    for split, name in ((data.val, "validation split"), (data.test, "evaluation set")):
        if split is not None and not len(split.labels):
            raise UserError(f"no image of the {name} can be read: repair its files", kind="bad-image")
    first, skipped_ids = data.skipped[0], "\n".join([data.checksum, *(image.id for image in data.skipped)])
    count = pluralize(len(data.skipped), "unreadable image")
    note = f"warning: skipped {count}{', such as' if len(data.skipped) > 1 else ':'} {first.id} ({first.why})"
    return replace(data, notes=(*data.notes, note), checksum=_digest(skipped_ids))


def load_cached(config: DataConfig, loaded: dict[DataConfig, DataSet]) -> DataSet:
    """Return the data set from `loaded` if it is there; else load it, add it and print its description."""
    config = replace(config, cached_views=0, folds=0)  # the images do not depend on them
    if config not in loaded:
        loaded[config] = load(config)
        for line in loaded[config].describe():
            log_info(line)
    return loaded[config]


def open_data(config: DataConfig) -> RawDataset:
    """Open a data set: read its labels, without drawing a subset or decoding images."""
    if config.name not in ("list", *BENCHMARKS) and (config.train_list or config.test_list):
        raise UserError(
            f"--data.train_list and --data.test_list need a data set of lists, but --data.name is {config.name}",
            kind="conflict",
        )
    files.check_working_directory((config.root, config.train_list, config.test_list))
    opened = _open(config, config.on_error == "skip")
    check_classes(opened.name, opened.train)
    return opened


def _open(config: DataConfig, skip: bool) -> RawDataset:
    match config.name:
        case "digits":
            return _open_digits(config.image_size)
        case "folder":
            return open_folder(config.root, config.image_size, skip)
        case "list":
            return open_lists(config.train_list, config.test_list, config.root, config.columns, config.image_size, skip)
        case "shards":
            return open_shards(config.root, config.columns, config.image_size, skip)
        case "imagenet-lt" | "inat2018" | "places-lt":
            return open_benchmark(config, skip)
        case "memory":
            return find_memory().open(config.image_size, skip)
        case name:
            root = config.root or Path(os.environ.get("LONGTAIL_DATA") or "data")
            return open_cifar(name, root, config.download, config.image_size)


def _open_digits(size: int) -> RawDataset:
    """Open the digits of scikit-learn: 1,797 images of 8x8 pixels with 17 gray levels, which are part of that package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None].repeat(3, axis=-1)
    labels, names = bunch.target.astype(np.int64), tuple(str(d) for d in range(10))
    test = draw_subset(labels, [DIGITS_TEST_PER_CLASS] * len(names))
    train = np.setdiff1d(np.arange(len(labels)), test)

    def select(rows: IntArray) -> LazyImages:
        def read(indices: IntArray) -> ImageArray:
            return resize_images(images[rows[indices]], size)

        return lazy_array_images(labels[rows], names, rows, read)

    return RawDataset("digits", select(train), select(test), int(np.bincount(labels[train]).min()))


def draw_long_tail(opened: RawDataset, config: DataConfig) -> tuple[IntArray, list[str]]:
    """Return the indices of the long-tailed subset of the training images, and a note if classes have too few images for it."""
    images = opened.train
    if config.imbalance == 1:
        return np.arange(len(images.labels)), []
    wanted = PROFILES[config.profile](opened.largest_class, len(images.class_names), config.imbalance)
    drawn = draw_subset(images.labels, wanted)
    short = int((images.counts < wanted).sum())
    actual = np.minimum(images.counts, wanted)
    if not short:
        return drawn, []
    have = f"{pluralize(short, 'class')} {'has' if short == 1 else 'have'} fewer images than --data.imbalance requires"
    return drawn, [f"{have}; the actual imbalance is {actual.max() / actual.min():.3g}"]


def _checksum(images: LazyImages, drawn: IntArray, test: LazyImages) -> str:
    """Return a checksum of the selected images.

    It covers the indices in the official file in the order drawn, or, for files, the sorted paths with labels and sizes of the
    training and the test images, or, for images in memory, their sorted digests with labels.
    """
    chosen = images.subset(drawn)
    parts: tuple[tuple[npt.NDArray[Any], ...], ...]
    if chosen.digests is not None and test.digests is not None:
        parts = (chosen.digests, chosen.labels), (test.digests, test.labels)
    elif chosen.sizes is not None and test.sizes is not None:
        parts = (chosen.ids, chosen.labels, chosen.sizes), (test.ids, test.labels, test.sizes)
    else:
        return checksum(chosen.ids)
    lines = ["\n".join(sorted("\t".join(map(str, item)) for item in zip(*part, strict=True))) for part in parts]
    return _digest("\n\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _preview_counts(counts: IntArray) -> str:
    """Return the counts in descending order; of more than twenty, the first five and the last five."""
    ordered = [str(n) for n in sorted(counts.tolist(), reverse=True)]
    return " ".join(ordered if len(ordered) <= 20 else [*ordered[:5], "…", *ordered[-5:]])
