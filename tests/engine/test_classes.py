"""A run with as many classes as iNaturalist 2018, from training to the files of the finished run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from longtail import run_folder
from longtail.data.sources import DataSet, Split
from longtail.engine.train import train
from tests.conftest import tiny

TESTED = 300  # images


def images_of(labels: np.ndarray, classes: int) -> Split:
    """Return images of noise with 8 pixels; those of the first classes also have a color for each class."""
    rng = np.random.default_rng(len(labels))
    images = rng.integers(0, 60, (len(labels), 8, 8, 3), dtype=np.uint8)
    images += (60 * (labels[:, None] // [1, 3, 9] % 3)).astype(np.uint8)[:, None, None]
    names = tuple(f"species {c}" for c in range(classes))
    return Split(images, labels, names, np.arange(len(labels)))


@pytest.mark.parametrize(("classes", "batch"), [(1_200, 128), pytest.param(8_142, 512, marks=pytest.mark.long)])
def test_a_run_of_many_classes(classes, batch, tmp_path):
    """There are more than 1,000 classes, up to which matrices of classes are stored."""
    tail, head = np.arange(classes), np.repeat(np.arange(4), 500)
    trained, tested = images_of(np.append(tail, head), classes), images_of(np.arange(TESTED) % 8, classes)
    data = DataSet("synthetic", trained, None, tested, "none")
    config = tiny("paco", epochs=2, batch_size=batch)
    config = replace(config, method=replace(config.method, chunk=classes // 3))
    (folder,) = train(config, tmp_path, data=data)

    run, stored = run_folder.read(folder), np.load(folder / "predictions.npz")
    log = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert run.metrics["confusion"] is None and len(run.metrics["per_class"]) == classes
    assert run.metrics["top1"] > 20  # four of the eight classes asked for are frequent
    assert 100 * (stored["top_classes"][:, 0] == stored["labels"]).mean() == pytest.approx(run.metrics["top1"])
    assert stored["top_logits"].shape == (TESTED, 20)
    small = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != run_folder.MODEL)
    assert small < 2**20  # the matrix of confusions alone would be larger
