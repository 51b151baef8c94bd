"""As many classes as iNaturalist 2018 has, from training to the files of a finished run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from longtail import runs
from longtail.data.sources import DataSet, Source
from longtail.engine.train import train
from tests.conftest import tiny

CLASSES, TESTED = 8_142, 300


def images_of(labels: np.ndarray) -> Source:
    """Noise of 8 pixels, on a colour of its class's own for those of the first classes."""
    rng = np.random.default_rng(len(labels))
    images = rng.integers(0, 60, (len(labels), 8, 8, 3), dtype=np.uint8)
    images += (60 * (labels[:, None] // [1, 3, 9] % 3)).astype(np.uint8)[:, None, None]
    names = tuple(f"species {c}" for c in range(CLASSES))
    return Source(images, labels, names, np.arange(len(labels)))


def test_a_run_of_8142_classes(tmp_path):
    tail, head = np.arange(CLASSES), np.repeat(np.arange(4), 500)
    data = DataSet("synthetic", images_of(np.append(tail, head)), None, images_of(np.arange(TESTED) % 8), "none")
    config = tiny("paco", epochs=2, batch_size=512)
    config = replace(config, method=replace(config.method, chunk=3_000))
    (folder,) = train(config, tmp_path, data=data)

    run, stored = runs.read(folder), np.load(folder / "predictions.npz")
    log = [json.loads(line) for line in (folder / runs.LOG).read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert run.metrics["confusion"] is None and len(run.metrics["per_class"]) == CLASSES
    assert run.metrics["top1"] > 20  # four of the eight classes asked for are frequent
    assert 100 * (stored["top_classes"][:, 0] == stored["labels"]).mean() == pytest.approx(run.metrics["top1"])
    assert stored["top_logits"].shape == (TESTED, 20)
    small = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != runs.MODEL)
    assert small < 2**20  # the matrix of confusions alone would be 130 MB of text
