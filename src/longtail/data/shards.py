"""Reading shards: parquet files that contain image files and labels, in the layout of Hugging Face's `datasets`.

Labels have a column of their own, so that counting and sampling need no images. Reading one image in random order costs reading
its row group, which has about a megabyte in the shards that this package writes. Nothing in such a file is executed.

With compression and dictionaries, a small file can declare any number of rows and bytes. The sizes in its footer and page
headers are therefore checked against limits before a column is read, and columns are read in batches whose bytes are counted.
"""

import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail import files
from longtail.data.decode import MAX_IMAGE_BYTES, BadImage, lazy_encoded_images, raise_resource_shortage
from longtail.data.folder import EVALUATION_NAMES, split_off_evaluation
from longtail.data.lazy_images import (
    LazyImages,
    RawDataset,
    check_last_label,
    check_text,
    empty_class_notes,
    to_path_array,
)
from longtail.errors import UserError, file_error_kind
from longtail.text import pluralize, preview

if TYPE_CHECKING:
    import pyarrow as pa
from typing import BinaryIO

DEFAULT_COLUMNS = ("image", "label")
TRAINING = "train"
SPLIT_NAMES = sorted((TRAINING, *EVALUATION_NAMES), key=len, reverse=True)  # prefixes of file names, the longest first
NUMBERED = re.compile(r"(|.*\D)(\d{1,6})(-of-\d{1,6})(?:|\D.*)\.parquet", re.IGNORECASE)
NUMBERED_WITHOUT_TOTAL = re.compile(r"(train-|test-)(\d{5})()\.parquet", re.IGNORECASE)  # as older versions wrote them
READ_OPTIONS: dict[str, Any] = {"page_checksum_verification": True}  # if the file has checksums
OPEN_FILES = 8  # per thread
MAX_ROWS = 2**24  # of all shards of a folder; ImageNet-21k has 14 million images
UNCHECKED_ROWS = 2**20  # a file with more rows must have MIN_ROW_BYTES for each
MIN_ROW_BYTES = 16  # no image file is smaller
MAX_COLUMN_BYTES = 2**31  # of a column in a row group, decompressed
MAX_TEXT_BYTES = 2**30  # of the labels and paths of a file
SHARED_BYTES = (
    2**27
)  # of the image column of a row group that is read by one thread at a time, and kept once for all threads
BATCH_BYTES = 2**26  # of a batch, even if each of its values is as long as the column
MAX_BATCH_ROWS = 2**16
SIGNATURE_BYTES = 28  # nonce and tag of AES-GCM, after the footer of a file with encrypted columns


def open_shards(root: Path | None, columns: Sequence[str], image_size: int, skip: bool = False) -> RawDataset:
    """Open a folder of shards: train-*.parquet, with val-*, validation-* or test-*.parquet for evaluation.

    Without evaluation shards, a fifth of each class is used for evaluation.

    Args:
        root: The folder.
        columns: The names of the image and the label column; the default is DEFAULT_COLUMNS.
        image_size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read.
    """
    if root is None or not files.is_directory(root):
        raise UserError(
            f"--data.root {root} is not a folder: give the one that contains the parquet files", kind="missing-file"
        )
    paths = [f for f in files.list_directory(root) if f.suffix.lower() == ".parquet"]
    if not paths:
        raise UserError(f"{root} has no parquet files: create them with `longtail data shard`", kind="missing-file")
    name, image, label = root.resolve().name, *(columns or DEFAULT_COLUMNS)
    splits: dict[str, list[Shard]] = {}
    rows = 0
    for path in paths:
        shard = Shard(path, image, label)
        splits.setdefault(_split_name(path.name.lower()), []).append(shard)
        rows += len(shard.labels)
        if rows > MAX_ROWS:
            raise UserError(
                f"the shards of {root} have more than {MAX_ROWS:,} rows: remove some of them", kind="unsafe-file"
            )
    tests = [s for s in EVALUATION_NAMES if s in splits]
    rest = [s for s in splits if s not in tests]
    used = [s for s in rest if s == TRAINING] or rest
    if not used:
        raise UserError(
            f"{root} has evaluation shards only ({', '.join(tests)}): add train-*.parquet", kind="missing-file"
        )
    _check_for_missing_shards(root, [shard.path.name for s in (*used, *tests[:1]) for shard in splits[s]])
    train = _read_images([shard for s in used for shard in splits[s]], image_size, skip)
    if not tests:
        opened = split_off_evaluation(name, train, "no evaluation shards")
        return replace(opened, notes=(*opened.notes, *_ignored_notes(splits, used)))
    test = _read_images(splits[tests[0]], image_size, skip, train.class_names)
    notes = _ignored_notes(splits, [*used, tests[0]])
    notes += empty_class_notes(train.class_names, train.counts, test.counts, "evaluation", is_separate=True)
    return RawDataset(name, train, test, int(train.counts.max()), tuple(notes))


def _split_name(name: str) -> str:
    """Return the split that a file name starts with, or its first word."""
    return next((split for split in SPLIT_NAMES if name.startswith(split)), re.split(r"[^a-z]", name)[0])


def _check_for_missing_shards(root: Path, names: Sequence[str]) -> None:
    """Raise UserError if the numbers in file names show that some files are missing."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if found := NUMBERED.fullmatch(name) or NUMBERED_WITHOUT_TOTAL.fullmatch(name):
            prefix, number, total = found.groups()
            numbers.setdefault((prefix, total), []).append(number)
    missing = [name for (prefix, total), present in numbers.items() for name in _missing_names(prefix, total, present)]
    if missing:
        fix = "restore them, or write all shards again; to train without them, renumber the others"
        raise UserError(
            f"{pluralize(len(missing), 'shard')} missing in {root} ({preview(missing)}): {fix}", kind="missing-file"
        )


def _missing_names(prefix: str, total: str, numbers: Sequence[str]) -> list[str]:
    """Return the names of missing files, which are numbered from 0, or from 1 if the last number is the total."""
    present, width = set(map(int, numbers)), min(map(len, numbers))
    count = int(total.rpartition("-")[2]) if total else max(present) + 1
    first = int(count in present)
    return [f"{prefix}{n:0{width}d}{total}.parquet" for n in range(first, first + count) if n not in present]


def _ignored_notes(splits: dict[str, Any], used: Sequence[str]) -> list[str]:
    ignored = [f"{s}*" for s in splits if s not in used]
    return [f"shards used: {' '.join(f'{s}*' for s in used)}; ignored: {' '.join(ignored)}"] if ignored else []


# Reading


class Shard:
    """A parquet file: its labels, paths and sizes. Images are read later, by `RowReader`.

    Args:
        path: The file.
        image: The name of the image column.
        label: The name of the label column.
    """

    def __init__(self, path: Path, image: str, label: str) -> None:
        self.path, self.image = path, image
        parquet = import_parquet()
        try:
            files.check_regular(path)
            file = parquet.ParquetFile(path.absolute(), **READ_OPTIONS)
            self.metadata, found = file.metadata, file.schema_arrow.names
            check_not_encrypted(path, self.metadata)
            for column in (image, label):
                if column not in found:
                    fix = "name the two columns with --data.columns IMAGE LABEL"
                    raise UserError(
                        f"{path} has no column {column!r}, but {_shorten(', '.join(found))}: {fix}", kind="bad-list"
                    )
            self.bytes_column, self.fixed_bytes = _bytes_column(path, file.schema_arrow, image)
            if not _is_flat(file.schema_arrow.field(label).type):
                have = f"{path}: column {label!r} has the type {_shorten(file.schema_arrow.field(label).type)}"
                raise UserError(f"{have}: labels must be integers or names", kind="bad-labels")
            self.text_columns = [*_path_column(file.schema_arrow, image), label]
            self._check_size()
            self.labels: list[Any] = []
            self.paths: list[str | None] = []
            self._read_labels(file, image, label)
            self.names = _stored_class_names(file.schema_arrow, label)
        except UserError:
            raise
        except Exception as error:  # a damaged file can raise anything
            raise UserError(
                f"cannot read the shard {path} ({_shorten(error)}): create or download it again",
                kind=file_error_kind(error),
            ) from error
        for name in {*(self.names or ()), *(value for value in self.labels if isinstance(value, str))}:
            check_text(name, path, "class name")
        for image_path in self.paths:
            check_text(image_path or "", path, "path")

    def _check_size(self) -> None:
        """Raise UserError if the file declares more rows or bytes than the limits, or contradicts itself."""
        rows, size = self.metadata.num_rows, os.stat(self.path).st_size
        groups = [self.metadata.row_group(g) for g in range(self.metadata.num_row_groups)]
        self.group_rows: list[int] = [group.num_rows for group in groups]
        if min(self.group_rows, default=0) < 0 or sum(self.group_rows) != rows:
            raise UserError(
                f"{self.path} has {rows:,} rows, but its row groups do not add up to that: create or download it again",
                kind="bad-list",
            )
        if rows > MAX_ROWS or (rows > UNCHECKED_ROWS and rows * MIN_ROW_BYTES > size):
            limits = f"{MAX_ROWS:,} rows, and {MIN_ROW_BYTES} bytes per row if there are more than {UNCHECKED_ROWS:,}"
            raise UserError(
                f"{self.path} declares {rows:,} rows in {size:,} bytes: the limits are {limits}", kind="unsafe-file"
            )
        largest = dict.fromkeys((self.bytes_column, *self.text_columns), 0)
        # The columns that pyarrow reads. Each chunk repeats the name of its column, which could be another one.
        names = [self.metadata.schema.column(number).path for number in range(self.metadata.num_columns)]
        self.image_chunks: list[int] = []  # their pages are checked when they are read
        with files.open_regular(self.path) as pages:
            for number, name in enumerate(names):
                for column in largest:
                    if name != column and not name.startswith(f"{column}."):
                        continue
                    chunks = [group.column(number) for group in groups]
                    sizes = [chunk.total_uncompressed_size for chunk in chunks]
                    if column == self.bytes_column:
                        self.image_chunks.append(number)
                    else:
                        sizes += [decompressed_size(pages, chunk) for chunk in chunks]
                    largest[column] = max([largest[column], *sizes])
        if max(largest.values()) > MAX_COLUMN_BYTES:
            raise UserError(
                f"{self.path} has a row group with {max(largest.values()):,} bytes in a column, more than the "
                f"{MAX_COLUMN_BYTES:,} allowed: write it with smaller row groups",
                kind="unsafe-file",
            )
        self.image_batch = _batch_rows(max(largest[self.bytes_column], self.fixed_bytes))
        self.text_batch = _batch_rows(max(largest[column] for column in self.text_columns))
        self.sizes = np.repeat(np.array([g.total_byte_size for g in groups], np.int64), self.group_rows)

    def _read_labels(self, file: Any, image: str, label: str) -> None:
        size = 0
        interned: dict[Any, Any] = {}  # equal labels share one object
        for batch in file.iter_batches(self.text_batch, columns=self.text_columns, use_threads=False):
            size += batch.nbytes
            if size > MAX_TEXT_BYTES:
                raise UserError(
                    f"the labels and paths of {self.path} have more than {MAX_TEXT_BYTES:,} bytes: shorten them",
                    kind="unsafe-file",
                )
            labels = batch.column(label).to_pylist()
            self.labels += [interned.setdefault(value, value) if isinstance(value, str) else value for value in labels]
            if image in batch.schema.names:
                paths = [(row or {}).get("path") for row in batch.column(image).to_pylist()]
                self.paths += [path if isinstance(path, str) else None for path in paths]
        if len(self.labels) != sum(self.group_rows):
            raise UserError(
                f"{self.path} has fewer rows than it declares: create or download it again", kind="bad-list"
            )

    def named_labels(self) -> list[str] | list[int]:
        """Return the labels as class names if the file has them, else as numbers."""
        if None in self.labels:
            raise UserError(f"{self.path}, row {self.labels.index(None)}: the label is missing", kind="bad-labels")
        if all(isinstance(value, str) for value in self.labels):
            return self.labels
        if not all(type(value) is int for value in self.labels):
            raise UserError(f"{self.path}: labels must be integers or names", kind="bad-labels")
        if self.names is None:
            return self.labels
        wrong = [value for value in self.labels if not 0 <= value < len(self.names)]
        if wrong:
            raise UserError(
                f"{self.path} has the label {wrong[0]}, but names only {len(self.names)} classes: create it again",
                kind="bad-labels",
            )
        return [self.names[value] for value in self.labels]


class RowGroup(NamedTuple):
    """The image column of a row group that was read last."""

    number: int
    """The number of the row group; -1 for none."""
    rows: Any


class RowReader:
    """Returns the image file of a row when called.

    Each thread keeps some files open, and the row group that it read last. All threads together keep one large row group.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self.cache = list(shards), threading.local()
        self.lock, self.large = threading.Lock(), RowGroup(-1, None)
        self.expanded: dict[int, int] = {}  # bytes of the row groups after decompression
        self.failed: dict[int, str] = {}  # row groups that are not read again, with the reason
        groups = [(s, g, n) for s, shard in enumerate(shards) for g, n in enumerate(shard.group_rows)]
        self.group_of = [(s, g) for s, g, _ in groups]
        self.starts = np.cumsum([0, *(n for *_, n in groups)])

    def __call__(self, index: int) -> bytes:
        group = int(np.searchsorted(self.starts, index, side="right")) - 1
        found = self._read_group(group)[index - int(self.starts[group])].as_py()
        found = found.get("bytes") if isinstance(found, dict) else found
        if not isinstance(found, bytes):
            raise BadImage("the row has no image bytes")
        if len(found) > MAX_IMAGE_BYTES:
            raise BadImage(f"it has {len(found):,} bytes, more than the {MAX_IMAGE_BYTES:,} allowed")
        return found

    def _read_group(self, group: int) -> "pa.ChunkedArray":
        """Return the image column of a row group, from the cache if it is the last one that was read."""
        if getattr(self.cache, "last", None) is not None and self.cache.last.number == group:
            return self.cache.last.rows
        if group in self.failed:
            raise BadImage(self.failed[group])
        number, group_of_shard = self.group_of[group]
        shard = self.shards[number]
        try:
            if group not in self.expanded:
                self.expanded[group] = self._expanded_bytes(shard, group_of_shard)
            if self.expanded[group] <= SHARED_BYTES:
                self.cache.last = RowGroup(group, self._read_column(shard, group_of_shard, self.expanded[group]))
                return self.cache.last.rows
            with self.lock:
                if self.large.number != group:
                    self.large = RowGroup(-1, None)  # so that two are never in memory
                    self.large = RowGroup(group, self._read_column(shard, group_of_shard, self.expanded[group]))
                return self.large.rows
        except Exception as error:  # a damaged file can raise anything
            if isinstance(error, OSError):
                raise_resource_shortage(error)
            reason = f"{shard.path.name}: {_shorten(error)}"
            if not isinstance(error, MemoryError) and getattr(error, "errno", None) is None:
                self.failed[group] = reason  # the file is damaged; other errors can be temporary
            raise BadImage(reason) from error

    def _expanded_bytes(self, shard: Shard, group: int) -> int:
        """Return the bytes of the image column of a row group after decompression; raise ValueError if there are too many."""
        with files.open_regular(shard.path) as pages:
            chunks = map(shard.metadata.row_group(group).column, shard.image_chunks)
            expanded = sum(decompressed_size(pages, chunk) for chunk in chunks)
        if expanded > MAX_COLUMN_BYTES:
            raise _too_large()
        return expanded

    def _read_column(self, shard: Shard, group: int, expanded: int) -> "pa.ChunkedArray":
        """Read the image column of a row group, in batches, so that it can be refused before it fills the memory.

        Args:
            shard: The file.
            group: The number of the row group in the file.
            expanded: The bytes of the column after decompression.
        """
        import pyarrow as pa

        file, size, rows = self._open(shard), 0, []
        batch_rows = min(shard.image_batch, _batch_rows(expanded))
        for batch in file.iter_batches(batch_rows, row_groups=[group], columns=[shard.bytes_column], use_threads=False):
            size += batch.nbytes
            if size > MAX_COLUMN_BYTES:
                raise _too_large()
            rows.append(batch.column(0))
        column = pa.chunked_array(rows)
        if len(column) != shard.group_rows[group]:
            raise ValueError(f"the row group has {len(column):,} rows, but declares another number")
        return column

    def _open(self, shard: Shard) -> Any:
        opened: dict[Path, Any] = self.cache.__dict__.setdefault("opened", {})
        if shard.path not in opened:
            while len(opened) >= OPEN_FILES:
                opened.pop(next(iter(opened))).close()
            files.check_regular(shard.path)
            opened[shard.path] = import_parquet().ParquetFile(
                shard.path.absolute(), metadata=shard.metadata, **READ_OPTIONS
            )
        return opened[shard.path]


def _read_images(
    shards: Sequence[Shard], size: int, skip: bool, class_names: tuple[str, ...] | None = None
) -> LazyImages:
    """Return the images of shards.

    Args:
        shards: The shards of a split.
        size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read.
        class_names: The classes of the training split, for other splits.
    """
    labels: list[Any] = []
    for shard in shards:
        found = shard.named_labels()
        if labels and found and type(found[0]) is not type(labels[0]):
            raise UserError(
                f"the labels of {shard.path} and {shards[0].path} differ: numbers in one, names in the other",
                kind="bad-labels",
            )
        labels += found
    if not labels:
        raise UserError(f"the shards of {shards[0].path.parent} have no rows", kind="bad-list")
    stored = next((shard.names for shard in shards if shard.names), None)
    names = class_names or _find_classes(shards[0], labels, stored)
    numbers = {name: i for i, name in enumerate(names)}
    for shard in shards:
        if wrong := [label for label in shard.named_labels() if str(label) not in numbers]:
            raise UserError(
                f"{shard.path} has the label {wrong[0]!r}, which is not one of the {len(names)} training classes: use "
                "shards of one data set",
                kind="bad-labels",
            )
    sizes = np.concatenate([shard.sizes for shard in shards])
    y = np.array([numbers[str(label)] for label in labels], np.int64)
    return lazy_encoded_images(y, names, _ids(shards), RowReader(shards), sizes, size, skip)


def _find_classes(shard: Shard, labels: Sequence[Any], stored: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the class names: those stored in the files, else the sorted labels if they are names, else numbers from 0."""
    if stored is not None or isinstance(labels[0], str):
        return stored or tuple(sorted(set(labels)))
    last = max(labels)
    if min(labels) < 0:
        raise UserError(
            f"{shard.path.parent} has labels from {min(labels)} to {last}: number the classes from 0", kind="bad-labels"
        )
    check_last_label(shard.path.parent, last, len(set(labels)))
    return tuple(map(str, range(last + 1)))


def _ids(shards: Sequence[Shard]) -> npt.NDArray[np.str_]:
    """Return the stored paths of the images if each has a different one, else file names and rows."""
    paths = [path for shard in shards for path in shard.paths]
    if paths and all(paths) and len(set(paths)) == len(paths) == sum(len(shard.labels) for shard in shards):
        return to_path_array([path for path in paths if path])
    return to_path_array([f"{s.path.name}:{row}" for s in shards for row in range(len(s.labels))])


def import_parquet() -> Any:
    """Return the module pyarrow.parquet; raise UserError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("shards need pyarrow: pip install pyarrow", kind="missing-package") from error
    return pyarrow.parquet


def check_not_encrypted(path: Path, metadata: Any) -> None:
    """Raise a ValueError if columns of a parquet file are encrypted, because pyarrow aborts the process when it looks at them.

    The footer of such a file is readable, and is followed by a signature.
    """
    with files.open_regular(path) as file:
        file.seek(-8, os.SEEK_END)
        footer_bytes = int.from_bytes(file.read(4), "little")
    if footer_bytes == metadata.serialized_size + SIGNATURE_BYTES:
        raise ValueError("it is encrypted")


def _stored_class_names(schema: "pa.Schema", label: str) -> tuple[str, ...] | None:
    """Return the class names from the metadata that `datasets` writes, if there are any."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, ValueError, TypeError):
        return None


def _is_flat(kind: "pa.DataType") -> bool:
    """Return whether a row has a single value that takes space in the file; a list can have billions that take none."""
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
    """Return the column with the bytes of image files, which is `image` or a field of it, and their number in each row.

    The number is 0 unless the type has a fixed size.
    """
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
    if types.is_fixed_size_binary(kind) and kind.byte_width <= MAX_IMAGE_BYTES:  # also of rows without an image
        return column, kind.byte_width
    raise UserError(
        f"{path}: column {image!r} has the type {_shorten(schema.field(image).type)}, without the bytes of image files: "
        "embed the images, or name another column with --data.columns",
        kind="bad-list",
    )


def _too_large() -> ValueError:
    return ValueError(f"its row group has more than {MAX_COLUMN_BYTES:,} bytes")


def _batch_rows(column_bytes: int) -> int:
    """Return the number of rows of a batch that stays small even if each of them repeats all bytes of the column."""
    return max(min(BATCH_BYTES // max(column_bytes, 1), MAX_BATCH_ROWS), 1)


def _shorten(error: object) -> str:
    return " ".join(str(error).split())[:200]


# Page headers
#
# The footer of a parquet file has the size of each column, but pyarrow allocates the size in the header of each page. A file
# whose footer and page headers contradict each other can therefore take any amount of memory. The headers are structs in
# Thrift's compact protocol (https://github.com/apache/parquet-format).


USUAL_HEADER_BYTES = 2**16
MAX_HEADER_BYTES = 2**24  # statistics may contain whole values; pyarrow has the same limit
MAX_DEPTH = 8  # of nested structs and lists
DATA, DATA_2 = 0, 3  # types of pages with values; the others are dictionaries and indexes
TYPE, UNCOMPRESSED, COMPRESSED = 1, 2, 3  # fields of a header
VALUES = {DATA: 5, DATA_2: 8}  # field of a header whose first field is the number of values, by type


def decompressed_size(file: BinaryIO, chunk: Any) -> int:
    """Return the bytes of all pages of a column of a row group after decompression.

    Args:
        file: The parquet file.
        chunk: The `pyarrow.parquet.ColumnChunkMetaData` of the column.

    Raises:
        ValueError: The headers are damaged, or have fewer values than the footer declares.
    """
    starts = [chunk.data_page_offset]
    if chunk.dictionary_page_offset and chunk.dictionary_page_offset > 0:
        starts.append(chunk.dictionary_page_offset)
    position = min(starts)
    end, size, values = position + chunk.total_compressed_size, 0, 0
    while values < chunk.num_values:
        if not 0 <= position < end:
            raise ValueError("a column has fewer values than the file declares")
        length, fields = read_header(file, position, end)
        kind, uncompressed, compressed = (fields.get(key) for key in (TYPE, UNCOMPRESSED, COMPRESSED))
        if not (type(kind) is type(uncompressed) is type(compressed) is int) or min(uncompressed, compressed) < 0:
            raise ValueError("the header of a page is damaged")
        if kind in VALUES:
            found = fields.get(VALUES[kind])
            count = found.get(1) if isinstance(found, dict) else None
            if type(count) is not int or not 0 <= count < 2**31:  # pyarrow reads the lowest 32 bits
                raise ValueError("the header of a page is damaged")
            values += count
        size += uncompressed
        position += length + compressed
    return size


def read_header(file: BinaryIO, start: int, end: int) -> tuple[int, dict[int, Any]]:
    """Return the length and the fields of the header of a page."""
    for limit in (USUAL_HEADER_BYTES, MAX_HEADER_BYTES):
        file.seek(start)
        header = CompactReader(file.read(min(limit, end - start)))
        try:
            fields = header.read_struct()
            return header.position, fields
        except ValueError:
            if limit == MAX_HEADER_BYTES or end - start <= limit:
                raise
    raise AssertionError


class CompactReader:
    """A reader of Thrift's compact protocol. Structs become dictionaries by field number; text and lists are skipped."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def read_byte(self) -> int:
        if self.position >= len(self.content):
            raise ValueError("the header of a page is damaged")
        self.position += 1
        return self.content[self.position - 1]

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.content):
            raise ValueError("the header of a page is damaged")

    def read_varint(self) -> int:
        """Return an unsigned integer of variable length."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.read_byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("the header of a page is damaged")

    def read_integer(self) -> int:
        """Return a signed integer of variable length."""
        value = self.read_varint()
        return (value >> 1) ^ -(value & 1)  # zigzag

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self.read_byte():
            number = number + (head >> 4) if head >> 4 else self.read_integer()
            if number in fields:
                raise ValueError("the header of a page is damaged")
            kind = head & 0xF
            fields[number] = kind == 1 if kind in (1, 2) else self.read_value(kind, depth)
        return fields

    def read_value(self, kind: int, depth: int) -> Any:
        """Return an integer or a struct, and None for other values."""
        if depth > MAX_DEPTH:
            raise ValueError("the header of a page is damaged")
        match kind:
            case 1 | 2 | 3:  # booleans in a list, bytes
                self.read_byte()
            case 4 | 5 | 6:
                return self.read_integer()
            case 7:
                self.skip(8)
            case 8:
                self.skip(self.read_varint())
            case 9 | 10:
                head = self.read_byte()
                for _ in range(self.read_varint() if head >> 4 == 15 else head >> 4):
                    self.read_value(head & 0xF, depth + 1)
            case 12:
                return self.read_struct(depth + 1)
            case _:
                raise ValueError("the header of a page is damaged")
        return None
