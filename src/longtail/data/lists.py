"""Lists of image files and their labels: text with `path label` lines, CSV, or the JSON of iNaturalist.

Classes are numbers from 0, names (CSV) or categories (JSON). The training list defines them, and the evaluation list must use
the same. Errors in a list are reported with file and line.

Long-tailed benchmarks that are published as lists (ImageNet-LT, iNaturalist 2018, Places-LT) are known by their names.
"""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from longtail import files
from longtail.config import DataConfig
from longtail.data.folder import lazy_image_files, split_off_evaluation
from longtail.data.lazy_images import (
    IntArray,
    LazyImages,
    RawDataset,
    check_last_label,
    check_text,
    empty_class_notes,
    file_paths,
)
from longtail.errors import UserError, file_error_kind
from longtail.text import pluralize, preview

DEFAULT_COLUMNS = ("path", "label")  # of a CSV file
MAX_LABEL_DIGITS = 9  # a number with more digits is not a class
MAX_LIST_BYTES = 2**30  # a list of ten million images has about 600 MB
MAX_LINES = 2**24  # the limit for rows of shards, too; each line takes about 300 bytes of memory
MAX_JSON_VALUES = 2**26  # an image of iNaturalist has about 20
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # those of str.splitlines
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


class ListEntry(NamedTuple):
    """An image in a list."""

    location: str  # file and line, for error messages
    path: str
    label: str


class ImageList(NamedTuple):
    """The content of a list file."""

    entries: list[ListEntry]
    categories: dict[str, str] | None = None  # label -> name, in the order of the classes, if the file has them
    notes: tuple[str, ...] = ()


class ClassMapping(NamedTuple):
    """The classes that a list defines."""

    index_of: dict[str, int]  # label -> index of the class
    names: tuple[str, ...]


def open_lists(
    train_list: Path | None,
    test_list: Path | None,
    root: Path | None,
    columns: Sequence[str],
    image_size: int,
    skip: bool = False,
) -> RawDataset:
    """Open lists of image files. Only labels are read.

    Without an evaluation list, a fifth of each class is used for evaluation.

    Args:
        train_list: The list of training images.
        test_list: The list of evaluation images.
        root: The folder that paths are relative to; the default is the folder of each list.
        columns: The names of the path and the label column of CSV files; the default is DEFAULT_COLUMNS.
        image_size: The height and width, in pixels, of decoded images.
        skip: Leave out images that are missing or cannot be read.
    """
    if train_list is None:
        raise UserError("--data.train_list is required for a list of files")
    train_entries = read_list(train_list, columns)
    classes = find_classes(train_list, train_entries)
    train = _read_images(train_list, train_entries, classes, root, image_size, skip)
    notes = [*train_entries.notes, *_mixed_label_notes(train_list, train_entries), *_duplicate_notes(train_list, train)]
    if test_list is None:
        # Without duplicates, which would be evaluated on twice.
        labeled_files = [*zip(file_paths(train), train.labels.tolist(), strict=True)]
        first_index = {labeled: i for i, labeled in reversed([*enumerate(labeled_files)])}
        unique = train.subset(np.sort(np.array([*first_index.values()])))
        opened = split_off_evaluation(train_list.stem, unique, "no --data.test_list")
        return replace(opened, notes=(*notes, *opened.notes))
    test_entries = read_list(test_list, columns)
    _check_same_categories(test_list, test_entries, train_list, train_entries)
    test = _read_images(test_list, test_entries, classes, root, image_size, skip)
    notes += [*test_entries.notes, *_duplicate_notes(test_list, test), *_overlap_notes(train, test)]
    notes += empty_class_notes(classes.names, train.counts, test.counts, "evaluation", is_separate=True)
    return RawDataset(train_list.stem, train, test, int(train.counts.max()), tuple(notes))


# Reading


def read_list(path: Path, columns: Sequence[str] = ()) -> ImageList:
    """Read a list; its extension gives the format: .txt, .csv, .tsv or .json."""
    extension = path.suffix.lower()
    if extension not in READERS:
        raise UserError(
            f"{path} has an unsupported extension: rename the list to one of {' '.join(READERS)}", kind="unsupported"
        )
    if columns and extension in (".txt", ".json"):
        raise UserError(
            f"--data.columns {' '.join(columns)}: only .csv and .tsv lists and shards have columns, not {path}",
            kind="conflict",
        )
    try:
        text = files.read_text(path, "utf-8-sig", "surrogateescape", limit=MAX_LIST_BYTES)
    except OSError as error:
        raise UserError(
            f"cannot read the list {path} ({error.strerror}): check its path and permissions",
            kind=file_error_kind(error),
        ) from error
    if "\0" in text:
        raise UserError(f"{path} is not UTF-8 text: save it with this encoding", kind="bad-list")
    if sum(map(text.count, LINE_ENDS)) > MAX_LINES:
        raise UserError(f"the list {path} has more than {MAX_LINES:,} lines: shorten it", kind="bad-list")
    listed = READERS[extension](path, text, columns)
    if not listed.entries:
        raise UserError(f"the list {path} has no images", kind="bad-list")
    for entry in listed.entries:
        check_text(entry.path, entry.location, "path")
        check_text(entry.label, entry.location, "label")
    for name in (listed.categories or {}).values():
        check_text(name, path, "category")
    return listed


def _read_lines(path: Path, text: str, _: Sequence[str]) -> ImageList:
    """Read lines `path label`, as in the lists of ImageNet-LT and Places-LT; paths may contain spaces."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            location, (*file, label) = f"{path}, line {number}", line.strip().rsplit(maxsplit=1)
            if not file or not label.isdecimal():
                raise UserError(
                    f"{location}: {line.strip()[:80]!r} is not a path and a class number, such as `a/b.jpg 7`",
                    kind="bad-list",
                )
            entries.append(ListEntry(location, file[0], label))
    return ImageList(entries)


def _read_csv(path: Path, text: str, columns: Sequence[str]) -> ImageList:
    """Read a CSV file with a header row."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    file, label = columns or DEFAULT_COLUMNS
    entries = []
    try:
        header = next(rows, [])
        position = {column: i for i, column in enumerate(header)}
        for column in (file, label):
            if column not in position:
                have = f"columns {', '.join(header)[:200]}" if header else "no header row"
                separators = "commas" if delimiter == "," else "tabs"
                fix = f"name its columns with --data.columns PATH LABEL, and separate them by {separators}"
                raise UserError(f"{path} has no column {column!r}, but {have}: {fix}", kind="bad-list")
        for row in filter(None, rows):  # not as dictionaries, since a file may have very many columns
            location = f"{path}, line {rows.line_num}"
            if len(row) > len(header):
                raise UserError(
                    f"{location} has more fields than the header row: put fields that contain commas into quotes",
                    kind="bad-list",
                )
            values = {
                column: row[position[column]].strip() if position[column] < len(row) else "" for column in (file, label)
            }
            for column, value in values.items():
                if not value:
                    raise UserError(f"{location}: {column} is missing", kind="bad-list")
            entries.append(ListEntry(location, values[file], values[label]))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {rows.line_num}: {error}: correct the quotes of this line", kind="bad-list"
        ) from error
    return ImageList(entries)


def _read_inaturalist(path: Path, text: str, _: Sequence[str]) -> ImageList:
    """Read the JSON of iNaturalist.

    Its form is {"images": [{id, file_name}], "annotations": [{image_id, category_id}], "categories": [{id, name}]}.
    """
    try:
        tree: Any = files.parse_json(text, MAX_JSON_VALUES)
        file_names = {str(image["id"]): str(image["file_name"]) for image in tree["images"]}
        duplicates = len(tree["images"]) - len(file_names)
        categories = sorted(tree["categories"], key=lambda category: category["id"])
        pairs = [(str(a["image_id"]), str(a["category_id"])) for a in tree["annotations"]]
        ids = [str(category["id"]) for category in categories]
        names = _make_unique([str(category.get("name") or category["id"]) for category in categories], ids)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:100]
        raise UserError(
            f"{path} is not JSON with images, annotations and categories as in iNaturalist ({reason})", kind="bad-list"
        ) from error
    if duplicates or len(set(ids)) < len(ids):
        raise UserError(f"{path} has duplicate ids of images or categories: ids must be unique", kind="bad-list")
    entries = []
    for i, (image, category) in enumerate(pairs):
        location = f"{path}, annotation {i}"
        if image not in file_names:
            raise UserError(f"{location}: the file has no image with id {image}", kind="bad-list")
        entries.append(ListEntry(location, file_names[image], category))
    unlabeled = len(file_names) - len({image for image, _ in pairs})
    notes = (
        (f"warning: ignored {pluralize(unlabeled, 'image')} of {path.name} without annotations",) if unlabeled else ()
    )
    return ImageList(entries, dict(zip(ids, names, strict=True)), notes)


READERS = {".txt": _read_lines, ".csv": _read_csv, ".tsv": _read_csv, ".json": _read_inaturalist}


# Classes


def find_classes(path: Path, listed: ImageList) -> ClassMapping:
    """Return the classes that a list defines: its categories, or the labels, which are all numbers or else sorted names.

    Args:
        path: The list file, for messages.
        listed: Its content.
    """
    if listed.categories is not None:
        return ClassMapping({label: i for i, label in enumerate(listed.categories)}, tuple(listed.categories.values()))
    labels = {entry.label for entry in listed.entries}
    if not all(label.isdecimal() for label in labels):
        if all(NUMBER.fullmatch(label) for label in labels):
            entry = next(entry for entry in listed.entries if not entry.label.isdecimal())
            raise UserError(
                f"{entry.location}: label {entry.label} is not a class number: number the classes 0, 1, 2, …",
                kind="bad-labels",
            )
        names = tuple(sorted(labels))
        return ClassMapping({name: i for i, name in enumerate(names)}, names)
    longest = max(labels, key=len)
    if len(longest) > MAX_LABEL_DIGITS:
        raise UserError(
            f"{path} has labels such as {longest[:20]} for {len(labels)} classes: number the classes from 0",
            kind="bad-labels",
        )
    last = max(map(int, labels))
    check_last_label(path, last, len(labels))
    index = {str(n): n for n in range(last + 1)} | {label: int(label) for label in labels}  # labels may be "007"
    return ClassMapping(index, _names_from_folders(listed, last + 1))


def _names_from_folders(listed: ImageList, classes: int) -> tuple[str, ...]:
    """Return the names of the folders if each class has one of its own, else the numbers of the classes."""
    folders: dict[int, set[str]] = {}
    for entry in listed.entries:
        folders.setdefault(int(entry.label), set()).add(PurePosixPath(entry.path).parent.name)
    names = [next(iter(f)) if len(f := folders.get(c, set())) == 1 else "" for c in range(classes)]
    return tuple(names if all(names) and len(set(names)) == len(names) else map(str, range(classes)))


def _make_unique(names: list[str], ids: list[str]) -> list[str]:
    """Append the id to the names that several categories have."""
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({i})" for name, i in zip(names, ids, strict=True)]


def _check_same_categories(path: Path, other: ImageList, train_path: Path, train: ImageList) -> None:
    """Raise UserError if an evaluation list has categories that the training list has not; it may have fewer."""
    if (other.categories is None) != (train.categories is None):
        raise UserError(f"{path} and {train_path} must both be JSON, or neither", kind="conflict")
    for label, name in (other.categories or {}).items():
        if (train.categories or {}).get(label) != name:
            raise UserError(
                f"{path} has category {label} ({name!r}), but {train_path} does not: use lists of the same data set",
                kind="bad-labels",
            )


def _class_indices(listed: ImageList, classes: ClassMapping) -> IntArray:
    for entry in listed.entries:
        if entry.label not in classes.index_of:
            raise UserError(
                f"{entry.location}: label {entry.label[:80]!r} is not one of the {len(classes.names)} classes of the "
                "training list: use lists of the same data set",
                kind="bad-labels",
            )
    return np.array([classes.index_of[entry.label] for entry in listed.entries], np.int64)


# Files


def _read_images(
    path: Path, listed: ImageList, classes: ClassMapping, root: Path | None, size: int, skip: bool
) -> LazyImages:
    """Return the images of a list; for the arguments, see `open_lists`."""
    base = root or path.parent
    if not os.path.isdir(base):
        raise UserError(
            f"--data.root {base} is not a folder: give the one that the paths in {path} are relative to",
            kind="missing-file",
        )
    ids = [_relative_path(base, entry, is_root_given=root is not None) for entry in listed.entries]
    images = lazy_image_files(base, ids, _class_indices(listed, classes), classes.names, size, skip)
    assert images.sizes is not None
    missing = [ids[i] for i in np.where(images.sizes == 0)[0] if not os.path.exists(base / ids[i])]
    if missing and not skip:
        fix = "set --data.root to the folder that paths are relative to, or skip these files with --data.on_error skip"
        raise UserError(
            f"{len(missing):,} of the {len(ids):,} files of {path} are not in {base} ({preview(missing)}): {fix}",
            kind="missing-file",
        )
    return images


def _relative_path(base: Path, entry: ListEntry, is_root_given: bool) -> str:
    """Return the path of an image relative to the root; raise UserError if it is outside.

    Without a root, absolute paths are accepted and returned.
    """
    if os.path.isabs(entry.path) and not is_root_given:
        return os.path.normpath(entry.path)
    top = os.path.abspath(base)
    path = os.path.normpath(os.path.join(top, entry.path))  # links are not resolved, since the user made them
    if os.path.commonpath([top, path]) != top:
        raise UserError(
            f"{entry.location}: {entry.path} is outside of {base}: set --data.root to a folder that contains all images",
            kind="bad-list",
        )
    return os.path.relpath(path, top)


# Notes


def _mixed_label_notes(path: Path, listed: ImageList) -> list[str]:
    """Return a warning if only some labels are numbers, for example because one is missing or "NA"."""
    labels = {entry.label for entry in listed.entries} if listed.categories is None else set()
    names = sorted(label for label in labels if not NUMBER.fullmatch(label))
    if not names or len(names) == len(labels):
        return []
    return [f"warning: all labels of {path.name} are treated as names, since some are not numbers ({preview(names)})"]


def _duplicate_notes(path: Path, images: LazyImages) -> list[str]:
    """Return a warning if a list names files more than once."""
    labels: dict[str, set[int]] = {}
    files, ids = file_paths(images), images.ids.tolist()
    for file, label in zip(files, images.labels.tolist(), strict=True):
        labels.setdefault(file, set()).add(label)
    duplicates = len(ids) - len(labels)
    if not duplicates:
        return []
    id_of = dict(zip(files, ids, strict=True))
    ambiguous = [id_of[file] for file, found in labels.items() if len(found) > 1]
    classes = f"; files in several classes: {len(ambiguous):,} ({preview(ambiguous)})" if ambiguous else ""
    return [f"warning: {path.name} has {pluralize(duplicates, 'duplicate line')}{classes}"]


def _overlap_notes(train: LazyImages, test: LazyImages) -> list[str]:
    """Return a warning if training and evaluation images have files in common."""
    train_files = set(file_paths(train))
    both = sorted(name for file, name in zip(file_paths(test), test.ids.tolist(), strict=True) if file in train_files)
    common = f"{pluralize(len(both), 'file')} in both the training and the evaluation list ({preview(both)})"
    return [f"warning: {common}"] if both else []


# Benchmarks


class ListFiles(NamedTuple):
    """The file names of a pair of lists."""

    train: str
    test: str


class Benchmark(NamedTuple):
    """A long-tailed data set that is published as lists."""

    lists: tuple[ListFiles, ...]
    """The pairs of lists that may be in the root; the first that exists is used."""
    source: str
    """The publisher of the lists."""
    root: str
    """The folder that the paths in the lists are relative to."""
    images: tuple[int, int]
    """The published numbers of training and evaluation images."""


DECOUPLING = "github.com/facebookresearch/classifier-balancing, folder data"
BENCHMARKS = {
    "imagenet-lt": Benchmark(
        (ListFiles("ImageNet_LT_train.txt", "ImageNet_LT_test.txt"),),
        f"{DECOUPLING}/ImageNet_LT",
        "the folder of ImageNet, with train/n01440764/*.JPEG and val/n01440764/*.JPEG",
        (115_846, 50_000),
    ),
    "inat2018": Benchmark(
        (ListFiles("iNaturalist18_train.txt", "iNaturalist18_val.txt"), ListFiles("train2018.json", "val2018.json")),
        f"{DECOUPLING}/iNaturalist18 (or train2018.json and val2018.json of the competition)",
        "the folder that contains train_val2018/",
        (437_513, 24_426),
    ),
    "places-lt": Benchmark(
        (ListFiles("Places_LT_train.txt", "Places_LT_test.txt"),),
        f"{DECOUPLING}/Places_LT",
        "the folder of Places365, with train/airfield/*.jpg and val/airfield/*.jpg",
        (62_500, 36_500),
    ),
}


def open_benchmark(config: DataConfig, skip: bool = False) -> RawDataset:
    """Open a benchmark by its name. Lists in the settings replace those in the root."""
    benchmark = BENCHMARKS[config.name]
    if config.root is None:
        raise UserError(f"--data.root is required for {config.name}: {benchmark.root}")
    pairs = (pair for pair in benchmark.lists if os.path.isfile(config.root / pair.train))
    lists = next(pairs, benchmark.lists[0])
    train = config.train_list or _find_list(config.root / lists.train, "--data.train_list", benchmark)
    test = config.test_list or _find_list(config.root / lists.test, "--data.test_list", benchmark)
    opened = open_lists(train, test, config.root, config.columns, config.image_size, skip)
    found, notes = (len(opened.train.labels), len(opened.test.labels)), opened.notes
    if found != benchmark.images:
        have, published = (f"{n:,} training and {m:,} evaluation images" for n, m in (found, benchmark.images))
        notes = (*notes, f"warning: these lists have {have}, but {config.name} was published with {published}")
    return replace(opened, name=config.name, notes=notes)


def _find_list(path: Path, flag: str, benchmark: Benchmark) -> Path:
    if os.path.isfile(path):
        return path
    raise UserError(
        f"{path} does not exist: get {path.name} from {benchmark.source} and put it there, or give its path with {flag}",
        kind="missing-file",
    )
