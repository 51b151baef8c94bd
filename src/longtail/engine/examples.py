"""Thumbnails for the report: the most frequent confusions, the best and worst of the rare classes, and images to check."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from longtail import files
from longtail.data.decode import decode_streamed
from longtail.data.lazy_images import ImageArray, StreamedImages
from longtail.data.sources import DataSet, Split
from longtail.suspects import MAX_SHOWN, NO_SUSPECTS, Suspects, thumbnail_name

MAX_CONFUSIONS, MAX_CLASSES, MAX_IMAGES = 12, 6, 4
"""The number of confused pairs, of best and of worst rare classes, and of images of each."""
MAX_SIDE = 96
"""The longer side of a thumbnail in pixels."""


def write_examples(folder: Path, data: DataSet, predicted: np.ndarray, suspects: Suspects = NO_SUSPECTS) -> None:
    """Write thumbnails as PNG files, and index.json, which says what each shows. The whole folder is replaced.

    Args:
        folder: The folder of the thumbnails.
        data: The images.
        predicted: The predicted class of each test image.
        suspects: The images to check.
    """
    chosen = {"confusions": find_worst_confusions(data, predicted), **find_rare_classes(data, predicted)}
    with files.replace_folder(folder) as fresh:
        for item in {i for entries in chosen.values() for entry in entries for i in entry["items"]}:
            write_thumbnail(fresh / f"{item}.png", data.test, item)
        for file, source, item in find_suspect_files(data, suspects):
            write_thumbnail(fresh / file, source, item)
        (fresh / "index.json").write_text(json.dumps(chosen, indent=1) + "\n")


def find_suspect_files(data: DataSet, suspects: Suspects) -> Iterator[tuple[str, Split, int]]:
    """Yield file name, split and item of the thumbnails of images to check.

    Args:
        data: The images.
        suspects: The images to check; those that the report shows get thumbnails.
    """
    training_items = {str(id): item for item, id in enumerate(data.train.ids)}
    shown = [*suspects.labels[:MAX_SHOWN], *suspects.duplicates[:MAX_SHOWN]]
    both = dict.fromkeys(image for suspect in shown for image in (suspect, suspect.original) if image is not None)
    for image in both:
        if image.split == "test":
            yield thumbnail_name(image), data.test, image.item
        elif image.id in training_items:  # other images were held out, or are of another version of the data
            yield thumbnail_name(image), data.train, training_items[image.id]


def write_thumbnail(path: Path, source: Split, item: int) -> None:
    """Write a small copy of an image."""
    image = Image.fromarray(load_picture(source, item))
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(path)


def load_picture(source: Split, item: int) -> ImageArray:
    """Return an image as an array (height, width, 3)."""
    if isinstance(source.images, StreamedImages):
        return decode_streamed(source.images, item, MAX_SIDE).transpose(1, 2, 0)
    return source.images[item]


def find_worst_confusions(data: DataSet, predicted: np.ndarray) -> list[dict[str, Any]]:
    """Return the most frequent pairs of true and predicted class, by their share of the true class's test images."""
    truth, classes = data.test.labels, len(data.train.class_names)
    wrong = truth != predicted
    pairs, times = np.unique(truth[wrong] * classes + predicted[wrong], return_counts=True)
    share = times / data.test.counts[pairs // classes]
    worst = np.argsort(-share, kind="stable")[:MAX_CONFUSIONS]
    return [
        {
            "truth": int(t),
            "predicted": int(p),
            "share": round(float(share[i]), 4),
            "items": _first_items((truth == t) & (predicted == p)),
        }
        for i, t, p in zip(worst, *divmod(pairs[worst], classes), strict=True)
    ]


def find_rare_classes(data: DataSet, predicted: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Return the classes with the best and the worst accuracy among the rarer half of the classes.

    No class is in both lists. A best class has at least one correct prediction, and a worst class at least one wrong one.
    """
    truth, counts, tested = data.test.labels, data.train.counts, data.test.counts
    accuracy_C = np.bincount(truth[predicted == truth], minlength=len(counts)) / np.maximum(tested, 1)
    rare = np.argsort(counts, kind="stable")[: max(1, len(counts) // 2)]
    rare = rare[tested[rare] > 0]
    ranked = rare[np.argsort(-accuracy_C[rare], kind="stable")]
    best = ranked[: min(MAX_CLASSES, (len(ranked) + 1) // 2)]
    best = best[accuracy_C[best] > 0]

    def entries(chosen: np.ndarray) -> list[dict[str, Any]]:
        return [
            {"class": int(c), "accuracy": round(100 * float(accuracy_C[c]), 2), "items": _first_items(truth == c)}
            for c in chosen
        ]

    worst = ranked[len(best) :][::-1][:MAX_CLASSES]
    return {"best_rare": entries(best), "worst_rare": entries(worst[accuracy_C[worst] < 1])}


def _first_items(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask)[:MAX_IMAGES]]
