"""Shards of real image files: writing and reading, files written by `datasets`, and damaged files."""

import base64
import io
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from longtail.config import DataConfig
from longtail.data import load
from longtail.data.decode import BadImage
from longtail.data.inspection import inspect
from longtail.data.shards import OPEN_FILES, RowReader, Shard
from longtail.data.sources import open_data
from longtail.data.write_shards import ROW_GROUP_BYTES, shard
from longtail.errors import Kind
from tests.raises import raises


@pytest.fixture
def folder(tmp_path):
    """Write images of noise, which compresses badly: each file has about 12 kB."""
    rng = np.random.default_rng(0)
    for split, counts in {"train": {"cat": 40, "dog": 7}, "val": {"cat": 5, "dog": 5}}.items():
        for name, n in counts.items():
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(n):
                noise = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / "images" / split / name / f"{i:02}.png")
    return tmp_path / "images"


def config(root, **options) -> DataConfig:
    return DataConfig(name="shards", root=root, image_size=8, **options)


def of(folder, **options) -> DataConfig:
    return DataConfig(name="folder", root=folder, image_size=8, **options)


def refuses(root, kind: Kind, *values: object) -> None:
    """Check that loading these shards ends in an error of this kind, whose only line contains the values."""
    with raises(kind, *values) as caught:
        load(config(root))
    assert "\n" not in str(caught.value)


def test_shards_are_the_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.data.write_shards.ROW_GROUP_BYTES", 50_000)
    assert shard(of(folder), tmp_path / "out", megabytes=1) == (57, [], ())
    wanted, found = load(of(folder)), load(config(tmp_path / "out"))
    for a, b in ((wanted.train, found.train), (wanted.test, found.test)):
        assert np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)
        assert a.ids.tolist() == b.ids.tolist() and a.class_names == b.class_names
    groups = pq.ParquetFile(tmp_path / "out/train-00000-of-00001.parquet").metadata.num_row_groups
    assert groups > 5 and sorted(p.name for p in tmp_path.iterdir()) == ["images", "out"]


def test_bytes_are_those_of_the_files_in_any_order_and_from_many_threads(folder, tmp_path):
    shard(of(folder), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        pq.write_table(pq.read_table(path), path, row_group_size=3)
    pool = open_data(config(tmp_path / "out")).train
    order = np.random.default_rng(0).permutation(len(pool.labels))
    for index in order:
        assert pool.read_encoded(int(index)) == (folder / pool.ids[index]).read_bytes()
    assert np.array_equal(pool.read(order).images, open_data(of(folder)).train.read(order).images)


def test_files_are_of_the_size_asked_for_and_a_shard_can_be_packed_again(folder, tmp_path):
    shard(of(folder), tmp_path / "one", megabytes=1)
    assert ROW_GROUP_BYTES == 2**20 and len(list((tmp_path / "one").glob("train-*"))) == 1
    big = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)  # 2.4 MB
    for i in range(3):
        Image.fromarray(big).save(folder / f"train/dog/big{i}.png")
    shard(of(folder), tmp_path / "two", megabytes=2)
    assert len(list((tmp_path / "two").glob("train-*"))) == 3
    shard(config(tmp_path / "two"), tmp_path / "three", megabytes=1000)
    assert len(list((tmp_path / "three").glob("train-*"))) == 1
    assert np.array_equal(load(config(tmp_path / "three")).train.images, load(of(folder)).train.images)


def test_arrays_and_draws_are_packed_too(tmp_path):
    digits = DataConfig(name="digits", image_size=8, imbalance=40)
    written = shard(digits, tmp_path / "out").images
    wanted, found = load(digits), load(config(tmp_path / "out"))
    assert written == 789 and np.array_equal(wanted.train.images, found.train.images)
    assert found.train.counts.tolist() == wanted.train.counts.tolist()


def test_files_of_datasets_are_read(tmp_path):
    """The file has other column names, plain bytes instead of a struct, names as labels, and an evaluation set "validation"."""
    png = tmp_path / "x.png"
    Image.new("RGB", (8, 8), (9, 8, 7)).save(png)
    table = pa.table({"img": [png.read_bytes()] * 6, "fine_label": ["b", "a", "b", "b", "b", "a"]})
    pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 2), tmp_path / "validation-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 1), tmp_path / "test-00000-of-00001.parquet")
    refuses(tmp_path, "bad-list", "'image'", "img, fine_label", "--data.columns")
    data = load(config(tmp_path, columns=("img", "fine_label")))
    assert data.train.class_names == ("a", "b") and data.train.labels.tolist() == [1, 0, 1, 1, 1, 0]
    assert data.test.labels.tolist() == [1, 0] and data.train.ids[2] == "train-00000-of-00001.parquet:2"
    assert data.train.images[0, 0, 0].tolist() == [9, 8, 7]


def test_shards_without_an_evaluation_set_give_a_fifth(folder, tmp_path):
    shard(of(folder), tmp_path / "out")
    for path in (tmp_path / "out").glob("test-*"):
        path.unlink()
    data = load(config(tmp_path / "out"))
    assert "9 of" in data.notes[0] and "47" in data.notes[0] and data.train.counts.tolist() == [32, 6]


def test_features_are_what_datasets_looks_for(folder, tmp_path):
    shard(of(folder), tmp_path / "out")
    schema = pq.read_schema(tmp_path / "out/train-00000-of-00001.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": ["cat", "dog"], "_type": "ClassLabel"}
    assert features["image"] == {"_type": "Image"} and schema.field("image").type.names == ["bytes", "path"]


def write_rows(path, images, labels):
    pq.write_table(pa.table({"image": pa.array(images, pa.binary()), "label": labels}), path)


def test_damaged_shards(folder, tmp_path):
    refuses(tmp_path / "none", "missing-file", "--data.root", tmp_path / "none")
    refuses(folder, "missing-file", folder)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "train-0.parquet").write_bytes(b"PAR1 no")
    refuses(bad, "damaged-file", bad / "train-0.parquet")
    write_rows(bad / "train-0.parquet", [b"x"] * 5, [0, 1, None, 0, 0])
    refuses(bad, "bad-labels", bad / "train-0.parquet", "row 2")
    write_rows(bad / "train-0.parquet", [b"x"] * 5, [0.5] * 5)
    refuses(bad, "bad-labels", bad / "train-0.parquet")
    write_rows(bad / "train-0.parquet", [b"x"] * 5, [0, 10**9, 0, 0, 0])
    refuses(bad, "bad-labels", bad, 10**9)
    write_rows(bad / "train-0.parquet", [b"x"] * 10, [0, 2] * 5)
    refuses(bad, "too-few-data", "3 classes", "(1)")
    write_rows(bad / "train-0.parquet", [b"x"] * 10, [0] * 10)
    refuses(bad, "too-few-data", "'0'")
    write_rows(bad / "train-0.parquet", [b"x"] * 5, [0, -1, 0, 0, 0])
    refuses(bad, "bad-labels", bad, "-1")
    write_rows(bad / "train-0.parquet", [], pa.array([], pa.int64()))
    refuses(bad, "bad-list", bad)
    write_rows(bad / "train-0.parquet", [b"x"] * 10, [0] * 5 + [1] * 5)
    refuses(bad, "bad-image", "train-0.parquet:0 (")
    write_rows(bad / "train-0.parquet", [None] * 10, [0] * 5 + [1] * 5)
    with pytest.raises(BadImage):
        RowReader([Shard(bad / "train-0.parquet", "image", "label")])(3)


def test_changed_bytes_are_detected(folder, tmp_path):
    """A damaged image can often be decoded, so the bytes are compared."""
    shard(of(folder), tmp_path / "packed")
    path = next((tmp_path / "packed").glob("train-*.parquet"))
    whole = path.read_bytes()
    image = next((folder / "train").rglob("*.png")).read_bytes()
    at = whole.index(image) + len(image) // 2
    path.write_bytes(whole[:at] + bytes(b ^ 255 for b in whole[at : at + 20]) + whole[at + 20 :])
    bad = inspect(DataConfig(name="shards", root=tmp_path / "packed", image_size=20)).unreadable
    assert bad and all("checksum" in image.why.lower() or "crc" in image.why.lower() for image in bad), bad


def test_a_shard_cut_short_under_its_reader_ends_no_process(folder, tmp_path):
    """This happens if the file is written again; with a memory map the process would end with a bus error."""
    shard(of(folder), tmp_path / "out")
    file = tmp_path / "out/train-00000-of-00001.parquet"
    code = """
import os, pathlib, sys
from longtail.data.decode import BadImage
from longtail.data.shards import RowReader, Shard

path = pathlib.Path(sys.argv[1])
rows = RowReader([Shard(path, "image", "label")])
first = rows(0)
rows.cache.last = None  # forget the row group that was read
os.truncate(path, 100)
try:
    print("the same" if rows(0) == first else "another image")  # the same if pyarrow has buffered the file
except BadImage as error:
    print(error)
rows.cache.opened.clear()
rows.cache.last = None
try:
    rows(0)
except BadImage as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    second, third = done.stdout.splitlines()
    assert second == "the same" or file.name in second
    assert file.name in third


def test_encrypted_columns_end_no_process(tmp_path):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def wrap_key(self, key, name):
            return base64.b64encode(key)

    factory = encryption.CryptoFactory(lambda connection: Keys())
    settings = encryption.EncryptionConfiguration(footer_key="a", column_keys={"b": ["image"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = pa.table({"image": [b"x"], "label": ["cat"]})
    with pq.ParquetWriter(tmp_path / "train.parquet", table.schema, encryption_properties=properties) as file:
        file.write_table(table)
    code = "import longtail.cli, sys; sys.exit(longtail.cli.main(['data', 'inspect', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "encrypted" in done.stderr


def test_a_bad_image_is_not_packed_unseen(folder, tmp_path):
    (folder / "train/cat/03.png").write_bytes(b"")
    with raises("bad-image", "train/cat/03.png ("):
        shard(of(folder), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images"]  # no incomplete file remains
    written, skipped, _ = shard(of(folder, on_error="skip"), tmp_path / "out")
    assert written == 56 and [s.id for s in skipped] == ["train/cat/03.png"]
    with raises("exists", tmp_path / "out", "--out"):
        shard(of(folder), tmp_path / "out")
    with raises("invalid-value", "--megabytes", "0"):
        shard(of(folder), tmp_path / "other", megabytes=0)
    with raises("conflict", folder / "shards", "--out"):
        shard(of(folder), folder / "shards")
    for i in range(7):
        (folder / f"train/dog/{i:02}.png").write_bytes(b"")
    with raises("bad-image", "class 'dog'"):
        shard(of(folder, on_error="skip"), tmp_path / "none")
    (tmp_path / "file").write_text("")
    with raises("not-writable", tmp_path / "file/out", "--out"):
        shard(of(folder), tmp_path / "file/out")


def with_names(path, labels, names):
    """Write class labels as `datasets` does; the gray level of an image is the alphabetical index of its class."""
    images = []
    for label in labels:
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (("cat", "dog", "eel").index(names[label] if names else label),) * 3).save(file, "PNG")
        images.append(file.getvalue())
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    meta = {"huggingface": json.dumps({"info": {"features": features}})} if names else {}
    pq.write_table(pa.table({"image": images, "label": labels}).replace_schema_metadata(meta), path)


@pytest.mark.parametrize("other", [["eel", "dog", "cat"], None])
def test_each_file_has_its_own_names(tmp_path, other):
    """The same number may stand for different classes in different files."""
    with_names(tmp_path / "train-0.parquet", [0, 1, 2, 0], ["cat", "dog", "eel"])
    labels = [0, 1, 2] if other else ["eel", "dog", "cat"]
    for name in ("train-1.parquet", "test-0.parquet"):
        with_names(tmp_path / name, labels, other)
    data = load(config(tmp_path))
    assert data.train.class_names == ("cat", "dog", "eel")
    for source in (data.train, data.test):
        assert source.labels.tolist() == source.images[:, 0, 0, 0].tolist()
    assert data.train.labels.tolist() == [0, 1, 2, 0, 2, 1, 0]


def test_labels_of_two_kinds_are_refused(tmp_path):
    with_names(tmp_path / "train-0.parquet", [0, 1, 2, 0], ["cat", "dog", "eel"])
    write_rows(tmp_path / "test-0.parquet", [b"x"] * 3, [0, 1, 2])
    refuses(tmp_path, "bad-labels", tmp_path / "test-0.parquet", "label 0", "3 training classes")
    write_rows(tmp_path / "train-1.parquet", [b"x"] * 3, [0, 1, 2])
    refuses(tmp_path, "bad-labels", tmp_path / "train-1.parquet", tmp_path / "train-0.parquet")


def test_file_names_determine_the_split(tmp_path):
    for name in ("Data-0", "Test-0"):
        with_names(tmp_path / f"{name}.parquet", [0, 1, 2, 0], ["cat", "dog", "eel"])
    data = load(config(tmp_path))
    assert len(data.train.labels) == len(data.test.labels) == 4
    with_names(tmp_path / "train-0.parquet", [0, 1, 2], ["cat", "dog", "eel"])
    with_names(tmp_path / "validation-0.parquet", [0, 1], ["cat", "dog", "eel"])
    data = load(config(tmp_path))
    assert (len(data.train.labels), len(data.test.labels)) == (3, 2)
    assert re.findall(r"\w+\*", data.notes[0]) == ["train*", "validation*", "data*", "test*"]


@pytest.mark.parametrize("name", ["testset", "testA", "Test_2", "valset", "VALUES", "validated", "testing1"])
def test_files_whose_names_begin_with_val_or_test_are_evaluated_on(tmp_path, name):
    with_names(tmp_path / "data.parquet", [0, 1, 2, 0], ["cat", "dog", "eel"])
    with_names(tmp_path / f"{name}.parquet", [0, 1], ["cat", "dog", "eel"])
    data = load(config(tmp_path))
    assert (len(data.train.labels), len(data.test.labels)) == (4, 2) and not data.notes[1:]


def test_all_files_of_a_kind_are_used(tmp_path):
    for name, labels in {"trainA": [0], "training-b": [1, 2], "testA": [0, 1, 2], "testB": [1], "other": [0]}.items():
        with_names(tmp_path / f"{name}.parquet", labels, ["cat", "dog", "eel"])
    data = load(config(tmp_path))
    assert data.train.labels.tolist() == [0, 1, 2] and data.test.labels.tolist() == [0, 1, 2, 1]
    assert len(data.notes) == 1 and re.findall(r"\w+\*", data.notes[0]) == ["train*", "test*", "other*"]


def ten_shards(folder, tmp_path):
    """Pack the 47 training images and write them again, five to a file."""
    shard(of(folder), tmp_path / "out")
    (whole,) = (tmp_path / "out").glob("train-*")
    table = pq.read_table(whole)
    whole.unlink()
    for i in range(10):
        pq.write_table(table.slice(5 * i, 5), tmp_path / f"out/train-{i:05d}-of-00010.parquet")
    return tmp_path / "out"


@pytest.mark.parametrize("number", [0, 3, 9])
def test_a_shard_that_is_missing_is_noticed(folder, tmp_path, number):
    out = ten_shards(folder, tmp_path)
    assert len(load(config(out)).train.labels) == 47
    (out / f"train-{number:05d}-of-00010.parquet").unlink()
    gone = f"(train-{number:05d}-of-00010.parquet)"
    refuses(out, "missing-file", out, gone)
    with raises("missing-file", out, gone):
        inspect(config(out), quick=True)


def test_missing_shard_of_the_evaluation_set_is_reported_and_of_an_ignored_set_is_not(tmp_path):
    for name in ("train-00000-of-00001", "validation-00001-of-00002", "test-00000-of-00009-0f3a"):
        with_names(tmp_path / f"{name}.parquet", [0, 1, 2], ["cat", "dog", "eel"])
    refuses(tmp_path, "missing-file", "(validation-00000-of-00002.parquet)")
    with_names(tmp_path / "validation-00000-of-00002.parquet", [0], ["cat", "dog", "eel"])
    assert len(load(config(tmp_path)).test.labels) == 4
    for path in tmp_path.glob("validation-*"):
        path.unlink()
    gone = "test-00001-of-00009.parquet, test-00002-of-00009.parquet, test-00003-of-00009.parquet, …"
    refuses(tmp_path, "missing-file", "8 shards", f"({gone})")


def test_shards_that_were_written_before_names_had_a_total(folder, tmp_path):
    out = ten_shards(folder, tmp_path)
    for path in out.iterdir():
        path.rename(out / f"{path.name.split('-of-')[0]}.parquet")
    assert len(load(config(out)).train.labels) == 47
    (out / "train-00000.parquet").unlink()
    (out / "train-00003.parquet").unlink()
    refuses(out, "missing-file", "2 shards", "(train-00000.parquet, train-00003.parquet)")


def test_numbers_of_other_kinds_have_no_gaps(tmp_path):
    for name in ("train-1-of-2", "train-2-of-2", "train-2023", "train-7", "test-20240101"):
        with_names(tmp_path / f"{name}.parquet", [0, 1, 2], ["cat", "dog", "eel"])
    data = load(config(tmp_path))
    assert (len(data.train.labels), len(data.test.labels)) == (12, 3)


def test_few_files_are_open_at_a_time(tmp_path):
    for i in range(3 * OPEN_FILES):
        with_names(tmp_path / f"train-{i:02}.parquet", [0, 1, 2, 0, 1, 2], ["cat", "dog", "eel"])
    rows = RowReader([Shard(path, "image", "label") for path in sorted(tmp_path.iterdir())])
    order = np.random.default_rng(0).permutation(18 * OPEN_FILES)
    images = [Image.open(io.BytesIO(rows(int(i)))) for i in order]
    assert [image.getpixel((0, 0))[0] for image in images] == (order % 3).tolist()
    assert len(rows.cache.opened) == OPEN_FILES
