"""Lists of image files with their classes: `path label` lines, CSV with columns, iNaturalist's JSON.

Classes are numbers from 0, names (CSV) or categories (JSON); the training list says which, and the evaluation list must agree.
What a list gets wrong is told with its place.
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
from longtail.data.folder import file_pool, own_split
from longtail.data.lazy_images import IntArray, LazyImages, RawDataset, check_last_label, files_of, no_image_notes
from longtail.data.paths import check_text
from longtail.errors import UserError
from longtail.text import preview

COLUMNS = ("path", "label")  # of a CSV that does not say otherwise
LABEL_DIGITS = 9  # a number with more is no class
LIST_LIMIT = 2**30  # bytes; a list of ten million images has about 600 MB
MOST_LINES = 2**24  # as many as rows of shards; each takes about 300 bytes of memory
MOST_VALUES = 2**26  # of a JSON file; an image of iNaturalist has about 20
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # those of str.splitlines
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


class Line(NamedTuple):
    place: str  # where it stands, for errors
    path: str
    label: str


class Listed(NamedTuple):
    """A list file as it is written."""

    lines: list[Line]
    categories: dict[str, str] | None = None  # label -> name, in their order, where the file says
    notes: tuple[str, ...] = ()


class Classes(NamedTuple):
    number: dict[str, int]  # label -> place
    names: tuple[str, ...]


def open_lists(
    train_list: Path | None,
    test_list: Path | None,
    root: Path | None,
    columns: Sequence[str],
    image_size: int,
    skip: bool = False,
) -> RawDataset:
    """What two lists name, or one: then a fifth of it is evaluated on. Only labels are read; images once they are chosen."""
    if train_list is None:
        raise UserError("the data are a list of files, but which one? add --data.train_list FILE")
    listed = read_list(train_list, columns)
    classes = find_classes(train_list, listed)
    train = _pool(train_list, listed, classes, root, image_size, skip)
    notes = [*listed.notes, *_mixed(train_list, listed), *_repeated(train_list, train)]
    if test_list is None:  # what is named twice would be evaluated on twice
        named = [*zip(files_of(train), train.labels.tolist(), strict=True)]
        once = {line: i for i, line in reversed([*enumerate(named)])}
        opened = own_split(train_list.stem, train.subset(np.sort(np.array([*once.values()]))), "no --data.test_list")
        return replace(opened, notes=(*notes, *opened.notes))
    other = read_list(test_list, columns)
    _refuse_others(test_list, other, train_list, listed)
    test = _pool(test_list, other, classes, root, image_size, skip)
    notes += [*other.notes, *_repeated(test_list, test), *_in_both(train, test)]
    notes += no_image_notes(classes.names, train.counts, test.counts, "evaluation")
    return RawDataset(train_list.stem, train, test, int(train.counts.max()), tuple(notes))


# Reading


def read_list(path: Path, columns: Sequence[str] = ()) -> Listed:
    """By its ending: .txt, .csv and .tsv, .json."""
    ending = path.suffix.lower()
    if ending not in READERS:
        raise UserError(f"{path}: a list ends in {' '.join(READERS)}; rename it to what it is", kind="unsupported")
    if columns and ending in (".txt", ".json"):
        raise UserError(
            f"--data.columns {' '.join(columns)}: {path} has none, only .csv, .tsv and shards do", kind="conflict"
        )
    try:
        text = files.read_text(path, "utf-8-sig", "surrogateescape", limit=LIST_LIMIT)
    except OSError as error:
        raise UserError(
            f"cannot read the list {path} ({error.strerror}): name one that is there", kind=files.read_error_kind(error)
        ) from error
    if "\0" in text:
        raise UserError(f"{path} is no UTF-8 text: save it as such", kind="bad-list")
    if sum(map(text.count, LINE_ENDS)) > MOST_LINES:
        raise UserError(f"the list {path} has more than {MOST_LINES:,} lines: divide it", kind="bad-list")
    listed = READERS[ending](path, text, columns)
    if not listed.lines:
        raise UserError(f"the list {path} names no image", kind="bad-list")
    for line in listed.lines:
        check_text(line.path, line.place, "path")
        check_text(line.label, line.place, "label")
    for name in (listed.categories or {}).values():
        check_text(name, path, "category")
    return listed


def _read_lines(path: Path, text: str, _: Sequence[str]) -> Listed:
    """`path label`, as ImageNet-LT, Places-LT and iNaturalist 2018 are published; the path may have spaces."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place, (*file, label) = f"{path}, line {number}", line.strip().rsplit(maxsplit=1)
            if not file or not label.isdecimal():
                raise UserError(
                    f"{place}: {line.strip()[:80]!r} is not a path and a class number, as in `a/b.jpg 7`",
                    kind="bad-list",
                )
            lines.append(Line(place, file[0], label))
    return Listed(lines)


def _read_csv(path: Path, text: str, columns: Sequence[str]) -> Listed:
    """With a heading; classes are numbers, or else names."""
    mark = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True, strict=True)
    file, label = columns or COLUMNS
    lines = []
    try:
        heading = next(rows, [])
        at = {column: i for i, column in enumerate(heading)}
        for column in (file, label):
            if column not in at:
                there = ", ".join(heading)[:200] or "no heading"
                fix = f"name its two with --data.columns PATH LABEL, and separate them by {'tabs' if mark != ',' else 'commas'}"
                raise UserError(f"{path} has no column {column!r} ({there}): {fix}", kind="bad-list")
        for row in filter(None, rows):  # without a dictionary for each row: there may be very many columns
            place = f"{path}, line {rows.line_num}"
            if len(row) > len(heading):
                raise UserError(
                    f"{place}: it has more fields than the heading: put a field with a comma into quotes",
                    kind="bad-list",
                )
            values = {column: row[at[column]].strip() if at[column] < len(row) else "" for column in (file, label)}
            for column, value in values.items():
                if not value:
                    raise UserError(f"{place}: {column} is missing", kind="bad-list")
            lines.append(Line(place, values[file], values[label]))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {rows.line_num}: {error}: mend the quotes of that line", kind="bad-list"
        ) from error
    return Listed(lines)


def _read_inaturalist(path: Path, text: str, _: Sequence[str]) -> Listed:
    """{"images": [{id, file_name}], "annotations": [{image_id, category_id}], "categories": [{id, name}]}."""
    try:
        tree: Any = files.parse_json(text, MOST_VALUES)
        names_of = {str(image["id"]): str(image["file_name"]) for image in tree["images"]}
        many = len(tree["images"]) - len(names_of)
        known = sorted(tree["categories"], key=lambda category: category["id"])
        pairs = [(str(a["image_id"]), str(a["category_id"])) for a in tree["annotations"]]
        ids = [str(category["id"]) for category in known]
        names = _distinct([str(category.get("name") or category["id"]) for category in known], ids)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:100]
        raise UserError(
            f"{path} is not iNaturalist's JSON of images, annotations and categories ({reason})", kind="bad-list"
        ) from error
    if many or len(set(ids)) < len(ids):
        raise UserError(
            f"{path} has ids of images or categories that stand twice: each must have its own", kind="bad-list"
        )
    lines = []
    for i, (image, category) in enumerate(pairs):
        place = f"{path}, annotation {i}"
        if image not in names_of:
            raise UserError(f"{place}: there is no image of id {image} in the file", kind="bad-list")
        lines.append(Line(place, names_of[image], category))
    bare = len(names_of) - len({image for image, _ in pairs})
    notes = (f"warning: {bare:,} images of {path.name} have no annotation and are left out",) if bare else ()
    return Listed(lines, dict(zip(ids, names, strict=True)), notes)


READERS = {".txt": _read_lines, ".csv": _read_csv, ".tsv": _read_csv, ".json": _read_inaturalist}


# Classes


def find_classes(path: Path, listed: Listed) -> Classes:
    """The file's categories; or labels that are numbers; or names, sorted."""
    if listed.categories is not None:
        return Classes({label: i for i, label in enumerate(listed.categories)}, tuple(listed.categories.values()))
    labels = {line.label for line in listed.lines}
    if not all(label.isdecimal() for label in labels):
        if all(NUMBER.fullmatch(label) for label in labels):
            line = next(line for line in listed.lines if not line.label.isdecimal())
            raise UserError(
                f"{line.place}: label {line.label} is no class number: number the classes from 0, 1, 2 on",
                kind="bad-labels",
            )
        names = tuple(sorted(labels))
        return Classes({name: i for i, name in enumerate(names)}, names)
    longest = max(labels, key=len)
    if len(longest) > LABEL_DIGITS:
        raise UserError(
            f"{path} has labels such as {longest[:20]} for {len(labels)} classes: number them from 0", kind="bad-labels"
        )
    last = max(map(int, labels))
    check_last_label(path, last, len(labels))
    number = {str(n): n for n in range(last + 1)}
    return Classes(number | {label: int(label) for label in labels}, _folder_names(listed, last + 1))


def _folder_names(listed: Listed, classes: int) -> tuple[str, ...]:
    """The folder that each class has for itself; else its number."""
    folders: dict[int, set[str]] = {}
    for line in listed.lines:
        folders.setdefault(int(line.label), set()).add(PurePosixPath(line.path).parent.name)
    own = [next(iter(f)) if len(f := folders.get(c, set())) == 1 else "" for c in range(classes)]
    return tuple(own if all(own) and len(set(own)) == len(own) else map(str, range(classes)))


def _distinct(names: list[str], ids: list[str]) -> list[str]:
    """Two categories of one name are told apart by their ids."""
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({i})" for name, i in zip(names, ids, strict=True)]


def _refuse_others(path: Path, other: Listed, train_path: Path, train: Listed) -> None:
    """Ids that mean another category than in training; some may be absent."""
    if (other.categories is None) != (train.categories is None):
        raise UserError(f"{path} and {train_path} must both be JSON, or neither", kind="conflict")
    for label, name in (other.categories or {}).items():
        if (train.categories or {}).get(label) != name:
            raise UserError(
                f"{path} has a category {label}, {name!r}, that {train_path} has not: use lists of one data set",
                kind="bad-labels",
            )


def _numbers(listed: Listed, classes: Classes) -> IntArray:
    for line in listed.lines:
        if line.label not in classes.number:
            known = f"the {len(classes.names)} classes of the training list"
            raise UserError(
                f"{line.place}: label {line.label[:80]!r} is none of {known}: use lists of one data set",
                kind="bad-labels",
            )
    return np.array([classes.number[line.label] for line in listed.lines], np.int64)


# Files


def _pool(path: Path, listed: Listed, classes: Classes, root: Path | None, size: int, skip: bool) -> LazyImages:
    base = root or path.parent
    if not os.path.isdir(base):
        raise UserError(
            f"--data.root {base} is not a folder: name the one that the paths of {path} begin in", kind="missing-file"
        )
    ids = [_below(base, line, given=root is not None) for line in listed.lines]
    pool = file_pool(base, ids, _numbers(listed, classes), classes.names, size, skip)
    assert pool.sizes is not None
    missing = [ids[i] for i in np.where(pool.sizes == 0)[0] if not os.path.exists(base / ids[i])]
    if missing and not skip:
        fix = "set --data.root to where the paths begin, or leave them out with --data.on_error skip"
        raise UserError(
            f"{len(missing):,} of the {len(ids):,} files of {path} are not in {base} ({preview(missing)}): {fix}",
            kind="missing-file",
        )
    return pool


def _below(base: Path, line: Line, given: bool) -> str:
    """The path below the root. One that leads elsewhere is refused; where no root is given, an absolute one stands as it is."""
    if os.path.isabs(line.path) and not given:
        return os.path.normpath(line.path)
    top = os.path.abspath(base)
    path = os.path.normpath(os.path.join(top, line.path))  # links are not followed: what lies below them is the user's
    if os.path.commonpath([top, path]) != top:
        raise UserError(
            f"{line.place}: {line.path} lies outside of {base}: set --data.root to the folder above all",
            kind="bad-list",
        )
    return os.path.relpath(path, top)


def _mixed(path: Path, listed: Listed) -> list[str]:
    """Labels of which some are numbers, as where one is missing or NA."""
    labels = Counter(line.label for line in listed.lines) if listed.categories is None else Counter[str]()
    names = sorted(label for label in labels if not NUMBER.fullmatch(label))
    if not names or len(names) == len(labels):
        return []
    return [f"warning: labels of {path.name} are numbers but for {preview(names)}: all of them are taken as names"]


def _repeated(path: Path, pool: LazyImages) -> list[str]:
    """Files that a list names more than once."""
    labels: dict[str, set[int]] = {}
    files, ids = files_of(pool), pool.ids.tolist()
    for file, label in zip(files, pool.labels.tolist(), strict=True):
        labels.setdefault(file, set()).add(label)
    again = len(ids) - len(labels)
    called = dict(zip(files, ids, strict=True))
    torn = [called[file] for file, found in labels.items() if len(found) > 1]
    words = f", some of them in several classes ({preview(torn)})" if torn else ""
    return [f"warning: {path.name} names files more than once, {again:,} lines in all{words}"] if again else []


def _in_both(train: LazyImages, test: LazyImages) -> list[str]:
    there = set(files_of(train))
    both = sorted(name for file, name in zip(files_of(test), test.ids.tolist(), strict=True) if file in there)
    return (
        [f"warning: files that are in both lists, training and evaluation: {len(both):,} ({preview(both)})"]
        if both
        else []
    )
