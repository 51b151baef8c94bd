"""Benchmarks that are published as lists: both layouts, lists given by flags, missing lists and unexpected lists."""

import json

import numpy as np
import pytest
from PIL import Image

from longtail.config import DataConfig
from longtail.data import load
from longtail.data.lists import BENCHMARKS
from longtail.data.sources import open_data
from tests.raises import raises

FILES = {"train_val2018/Aves/0/a.jpg": 0, "train_val2018/Aves/0/b.jpg": 0, "train_val2018/Fungi/1/c.jpg": 1}
HELD = {"train_val2018/Aves/0/d.jpg": 0, "train_val2018/Fungi/1/e.jpg": 1}


@pytest.fixture
def root(tmp_path):
    for file in FILES | HELD:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 6, 3), 90, np.uint8)).save(tmp_path / file)
    return tmp_path


def as_text(path, files):
    path.write_text("".join(f"{file} {label}\n" for file, label in files.items()))
    return path


def as_json(path, files):
    tree = {
        "images": [{"id": i, "file_name": file} for i, file in enumerate(files)],
        "annotations": [{"image_id": i, "category_id": label} for i, label in enumerate(files.values())],
        "categories": [{"id": 0, "name": "Corvus"}, {"id": 1, "name": "Boletus"}],
    }
    path.write_text(json.dumps(tree))
    return path


def config(root, **options) -> DataConfig:
    return DataConfig(name="inat2018", root=root, image_size=6, **options)


@pytest.mark.parametrize(
    ("write", "train", "test", "names"),
    [
        (as_text, "iNaturalist18_train.txt", "iNaturalist18_val.txt", ("0", "1")),
        (as_json, "train2018.json", "val2018.json", ("Corvus", "Boletus")),
    ],
)
def test_both_layouts_of_inaturalist(root, write, train, test, names):
    write(root / train, FILES)
    write(root / test, HELD)
    data = load(config(root))
    assert data.name == "inat2018" and data.train.class_names == names
    assert data.train.counts.tolist() == [2, 1] and data.test.counts.tolist() == [1, 1]
    (warning,) = (note for note in data.notes if note.startswith("warning"))
    assert all(value in warning for value in ("inat2018", "437,513", "24,426", "3 training", " 2"))


def test_lists_of_the_published_size_are_not_warned_of(root, monkeypatch):
    as_text(root / "iNaturalist18_train.txt", FILES), as_text(root / "iNaturalist18_val.txt", HELD)
    monkeypatch.setitem(BENCHMARKS, "inat2018", BENCHMARKS["inat2018"]._replace(images=(3, 2)))
    assert not load(config(root)).notes


def test_lists_may_lie_elsewhere(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("lists")
    train, test = as_text(other / "t.txt", FILES), as_text(root / "iNaturalist18_val.txt", HELD)
    opened = open_data(config(root, train_list=train))
    assert len(opened.train.labels) == 3 and len(opened.test.labels) == 2
    test.unlink()
    assert len(open_data(config(root, train_list=train, test_list=as_text(other / "v.txt", FILES))).test.labels) == 3


def test_missing_lists_are_reported_with_path_and_source(root):
    with raises("invalid-value", "inat2018", "--data.root", "train_val2018/"):
        open_data(DataConfig(name="inat2018"))
    with raises("missing-file", "iNaturalist18_train.txt", "github.com/", "--data.train_list"):
        open_data(config(root))
    as_json(root / "train2018.json", FILES)
    with raises("missing-file", str(root / "val2018.json"), "--data.test_list"):
        open_data(config(root))


def test_published_counts_are_the_paper_s():
    assert {name: known.images[0] for name, known in BENCHMARKS.items()} == {
        "imagenet-lt": 115_846,
        "inat2018": 437_513,
        "places-lt": 62_500,
    }
