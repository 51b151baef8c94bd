"""Shards: parquet files with the bytes of image files and their labels, in the layout of Hugging Face's `datasets`.

Labels are a column of their own, so that counts and samplers need no image. A row group holds about a megabyte, which is what
one image costs to fetch in whatever order. Nothing in such a file is ever executed.

Compression and dictionaries let a small file promise any number of rows and bytes. What a file says of itself, in its footer
and in the headers of its pages, is therefore checked against limits before a column is read, and columns are read in batches
whose content is counted.
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

from longtail import files
from longtail.data.decode import LARGEST_IMAGE, BadImage, encoded_pool, refuse_shortage
from longtail.data.folder import EVALUATION, own_split
from longtail.data.lazy_images import LazyImages, RawDataset, check_last_label, name_array, no_image_notes
from longtail.data.parquet_pages import expanded_size
from longtail.data.paths import check_text, is_directory, list_directory
from longtail.errors import UserError
from longtail.text import preview

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
MOST_ROWS = 2**24  # of all shards of a folder; ImageNet-21k has 14 million images
FEW_ROWS = 2**20  # so many may share the bytes of a file in any way
ROW_BYTES = 16  # of the file for each row, where rows are more; no image has fewer
LARGEST_COLUMN = 2**31  # bytes of a column in a row group, without compression
LARGEST_TEXT = 2**30  # bytes of the labels and paths of a file
BATCH_BYTES = 2**26  # that a batch may have, if all its values are as long as the column
MOST_IN_BATCH = 2**16  # rows


def open_shards(root: Path | None, columns: Sequence[str], image_size: int, skip: bool = False) -> RawDataset:
    """train-*.parquet with val-*, validation-* or test-*.parquet beside them; without these a fifth is evaluated on."""
    if root is None or not is_directory(root):
        raise UserError(
            f"--data.root {root} is not a folder: name the one that holds the parquet files", kind="missing-file"
        )
    files = [f for f in list_directory(root) if f.suffix.lower() == ".parquet"]
    if not files:
        raise UserError(f"{root} has no parquet file: write some with `longtail data shard`", kind="missing-file")
    name, image, label = root.resolve().name, *(columns or COLUMNS)
    splits: dict[str, list[Shard]] = {}
    rows = 0
    for file in files:
        shard = Shard(file, image, label)
        splits.setdefault(_kind(file.name.lower()), []).append(shard)
        rows += len(shard.labels)
        if rows > MOST_ROWS:
            raise UserError(
                f"the shards of {root} have more than {MOST_ROWS:,} rows: take some of them away", kind="unsafe-file"
            )
    tests = [s for s in EVALUATION if s in splits]
    rest = [s for s in splits if s not in tests]
    used = [s for s in rest if s == TRAINING] or rest
    if not used:
        raise UserError(
            f"{root} has files to evaluate on alone ({', '.join(tests)}): add train-*.parquet", kind="missing-file"
        )
    _refuse_gaps(root, [shard.path.name for s in (*used, *tests[:1]) for shard in splits[s]])
    train = _pool([shard for s in used for shard in splits[s]], image_size, skip)
    if not tests:
        opened = own_split(name, train, "no evaluation shards")
        return replace(opened, notes=(*opened.notes, *_left_alone(splits, used)))
    test = _pool(splits[tests[0]], image_size, skip, train.class_names)
    notes = _left_alone(splits, [*used, tests[0]])
    notes += no_image_notes(train.class_names, train.counts, test.counts, "evaluation")
    return RawDataset(name, train, test, int(train.counts.max()), tuple(notes))


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
        raise UserError(
            f"shards are missing in {root}, {len(lost):,} in all ({preview(lost)}): {fix}", kind="missing-file"
        )


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
            files.check_regular(path)
            file = parquet.ParquetFile(path.absolute(), **CHECKED)
            self.metadata, there = file.metadata, file.schema_arrow.names
            for column in (image, label):
                if column not in there:
                    fix = "name its two with --data.columns IMAGE LABEL"
                    raise UserError(
                        f"{path} has no column {column!r} ({_words(', '.join(there))}): {fix}", kind="bad-list"
                    )
            self.bytes_column, self.fixed_bytes = _bytes_column(path, file.schema_arrow, image)
            if not _is_flat(file.schema_arrow.field(label).type):
                have = f"{path}: column {label!r} is {_words(file.schema_arrow.field(label).type)}"
                raise UserError(f"{have}: its labels must be whole numbers, or names", kind="bad-labels")
            self.text_columns = [*_path_column(file.schema_arrow, image), label]
            self._check_size()
            self.labels: list[Any] = []
            self.paths: list[str | None] = []
            self._read_labels(file, image, label)
            self.names = _class_names(file.schema_arrow, label)
        except UserError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise UserError(
                f"cannot read the shard {path} ({_words(error)}): write or fetch it again",
                kind=files.read_error_kind(error),
            ) from error
        for name in {*(self.names or ()), *(value for value in self.labels if isinstance(value, str))}:
            check_text(name, path, "class name")
        for image_path in self.paths:
            check_text(image_path or "", path, "path")

    def _check_size(self) -> None:
        """Raise UserError where the file promises more rows or bytes than are read, or contradicts itself."""
        rows, size = self.metadata.num_rows, os.stat(self.path).st_size
        groups = [self.metadata.row_group(g) for g in range(self.metadata.num_row_groups)]
        self.group_rows: list[int] = [group.num_rows for group in groups]
        if min(self.group_rows, default=0) < 0 or sum(self.group_rows) != rows:
            raise UserError(
                f"{self.path} has {rows:,} rows, and others in its row groups: write or fetch it again", kind="bad-list"
            )
        if rows > MOST_ROWS or (rows > FEW_ROWS and rows * ROW_BYTES > size):
            limit = f"{MOST_ROWS:,} rows, and of {ROW_BYTES} bytes a row where there are more than {FEW_ROWS:,}"
            raise UserError(
                f"{self.path} promises {rows:,} rows in {size:,} bytes: the limit is {limit}", kind="unsafe-file"
            )
        largest = dict.fromkeys((self.bytes_column, *self.text_columns), 0)
        with files.open_regular(self.path) as pages:
            for group in groups:
                for number, chunk in enumerate(map(group.column, range(group.num_columns))):
                    for column in largest:
                        if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}."):
                            largest[column] = max(largest[column], chunk.total_uncompressed_size)
                            if column == self.bytes_column:
                                self.image_chunk = number  # whose pages are looked at when they are read
                            else:
                                largest[column] = max(largest[column], expanded_size(pages, chunk))
        if max(largest.values()) > LARGEST_COLUMN:
            limit = f"the limit is {LARGEST_COLUMN:,}: write it with smaller row groups"
            raise UserError(
                f"{self.path} has a row group of {max(largest.values()):,} bytes in a column: {limit}",
                kind="unsafe-file",
            )
        self.image_batch = _batch_rows(max(largest[self.bytes_column], self.fixed_bytes))
        self.text_batch = _batch_rows(max(largest[column] for column in self.text_columns))
        self.sizes = np.repeat(np.array([g.total_byte_size for g in groups], np.int64), self.group_rows)

    def _read_labels(self, file: Any, image: str, label: str) -> None:
        size = 0
        same: dict[Any, Any] = {}  # a label that many rows have is kept once
        for batch in file.iter_batches(self.text_batch, columns=self.text_columns, use_threads=False):
            size += batch.nbytes
            if size > LARGEST_TEXT:
                raise UserError(
                    f"{self.path} has labels and paths of more than {LARGEST_TEXT:,} bytes: shorten them",
                    kind="unsafe-file",
                )
            labels = batch.column(label).to_pylist()
            self.labels += [same.setdefault(value, value) if isinstance(value, str) else value for value in labels]
            if image in batch.schema.names:
                paths = [(row or {}).get("path") for row in batch.column(image).to_pylist()]
                self.paths += [path if isinstance(path, str) else None for path in paths]
        if len(self.labels) != sum(self.group_rows):
            raise UserError(f"{self.path} has fewer rows than it says: write or fetch it again", kind="bad-list")

    def named(self) -> list[str] | list[int]:
        """The labels as names, where the file has some; else as numbers."""
        if None in self.labels:
            raise UserError(f"{self.path}, row {self.labels.index(None)}: the label is missing", kind="bad-labels")
        if all(isinstance(value, str) for value in self.labels):
            return self.labels
        if not all(type(value) is int for value in self.labels):
            raise UserError(f"{self.path}: its labels must be whole numbers, or names", kind="bad-labels")
        if self.names is None:
            return self.labels
        wrong = [value for value in self.labels if not 0 <= value < len(self.names)]
        if wrong:
            raise UserError(
                f"{self.path} has a label {wrong[0]} for {len(self.names)} classes: write it again", kind="bad-labels"
            )
        return [self.names[value] for value in self.labels]


class ExpandedTooFar(Exception):
    """A row group has more bytes than LARGEST_COLUMN, whatever it says of itself."""


class Rows:
    """The image bytes of any row. A thread keeps a few files open, and the row group that it read last."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.mine = list(shards), threading.local()
        self.too_large: set[int] = set()  # row groups, which are not read again for each of their rows
        groups = [(s, g, n) for s, shard in enumerate(shards) for g, n in enumerate(shard.group_rows)]
        self.group_of = [(s, g) for s, g, _ in groups]
        self.starts = np.cumsum([0, *(n for *_, n in groups)])

    def __call__(self, index: int) -> bytes:
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        found = self._group(group)[index - int(self.starts[group])].as_py()
        found = found.get("bytes") if isinstance(found, dict) else found
        if not isinstance(found, bytes):
            raise BadImage("the row holds no bytes")
        if len(found) > LARGEST_IMAGE:
            raise BadImage(f"it has {len(found):,} bytes, more than the limit of {LARGEST_IMAGE:,}")
        return found

    def _group(self, group: int) -> "pa.ChunkedArray":
        if getattr(self.mine, "group", None) != group:
            number, within = self.group_of[group]
            shard = self.shards[number]
            if group in self.too_large:
                raise BadImage(f"{shard.path.name}: its row group has more than {LARGEST_COLUMN:,} bytes")
            try:
                rows = self._read(shard, within)
            except ExpandedTooFar as error:
                self.too_large.add(group)
                raise BadImage(f"{shard.path.name}: its row group has more than {LARGEST_COLUMN:,} bytes") from error
            except Exception as error:  # a damaged file fails in many ways
                if isinstance(error, OSError):
                    refuse_shortage(error)
                raise BadImage(f"{shard.path.name}: {_words(error)}") from error
            self.mine.rows, self.mine.group = rows, group
        return self.mine.rows

    def _read(self, shard: Shard, group: int) -> "pa.ChunkedArray":
        """Return the image column of a row group, read in batches so that it can be refused before it fills the memory."""
        import pyarrow as pa

        file, size, rows = self._file(shard), 0, []
        with files.open_regular(shard.path) as pages:
            expanded = expanded_size(pages, shard.metadata.row_group(group).column(shard.image_chunk))
        if expanded > LARGEST_COLUMN:
            raise ExpandedTooFar
        in_batch = min(shard.image_batch, _batch_rows(expanded))
        for batch in file.iter_batches(in_batch, row_groups=[group], columns=[shard.bytes_column], use_threads=False):
            size += batch.nbytes
            if size > LARGEST_COLUMN:
                raise ExpandedTooFar
            rows.append(batch.column(0))
        column = pa.chunked_array(rows)
        if len(column) != shard.group_rows[group]:
            raise ValueError(f"the row group has {len(column):,} rows, and says others")
        return column

    def _file(self, shard: Shard) -> Any:
        opened: dict[Path, Any] = self.mine.__dict__.setdefault("opened", {})
        if shard.path not in opened:
            while len(opened) >= OPEN_FILES:
                opened.pop(next(iter(opened))).close()
            files.check_regular(shard.path)
            opened[shard.path] = _parquet().ParquetFile(shard.path.absolute(), metadata=shard.metadata, **CHECKED)
        return opened[shard.path]


def _pool(shards: Sequence[Shard], size: int, skip: bool, names: tuple[str, ...] | None = None) -> LazyImages:
    """`names`: the classes of the training images, where these are others."""
    labels: list[Any] = []
    for shard in shards:
        found = shard.named()
        if labels and found and type(found[0]) is not type(labels[0]):
            raise UserError(
                f"{shard.path} has labels of another kind than {shards[0].path}: numbers in one, names in the other",
                kind="bad-labels",
            )
        labels += found
    if not labels:
        raise UserError(f"the shards of {shards[0].path.parent} have no row", kind="bad-list")
    stored = next((shard.names for shard in shards if shard.names), None)
    known = names or _classes(shards[0], labels, stored)
    numbers = {name: i for i, name in enumerate(known)}
    for shard in shards:
        if wrong := [label for label in shard.named() if str(label) not in numbers]:
            none = f"none of the {len(known)} classes of training"
            raise UserError(
                f"{shard.path} has a label {wrong[0]!r}, {none}: use shards of one data set", kind="bad-labels"
            )
    sizes = np.concatenate([shard.sizes for shard in shards])
    chosen = np.array([numbers[str(label)] for label in labels], np.int64)
    return encoded_pool(chosen, known, _ids(shards), Rows(shards), sizes, size, skip)


def _classes(shard: Shard, labels: Sequence[Any], stored: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those that the files name, the names that are there, or numbers from 0."""
    if stored is not None or isinstance(labels[0], str):
        return stored or tuple(sorted(set(labels)))
    last = max(labels)
    if min(labels) < 0:
        raise UserError(
            f"{shard.path.parent} has labels from {min(labels)} to {last}: number them from 0", kind="bad-labels"
        )
    check_last_label(shard.path.parent, last, len(set(labels)))
    return tuple(map(str, range(last + 1)))


def _ids(shards: Sequence[Shard]) -> npt.NDArray[np.str_]:
    """The paths that the images had; where they have none of their own, file and row."""
    paths = [path for shard in shards for path in shard.paths]
    if paths and all(paths) and len(set(paths)) == len(paths) == sum(len(shard.labels) for shard in shards):
        return name_array([path for path in paths if path], "path")
    return name_array([f"{s.path.name}:{row}" for s in shards for row in range(len(s.labels))], "path")


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "shards are parquet files, which pyarrow reads: pip install pyarrow", kind="missing-package"
        ) from error
    return pyarrow.parquet


def _class_names(schema: "pa.Schema", label: str) -> tuple[str, ...] | None:
    """As `datasets` stores them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, ValueError, TypeError):
        return None


def _is_flat(kind: "pa.DataType") -> bool:
    """Return whether a row has one value of this type, which takes room: a list may have billions that take none."""
    import pyarrow.types as types

    value = kind.value_type if types.is_dictionary(kind) else getattr(kind, "storage_type", kind)
    return not types.is_nested(value) and not types.is_fixed_size_binary(value)


def _path_column(schema: "pa.Schema", image: str) -> list[str]:
    """Return the name of the column with the paths of the images, if there is one."""
    import pyarrow.types as types

    kind = schema.field(image).type
    has_paths = types.is_struct(kind) and kind.get_field_index("path") >= 0 and _is_flat(kind.field("path").type)
    return [f"{image}.path"] if has_paths else []


def _bytes_column(path: Path, schema: "pa.Schema", image: str) -> tuple[str, int]:
    """Return the column that holds the bytes of image files, `image` or a field of it, and how many each row has; 0: any."""
    import pyarrow.types as types

    kind = schema.field(image).type
    column = image
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, column = kind.field("bytes").type, f"{image}.bytes"
    if types.is_dictionary(kind):
        kind = kind.value_type
    views = getattr(types, "is_binary_view", lambda _: False)
    if types.is_binary(kind) or types.is_large_binary(kind) or views(kind):
        return column, 0
    if types.is_fixed_size_binary(kind) and kind.byte_width <= LARGEST_IMAGE:  # which rows without an image have too
        return column, kind.byte_width
    have = f"{path}: column {image!r} is {_words(schema.field(image).type)}, without the bytes of image files"
    raise UserError(
        f"{have}: write it with the images embedded, or name another column with --data.columns", kind="bad-list"
    )


def _batch_rows(column_bytes: int) -> int:
    """Return the rows of a batch that stays small even if each of them repeats all bytes of a row group's column."""
    return max(min(BATCH_BYTES // max(column_bytes, 1), MOST_IN_BATCH), 1)


def _words(error: object) -> str:
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
