"""Lists of image files with their classes: `path label` lines, CSV with columns, iNaturalist's JSON.

The class of a line is a number from 0, or in CSV also a name. What a list gets wrong is told with its place.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from longtail.data.folder import file_pool, own_split
from longtail.data.pool import Opened, Pool, class_counts, no_image_notes
from longtail.errors import UserError

COLUMNS = ("path", "label")  # of a CSV that does not say otherwise
SHOWN = 3  # examples in an error


class Line(NamedTuple):
    place: str  # where it stands, for errors
    path: str
    label: int | str


class Listed(NamedTuple):
    """A list file as it is written."""

    lines: list[Line]
    names: tuple[str, ...] | None  # of the classes, where the file has them


def open_lists(
    train_list: Path | None,
    test_list: Path | None,
    root: Path | None,
    columns: Sequence[str],
    image_size: int,
    skip: bool = False,
) -> Opened:
    """What two lists name, or one: then a fifth of it is evaluated on. Only labels are read; images once they are chosen."""
    if train_list is None:
        raise UserError("the data are a list of files, but which one? add --data.train_list FILE")
    listed = read_list(train_list, columns)
    names = class_names(train_list, listed)
    train = _pool(train_list, listed, names, root, image_size, skip)
    _refuse_gaps(train_list, train)
    if test_list is None:
        return own_split(train_list.stem, train, "no --data.test_list")
    other = read_list(test_list, columns)
    if other.names is not None and other.names != listed.names:
        raise UserError(f"{test_list} has other categories than {train_list}: use the lists of one data set")
    test = _pool(test_list, other, names, root, image_size, skip)
    notes = [*_repeated(train_list, train), *_repeated(test_list, test), *_in_both(train, test)]
    notes += no_image_notes(names, train.counts, test.counts, "evaluation")
    return Opened(train_list.stem, train, test, int(train.counts.max()), tuple(notes))


# Reading


def read_list(path: Path, columns: Sequence[str] = ()) -> Listed:
    """By its ending: .txt, .csv and .tsv, .json."""
    readers = {".txt": _read_lines, ".csv": _read_csv, ".tsv": _read_csv, ".json": _read_inaturalist}
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: a list ends in {' '.join(readers)}; rename it to what it is")
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"cannot read the list {path} ({error.strerror})") from error
    listed = readers[path.suffix.lower()](path, text, columns)
    if not listed.lines:
        raise UserError(f"the list {path} names no image")
    return listed


def _read_lines(path: Path, text: str, _: Sequence[str]) -> Listed:
    """`path label`, as ImageNet-LT, Places-LT and iNaturalist 2018 are published; the path may have spaces."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            file, _, label = line.strip().rpartition(" ")
            place = f"{path}, line {number}"
            if not file or not label.isdecimal():
                raise UserError(f"{place}: {line.strip()[:80]!r} is not a path and a class number, as in `a/b.jpg 7`")
            lines.append(Line(place, file.strip(), int(label)))
    return Listed(lines, None)


def _read_csv(path: Path, text: str, columns: Sequence[str]) -> Listed:
    """With a heading; classes are numbers, or else names."""
    rows = csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    file, label = columns or COLUMNS
    for column in (file, label):
        if column not in (rows.fieldnames or ()):
            there = ", ".join(rows.fieldnames or ()) or "no heading"
            raise UserError(f"{path} has no column {column!r} ({there}): name its two with --data.columns PATH LABEL")
    lines = []
    for row in rows:
        place = f"{path}, line {rows.line_num}"
        if not row[file] or not row[label]:
            raise UserError(f"{place}: {file if not row[file] else label} is missing")
        lines.append(Line(place, row[file].strip(), row[label].strip()))
    if all(str(line.label).isdecimal() for line in lines):
        lines = [line._replace(label=int(line.label)) for line in lines]
    return Listed(lines, None)


def _read_inaturalist(path: Path, text: str, _: Sequence[str]) -> Listed:
    """{"images": [{id, file_name}], "annotations": [{image_id, category_id}], "categories": [{id, name}]}."""
    try:
        tree: Any = json.loads(text)
        files = {image["id"]: str(image["file_name"]) for image in tree["images"]}
        known = sorted(tree["categories"], key=lambda category: category["id"])
        number = {category["id"]: i for i, category in enumerate(known)}
        lines = [
            Line(f"{path}, annotation {i}", files[a["image_id"]], number[a["category_id"]])
            for i, a in enumerate(tree["annotations"])
        ]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not iNaturalist's JSON of images, annotations and categories ({reason})") from error
    names = [str(category.get("name", category["id"])) for category in known]
    return Listed(lines, tuple(_distinct(names, [str(category["id"]) for category in known])))


# Classes


def class_names(path: Path, listed: Listed) -> tuple[str, ...]:
    """The file's own; the labels themselves where they are names; the folder that a class has for itself; its number."""
    if listed.names is not None:
        return listed.names
    labels = {line.label for line in listed.lines}
    if any(isinstance(label, str) for label in labels):
        return tuple(sorted(map(str, labels)))
    last = max(int(label) for label in labels)
    if last > 1000 * len(labels):  # not even worth listing what is absent
        raise UserError(f"{path} has labels up to {last}, but {len(labels)} of them: number them from 0")
    numbers = [str(n) for n in range(last + 1)]
    folders: dict[int, set[str]] = {}
    for line in listed.lines:
        folders.setdefault(int(line.label), set()).add(PurePosixPath(line.path).parent.name)
    own = [next(iter(f)) if len(f := folders.get(c, set())) == 1 else "" for c in range(len(numbers))]
    return tuple(own if all(own) and len(set(own)) == len(own) else numbers)


def _distinct(names: list[str], ids: list[str]) -> list[str]:
    """Two categories of one name are told apart by their ids."""
    often = Counter(names)
    return [name if often[name] == 1 else f"{name} ({i})" for name, i in zip(names, ids, strict=True)]


def _numbers(path: Path, listed: Listed, names: tuple[str, ...]) -> Iterator[int]:
    """The label of each line as a number below that of the classes."""
    known = {name: i for i, name in enumerate(names)}
    for line in listed.lines:
        found = known.get(line.label) if isinstance(line.label, str) else line.label
        if found is None or not 0 <= found < len(names):
            classes = f"the {len(names)} classes of the training list"
            raise UserError(f"{line.place}: label {line.label!r} is none of {classes}: use the lists of one data set")
        yield found


def _refuse_gaps(path: Path, train: Pool) -> None:
    absent = np.where(class_counts(train.labels, train.class_names) == 0)[0]
    if len(absent):
        some = _some(train.class_names[c] for c in absent)
        raise UserError(
            f"{path} has no image of {len(absent)} of its classes ({some}): number labels without gaps from 0"
        )


# Files


def _pool(path: Path, listed: Listed, names: tuple[str, ...], root: Path | None, size: int, skip: bool) -> Pool:
    base = root or path.parent
    if not base.is_dir():
        raise UserError(f"--data.root {base} is not a folder: name the one that the paths of {path} begin in")
    ids = [_below(base, line, given=root is not None) for line in listed.lines]
    pool = file_pool(base, ids, list(_numbers(path, listed, names)), names, size, skip)
    assert pool.sizes is not None
    missing = [ids[i] for i in np.where(pool.sizes == 0)[0] if not (base / ids[i]).exists()]
    if missing and not skip:
        fix = "set --data.root to where the paths begin, or leave them out with --data.on_error skip"
        raise UserError(
            f"{len(missing):,} of the {len(ids):,} files of {path} are not in {base} ({_some(missing)}): {fix}"
        )
    return pool


def _below(base: Path, line: Line, given: bool) -> str:
    """The path below the root. One that leads elsewhere is refused; where no root is given, an absolute one stands as it is."""
    if os.path.isabs(line.path) and not given:
        return os.path.normpath(line.path)
    top = os.path.abspath(base)
    path = os.path.normpath(os.path.join(top, line.path))  # links are not followed: what lies below them is the user's
    if os.path.commonpath([top, path]) != top:
        raise UserError(f"{line.place}: {line.path} lies outside of {base}: set --data.root to the folder above all")
    return os.path.relpath(path, top)


def _repeated(path: Path, pool: Pool) -> list[str]:
    """Files that a list names more than once."""
    labels: dict[str, set[int]] = {}
    for i, label in zip(pool.ids.tolist(), pool.labels.tolist(), strict=True):
        labels.setdefault(i, set()).add(label)
    again = len(pool.ids) - len(labels)
    torn = [i for i, found in labels.items() if len(found) > 1]
    words = f", {len(torn)} of these in several classes ({_some(torn)})" if torn else ""
    return [f"warning: {path.name} names {again:,} files more than once{words}"] if again else []


def _in_both(train: Pool, test: Pool) -> list[str]:
    both = sorted(set(train.ids.tolist()) & set(test.ids.tolist()))
    return [f"warning: {len(both):,} files are in both lists, training and evaluation ({_some(both)})"] if both else []


def _some(items: Iterable[object]) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:SHOWN]) + (", …" if len(shown) > SHOWN else "")
