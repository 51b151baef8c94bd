"""Images to check at the end of a run: suspects.csv, and thumbnails of training and test images."""

import csv
import shutil

import numpy as np

from longtail.data.sources import load
from longtail.engine import examples
from longtail.suspects import find_suspects, read_splits
from tests.inference.made import finished_run, folder_config, photographs


def test_copies_are_found_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
    root = tmp_path / "data"
    photographs(root / "train", n=6)
    photographs(root / "test", n=6, seed=1)
    shutil.copy(root / "test/cat/2.png", root / "test/eel/copy.png")
    config = folder_config(root)
    folder = finished_run(tmp_path / "run/seed0", config)
    with open(folder / "suspects.csv", newline="") as file:
        pairs = {(row["file"], row["duplicate_of"]) for row in csv.DictReader(file) if row["problem"] == "duplicate"}
    assert ("test/eel/copy.png", "test/cat/2.png") in pairs
    (images,) = read_splits(folder, 3)
    for name in ("test/eel/copy.png", "test/cat/2.png"):
        assert (folder / f"examples/{images.items_N[images.ids_N.tolist().index(name)]}.png").exists()


def test_training_images_get_thumbnails(tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
    root = tmp_path / "data"
    photographs(root / "train", n=4)
    photographs(root / "test", n=4, seed=1)
    config = folder_config(root)
    data = load(config.data)
    folder = finished_run(tmp_path / "run/seed0", config)
    ids, n = data.train.ids[::-1], len(data.train.ids)  # in another order
    x_NF, p_N = np.eye(n, 64).astype(np.float16), np.ones(n, np.float16)
    x_NF[1] = x_NF[0]
    labels = data.train.labels[::-1]
    arrays = {"features": x_NF, "labels": labels, "ids": ids, "probabilities_label": p_N, "suggested": labels}
    np.savez(folder / "training_features.npz", **arrays)
    found = examples.find_suspect_files(data, find_suspects(read_splits(folder, 3)))
    named = {name: (split, item) for name, split, item in found if name.startswith("training-")}
    assert named == {"training-1.png": (data.train, n - 2), "training-0.png": (data.train, n - 1)}
