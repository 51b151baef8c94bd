"""Shards: parquet files with the bytes of image files and their labels, in the layout of Hugging Face's `datasets`.

Labels are a column of their own, so that counts and samplers need no image. A row group holds about a megabyte, which is what
one image costs to fetch in whatever order. Nothing in such a file is ever executed.
"""

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longtail.data.decode import BadImage, encoded_pool, refuse_shortage
from longtail.data.folder import EVALUATION, own_split
from longtail.data.pool import Opened, Pool, no_image_notes
from longtail.errors import UserError, some

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("image", "label")
TRAINING = "train"
KINDS = sorted((TRAINING, *EVALUATION), key=len, reverse=True)  # by how names begin; the longest counts
NUMBERED = re.compile(r"(|.*\D)(\d{1,6})(-of-\d{1,6})(?:|\D.*)\.parquet", re.IGNORECASE)
UNCOUNTED = re.compile(r"(train-|test-)(\d{5})()\.parquet", re.IGNORECASE)  # ours, before names said how many there are
CHECKED: dict[str, Any] = {"page_checksum_verification": True}  # where a file has checksums, as ours do
GROUP_BYTES = 2**20  # of a row group
OPEN_FILES = 8  # of each thread


def open_shards(root: Path | None, columns: Sequence[str], image_size: int, skip: bool = False) -> Opened:
    """train-*.parquet with val-*, validation-* or test-*.parquet beside them; without these a fifth is evaluated on."""
    if root is None or not os.path.isdir(root):
        raise UserError(f"--data.root {root} is not a folder: name the one that holds the parquet files")
    files = sorted(f for f in root.iterdir() if f.suffix.lower() == ".parquet" and not f.name.startswith("."))
    if not files:
        raise UserError(f"{root} has no parquet file: write some with `longtail data shard`")
    name, image, label = root.resolve().name, *(columns or COLUMNS)
    splits: dict[str, list[Shard]] = {}
    for file in files:
        splits.setdefault(_kind(file.name.lower()), []).append(Shard(file, image, label))
    tests = [s for s in EVALUATION if s in splits]
    rest = [s for s in splits if s not in tests]
    used = [s for s in rest if s == TRAINING] or rest
    if not used:
        raise UserError(f"{root} has files to evaluate on alone ({', '.join(tests)}): add train-*.parquet")
    _refuse_gaps(root, [shard.path.name for s in (*used, *tests[:1]) for shard in splits[s]])
    train = _pool([shard for s in used for shard in splits[s]], image_size, skip)
    if not tests:
        opened = own_split(name, train, "no evaluation shards")
        return replace(opened, notes=(*opened.notes, *_left_alone(splits, used)))
    test = _pool(splits[tests[0]], image_size, skip, train.class_names)
    notes = _left_alone(splits, [*used, tests[0]])
    notes += no_image_notes(train.class_names, train.counts, test.counts, "evaluation")
    return Opened(name, train, test, int(train.counts.max()), tuple(notes))


def _kind(name: str) -> str:
    """What a file is for, by how its name begins; else its first word."""
    return next((kind for kind in KINDS if name.startswith(kind)), re.split(r"[^a-z]", name)[0])


def _refuse_gaps(root: Path, names: Sequence[str]) -> None:
    """Files that have been lost would be images lost in silence: the names of the others tell."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if found := NUMBERED.fullmatch(name) or UNCOUNTED.fullmatch(name):
            head, number, total = found.groups()
            numbers.setdefault((head, total), []).append(number)
    lost = [name for (head, total), there in numbers.items() for name in _lost(head, total, there)]
    if lost:
        fix = "put back what is missing, or write all shards again; to do without it, number the others anew"
        raise UserError(f"shards are missing in {root}, {len(lost):,} in all ({some(lost)}): {fix}")


def _lost(head: str, total: str, there: Sequence[str]) -> list[str]:
    """Counted from 0, or from 1 where the last number is the total."""
    present, width = set(map(int, there)), min(map(len, there))
    every = int(total.rpartition("-")[2]) if total else max(present) + 1
    first = int(every in present)
    return [f"{head}{n:0{width}d}{total}.parquet" for n in range(first, first + every) if n not in present]


def _left_alone(splits: dict[str, Any], used: Sequence[str]) -> list[str]:
    others = [f"{s}*" for s in splits if s not in used]
    return [f"{' '.join(used)} are used, {' '.join(others)} is left alone"] if others else []


# Reading


class Shard:
    """One file: its labels, and what it says of its rows; images are read later."""

    def __init__(self, path: Path, image: str, label: str) -> None:
        self.path, self.image = path, image
        parquet = _parquet()
        try:
            file = parquet.ParquetFile(path, **CHECKED)
            self.metadata, there = file.metadata, file.schema_arrow.names
            for column in (image, label):
                if column not in there:
                    fix = "name its two with --data.columns IMAGE LABEL"
                    raise UserError(f"{path} has no column {column!r} ({', '.join(there)}): {fix}")
            table = file.read(columns=[f"{image}.path", label])
            self.labels: list[Any] = table.column(label).to_pylist()
            self.paths = (
                [(row or {}).get("path") for row in table.column(image).to_pylist()]
                if image in table.column_names
                else []
            )
            self.names = _class_names(file.schema_arrow, label)
        except UserError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise UserError(f"cannot read the shard {path} ({_words(error)}): write or fetch it again") from error
        groups = [self.metadata.row_group(g) for g in range(self.metadata.num_row_groups)]
        self.group_rows = [group.num_rows for group in groups]
        self.sizes = [group.total_byte_size for group in groups for _ in range(group.num_rows)]

    def named(self) -> list[str] | list[int]:
        """The labels as names, where the file has some; else as numbers."""
        if None in self.labels:
            raise UserError(f"{self.path}, row {self.labels.index(None)}: the label is missing")
        if all(isinstance(value, str) for value in self.labels):
            return self.labels
        if not all(type(value) is int for value in self.labels):
            raise UserError(f"{self.path}: its labels must be whole numbers, or names")
        if self.names is None:
            return self.labels
        wrong = [value for value in self.labels if not 0 <= value < len(self.names)]
        if wrong:
            raise UserError(f"{self.path} has a label {wrong[0]} for {len(self.names)} classes: write it again")
        return [self.names[value] for value in self.labels]


class Rows:
    """The image bytes of any row. A thread keeps a few files open, and the row group that it read last."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.mine = list(shards), threading.local()
        groups = [(s, g, n) for s, shard in enumerate(shards) for g, n in enumerate(shard.group_rows)]
        self.group_of = [(s, g) for s, g, _ in groups]
        self.starts = np.cumsum([0, *(n for *_, n in groups)])

    def __call__(self, index: int) -> bytes:
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        found = self._group(group)[index - int(self.starts[group])].as_py()
        found = found["bytes"] if isinstance(found, dict) else found
        if not isinstance(found, bytes):
            raise BadImage("the row holds no bytes")
        return found

    def _group(self, group: int) -> "pa.ChunkedArray":
        if getattr(self.mine, "group", None) != group:
            number, within = self.group_of[group]
            shard = self.shards[number]
            try:
                rows = self._file(shard).read_row_group(within, columns=[shard.image], use_threads=False).column(0)
            except Exception as error:  # a damaged file fails in many ways
                if isinstance(error, OSError):
                    refuse_shortage(error)
                raise BadImage(f"{shard.path.name}: {_words(error)}") from error
            self.mine.rows, self.mine.group = rows, group
        return self.mine.rows

    def _file(self, shard: Shard) -> Any:
        opened: dict[Path, Any] = self.mine.__dict__.setdefault("opened", {})
        if shard.path not in opened:
            while len(opened) >= OPEN_FILES:
                opened.pop(next(iter(opened))).close()
            opened[shard.path] = _parquet().ParquetFile(shard.path, metadata=shard.metadata, **CHECKED)
        return opened[shard.path]


def _pool(shards: Sequence[Shard], size: int, skip: bool, names: tuple[str, ...] | None = None) -> Pool:
    """`names`: the classes of the training images, where these are others."""
    labels: list[Any] = []
    for shard in shards:
        found = shard.named()
        if labels and found and type(found[0]) is not type(labels[0]):
            raise UserError(
                f"{shard.path} has labels of another kind than {shards[0].path}: numbers in one, names in the other"
            )
        labels += found
    if not labels:
        raise UserError(f"the shards of {shards[0].path.parent} have no row")
    stored = next((shard.names for shard in shards if shard.names), None)
    known = names or _classes(shards[0], labels, stored)
    numbers = {name: i for i, name in enumerate(known)}
    for shard in shards:
        if wrong := [label for label in shard.named() if str(label) not in numbers]:
            none = f"none of the {len(known)} classes of training"
            raise UserError(f"{shard.path} has a label {wrong[0]!r}, {none}: use shards of one data set")
    sizes = np.array([n for shard in shards for n in shard.sizes], np.int64)
    chosen = np.array([numbers[str(label)] for label in labels], np.int64)
    return encoded_pool(chosen, known, _ids(shards), Rows(shards), sizes, size, skip)


def _classes(shard: Shard, labels: Sequence[Any], stored: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those that the files name, the names that are there, or numbers from 0."""
    if stored is not None or isinstance(labels[0], str):
        return stored or tuple(sorted(set(labels)))
    last = max(labels)
    if min(labels) < 0 or last > 1000 * len(set(labels)):
        raise UserError(f"{shard.path.parent} has labels from {min(labels)} to {last}: number them from 0")
    return tuple(map(str, range(last + 1)))


def _ids(shards: Sequence[Shard]) -> npt.NDArray[np.str_]:
    """The paths that the images had; where they have none of their own, file and row."""
    paths = [path for shard in shards for path in shard.paths]
    if paths and all(paths) and len(set(paths)) == len(paths) == sum(len(shard.labels) for shard in shards):
        return np.array(paths, dtype=np.str_)
    return np.array([f"{s.path.name}:{row}" for s in shards for row in range(len(s.labels))], dtype=np.str_)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("shards are parquet files, which pyarrow reads: pip install pyarrow") from error
    return pyarrow.parquet


def _class_names(schema: "pa.Schema", label: str) -> tuple[str, ...] | None:
    """As `datasets` stores them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, ValueError, TypeError):
        return None


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# Writing


class Writer:
    """One split, in files of about so many bytes; once all are written their names say how many there are."""

    def __init__(self, folder: Path, split: str, class_names: Sequence[str], file_bytes: int) -> None:
        _parquet()
        import pyarrow as pa

        features = {"image": {"_type": "Image"}, "label": {"names": list(class_names), "_type": "ClassLabel"}}
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self.schema = pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)
        self.folder, self.split, self.file_bytes = folder, split, file_bytes
        self.rows: list[dict[str, Any]] = []
        self.paths: list[Path] = []
        self.group_bytes = self.written = 0
        self.file: Any = None

    def add(self, encoded: bytes, path: str, label: int) -> None:
        readable = path.encode(errors="surrogateescape").decode(errors="replace")  # parquet has UTF-8 alone
        self.rows.append({"image": {"bytes": encoded, "path": readable}, "label": label})
        self.group_bytes += len(encoded)
        if self.group_bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows at hand as a row group, into a new file where the last is full."""
        import pyarrow as pa

        if not self.rows:
            return
        if self.file is None:
            self.paths.append(self.folder / f"{self.split}-{len(self.paths):05d}.parquet")
            options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
            options["write_page_checksum"] = True
            self.file = _parquet().ParquetWriter(self.paths[-1].absolute(), self.schema, **options)  # no URI
            self.written = 0
        self.file.write_table(pa.Table.from_pylist(self.rows, self.schema))
        self.written += self.group_bytes
        self.rows, self.group_bytes = [], 0
        if self.written >= self.file_bytes:
            self.end()

    def end(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self) -> None:
        self.flush()
        self.end()
        for path in self.paths:
            path.rename(path.with_name(f"{path.stem}-of-{len(self.paths):05d}.parquet"))
