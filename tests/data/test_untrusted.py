"""Malicious or inaccessible images, lists, folders and shards are refused with one-line errors."""

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import GifImagePlugin, Image

from longtail.config import DataConfig, ViewsConfig
from longtail.data import decode, lazy_images, shards
from longtail.data.decode import IMAGE_FORMATS, OPTIONAL_FORMATS, BadImage, probe_image, read_file, supported_formats
from longtail.data.in_memory import encode_picture
from longtail.data.inspection import inspect
from longtail.data.write_shards import shard
from longtail.errors import UserError
from longtail.inference.card import PREPARED
from longtail.inference.model import Preprocessing
from longtail.views import Views
from tests.data.guard import run_guarded
from tests.data.test_sources import fill
from tests.raises import raises

# Formats

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
showpage
%%EOF
"""


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """Put a `gs` first on the PATH; return the file that it writes when it is started."""
    from PIL import EpsImagePlugin

    folder, mark = tmp_path / "bin", tmp_path / "started"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\necho 10.0\ntouch {mark}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it looks for the program once
    return mark


def test_eps_starts_no_program(ghostscript, tmp_path):
    fill(tmp_path / "images", cat=6, dog=6)
    (tmp_path / "images/cat/photo.jpg").write_bytes(EPS)
    found = inspect(DataConfig(name="folder", root=tmp_path / "images"))
    assert [image.id for image in found.unreadable] == ["cat/photo.jpg"] and found.read == 12
    assert not ghostscript.exists()
    with pytest.raises(OSError), Image.open(tmp_path / "images/cat/photo.jpg") as image:
        image.load()
    assert ghostscript.exists()  # it would have been


def test_eps_that_the_caller_has_opened_starts_no_program(ghostscript, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(EPS)
    with Image.open(tmp_path / "photo.jpg") as image:
        with pytest.raises(BadImage):
            encode_picture(image)
        with pytest.raises(BadImage):
            Preprocessing(Views(ViewsConfig(), 8)).pixels(image)
    assert not ghostscript.exists()


def test_code_of_model_cards_names_the_formats(ghostscript, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(EPS)
    code = PREPARED.format(size=8, formats=list(IMAGE_FORMATS), decoded="    image.load()", cut="    return image")
    names: dict = {"Image": Image}
    exec(code, names)
    with pytest.raises(OSError):
        names["prepared"](tmp_path / "photo.jpg")
    assert not ghostscript.exists()
    Image.new("RGB", (3, 2)).save(tmp_path / "photo.jpg")
    assert names["prepared"](tmp_path / "photo.jpg").size == (3, 2)


def test_formats_are_known_to_pillow(tmp_path):
    Image.init()
    assert set(IMAGE_FORMATS) <= set(Image.OPEN) and "EPS" not in supported_formats()
    assert supported_formats() == (*IMAGE_FORMATS, *(name for name in OPTIONAL_FORMATS if name in Image.OPEN))
    picture = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3))
    saved = [name for name in supported_formats() if name in Image.SAVE]
    assert {"JPEG", "PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP"} <= set(saved)
    for name in saved:
        picture.save(tmp_path / name, name)
        assert probe_image(read_file(tmp_path / name)).format == name
    picture.save(tmp_path / "MPO", "MPO", save_all=True, append_images=[picture])
    assert probe_image(read_file(tmp_path / "MPO")).format == "MPO"
    for name in ("EPS", "PCX", "TGA", "ICO"):
        picture.save(tmp_path / name, name)
        with pytest.raises(BadImage, match="supported format"):
            probe_image(read_file(tmp_path / name))


# Sizes and kinds of image files


def test_image_files_of_gigabytes(tmp_path):
    with open(tmp_path / "huge.jpg", "wb") as file:
        file.truncate(decode.MAX_IMAGE_BYTES + 1)
    outcome = run_guarded(lambda: read_file(tmp_path / "huge.jpg"), memory=2**26)
    assert outcome.kind == "traceback" and "BadImage: " in outcome.text and "536,870,913 bytes" in outcome.text


def test_frames_of_an_animation_are_not_counted(monkeypatch):
    """A GIF of a few megabytes can have a million frames."""
    seeks, seek = [], GifImagePlugin.GifImageFile._seek
    monkeypatch.setattr(
        GifImagePlugin.GifImageFile, "_seek", lambda self, *args: seeks.append(args) or seek(self, *args)
    )
    for frames in (1, 50):
        seeks.clear()
        file = io.BytesIO()
        pictures = [Image.new("L", (4, 4), shade) for shade in range(frames)]
        pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:])
        assert probe_image(file.getvalue()).animated == (frames > 1) and len(seeks) < 10


@pytest.mark.parametrize("kind", ["EXIF", "comments", "profiles"])
def test_repeated_metadata_takes_little_time(kind):
    """Pillow copies everything before a JPEG's EXIF segment, and everything after a comment in a PPM file.

    It decompresses each color profile of a PNG, although one is allowed.
    """
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG" if kind == "profiles" else "JPEG")
    if kind == "profiles":
        content = b"iCCPname\0\0" + zlib.compress(bytes(2**20))
        chunk = (len(content) - 4).to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")
        few, many = (file.getvalue()[:33] + chunk * n + file.getvalue()[33:] for n in (2, 10_000))
    elif kind == "EXIF":
        jpeg = file.getvalue()
        segment = b"\xff\xe1\0\x09Exif\0\0x"
        few, many = (jpeg[:2] + segment * n + jpeg[2:] for n in (9, 1_000_000))
    else:
        few, many = (b"P3 4 4 255\n" + b"#\n" * n + b"0 " * 48 for n in (9, 1_000_000))
    assert probe_image(few).width in (4, 16)
    outcome = run_guarded(lambda: probe_image(many), seconds=1)
    assert outcome.kind == "traceback" and "BadImage" in outcome.text


def test_few_images_are_held_in_memory(monkeypatch):
    """The number of images that are read ahead is limited, and no more are started if the consumer stops."""
    monkeypatch.setattr(decode, "available_cores", lambda: 2)
    begun: list[int] = []
    every = decode.map_in_threads(lambda index: begun.append(index) or index, np.arange(100))
    for place, found in enumerate(every):
        assert found == place and len(begun) <= place + 1 + 2 * decode.QUEUED_PER_THREAD
        if place == 50:
            break
    every.close()
    assert len(begun) < 70


@pytest.mark.parametrize("path", ["a\0b.jpg", "a\ud800.jpg", Path("a\0b.jpg")])
def test_paths_that_no_file_can_have(path):
    with pytest.raises(BadImage, match=r"\bpath\b"):
        read_file(path)


# Lists


def write_images(root: Path) -> list[str]:
    fill(root, cat=6, dog=6)
    return sorted(str(file.relative_to(root)) for file in root.rglob("*.png"))


def inaturalist(root: Path, change) -> Path:
    files = write_images(root)
    tree = {
        "images": [{"id": i, "file_name": file} for i, file in enumerate(files)],
        "annotations": [{"image_id": i, "category_id": int("dog" in file)} for i, file in enumerate(files)],
        "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
    }
    change(tree)
    (root / "list.json").write_text(json.dumps(tree))
    return root / "list.json"


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "\udfff", "a\udc7f"])
@pytest.mark.parametrize(
    "change",
    [
        lambda bad: lambda tree: tree["images"][1].update(file_name=bad),
        lambda bad: lambda tree: tree["categories"][1].update(name=bad),
        lambda bad: (
            lambda tree: [
                tree["categories"][0].update(id=bad),
                *(a.update(category_id=bad) for a in tree["annotations"]),
            ]
        ),
    ],
    ids=["file_name", "name", "id"],
)
def test_json_with_characters_that_cannot_be_stored(tmp_path, change, bad):
    train = inaturalist(tmp_path, change(bad))
    with raises("bad-list", "list.json"):
        inspect(DataConfig(name="list", train_list=train))


def test_json_with_names_of_bytes_that_are_not_utf_8(tmp_path):
    """Python represents such a byte by a character from U+DC80 to U+DCFF, which stays readable."""
    write_images(tmp_path)
    os.rename(tmp_path / "cat/000.png", os.fsencode(tmp_path / "cat") + b"/\xff.png")
    train = inaturalist(tmp_path, lambda tree: tree["images"][0].update(file_name="cat/\udcff.png"))
    assert inspect(DataConfig(name="list", train_list=train)).unreadable == []


def test_output_of_find_print0(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\0".join(file.encode() for file in write_images(tmp_path)) + b"\0")
    with raises("bad-list", "list.txt"):
        inspect(DataConfig(name="list", train_list=tmp_path / "list.txt"))


def test_labels_that_leave_out_millions(tmp_path):
    file = write_images(tmp_path)[0]
    lines = [f"{file} {label}\n" for label in (*range(200_000), 99_999_999)]
    (tmp_path / "list.txt").write_text("".join(lines))
    outcome = run_guarded(lambda: inspect(DataConfig(name="list", train_list=tmp_path / "list.txt"), quick=True))
    assert outcome.kind == "UserError" and "99999999" in outcome.text


def test_one_path_that_is_far_longer_than_the_others(tmp_path, monkeypatch):
    file = write_images(tmp_path)[0]
    (tmp_path / "list.txt").write_text(f"{'x/' * 50_000}a.png 0\n" + f"{file} 1\n" * 100_000)
    outcome = run_guarded(lambda: inspect(DataConfig(name="list", train_list=tmp_path / "list.txt"), quick=True))
    assert outcome.kind == "UserError" and "100,005 characters" in outcome.text
    assert lazy_images.to_path_array(["a", "bc" * 100]).tolist() == ["a", "bc" * 100]


# Folders


def unprivileged(work) -> object:
    """Call `work` as an unprivileged user; only in a child process, because this cannot be undone."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setegid(65534)
        os.seteuid(65534)
    return work()


@pytest.mark.parametrize("name", ["folder", "shards"])
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o311])
def test_folders_without_permission(name, mode):
    """The folder can be neither read nor entered, only read, or only entered."""
    with tempfile.TemporaryDirectory() as top:  # unlike tmp_path, which other users may not enter
        os.chmod(top, 0o755)
        root = Path(top, "images")
        fill(root, cat=6, dog=6)
        write_shard(root, ROWS, LABELS)
        root.chmod(mode)
        data = DataConfig(name=name, root=root)
        outcome = run_guarded(lambda: unprivileged(lambda: inspect(data, quick=True)))
        root.chmod(0o755)
    assert outcome.kind == "UserError" and "images" in outcome.text and "ermission" in outcome.text


def test_access_that_fails_by_chance(tmp_path, monkeypatch):
    fill(tmp_path, cat=6, dog=6)
    stat = os.stat

    def broken(path, *args, **options):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", broken)
    with raises("unreadable-file", "dog"):
        inspect(DataConfig(name="folder", root=tmp_path), quick=True)


DELETED = """
from pathlib import Path
from longtail.config import DataConfig
from longtail.data.inspection import inspect
from longtail.data.write_shards import shard
from longtail import recipes
from longtail.comparison import compare
from longtail.engine.train import train
from longtail.errors import UserError
from longtail.paper.figures import figure
root = Path(sys.argv[1])
os.rmdir(os.getcwd())
for work in (
    lambda: inspect(DataConfig(name="folder", root=Path(".")), quick=True),
    lambda: inspect(DataConfig(name="list", train_list=root / "list.txt", root=Path(".")), quick=True),
    lambda: inspect(DataConfig(name="shards", root=Path("shards")), quick=True),
    lambda: inspect(DataConfig(name="cifar10", root=Path("data"), download=False), quick=True),
    lambda: shard(DataConfig(name="folder", root=root), "out"),
    lambda: DataConfig(name="list", train_list=Path("list.txt")),
    lambda: figure("extra"),
    lambda: train(recipes.digits_lt("ce"), Path("out")),
    lambda: compare("digits-lt", ["ce"], "out"),
):
    try:
        work()
        print("done")
    except UserError as error:
        print("UserError", "no longer exists" in str(error))
print(inspect(DataConfig(name="folder", root=root), quick=True).counts)
"""


def test_working_directory_that_was_deleted(tmp_path):
    fill(tmp_path / "images", cat=6, dog=6)
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys\n" + DELETED, tmp_path / "images"],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["UserError True"] * 9 + ["[5, 5]"], done.stderr


# Shards


PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encoded(shade: int) -> bytes:
    import io

    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, shade, 9)).save(file, "PNG")
    return file.getvalue()


def write_shard(root: Path, images, labels, name: str = "train.parquet", **options) -> Path:
    root.mkdir(exist_ok=True)
    images = images if isinstance(images, pa.Array | pa.ChunkedArray) else pa.array(images)
    labels = labels if isinstance(labels, pa.Array | pa.ChunkedArray) else pa.array(labels)
    pq.write_table(pa.table({"image": images, "label": labels}), root / name, **options)
    return root


def outcome_of(root: Path, quick: bool = False, **options):
    return run_guarded(lambda: inspect(DataConfig(name="shards", root=root), quick=quick), **options)


ROWS = [{"bytes": encoded(i), "path": f"{i}.png"} for i in range(20)]
LABELS = [i % 2 for i in range(20)]


@pytest.mark.parametrize(
    "images",
    [
        pa.array([{"path": row["path"]} for row in ROWS]),
        pa.array([{"width": 3, "data": row["bytes"]} for row in ROWS]),
        pa.array([[row["bytes"]] for row in ROWS]),
        pa.array([[row] for row in ROWS]),
        pa.array(["a.png"] * 20),
        pa.array(range(20)),
        pa.array([{"bytes": "text", "path": "a"}] * 20),
        pa.array([{"bytes": [1, 2], "path": "a"}] * 20),
        pa.nulls(20),
    ],
    ids=lambda images: str(images.type),
)
def test_image_columns_without_bytes(tmp_path, images):
    outcome = outcome_of(write_shard(tmp_path / "shards", images, LABELS))
    assert outcome.kind == "UserError" and "'image'" in outcome.text


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.struct([("bytes", pa.large_binary())]), PICTURE, pa.binary(len(encoded(0)))],
)
def test_image_columns_with_bytes(tmp_path, kind):
    rows = [row if pa.types.is_struct(kind) else row["bytes"] for row in ROWS]
    rows = [{"bytes": row["bytes"]} for row in rows] if pa.types.is_struct(kind) and kind.num_fields == 1 else rows
    found = inspect(DataConfig(name="shards", root=write_shard(tmp_path / "shards", pa.array(rows, kind), LABELS)))
    assert found.read == 20 and found.unreadable == []


def test_rows_without_an_image(tmp_path):
    rows = [None, {"bytes": None, "path": None}, {"bytes": None, "path": "gone.png"}, *ROWS[3:]]
    found = inspect(DataConfig(name="shards", root=write_shard(tmp_path / "shards", pa.array(rows, PICTURE), LABELS)))
    assert found.read == 17 and len(found.unreadable) == 3


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ([{**ROWS[0], "path": "a\0b"}, *ROWS[1:]], LABELS),
        (ROWS, ["a\0b", *"ab" * 9, "b"]),
    ],
    ids=["path", "label"],
)
def test_shards_with_nul_characters(tmp_path, images, labels):
    outcome = outcome_of(write_shard(tmp_path / "shards", images, labels))
    assert outcome.kind == "UserError" and "NUL" in outcome.text


@pytest.mark.parametrize("bad", ["a\0b", "\ud800"])
def test_class_names_of_shards_that_cannot_be_stored(tmp_path, bad):
    features = {"info": {"features": {"label": {"names": ["a", bad]}}}}
    schema = pa.schema([("image", PICTURE), ("label", pa.int64())], metadata={"huggingface": json.dumps(features)})
    table = pa.Table.from_pylist([{"image": row, "label": n} for row, n in zip(ROWS, LABELS, strict=True)], schema)
    (tmp_path / "shards").mkdir()
    pq.write_table(table, tmp_path / "shards/train.parquet")
    outcome = outcome_of(tmp_path / "shards")
    assert outcome.kind == "UserError" and "class name" in outcome.text


def test_paths_of_shards_that_are_no_strings(tmp_path):
    rows = [{"bytes": row["bytes"], "path": ["a", "b"]} for row in ROWS]
    found = inspect(DataConfig(name="shards", root=write_shard(tmp_path / "shards", rows, LABELS)))
    assert found.read == 20


@pytest.mark.parametrize("target", ["fifo", "device", "folder"])
def test_shards_that_are_not_files(tmp_path, target):
    root = write_shard(tmp_path / "shards", ROWS, LABELS)
    if target == "fifo":
        os.mkfifo(root / "train-2.parquet")
    elif target == "device":
        (root / "train-2.parquet").symlink_to("/dev/zero")
    else:
        (root / "train-2.parquet").mkdir()
    outcome = outcome_of(root)
    assert outcome.kind == "UserError" and "train-2.parquet" in outcome.text


def test_shard_of_very_many_rows(tmp_path):
    """A file of a few kilobytes has two hundred million labels."""
    writer = None
    for _ in range(20):
        table = pa.table({"image": pa.nulls(10_000_000, pa.binary()), "label": pa.nulls(10_000_000, pa.int64())})
        (tmp_path / "shards").mkdir(exist_ok=True)
        writer = writer or pq.ParquetWriter(tmp_path / "shards/train.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    assert (tmp_path / "shards/train.parquet").stat().st_size < 10**6
    outcome = outcome_of(tmp_path / "shards", quick=True)
    assert outcome.kind == "UserError" and "200,000,000 rows" in outcome.text


def test_many_shards_of_many_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_ROWS", 50)
    root = write_shard(tmp_path / "shards", ROWS, LABELS)
    for i in range(2):
        write_shard(root, ROWS, LABELS, f"train-{i}.parquet")
    with raises("unsafe-file", "50 rows"):
        inspect(DataConfig(name="shards", root=root))


def repeated(value, count: int):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


def test_row_group_that_decompresses_to_gigabytes(tmp_path, monkeypatch):
    """All images differ, so that the column itself is large; zeros compress well."""
    large = [b"%d" % i + bytes(2**20) for i in range(20)]
    root = write_shard(tmp_path / "shards", large, LABELS, compression="zstd", use_dictionary=False)
    assert (root / "train.parquet").stat().st_size < 2**20
    assert inspect(DataConfig(name="shards", root=root), quick=True).counts == [8, 8]
    monkeypatch.setattr(shards, "MAX_COLUMN_BYTES", 2**24)
    with raises("unsafe-file", "16,777,216"):
        inspect(DataConfig(name="shards", root=root), quick=True)


@pytest.mark.parametrize("column", ["image", "label", "path"])
def test_dictionaries_that_expand_to_gigabytes(tmp_path, monkeypatch, column):
    """A thousand rows repeat a value of 16 MB: 16 GB from a file of a few kilobytes."""
    text, labels = "x" * 2**24, pa.array([i % 2 for i in range(1000)])
    images = repeated(encoded(0), 1000)
    if column == "image":
        images = repeated(encoded(0) + text.encode(), 1000)
    elif column == "path":
        images = pa.StructArray.from_arrays([images, repeated(text, 1000)], names=["bytes", "path"])
    else:
        labels = repeated(text, 1000)
    root = write_shard(tmp_path / "shards", images, labels, compression="zstd", store_schema=False)
    assert (root / "train.parquet").stat().st_size < 10**6
    monkeypatch.setattr(shards, "MAX_COLUMN_BYTES", 2**28)
    monkeypatch.setattr(shards, "MAX_TEXT_BYTES", 2**28)
    outcome = outcome_of(root, quick=column != "image", memory=2**31, seconds=60)
    if column == "image":  # each is reported as unreadable
        assert outcome.kind == "done"
    else:
        assert outcome.kind == "UserError" and f"{shards.MAX_TEXT_BYTES:,}" in outcome.text


def varint(number: int, length: int = 1) -> bytes:
    """Return a signed integer of Thrift's compact protocol, filled up to a length."""
    left, found = number << 1, []
    while left or len(found) < length:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes(found[:-1]) + bytes([found[-1] & 0x7F])


@pytest.mark.parametrize("column", ["image", "label"])
def test_shards_whose_footer_contradicts_their_pages(tmp_path, column):
    """The footer says that the column has ten bytes; a dictionary in it has 16 MB, which a thousand rows repeat."""
    images, labels = repeated(encoded(0), 1000), pa.array([i % 2 for i in range(1000)])
    if column == "image":
        images = repeated(encoded(0) + bytes(2**24), 1000)
    else:
        labels = repeated("x" * 2**24, 1000)
    root = write_shard(tmp_path / "shards", images, labels, compression="zstd", store_schema=False)
    path = root / "train.parquet"
    group, whole = pq.read_metadata(path).row_group(0), path.read_bytes()
    found = group.column(["image", "label"].index(column)).total_uncompressed_size
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    footer = whole[start:]
    for size in (found, group.total_byte_size):
        footer = footer.replace(varint(size), varint(10, len(varint(size))))
    path.write_bytes(whole[:start] + footer)
    assert pq.read_metadata(path).row_group(0).column(["image", "label"].index(column)).total_uncompressed_size == 10
    outcome = outcome_of(root, quick=column == "label", memory=2**31, seconds=60)
    assert outcome.kind == ("done" if column == "image" else "UserError"), outcome.text


@pytest.mark.parametrize("column", ["image", "label"])
def test_column_chunks_with_the_name_of_another_column(tmp_path, column):
    """pyarrow finds a column by its index in the schema; the chunk repeats the name, which is changed here."""
    images, labels = pa.array([encoded(i) for i in range(20)]), pa.array([i % 2 for i in range(20)])
    path = write_shard(tmp_path / "shards", images, labels, store_schema=False) / "train.parquet"
    whole = path.read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    name = bytes([len(column)]) + column.encode()
    schema, _, chunk = whole[start:].rpartition(name)
    assert name in schema
    path.write_bytes(whole[:start] + schema + name.lower().swapcase() + chunk)
    number = ["image", "label"].index(column)
    assert pq.read_metadata(path).row_group(0).column(number).path_in_schema == column.upper()
    opened = shards.Shard(path, "image", "label")
    reader = shards.RowReader([opened])
    with mock.patch.object(shards, "MAX_COLUMN_BYTES", 100):
        if column == "image":
            with pytest.raises(BadImage, match="more than 100 bytes"):
                reader(0)
        else:
            with pytest.raises(UserError) as error:
                shards.Shard(path, "image", "label")
            assert error.value.kind == "unsafe-file"


def page(values: int, size: int) -> bytes:
    """Return a page of values whose header declares a size."""
    number = varint(values)
    return b"\x15\x00\x15" + varint(size) + b"\x15\x00\x2c\x15" + number + b"\x15\x00\x15\x06\x15\x06\x00\x00"


def test_numbers_of_values_above_32_bits_hide_no_pages(tmp_path):
    """pyarrow reads 2^32 + 1 values as one, and continues with the next page."""
    chunk = SimpleNamespace(data_page_offset=0, dictionary_page_offset=None, num_values=20)
    for values, rest in ((1, 19), (2**32 + 1, 20)):
        content = page(values, 8) + page(rest, 2**30)
        chunk.total_compressed_size = len(content)
        if values == 1:
            assert shards.decompressed_size(io.BytesIO(content), chunk) == 2**30 + 8
        else:
            with pytest.raises(ValueError, match="damaged"):
                shards.decompressed_size(io.BytesIO(content), chunk)


def test_threads_share_large_row_groups(tmp_path, monkeypatch):
    """Each thread keeps a small row group; a large one is read once, and by one thread at a time."""
    root = write_shard(tmp_path / "shards", pa.array([encoded(i) for i in range(20)]), LABELS, store_schema=False)
    for limit, times in ((2**27, 4), (100, 1)):
        monkeypatch.setattr(shards, "SHARED_BYTES", limit)
        reader = shards.RowReader([shards.Shard(root / "train.parquet", "image", "label")])
        read, start = mock.Mock(side_effect=reader._read_column), threading.Barrier(4)
        monkeypatch.setattr(reader, "_read_column", read)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda i, reader=reader, start=start: start.wait() * 0 or reader(i), range(4)))
        assert found == [encoded(i) for i in range(4)] and read.call_count == times


def test_a_damaged_row_group_is_read_once(tmp_path, monkeypatch):
    root = write_shard(tmp_path / "shards", pa.array([encoded(i) for i in range(20)]), LABELS, store_schema=False)
    reader = shards.RowReader([shards.Shard(root / "train.parquet", "image", "label")])
    failing = mock.Mock(side_effect=OSError("gzip"))
    monkeypatch.setattr(reader, "_read_column", failing)
    for index in range(5):
        with pytest.raises(BadImage, match="gzip"):
            reader(index)
    assert failing.call_count == 1


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.binary(4), pa.struct([("a", pa.int64())])], ids=str)
def test_labels_that_are_not_one_value_in_a_row(tmp_path, kind):
    outcome = outcome_of(write_shard(tmp_path / "shards", pa.array(ROWS), pa.nulls(20, kind)))
    assert outcome.kind == "UserError"


@pytest.mark.parametrize(
    "content", [b"", b"\x15", b"\x19\xf7" + b"\xff" * 9 + b"\x01", b"\x1c" * 100, b"\x18\xff\xff\xff\x7f"]
)
def test_damaged_page_headers_are_refused(content):
    with pytest.raises(ValueError):
        shards.CompactReader(content).read_struct()


def test_sizes_of_pages_are_those_of_pyarrow(tmp_path):
    images = pa.array([encoded(i) + bytes(2**18) for i in range(20)])
    for options in ({}, {"use_dictionary": False}, {"data_page_version": "2.0", "data_page_size": 2**16}):
        path = write_shard(tmp_path / "shards", images, LABELS, compression="zstd", **options) / "train.parquet"
        group = pq.read_metadata(path).row_group(0)
        with open(path, "rb") as file:
            for chunk in map(group.column, range(group.num_columns)):
                size = shards.decompressed_size(file, chunk)
                assert 0 < chunk.total_uncompressed_size - size < 1000  # the headers


def test_groups_of_images_that_expand_are_bad_images(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_COLUMN_BYTES", 100_000)
    images = repeated(encoded(0) + bytes(20_000), 20)
    root = write_shard(tmp_path / "shards", images, LABELS, store_schema=False)
    found = inspect(DataConfig(name="shards", root=root))
    assert found.read == 0 and len(found.unreadable) == 20
    assert all("100,000" in image.why for image in found.unreadable)


def test_label_numbers_of_shards_that_leave_out_millions(tmp_path):
    images, labels = [ROWS[0]["bytes"]] * 200_000, [*range(199_999), 150_000_000]
    root = write_shard(tmp_path / "shards", images, labels)
    outcome = outcome_of(root, quick=True)
    assert outcome.kind == "UserError" and "150000000" in outcome.text


def test_shards_are_read_as_before(tmp_path):
    fill(tmp_path / "images", cat=30, dog=30)
    shard(DataConfig(name="folder", root=tmp_path / "images"), tmp_path / "shards")
    found = inspect(DataConfig(name="shards", root=tmp_path / "shards"))
    assert (found.read, found.counts, found.unreadable) == (60, [24, 24], [])
