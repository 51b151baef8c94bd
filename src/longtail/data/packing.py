"""`longtail data shard`: any source as parquet shards."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from longtail.config import DataConfig
from longtail.data.decode import BadImage, look
from longtail.data.pool import Pool, Skipped
from longtail.data.shards import Writer
from longtail.data.sources import long_tail, open_data
from longtail.errors import UserError
from longtail.progress import shown

AT_ONCE = 256  # images on their way: bounds what is held in memory


def shard(data: DataConfig, out: Path | str, megabytes: int = 256) -> tuple[int, list[Skipped]]:
    """Write OUT/train-*.parquet and OUT/test-*.parquet: how many images, and which were left out.

    The training images as drawn, where `data` asks for an imbalance. Each image is decoded once: one that cannot be read ends
    it, or is left out (`on_error="skip"`). OUT appears when all of it is written.
    """
    out, opened = Path(out), open_data(data)
    if out.exists():
        raise UserError(f"{out} is there already: choose another --out, or remove it")
    if megabytes < 1:
        raise UserError(f"--megabytes {megabytes}: it must be at least 1")
    drawn, _ = long_tail(opened, data)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        written, skipped = 0, list[Skipped]()
        for split, pool in (("train", opened.train.subset(drawn)), ("test", opened.test)):
            writer = Writer(unfinished, split, pool.class_names, megabytes * 2**20)
            for place, found in enumerate(shown(checked(pool), len(pool.labels), f"writing {split}")):
                name = str(pool.ids[place])
                if isinstance(found, bytes):
                    writer.add(found, name, int(pool.labels[place]))
                    written += 1
                elif data.on_error == "skip":
                    skipped.append(Skipped(name, str(found)))
                else:
                    raise UserError(f"cannot read the image {name} ({found}): mend it, or use --data.on_error skip")
            writer.close()
        unfinished.rename(out)
    except OSError as error:
        raise UserError(f"cannot write to {unfinished} ({error.strerror or error}): choose another --out") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written, skipped


def checked(pool: Pool) -> Iterator[bytes | BadImage]:
    """The files in order, each decoded to see that it can be."""

    def one(index: int) -> bytes | BadImage:
        try:
            encoded = pool.encoded(index)
            look(encoded)
        except BadImage as error:
            return error
        return encoded

    with ThreadPoolExecutor() as threads:
        for some in np.array_split(np.arange(len(pool.labels)), max(len(pool.labels) // AT_ONCE, 1)):
            yield from threads.map(one, some.tolist())
