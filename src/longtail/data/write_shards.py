"""`longtail data shard`: any source as parquet shards."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longtail import files
from longtail.config import DataConfig
from longtail.data.decode import BadImage, cannot_read, in_threads, probe_image
from longtail.data.lazy_images import LazyImages, Skipped
from longtail.data.shards import Writer
from longtail.data.sources import long_tail, open_data
from longtail.errors import UserError, disk_full_as_user_error
from longtail.progress import track


class Packed(NamedTuple):
    images: int  # written
    skipped: list[Skipped]
    notes: tuple[str, ...]


def shard(data: DataConfig, out: Path | str, megabytes: int = 256) -> Packed:
    """Write OUT/train-*.parquet and OUT/test-*.parquet. The twin of `longtail data shard`.

    The training images as drawn, where `data` asks for an imbalance. Each image is decoded once: one that cannot be read ends
    it, or is left out (`on_error="skip"`). OUT appears when all of it is written.
    """
    if not isinstance(data, DataConfig):
        raise UserError(f"shard takes a DataConfig, such as recipes.make('images/').data, got {type(data).__name__}")
    out = Path(out)
    check_place(data, out)
    if megabytes < 1:
        raise UserError(f"--megabytes {megabytes}: it must be at least 1")
    opened = open_data(data)
    drawn, notes = long_tail(opened, data)
    parts = {"train": opened.train.subset(drawn), "test": opened.test}
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    skipped: list[Skipped] = []
    try:
        with disk_full_as_user_error(out):
            unfinished.mkdir(parents=True)
            written = sum(write(pool, split, unfinished, megabytes, data, skipped) for split, pool in parts.items())
            unfinished.rename(out)
    except OSError as error:
        raise UserError(
            f"cannot write to {out} ({error.strerror or error}): choose another --out", kind="not-writable"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Packed(written, skipped, (*opened.notes, *notes))


def check_place(data: DataConfig, out: Path) -> None:
    files.check_working_directory((out, data.root))
    if os.path.lexists(out):
        raise UserError(f"{out} is there already: choose another --out, or remove it", kind="exists")
    if data.name == "folder" and data.root and out.resolve().is_relative_to(data.root.resolve()):
        raise UserError(
            f"{out} lies in the image folder, where it would look like a class: choose another --out", kind="conflict"
        )


def write(pool: LazyImages, split: str, folder: Path, megabytes: int, data: DataConfig, skipped: list[Skipped]) -> int:
    """The images of a part that were written; the others go into `skipped`."""
    writer, labels = Writer(folder, split, pool.class_names, megabytes * 2**20), pool.labels.tolist()
    written = np.zeros(len(pool.class_names), np.int64)
    for place, file in enumerate(
        track(in_threads(checked(pool), np.arange(len(labels))), len(labels), f"writing {split}")
    ):
        if isinstance(file, BadImage) and data.on_error == "stop":
            raise cannot_read(pool.ids[place], file)
        if isinstance(file, BadImage):
            skipped.append(Skipped(str(pool.ids[place]), str(file)))
        else:
            writer.add(file, str(pool.ids[place]), labels[place])
            written[labels[place]] += 1
    writer.close()
    lost = [name for name, n in zip(pool.class_names, written, strict=True) if not n]
    if (split == "train" and lost) or not written.any():
        what = f"class {lost[0]!r}" if split == "train" else "the evaluation set"
        raise UserError(f"no image of {what} can be read: mend its files, or take it out of the data", kind="bad-image")
    return int(written.sum())


def checked(pool: LazyImages) -> Callable[[int], bytes]:
    """Reads the file of an index, and decodes it to see that it can be."""

    def one(index: int) -> bytes:
        encoded = pool.encoded(index)
        probe_image(encoded)
        return encoded

    return one
