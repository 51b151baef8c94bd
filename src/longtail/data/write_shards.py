"""Writing any data set as parquet shards (`longtail data shard`)."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longtail import files
from longtail.config import DataConfig
from longtail.data.decode import BadImage, map_in_threads, probe_image, unreadable_image_error
from longtail.data.lazy_images import LazyImages, SkippedImage
from longtail.data.shards import import_parquet
from longtail.data.sources import draw_long_tail, open_data
from longtail.errors import UserError, disk_full_as_user_error
from longtail.progress import track

ROW_GROUP_BYTES = 2**20


class ShardResult(NamedTuple):
    """The result of `shard`."""

    images: int
    """The number of images that were written."""
    skipped: list[SkippedImage]
    notes: tuple[str, ...]


def shard(data: DataConfig, out: Path | str, megabytes: int = 256) -> ShardResult:
    """Write a data set to OUT/train-*.parquet and OUT/test-*.parquet, as `longtail data shard` does.

    If `data` has an imbalance factor, the long-tailed subset is written. Each image is decoded once; one that cannot be read
    raises UserError, or is left out with `on_error="skip"`. The folder appears when all shards are complete.

    Args:
        data: The data set.
        out: The new folder.
        megabytes: The approximate size of each file.
    """
    if not isinstance(data, DataConfig):
        raise UserError(f"shard takes a DataConfig, such as recipes.make('images/').data, got {type(data).__name__}")
    out = Path(out)
    _check_output(data, out)
    if megabytes < 1:
        raise UserError(f"--megabytes is {megabytes}: it must be at least 1")
    opened = open_data(data)
    drawn, notes = draw_long_tail(opened, data)
    splits = {"train": opened.train.subset(drawn), "test": opened.test}
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    skipped: list[SkippedImage] = []
    try:
        with disk_full_as_user_error(out):
            unfinished.mkdir(parents=True)
            written = 0
            for name, images in splits.items():
                writer = ShardWriter(unfinished, name, images.class_names, megabytes * 2**20)
                written += _write_split(images, writer, data, skipped)
            unfinished.rename(out)
    except OSError as error:
        raise UserError(
            f"cannot write to {out} ({error.strerror or error}): choose another --out", kind="not-writable"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ShardResult(written, skipped, (*opened.notes, *notes))


def _check_output(data: DataConfig, out: Path) -> None:
    files.check_working_directory((out, data.root))
    if os.path.lexists(out):
        raise UserError(f"{out} exists already: choose another --out, or remove it", kind="exists")
    if data.name == "folder" and data.root and out.resolve().is_relative_to(data.root.resolve()):
        raise UserError(
            f"{out} is inside the image folder, where it would become a class: choose another --out",
            kind="conflict",
        )


def _write_split(images: LazyImages, writer: "ShardWriter", data: DataConfig, skipped: list[SkippedImage]) -> int:
    """Write a split and return the number of images written; unreadable images are appended to `skipped`."""
    labels, written = images.labels.tolist(), np.zeros(len(images.class_names), np.int64)
    results = map_in_threads(_checked_reader(images), np.arange(len(labels)))
    for index, file in enumerate(track(results, len(labels), f"writing {writer.split}")):
        if isinstance(file, BadImage) and data.on_error == "stop":
            raise unreadable_image_error(images.ids[index], file)
        if isinstance(file, BadImage):
            skipped.append(SkippedImage(str(images.ids[index]), str(file)))
        else:
            writer.add(file, str(images.ids[index]), labels[index])
            written[labels[index]] += 1
    writer.close()
    empty = [name for name, n in zip(images.class_names, written, strict=True) if not n]
    if (writer.split == "train" and empty) or not written.any():
        what = f"class {empty[0]!r}" if writer.split == "train" else "the evaluation set"
        raise UserError(
            f"no image of {what} can be read: repair its files, or remove it from the data", kind="bad-image"
        )
    return int(written.sum())


def _checked_reader(images: LazyImages) -> Callable[[int], bytes]:
    """Return a function that reads the file with an index, and decodes it to make sure that this is possible."""

    def read(index: int) -> bytes:
        encoded = images.read_encoded(index)
        probe_image(encoded)
        return encoded

    return read


class ShardWriter:
    """Writes a split as parquet files, which are renamed at the end, when their number is known.

    Args:
        folder: The folder.
        split: The name of the split, with which file names start.
        class_names: The names of the classes.
        file_bytes: The approximate size of each file.
    """

    def __init__(self, folder: Path, split: str, class_names: Sequence[str], file_bytes: int) -> None:
        import_parquet()
        import pyarrow as pa

        features = {"image": {"_type": "Image"}, "label": {"names": list(class_names), "_type": "ClassLabel"}}
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        self.schema = pa.schema([("image", image), ("label", pa.int64())], metadata=metadata)
        self.folder, self.split, self.file_bytes = folder, split, file_bytes
        self.rows: list[dict[str, Any]] = []
        self.paths: list[Path] = []
        self.group_bytes = self.written_bytes = 0
        self.file: Any = None

    def add(self, encoded: bytes, path: str, label: int) -> None:
        """Add an image file with its path and label."""
        utf_8_path = path.encode(errors="surrogateescape").decode(errors="replace")  # parquet stores UTF-8 only
        self.rows.append({"image": {"bytes": encoded, "path": utf_8_path}, "label": label})
        self.group_bytes += len(encoded)
        if self.group_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def _write_row_group(self) -> None:
        """Write the rows that were added as a row group, to a new file if the last one is full."""
        import pyarrow as pa

        if not self.rows:
            return
        if self.file is None:
            self.paths.append(self.folder / f"{self.split}-{len(self.paths):05d}.parquet")
            options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": ["label"]}
            options["write_page_checksum"] = True
            path = self.paths[-1].absolute()  # a relative path could be taken for a URI
            self.file = import_parquet().ParquetWriter(path, self.schema, **options)
            self.written_bytes = 0
        self.file.write_table(pa.Table.from_pylist(self.rows, self.schema))
        self.written_bytes += self.group_bytes
        self.rows, self.group_bytes = [], 0
        if self.written_bytes >= self.file_bytes:
            self._close_file()

    def _close_file(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self) -> None:
        """Write the remaining rows, and put the number of files into their names."""
        self._write_row_group()
        self._close_file()
        for path in self.paths:
            path.rename(path.with_name(f"{path.stem}-of-{len(self.paths):05d}.parquet"))
