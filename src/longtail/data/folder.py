"""Image folders: train/CLASS/*.jpg with val/CLASS/*.jpg (or one that is called alike) beside it, or CLASS/*.jpg alone."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from longtail import files
from longtail.data.decode import encoded_pool, read_file
from longtail.data.lazy_images import (
    IntArray,
    LazyImages,
    RawDataset,
    check_classes,
    name_array,
    no_image_notes,
    split_files,
)
from longtail.data.paths import is_directory, list_directory
from longtail.errors import UserError
from longtail.metrics import MIN_TEST_IMAGES, shot_groups
from longtail.text import did_you_mean, pluralize, preview

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"}
)
# In this order: the test/ of ImageNet and its kin has no labels.
EVALUATION = ("val", "valid", "validation", "test", "testing")
PACKED = "__MACOSX"  # what an archive made on a Mac has beside its content
OWN_SPLIT = 0.2  # share of each class that is evaluated on where the folder does not say


def open_folder(root: Path | None, image_size: int, skip: bool = False) -> RawDataset:
    """The image folder `root`; images are decoded only once they are chosen."""
    if root is None:
        raise UserError("the data are a folder, but which one? add --data.root DIR")
    if not is_directory(root):
        raise UserError(
            f"--data.root {root} is not a folder: name one that holds train/CLASS/*.jpg or CLASS/*.jpg",
            kind="missing-file",
        )
    train_root = root / "train" if _is_split(root / "train") else root
    names = _training_classes(train_root)
    others: list[str] = []
    train = _pool(root, train_root, names, image_size, skip, others)
    splits = [root / s for s in EVALUATION if train_root != root and is_directory(root / s)]
    if not splits:
        opened = own_split(root.resolve().name, train, "no val/ folder")
        return replace(opened, notes=(*opened.notes, *_left_alone(others), *_another_level(root, train_root, names)))
    notes = [f"{splits[0].name}/ is the evaluation set, {s.name}/ is left alone" for s in splits[1:]]
    test = _evaluation_pool(root, splits[0], names, image_size, skip, others)
    notes += _left_alone(others)
    notes += no_image_notes(names, train.counts, test.counts, "evaluation")
    return RawDataset(root.resolve().name, train, test, int(train.counts.max()), tuple(notes))


def _another_level(root: Path, train_root: Path, names: tuple[str, ...]) -> list[str]:
    """Where one may have meant the folder above, or those below."""
    here, above = root.resolve(), root.resolve().parent
    partners = EVALUATION if here.name == "train" else ("train",) if here.name in EVALUATION else ()
    beside = next((name for name in partners if _is_split(above / name)), None)
    if beside:
        return [f"{beside}/ stands beside this folder: to train on train/ and evaluate on the other, name {above}"]
    inner = {name: _subfolders(train_root / name) for name in names}
    bare = [name for name in names if not any(_is_image(f.name) for f in _entries(train_root / name))]
    if len(bare) == len(names) and all(inner.values()):
        held = f"the class folders hold no image but in folders of their own ({names[0]}/{inner[names[0]][0]}, …)"
        return [f"{held}: if these are the classes, put them all into one folder and name that"]
    return []


# Listing files


def _is_split(folder: Path) -> bool:
    """Whether train/ holds class folders; one that holds images alone is a class called train (a vehicle)."""
    return is_directory(folder) and (bool(_subfolders(folder)) or not any(_is_image(f.name) for f in _entries(folder)))


def _entries(folder: Path) -> list[Path]:
    return [f for f in list_directory(folder) if f.name != PACKED]


def _subfolders(folder: Path) -> list[str]:
    return [f.name for f in _entries(folder) if is_directory(f)]


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _training_classes(folder: Path) -> tuple[str, ...]:
    names = tuple(_subfolders(folder))
    if not names:
        raise UserError(
            f"{folder} has no class folder: put the images of each class into a folder of its name", kind="missing-file"
        )
    if len(names) == 1:
        below = folder / names[0]
        advice = f"name {below}, if its folders are the classes" if _subfolders(below) else "it takes two class folders"
        raise UserError(f"{folder} has a single class, {names[0]!r}: {advice}", kind="too-few-data")
    return names


def image_files(folder: Path, above: tuple[Path, ...], others: list[str]) -> Iterator[Path]:
    """Images at any depth, links followed; each folder is entered once and none `above`, so that loops end.

    `others` are given the files that are left alone.
    """
    seen = {os.path.realpath(f) for f in above}
    try:
        for place, inner, names in files.walk(folder, _cannot_list, follow_links=True):
            if os.path.realpath(place) in seen:
                inner.clear()
                continue
            seen.add(os.path.realpath(place))
            inner[:] = sorted(d for d in inner if not d.startswith("."))
            others += [f for f in names if not _is_image(f) and not f.startswith(".")]
            yield from (Path(place, f) for f in sorted(names) if _is_image(f))
    except files.RefusedFile as error:
        raise UserError(
            f"cannot search {folder} ({error.strerror}): move the images to a folder closer to it", kind="unsafe-file"
        ) from error


def _cannot_list(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):  # a class may be absent from the evaluation set
        return
    raise UserError(
        f"cannot list {error.filename} ({error.strerror}): check its permissions", kind="unreadable-file"
    ) from error


def _pool(
    root: Path,
    folder: Path,
    names: tuple[str, ...],
    size: int,
    skip: bool,
    others: list[str],
    may_be_empty: bool = False,
) -> LazyImages:
    paths: list[Path] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        found = list(image_files(folder / name, (root, folder), others))
        empty += [] if found else [str(folder / name)]
        paths += found
        labels += [label] * len(found)
    if empty and not may_be_empty:
        more = f" and {len(empty) - 5:,} more" if len(empty) > 5 else ""
        kinds = " ".join(sorted(e[1:] for e in EXTENSIONS))
        raise UserError(
            f"no image ({kinds}) in the class folder {', '.join(empty[:5])}{more}: fill it or remove it",
            kind="too-few-data",
        )
    ids = [f.relative_to(root).as_posix() for f in paths]
    return file_pool(root, ids, np.array(labels, np.int64), names, size, skip)


def file_pool(
    root: Path, ids: list[str], labels: IntArray, names: tuple[str, ...], size: int, skip: bool
) -> LazyImages:
    """Of image files by their paths below `root`."""
    sizes = np.array([_size(root / i) for i in ids], np.int64)
    return encoded_pool(
        labels,
        names,
        name_array(ids, "path"),
        lambda index: read_file(os.path.join(root, ids[index])),
        sizes,
        size,
        skip,
        place=lambda index: root / ids[index],
    )


def _size(path: Path) -> int:
    """Bytes; a dead link has none, and is told of when it is to be decoded."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _left_alone(others: list[str]) -> list[str]:
    """Files that may be images, and are not taken for such."""
    endings = preview(sorted({os.path.splitext(f)[1] or "no ending" for f in others}))
    return [f"files left alone, as they do not end as images do: {len(others):,} ({endings})"] if others else []


def _evaluation_pool(
    root: Path, folder: Path, names: tuple[str, ...], size: int, skip: bool, others: list[str]
) -> LazyImages:
    """The images of val/ or test/; a class may be absent there, but none may be new."""
    for name in _subfolders(folder):
        if name not in names:
            advice = "rename it, remove it, or give train/ some of its images"
            what = f"{folder} has a class that train/ does not have, {name!r}"
            raise UserError(f"{what}: {' '.join(filter(None, (did_you_mean(name, names), advice)))}", kind="bad-labels")
    pool = _pool(root, folder, names, size, skip, others, may_be_empty=True)
    if not len(pool.labels):
        raise UserError(
            f"{folder} has no image: fill its class folders, or remove it to evaluate on a share of train/",
            kind="missing-file",
        )
    return pool


def own_split(name: str, pool: LazyImages, why: str) -> RawDataset:
    """A fifth of each class is evaluated on, where nothing else is there for it."""
    check_classes(name, pool)
    kept, held = split_files(pool, OWN_SPLIT)
    if not len(held):
        lacks = f"{name} has no class of five images or more, of that class alone, to evaluate on"
        raise UserError(f"{lacks}: add images, or an evaluation set", kind="too-few-data")
    train, test = pool.subset(kept), pool.subset(held)
    bare = no_image_notes(pool.class_names, pool.counts, test.counts, "evaluation")
    note = f"{why}: {len(held):,} of {len(pool.labels):,} images (a fifth per class) are the evaluation set"
    return RawDataset(name, train, test, int(train.counts.max()), (note, *_too_few(train.counts, test.counts), *bare))


def _too_few(train_C: IntArray, test_C: IntArray) -> list[str]:
    """Said before anything is trained: what the report will not be able to say."""
    few_C = shot_groups(train_C)["few"]
    images = int(test_C[few_C].sum())
    if not few_C.any() or images >= MIN_TEST_IMAGES:
        return []
    shown, classes = (pluralize(n, noun) for n, noun in ((images, "evaluation image"), (int(few_C.sum()), "class")))
    have = f"{shown} of the {classes} with fewer than 20 training images"
    return [
        f"{have} are too few for a verdict on these: an evaluation set with {MIN_TEST_IMAGES} or more of them gives one"
    ]
