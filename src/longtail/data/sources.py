"""Where images come from: CIFAR archives, scikit-learn's digits, image folders, lists of files, shards; `load` makes a DataSet
of any of them.

The long-tailed draw and the validation split are made on labels alone, so that only chosen images are ever read.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail import files
from longtail.config import DataConfig
from longtail.data.benchmark_lists import PUBLISHED, open_published
from longtail.data.cifar import open_cifar
from longtail.data.decode import memory, unreadable
from longtail.data.folder import open_folder
from longtail.data.lazy_images import (
    ImageArray,
    IntArray,
    LazyImages,
    RawDataset,
    Skipped,
    Split,
    StreamedImages,
    array_pool,
    check_classes,
    check_memory,
    class_counts,
    fit_in_memory,
    no_image_notes,
    resized,
    split_files,
)
from longtail.data.lists import open_lists
from longtail.data.long_tail import PROFILES, checksum, draw, shot_groups
from longtail.data.shards import open_shards
from longtail.errors import UserError
from longtail.progress import log_info
from longtail.text import escape_nonprintable

__all__ = ["DataSet", "Split", "load", "load_once"]

Once = Callable[..., Any]  # called with a function and its arguments
DIGITS_TEST = 40  # images per class of `digits` that are the test set, whatever is drawn from the rest


@dataclass(frozen=True, eq=False)
class DataSet:
    """What a run trains on, validates on (if asked to) and is tested on."""

    name: str
    train: Split
    val: Split | None
    test: Split
    checksum: str  # of the drawn training images, before the validation split
    notes: tuple[str, ...] = ()
    drawn: IntArray | None = None
    """Images of each class before some were held out; the training images', if not said."""

    @property
    def counts(self) -> IntArray:
        """By which classes are called frequent or rare: the same for methods that hold images out and for those that do not."""
        return self.train.counts if self.drawn is None else self.drawn

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Images that could not be read, and are in none of the parts."""
        return tuple(item for part in (self.train, self.val, self.test) if part for item in part.skipped)

    def describe(self) -> list[str]:
        """The lines that every run prints on start."""
        counts = self.train.counts
        many, medium, few = (int(mask.sum()) for mask in shot_groups(self.counts).values())
        held = f"{len(self.val.labels):,} images" if self.val else "none"
        counted = ", those held out counted" if self.val else ""
        return [
            f"{escape_nonprintable(self.name)}: {counts.sum():,} training images of {len(counts)} classes, {_kept(self.train)}",
            f"images per class: {_head_to_tail(counts)}",
            f"classes by training images{counted}: {many} many (>100), {medium} medium (20-100), {few} few (<20)",
            f"validation: {held}; test: {len(self.test.labels):,} images",
            f"checksum of the draw: {self.checksum}",
            *map(escape_nonprintable, self.notes),
        ]


def load(config: DataConfig, once: Once = lambda work, *args: work(*args)) -> DataSet:
    """The data set that `config` asks for, drawn, split and in memory; what the user can mend is a UserError.

    `once` calls what needs to be done by one of several processes only, and tells the others.
    """
    opened = open_data(config)
    pool, names = opened.train, opened.train.class_names
    drawn, notes = long_tail(opened, config)
    every = np.arange(len(opened.test.labels))
    take = _way_to_take(config, opened, len(drawn) + len(every), once)
    kept, held = split_files(pool.subset(drawn), config.val_fraction)
    if config.val_fraction > 0:
        before, given = (class_counts(pool.labels[indices], names) for indices in (drawn, drawn[held]))
        notes += no_image_notes(names, before, given, "validation")
    train, val = take(pool, drawn[kept]), take(pool, drawn[held]) if len(held) else None
    data = DataSet(
        name=opened.name,
        train=train,
        val=val,
        test=take(opened.test, every),
        checksum=_checksum(pool, drawn, opened.test),
        notes=(*opened.notes, *notes),
        drawn=train.counts + val.counts if val else train.counts,
    )
    return _without_skipped(data) if data.skipped else data


RESIDENT_SIDE = 96  # pixels: from larger images views are cut that a small copy of their center would not hold


def _way_to_take(
    config: DataConfig, opened: RawDataset, images: int, once: Once
) -> Callable[[LazyImages, IntArray], Split]:
    """Into memory, or as they lie on disk."""
    files, small = opened.train.sizes is not None, config.image_size <= RESIDENT_SIDE
    stays = files and not (small and fit_in_memory(images, config.image_size))
    if config.load == "stream" or (config.load == "auto" and stays):
        return lambda pool, indices: _stream(pool, indices, config, once)
    check_memory(images, config.image_size, memory())
    return LazyImages.take


def _stream(pool: LazyImages, indices: IntArray, config: DataConfig, once: Once) -> Split:
    """Where bad images are to be skipped they must be known beforehand: counts and order depend on them."""
    skipped = once(unreadable, pool.encoded, indices) if config.on_error == "skip" else {}
    return pool.stream(indices, streamed_side(config), config.workers, config.decode, skipped)


def streamed_side(config: DataConfig) -> int:
    """Pixels of the square that a streamed image is made to fit in."""
    return config.resolution or round(config.image_size * 16 / 7)


def _kept(source: Split) -> str:
    if isinstance(source.images, StreamedImages):
        return f"read when needed, up to {source.images.side} pixels"
    return "x".join(str(side) for side in source.images.shape[1:3]) + " pixels"


def _without_skipped(data: DataSet) -> DataSet:
    """Say what is missing; a class of which nothing is left cannot be learned. Other images are left: another checksum."""
    lost = [name for name, n in zip(data.train.class_names, data.train.counts, strict=True) if not n]
    if lost:
        raise UserError(
            f"none of the training images chosen of class {lost[0]!r} can be read: mend them, or take it out",
            kind="bad-image",
        )
    for part, what in ((data.val, "validation split"), (data.test, "evaluation set")):
        if part is not None and not len(part.labels):
            raise UserError(f"no image of the {what} can be read: mend its files", kind="bad-image")
    first, gone = data.skipped[0], "\n".join([data.checksum, *(image.id for image in data.skipped)])
    many = f"{len(data.skipped):,} images cannot be read and are left out, such as"
    lacks = many if len(data.skipped) > 1 else "one image cannot be read and is left out:"
    note = f"warning: {lacks} {first.id} ({first.why})"
    return replace(data, notes=(*data.notes, note), checksum=_digest(gone))


def load_once(config: DataConfig, loaded: dict[DataConfig, DataSet]) -> DataSet:
    """For methods that share their images, but for those that hold some out; described when they come."""
    if config not in loaded:
        loaded[config] = load(config)
        for line in loaded[config].describe():
            log_info(line)
    return loaded[config]


def open_data(config: DataConfig) -> RawDataset:
    """What is there, before anything is drawn or decoded."""
    if config.name not in ("list", *PUBLISHED) and (config.train_list or config.test_list):
        raise UserError(
            f"--data.test_list goes with a list of training images, and the data are {config.name}", kind="conflict"
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
            return open_published(config, skip)
        case name:
            root = config.root or Path(os.environ.get("LONGTAIL_DATA") or "data")
            return open_cifar(name, root, config.download, config.image_size)


def _open_digits(size: int) -> RawDataset:
    """The 1,797 digits of scikit-learn: 8x8 pixels in 17 shades of gray, embedded in the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None].repeat(3, axis=-1)
    labels, names = bunch.target.astype(np.int64), tuple(str(d) for d in range(10))
    test = draw(labels, [DIGITS_TEST] * len(names))
    rest = np.setdiff1d(np.arange(len(labels)), test)

    def part(official: IntArray) -> LazyImages:
        def read(indices: IntArray) -> ImageArray:
            return resized(images[official[indices]], size)

        return array_pool(labels[official], names, official, read)

    return RawDataset("digits", part(rest), part(test), int(np.bincount(labels[rest]).min()))


def long_tail(opened: RawDataset, config: DataConfig) -> tuple[IntArray, list[str]]:
    """Indices into the training pool, and a note where it has too few images for the profile."""
    pool = opened.train
    if config.imbalance == 1:
        return np.arange(len(pool.labels)), []
    wanted = PROFILES[config.profile](opened.largest, len(pool.class_names), config.imbalance)
    drawn = draw(pool.labels, wanted)
    short = int((pool.counts < wanted).sum())
    got = np.minimum(pool.counts, wanted)
    lacking = f"classes with fewer images than the draw asks for: {short}; the imbalance is {got.max() / got.min():.3g}"
    return drawn, [lacking] if short else []


def _checksum(pool: LazyImages, drawn: IntArray, test: LazyImages) -> str:
    """Of the official indices in the order drawn; of files, of their sorted paths with labels and sizes, the test's too."""
    if pool.sizes is None or test.sizes is None:
        return checksum(pool.ids[drawn])
    parts = (pool.ids[drawn], pool.labels[drawn], pool.sizes[drawn]), (test.ids, test.labels, test.sizes)
    lines = ["\n".join(sorted("\t".join(map(str, item)) for item in zip(*part, strict=True))) for part in parts]
    return _digest("\n\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _head_to_tail(counts: IntArray) -> str:
    """All counts from the largest to the smallest; of more than twenty classes the five at either end."""
    ordered = [str(n) for n in sorted(counts.tolist(), reverse=True)]
    return " ".join(ordered if len(ordered) <= 20 else [*ordered[:5], "…", *ordered[-5:]])
