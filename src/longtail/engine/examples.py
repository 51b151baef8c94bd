"""Thumbnails for the report: the worst confusions, and the best and worst of the rare classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtail.data.sources import DataSet

CONFUSIONS, CLASSES, IMAGES = 12, 6, 4  # how many pairs, rare classes each way, and images of each
SIDE = 96  # pixels, at most


def write_examples(folder: Path, data: DataSet, predicted: np.ndarray) -> None:
    """PNG files, and index.json that says what each shows; classes are given by number. Replaces what was there, whole."""
    final, folder = folder, folder.with_suffix(".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    chosen = {"confusions": worst_confusions(data, predicted), **rare_classes(data, predicted)}
    for item in {i for entries in chosen.values() for entry in entries for i in entry["items"]}:
        image = Image.fromarray(data.test.images[item])
        image.thumbnail((SIDE, SIDE))
        image.save(folder / f"{item}.png")
    (folder / "index.json").write_text(json.dumps(chosen, indent=1) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    folder.replace(final)


def worst_confusions(data: DataSet, predicted: np.ndarray) -> list[dict[str, Any]]:
    """The most frequent wrong answers, as shares of the true class's test images."""
    truth, classes = data.test.labels, len(data.train.class_names)
    table = np.zeros((classes, classes))
    np.add.at(table, (truth, predicted), 1)
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    np.fill_diagonal(share, 0)
    worst = np.argsort(-share, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [divmod(int(i), classes) for i in worst if share.flat[i] > 0]
    return [
        {
            "truth": t,
            "predicted": p,
            "share": round(float(share[t, p]), 4),
            "items": _items((truth == t) & (predicted == p)),
        }
        for t, p in pairs
    ]


def rare_classes(data: DataSet, predicted: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Among the rarer half of the classes, those recognised best and worst."""
    truth, counts = data.test.labels, data.train.counts
    rare = [int(c) for c in np.argsort(counts, kind="stable")[: max(1, len(counts) // 2)] if (truth == c).any()]
    right = {c: float((predicted[truth == c] == c).mean()) for c in rare}
    ranked = sorted(rare, key=lambda c: -right[c])
    entries = [{"class": c, "accuracy": round(100 * right[c], 2), "items": _items(truth == c)} for c in ranked]
    return {"best_rare": entries[:CLASSES], "worst_rare": entries[::-1][:CLASSES]}


def _items(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask)[:IMAGES]]
