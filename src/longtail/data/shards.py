"""Shards: parquet files with the bytes of image files and their labels, in the layout of Hugging Face's `datasets`.

Labels are a column of their own, so that counts and samplers need no image. A row group holds about a megabyte, which is what
one image costs to fetch in whatever order. Nothing in such a file is ever executed.
"""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longtail.data.decode import BadImage, encoded_pool
from longtail.data.folder import own_split
from longtail.data.pool import IntArray, Opened, Pool, no_image_notes
from longtail.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("image", "label")
EVALUATION = ("val", "validation", "test")  # in this order, as with image folders
GROUP_BYTES = 2**20  # of a row group


def open_shards(root: Path | None, columns: Sequence[str], image_size: int, skip: bool = False) -> Opened:
    """train-*.parquet with val-*, validation-* or test-*.parquet beside them; of other files a fifth is evaluated on."""
    if root is None or not root.is_dir():
        raise UserError(f"--data.root {root} is not a folder: name the one that holds the parquet files")
    files = sorted(f for f in root.glob("*.parquet") if not f.name.startswith("."))
    if not files:
        raise UserError(f"{root} has no parquet file: write some with `longtail data shard`")
    name = root.resolve().name
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(re.split(r"[^a-z]", file.name)[0], []).append(file)
    tests = [splits[s] for s in EVALUATION if s in splits]
    if "train" not in splits or not tests:
        return own_split(name, _pool(splits.get("train", files), columns, image_size, skip), "no evaluation shards")
    train = _pool(splits["train"], columns, image_size, skip)
    test = _pool(tests[0], columns, image_size, skip, train.class_names)
    notes = no_image_notes(train.class_names, train.counts, test.counts, "evaluation")
    return Opened(name, train, test, int(train.counts.max()), tuple(notes))


# Reading


class Rows:
    """The image bytes of any row. A file is opened once per thread, and the row group that was read last is kept."""

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files, self.column, self.mine = list(files), column, threading.local()
        groups = [(f, g, n) for f, path in enumerate(files) for g, n in enumerate(_group_rows(path))]
        self.group_of = [(f, g) for f, g, _ in groups]
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
            file, number = self.group_of[group]
            opened: dict[int, Any] = self.mine.__dict__.setdefault("opened", {})
            try:
                if file not in opened:
                    opened[file] = _open(self.files[file])
                self.mine.rows = opened[file].read_row_group(number, columns=[self.column], use_threads=False).column(0)
            except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
                raise BadImage(f"{self.files[file].name}: {_words(error)}") from error
            self.mine.group = group
        return self.mine.rows


def _pool(
    files: Sequence[Path], columns: Sequence[str], size: int, skip: bool, names: tuple[str, ...] | None = None
) -> Pool:
    """`names`: the classes, where they are known; else the files say, or the labels that are there."""
    image, label = columns or COLUMNS
    tables = [_read(path, image, label) for path in files]
    stored = _class_names(tables[0].schema, label)
    labels, names = _labels(files, [table.column(label) for table in tables], names or stored)
    rows = Rows(files, image)
    ids = _ids(files, tables, image)
    return encoded_pool(labels, names, ids, rows, _group_sizes(files), size, skip)


def _read(path: Path, image: str, label: str) -> "pa.Table":
    """Labels, and the paths that the images had, where they are stored; not the images."""
    try:
        file = _open(path)
        there = file.schema_arrow.names
        for column in (image, label):
            if column not in there:
                known = ", ".join(there)
                raise UserError(
                    f"{path} has no column {column!r} ({known}): name its two with --data.columns IMAGE LABEL"
                )
        return file.read(columns=[f"{image}.path", label])
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the shard {path} ({_words(error)}): write or fetch it again") from error


def _open(path: Path) -> Any:
    return _parquet().ParquetFile(path, memory_map=True)


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


def _labels(
    files: Sequence[Path], columns: Sequence["pa.ChunkedArray"], names: tuple[str, ...] | None
) -> tuple[IntArray, tuple[str, ...]]:
    values: list[Any] = [value for column in columns for value in column.to_pylist()]
    where = files[0].parent
    if not values or None in values:
        raise UserError(f"{where} has rows without a label" if values else f"the shards of {where} have no row")
    if all(isinstance(value, str) for value in values):
        names = names or tuple(sorted(set(values)))
        known = {name: i for i, name in enumerate(names)}
        values = [known.get(value, -1) for value in values]
    if not all(type(value) is int for value in values):
        raise UserError(f"the labels of {where} are {type(values[0]).__name__}: they must be whole numbers or names")
    names = names or tuple(map(str, range(max(values) + 1)))
    labels = np.array(values, np.int64)
    if not 0 <= labels.min() <= labels.max() < len(names):
        raise UserError(
            f"{where} has labels from {labels.min()} to {labels.max()} for {len(names)} classes: write it again"
        )
    return labels, names


def _ids(files: Sequence[Path], tables: Sequence["pa.Table"], image: str) -> npt.NDArray[np.str_]:
    """The paths that the images had; where they have none of their own, file and row."""
    if all(image in table.column_names for table in tables):
        found = [(row or {}).get("path") for table in tables for row in table.column(image).to_pylist()]
        if all(found) and len(set(found)) == len(found):
            return np.array(found, dtype=np.str_)
    return np.array(
        [f"{f.name}:{row}" for f, t in zip(files, tables, strict=True) for row in range(len(t))], dtype=np.str_
    )


def _group_rows(path: Path) -> list[int]:
    metadata = _open(path).metadata
    return [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]


def _group_sizes(files: Sequence[Path]) -> IntArray:
    """For each row the bytes of its row group: like a file's size, it tells that images are others now."""
    sizes: list[int] = []
    for path in files:
        metadata = _open(path).metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            sizes += [group.total_byte_size] * group.num_rows
    return np.array(sizes, np.int64)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# Writing


class Writer:
    """One split, in files of about so many bytes."""

    def __init__(self, folder: Path, split: str, class_names: Sequence[str], file_bytes: int) -> None:
        import pyarrow as pa

        features = {"image": {"_type": "Image"}, "label": {"names": list(class_names), "_type": "ClassLabel"}}
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self.schema = pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)
        self.folder, self.split, self.file_bytes = folder, split, file_bytes
        self.rows: list[dict[str, Any]] = []
        self.group_bytes = self.written = self.files = 0
        self.file: Any = None

    def add(self, encoded: bytes, path: str, label: int) -> None:
        self.rows.append({"image": {"bytes": encoded, "path": path}, "label": label})
        self.group_bytes += len(encoded)
        if self.group_bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows at hand as a row group, into a new file where the last is full."""
        import pyarrow as pa

        if not self.rows:
            return
        if self.file is None:
            path = self.folder / f"{self.split}-{self.files:05d}.parquet"
            options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
            self.file = _parquet().ParquetWriter(path, self.schema, **options)
            self.files, self.written = self.files + 1, 0
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
