"""Randomly damaged data is either read or refused with a one-line error, with little time and memory and without a crash."""

import gzip
import random
from pathlib import Path

import pyarrow as pa
import pytest

from longtail.config import DataConfig
from longtail.data.inspection import inspect
from tests.data.guard import run_guarded
from tests.data.test_sources import cifar100_entries, write, write_tar
from tests.data.test_untrusted import LABELS, PICTURE, ROWS, inaturalist, write_shard

ROUNDS = 12  # of each kind
ARCHIVE = "cifar-100-python.tar.gz"
INSERTED = (
    *(b"\0", b"\xff", b"\n", b'"', b",", b"/", b"..", b"-1", b"1e999", b"99999999999", b"null", b"[]", b"{}", b"NaN"),
    *(b"\\u0000", b"\\ud800", b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x01", b"\x7f" * 8),
)


def damaged(content: bytes, first: int, last: int, generator: random.Random) -> bytes:
    """Return the content with some bytes from `first` to `last` changed, inserted, replaced or removed."""
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 4, 8])):
        at, token = generator.randrange(first, last), generator.choice(INSERTED)
        match generator.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([generator.randrange(256)])
            case 1:
                changed[at:at] = token
            case 2:
                changed[at : at + len(token)] = token
            case 3:
                del changed[at : at + generator.randrange(1, 9)]
    return bytes(changed)


def damaged_archive(content: bytes, generator: random.Random) -> bytes:
    """Return the archive with a damaged first header whose checksum is correct."""
    header = bytearray(damaged(content[:512], 0, 512, generator)[:512].ljust(512, b"\0"))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return gzip.compress(bytes(header) + content[512:], 1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, tuple[Path, DataConfig]]:
    """Return for each kind of data the file to damage, and the configuration of the data."""
    top = tmp_path_factory.mktemp("sources")
    tree = inaturalist(top / "images", lambda tree: None)
    files = sorted(str(file.relative_to(top / "images")) for file in (top / "images").rglob("*.png"))
    txt, csv = top / "images/list.txt", top / "images/list.csv"
    txt.write_text("".join(f"{file} {int('dog' in file)}\n" for file in files))
    csv.write_text("path,label\n" + "".join(f"{file},{file[:3]}\n" for file in files))
    plain = write_shard(top / "plain", pa.array(ROWS, PICTURE), LABELS, row_group_size=7)
    named = write_shard(top / "named", [row["bytes"] for row in ROWS], [*"ab" * 10], compression="zstd")
    unpacked = write(top / "unpacked", "cifar-100-python", cifar100_entries())
    (top / "packed").mkdir()
    packed = write_tar(top / "packed", "cifar-100-python", cifar100_entries(), ARCHIVE)
    return {
        "json": (tree, DataConfig(name="list", train_list=tree)),
        "txt": (txt, DataConfig(name="list", train_list=txt)),
        "csv": (csv, DataConfig(name="list", train_list=csv)),
        "shard": (plain / "train.parquet", DataConfig(name="shards", root=plain)),
        "named shard": (named / "train.parquet", DataConfig(name="shards", root=named)),
        "pickle": (unpacked / "cifar-100-python/train", DataConfig(root=unpacked, download=False)),
        "names": (unpacked / "cifar-100-python/meta", DataConfig(root=unpacked, download=False)),
        "archive": (packed / ARCHIVE, DataConfig(root=packed, download=False)),
        "headers": (packed / ARCHIVE, DataConfig(root=packed, download=False)),
        "image": (top / "images/cat/001.png", DataConfig(name="folder", root=top / "images")),
    }


KINDS = ["json", "txt", "csv", "shard", "named shard", "pickle", "names", "archive", "headers", "image"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_sources_are_read_or_refused(kind, sources):
    path, data = sources[kind]
    whole, generator = path.read_bytes(), random.Random(kind)
    assert run_guarded(lambda: inspect(data)).kind == "done"
    ends = {"shard": (max(len(whole) - 1500, 0), len(whole)), "pickle": (0, 400), "archive": (0, 400)}
    first, last = ends.get(kind, (0, len(whole)))
    try:
        for _ in range(ROUNDS):
            content = (
                damaged_archive(gzip.decompress(whole), generator)
                if kind == "headers"
                else damaged(whole, first, last, generator)
            )
            path.write_bytes(content)
            outcome = run_guarded(lambda: inspect(data))
            assert outcome.kind in ("done", "UserError") and "\n" not in outcome.text, (outcome, content[:4000])
    finally:
        path.write_bytes(whole)
