"""Thumbnails for the report: the worst confusions, and the best and worst of the rare classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtail import files
from longtail.data.decode import decode_streamed
from longtail.data.lazy_images import ImageArray, StreamedImages
from longtail.data.sources import DataSet, Split

CONFUSIONS, CLASSES, IMAGES = 12, 6, 4  # how many pairs, rare classes each way, and images of each
SIDE = 96  # pixels, at most


def write_examples(folder: Path, data: DataSet, predicted: np.ndarray) -> None:
    """PNG files, and index.json that says what each shows; classes are given by number. Replaces what was there, whole."""
    chosen = {"confusions": worst_confusions(data, predicted), **rare_classes(data, predicted)}
    with files.replace_folder(folder) as fresh:
        for item in {i for entries in chosen.values() for entry in entries for i in entry["items"]}:
            image = Image.fromarray(picture(data.test, item))
            image.thumbnail((SIDE, SIDE))
            image.save(fresh / f"{item}.png")
        (fresh / "index.json").write_text(json.dumps(chosen, indent=1) + "\n")


def picture(source: Split, item: int) -> ImageArray:
    if isinstance(source.images, StreamedImages):
        return decode_streamed(source.images, item, SIDE).transpose(1, 2, 0)
    return source.images[item]


def worst_confusions(data: DataSet, predicted: np.ndarray) -> list[dict[str, Any]]:
    """The most frequent wrong answers, as shares of the true class's test images."""
    truth, classes = data.test.labels, len(data.train.class_names)
    wrong = truth != predicted
    pairs, times = np.unique(truth[wrong] * classes + predicted[wrong], return_counts=True)
    share = times / data.test.counts[pairs // classes]
    worst = np.argsort(-share, kind="stable")[:CONFUSIONS]
    return [
        {
            "truth": int(t),
            "predicted": int(p),
            "share": round(float(share[i]), 4),
            "items": _items((truth == t) & (predicted == p)),
        }
        for i, t, p in zip(worst, *divmod(pairs[worst], classes), strict=True)
    ]


def rare_classes(data: DataSet, predicted: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Among the rarer half of the classes those recognized best and worst: never both, nor best without a hit, nor worst
    without a miss."""
    truth, counts, tested = data.test.labels, data.train.counts, data.test.counts
    right = np.bincount(truth[predicted == truth], minlength=len(counts)) / np.maximum(tested, 1)
    rare = np.argsort(counts, kind="stable")[: max(1, len(counts) // 2)]
    rare = rare[tested[rare] > 0]
    ranked = rare[np.argsort(-right[rare], kind="stable")]
    best = ranked[: min(CLASSES, (len(ranked) + 1) // 2)]
    best = best[right[best] > 0]

    def entries(chosen: np.ndarray) -> list[dict[str, Any]]:
        return [
            {"class": int(c), "accuracy": round(100 * float(right[c]), 2), "items": _items(truth == c)} for c in chosen
        ]

    worst = ranked[len(best) :][::-1][:CLASSES]
    return {"best_rare": entries(best), "worst_rare": entries(worst[right[worst] < 1])}


def _items(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask)[:IMAGES]]
