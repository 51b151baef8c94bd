"""Image folders: train/CLASS/*.jpg with val/CLASS/*.jpg (or another name of an evaluation set), or CLASS/*.jpg alone."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from longtail import files
from longtail.data.decode import lazy_encoded_images, read_file
from longtail.data.lazy_images import (
    IntArray,
    LazyImages,
    RawDataset,
    check_classes,
    empty_class_notes,
    split_by_file,
    to_path_array,
)
from longtail.errors import UserError
from longtail.metrics import MIN_TEST_IMAGES, shot_groups
from longtail.text import did_you_mean, pluralize, preview

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"}
)
EVALUATION_NAMES = ("val", "valid", "validation", "test", "testing")
"""Names of the evaluation set, in order of preference: the test/ folder of ImageNet and similar data sets has no labels."""
MAC_METADATA = "__MACOSX"  # a folder that macOS adds to archives
EVALUATION_FRACTION = 0.2  # share of each class that is used for evaluation if there is no evaluation set


def open_folder(root: Path | None, image_size: int, skip: bool = False) -> RawDataset:
    """Open an image folder without decoding any image.

    Args:
        root: The folder.
        image_size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read.
    """
    if root is None:
        raise UserError("--data.root is required for an image folder")
    if not files.is_directory(root):
        raise UserError(
            f"--data.root {root} is not a folder: give one that contains train/CLASS/*.jpg or CLASS/*.jpg",
            kind="missing-file",
        )
    train_root = root / "train" if _is_split(root / "train") else root
    names = _training_classes(train_root)
    ignored: list[str] = []
    train = _read_classes(root, train_root, names, image_size, skip, ignored)
    splits = [root / s for s in EVALUATION_NAMES if train_root != root and files.is_directory(root / s)]
    if not splits:
        opened = split_off_evaluation(root.resolve().name, train, "no val/ folder")
        hints = _level_hints(root, train_root, names)
        return replace(opened, notes=(*opened.notes, *_ignored_notes(ignored), *hints))
    notes = [f"{splits[0].name}/ is the evaluation set; {s.name}/ is ignored" for s in splits[1:]]
    test = _read_evaluation(root, splits[0], names, image_size, skip, ignored)
    notes += _ignored_notes(ignored)
    notes += empty_class_notes(names, train.counts, test.counts, "evaluation", is_separate=True)
    return RawDataset(root.resolve().name, train, test, int(train.counts.max()), tuple(notes))


def _level_hints(root: Path, train_root: Path, names: tuple[str, ...]) -> list[str]:
    """Return a hint if the user may have meant the folder above, or the folders below."""
    here, above = root.resolve(), root.resolve().parent
    partners = EVALUATION_NAMES if here.name == "train" else ("train",) if here.name in EVALUATION_NAMES else ()
    partner = next((name for name in partners if _is_split(above / name)), None)
    if partner:
        return [
            f"{above} also contains {partner}/: use {above} to train on one of the two folders and evaluate on the other"
        ]
    inner = {name: _subfolders(train_root / name) for name in names}
    without_images = [name for name in names if not any(_is_image(f.name) for f in _entries(train_root / name))]
    if len(without_images) == len(names) and all(inner.values()):
        example = f"{names[0]}/{inner[names[0]][0]}"
        return [
            f"the class folders contain images only in subfolders ({example}, …): if these are the classes, move them all "
            "into one folder and use that"
        ]
    return []


# Listing files


def _is_split(folder: Path) -> bool:
    """Return whether train/ contains class folders; a folder with images only is a class that is called "train" (a vehicle)."""
    return files.is_directory(folder) and (
        bool(_subfolders(folder)) or not any(_is_image(f.name) for f in _entries(folder))
    )


def _entries(folder: Path) -> list[Path]:
    return [f for f in files.list_directory(folder) if f.name != MAC_METADATA]


def _subfolders(folder: Path) -> list[str]:
    return [f.name for f in _entries(folder) if files.is_directory(f)]


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _training_classes(folder: Path) -> tuple[str, ...]:
    names = tuple(_subfolders(folder))
    if not names:
        raise UserError(
            f"{folder} has no class folders: put the images of each class into a folder named after it",
            kind="missing-file",
        )
    if len(names) == 1:
        inner = folder / names[0]
        advice = f"use {inner} if its subfolders are the classes" if _subfolders(inner) else "at least two are needed"
        raise UserError(f"{folder} has only one class, {names[0]!r}: {advice}", kind="too-few-data")
    return names


def walk_images(folder: Path, above: tuple[Path, ...], ignored: list[str]) -> Iterator[Path]:
    """Yield the images in a folder and all its subfolders, sorted by name within each. Symbolic links are followed.

    Args:
        folder: The folder.
        above: Folders that contain it. None of these, and no folder twice, is entered, so that loops of links end.
        ignored: Files that are not images are appended to this list.
    """
    seen = {os.path.realpath(f) for f in above}
    try:
        for directory, inner, names in files.walk(folder, _raise_unreadable_folder, follow_links=True):
            if os.path.realpath(directory) in seen:
                inner.clear()
                continue
            seen.add(os.path.realpath(directory))
            inner[:] = sorted(d for d in inner if not d.startswith("."))
            ignored += [f for f in names if not _is_image(f) and not f.startswith(".")]
            yield from (Path(directory, f) for f in sorted(names) if _is_image(f))
    except files.RefusedFile as error:
        raise UserError(
            f"cannot search {folder} ({error.strerror}): move the images to a less deeply nested folder",
            kind="unsafe-file",
        ) from error


def _raise_unreadable_folder(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):  # the evaluation set may lack a class
        return
    raise UserError(
        f"cannot list {error.filename} ({error.strerror}): check its permissions", kind="unreadable-file"
    ) from error


def _read_classes(
    root: Path,
    folder: Path,
    names: tuple[str, ...],
    size: int,
    skip: bool,
    ignored: list[str],
    may_be_empty: bool = False,
) -> LazyImages:
    """Find the images of all classes.

    Args:
        root: The folder that ids are relative to.
        folder: The folder that contains the class folders.
        names: The classes.
        size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read.
        ignored: Files that are not images are appended to this list.
        may_be_empty: Accept classes without images.
    """
    paths: list[Path] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        found = list(walk_images(folder / name, (root, folder), ignored))
        empty += [] if found else [str(folder / name)]
        paths += found
        labels += [label] * len(found)
    if empty and not may_be_empty:
        more = f" and {len(empty) - 5:,} more" if len(empty) > 5 else ""
        kinds = " ".join(sorted(e[1:] for e in EXTENSIONS))
        which = f"folder {empty[0]}" if len(empty) == 1 else f"folders {', '.join(empty[:5])}{more}"
        raise UserError(
            f"no images in the class {which}: add some ({kinds}), or remove the folder", kind="too-few-data"
        )
    ids = [f.relative_to(root).as_posix() for f in paths]
    return lazy_image_files(root, ids, np.array(labels, np.int64), names, size, skip)


def lazy_image_files(
    root: Path, ids: list[str], labels: IntArray, names: tuple[str, ...], size: int, skip: bool
) -> LazyImages:
    """Return lazy images of files.

    Args:
        root: The folder that the ids are relative to.
        ids: The path of each image.
        labels: The label of each image.
        names: The names of the classes.
        size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read.
    """
    sizes = np.array([_file_size(root / i) for i in ids], np.int64)
    return lazy_encoded_images(
        labels,
        names,
        to_path_array(ids),
        lambda index: read_file(os.path.join(root, ids[index])),
        sizes,
        size,
        skip,
        describe=lambda index: root / ids[index],
    )


def _file_size(path: Path) -> int:
    """Return the size in bytes, or 0 for a broken link, which is reported when it is to be decoded."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _ignored_notes(ignored: list[str]) -> list[str]:
    if not ignored:
        return []
    extensions = preview(sorted({os.path.splitext(f)[1] or "none" for f in ignored}))
    noun = "an unsupported extension" if len(ignored) == 1 else "unsupported extensions"
    return [f"ignored {pluralize(len(ignored), 'file')} with {noun} ({extensions})"]


# Evaluation sets


def _read_evaluation(
    root: Path, folder: Path, names: tuple[str, ...], size: int, skip: bool, ignored: list[str]
) -> LazyImages:
    """Find the images of val/ or test/, which may lack classes but must not have others; see `_read_classes`."""
    for name in _subfolders(folder):
        if name not in names:
            advice = "rename it, remove it, or add some of its images to train/"
            suggestion = " ".join(filter(None, (did_you_mean(name, names), advice)))
            raise UserError(f"{folder} has a class {name!r} that train/ does not have: {suggestion}", kind="bad-labels")
    images = _read_classes(root, folder, names, size, skip, ignored, may_be_empty=True)
    if not len(images.labels):
        raise UserError(
            f"{folder} has no images: fill its class folders, or remove it to evaluate on a part of train/",
            kind="missing-file",
        )
    return images


def split_off_evaluation(name: str, images: LazyImages, reason: str) -> RawDataset:
    """Split off a fifth of each class for evaluation.

    Args:
        name: The name of the data set.
        images: All images.
        reason: Why this is necessary, for the note.
    """
    check_classes(name, images)
    kept, held = split_by_file(images, EVALUATION_FRACTION)
    if not len(held):
        raise UserError(
            f"{name} has no class with five images or more (not counting images in several classes) to evaluate on: add "
            "images, or an evaluation set",
            kind="too-few-data",
        )
    train, test = images.subset(kept), images.subset(held)
    empty = empty_class_notes(images.class_names, images.counts, test.counts, "evaluation")
    note = f"{reason}: {len(held):,} of {len(images.labels):,} images (a fifth of each class) are used for evaluation"
    notes = (note, *_few_image_notes(train.counts, test.counts), *empty)
    return RawDataset(name, train, test, int(train.counts.max()), notes)


def _few_image_notes(train_C: IntArray, test_C: IntArray) -> list[str]:
    """Return a note if the few-shot classes have too few evaluation images for the report to compare methods on them."""
    few_C = shot_groups(train_C)["few"]
    images = int(test_C[few_C].sum())
    if not few_C.any() or images >= MIN_TEST_IMAGES:
        return []
    classes = pluralize(int(few_C.sum()), "class")
    have = f"{classes} with fewer than 20 training images: {pluralize(images, 'evaluation image')} in total"
    return [f"{have}, too few to compare methods on them; use an evaluation set with at least {MIN_TEST_IMAGES}"]
