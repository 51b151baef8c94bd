"""Images to check: suspected label errors and near-duplicates, from features and predicted probabilities.

A label is suspected if the probability of another class is at least the mean probability that this class has among its own
images (confident learning, Northcutt et al. 2021), and if the nearest neighbors among the features agree. Two images are
near-duplicates if their features are much closer than those of typical nearest neighbors.

Shapes: N images, F features, C classes.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from longtail import files
from longtail.metrics import BoolArray, FloatArray, IntArray, evenly_spaced
from longtail.text import csv_safe, csv_safe_path, escape_nonprintable

FEATURES, PREDICTIONS = "features.npz", "predictions.npz"
TRAINING_FEATURES = "training_features.npz"
"""Optional: features (N, F), labels and ids (N,) of training images, with probabilities_label and suggested (N,), the
probability of the label and the predicted class by a network that was not trained on the image."""
SUSPECTS = "suspects.csv"
MAX_FEATURES_BYTES, MAX_PREDICTIONS_BYTES = 2**28, 2**30  # after decompression
MAX_FEATURE_DIM, MAX_ID_LENGTH = 16_384, 4096
MAX_IMAGES = 2**21
MAX_FLOAT16 = 65_504  # features are stored in half precision
MAX_COMPARED = 10_000  # images; the time grows with the square
NEIGHBORS = 3  # of each class
MAX_DUPLICATE_DISTANCE = 0.1
"""The largest cosine distance of near-duplicates."""
DUPLICATE_RATIO = 0.25
"""The largest cosine distance of near-duplicates, relative to the median distance of nearest neighbors. It was chosen on
training images: copies that were compressed again are closer, and other photographs of the same species are not."""
ROWS_AT_ONCE = 1024
MAX_BLOCK_VALUES = 2**20
"""The largest number of probabilities in a block, which take 8 MiB; there may be a million classes."""
MAX_SHOWN = 20
"""The number of suspected label errors, and of near-duplicates, that the report shows with thumbnails."""

SplitName = Literal["training", "test"]


@dataclass(frozen=True)
class ImageFeatures:
    """Features and labels of images of a split, with the predictions that labels are compared with."""

    split: SplitName
    x_NF: np.ndarray
    labels_N: IntArray
    ids_N: np.ndarray
    """Files below the folder of the data, or numbers in the data set."""
    items_N: IntArray
    """Numbers of the images, which name their thumbnails."""
    suggested_N: IntArray
    """The class that the label is compared with; -1 for none."""
    probability_N: FloatArray
    """The probability of the label, from a network that was not trained on the image."""

    def take(self, rows: IntArray) -> "ImageFeatures":
        """Return some of the images."""
        labels, ids, items = self.labels_N[rows], self.ids_N[rows], self.items_N[rows]
        suggested, probability = self.suggested_N[rows], self.probability_N[rows]
        return ImageFeatures(self.split, self.x_NF[rows], labels, ids, items, suggested, probability)

    def take_share(self, share: float) -> "ImageFeatures":
        """Return an evenly spaced share of the images, and at least one."""
        images = len(self.labels_N)
        return self.take(evenly_spaced(images, max(int(share * images), 1)))


class Suspect(NamedTuple):
    """An image to check."""

    split: SplitName
    item: int
    """Number of the image in its split."""
    id: str
    """File of the image below the folder of the data, or its number in the data set."""
    label: int
    suggested: int | None
    """The probable class; None for a near-duplicate."""
    original: "Suspect | None"
    """The image that this one is a near-duplicate of; None for a suspected label error."""
    score: float
    """One minus the probability of the label, or the cosine similarity to the other image."""


class Suspects(NamedTuple):
    """The images of a run to check, the most suspicious first."""

    labels: list[Suspect]
    duplicates: list[Suspect]


NO_SUSPECTS = Suspects([], [])


# Label errors


def confidence_thresholds(p_N: FloatArray, y_N: IntArray, classes: int) -> FloatArray:
    """Return the mean probability of each class among its own images (C,); infinity for a class without images.

    Args:
        p_N: The probability of the label of each image.
        y_N: The labels.
        classes: The number of classes.
    """
    images_C = np.bincount(y_N, minlength=classes)
    return np.where(images_C > 0, np.bincount(y_N, p_N, classes) / np.maximum(images_C, 1), np.inf)


def confident_classes(p_NC: FloatArray, threshold_C: FloatArray) -> IntArray:
    """Return the class that each image confidently belongs to (N,); -1 for none.

    It is the most probable of the classes whose probability is at least the threshold of `confidence_thresholds`.
    """
    confident_NC = np.where(p_NC >= threshold_C, p_NC, -1.0)
    best_N = confident_NC.argmax(1)
    return np.where(confident_NC.max(1) >= 0, best_N, -1)


def confident_suggestions(suggested_N: IntArray, probability_N: FloatArray, y_N: IntArray) -> IntArray:
    """Return the predicted classes (N,) that confidently differ from the labels; -1 for the other images.

    Used if only the probability of the label is known. All other classes together must have at least the mean probability that
    the predicted class has among its own images.

    Args:
        suggested_N: The predicted classes.
        probability_N: The probabilities of the labels.
        y_N: The labels.
    """
    classes = int(max(suggested_N.max(initial=0), y_N.max(initial=0))) + 1
    threshold_C = confidence_thresholds(probability_N, y_N, classes)
    return np.where((suggested_N != y_N) & (1 - probability_N >= threshold_C[suggested_N]), suggested_N, -1)


def find_label_errors(images: ImageFeatures) -> IntArray:
    """Return the rows of images with suspected label errors, the least probable label first."""
    suggested_N, y_N = images.suggested_N, images.labels_N
    rows = np.flatnonzero((suggested_N >= 0) & (suggested_N != y_N))
    rows = rows[neighbors_agree(images.x_NF, y_N, rows, suggested_N[rows])]
    return rows[np.argsort(images.probability_N[rows], kind="stable")]


def neighbors_agree(x_NF: FloatArray, y_N: IntArray, rows: IntArray, suggested: IntArray) -> BoolArray:
    """Return whether images are closer to the nearest images of another class than to those of their own.

    The mean cosine similarities to the nearest three are compared, or to as many as both classes have. An image that is the
    only one of its class has nothing to compare with, and the result is False.

    Args:
        x_NF: The features of all images.
        y_N: The labels of all images.
        rows: The images in question.
        suggested: The other class of each.
    """
    unit_NF, agree = normalize_rows(x_NF), np.zeros(len(rows), bool)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        similarity = unit_NF[rows[first : first + ROWS_AT_ONCE]] @ unit_NF.T
        for i, values_N in enumerate(similarity, first):
            values_N[rows[i]] = -np.inf  # the image itself
            own, other = (np.sort(values_N[y_N == c])[::-1] for c in (y_N[rows[i]], suggested[i]))
            k = min(NEIGHBORS, len(own) - 1, len(other))
            agree[i] = k > 0 and other[:k].mean() > own[:k].mean()
    return agree


# Near-duplicates


def find_duplicates(x_NF: FloatArray) -> list[tuple[int, int, float]]:
    """Return (row, earlier row, cosine similarity) of near-duplicates, the most similar first.

    Each row is listed at most once, with the most similar of the earlier rows. Rows of zeros are left out.
    """
    unit_NF = normalize_rows(x_NF)
    nearest_N, earlier_N = np.full(len(x_NF), -1.0), np.zeros(len(x_NF), np.int64)
    similarity_N = np.full(len(x_NF), -1.0)  # to the most similar of the earlier rows
    for first in range(0, len(x_NF), ROWS_AT_ONCE):
        part = unit_NF[first : first + ROWS_AT_ONCE] @ unit_NF.T
        own = np.arange(len(part))
        part[own, first + own] = -1.0
        nearest_N[first : first + len(part)] = part.max(1)
        before = np.where(np.arange(first + len(part)) < (first + own)[:, None], part[:, : first + len(part)], -1.0)
        earlier_N[first : first + len(part)] = before.argmax(1)
        similarity_N[first : first + len(part)] = before.max(1)
    has_direction_N = np.abs(unit_NF).max(1, initial=0) > 0
    threshold = duplicate_threshold(nearest_N[has_direction_N])
    rows = np.flatnonzero(has_direction_N & (similarity_N >= threshold))
    rows = rows[np.argsort(-similarity_N[rows], kind="stable")]
    return [(int(i), int(earlier_N[i]), min(float(similarity_N[i]), 1.0)) for i in rows]


def duplicate_threshold(nearest_N: FloatArray) -> float:
    """Return the least cosine similarity of near-duplicates.

    Args:
        nearest_N: The similarity of each image to its nearest neighbor.
    """
    typical = float(np.median(1 - nearest_N)) if len(nearest_N) else 0.0
    return 1 - min(MAX_DUPLICATE_DISTANCE, DUPLICATE_RATIO * max(typical, 0.0)) - 1e-6  # rounding of float32


def normalize_rows(x_NF: FloatArray) -> np.ndarray:
    """Return the rows divided by their lengths, in float32; rows of zeros are unchanged."""
    largest_N1 = np.abs(x_NF).max(1, keepdims=True, initial=0.0)  # so that squares do not overflow
    scaled_NF = x_NF / np.where(largest_N1 > 0, largest_N1, 1.0)
    length_N1 = np.linalg.norm(scaled_NF, axis=1, keepdims=True)
    return (scaled_NF / np.where(length_N1 > 0, length_N1, 1.0)).astype(np.float32)


# Runs


def find_suspects(splits: Sequence[ImageFeatures]) -> Suspects:
    """Return the images to check in the splits of a run. Duplicates are searched in all splits together, if possible."""
    labels = [
        _make_suspect(images, row, suggested=int(images.suggested_N[row]), score=1 - float(images.probability_N[row]))
        for images in splits
        for row in find_label_errors(images)
    ]
    duplicates: list[Suspect] = []
    for group in _comparable_groups(splits):
        rows = [(images, row) for images in group for row in range(len(images.labels_N))]
        for i, j, similarity in find_duplicates(np.concatenate([images.x_NF for images in group])):
            original = _make_suspect(*rows[j])
            duplicates.append(_make_suspect(*rows[i], original=original, score=similarity))
    return Suspects(labels, duplicates)


def _comparable_groups(splits: Sequence[ImageFeatures]) -> Iterator[list[ImageFeatures]]:
    """Yield splits whose features have the same length."""
    for width in dict.fromkeys(images.x_NF.shape[1] for images in splits):
        yield [images for images in splits if images.x_NF.shape[1] == width]


def _make_suspect(
    images: ImageFeatures, row: int, suggested: int | None = None, original: Suspect | None = None, score: float = 0.0
) -> Suspect:
    item, label = int(images.items_N[row]), int(images.labels_N[row])
    return Suspect(images.split, item, str(images.ids_N[row]), label, suggested, original, score)


def thumbnail_name(suspect: Suspect) -> str:
    """Return the file name of the thumbnail of an image in the folder of examples."""
    return f"{'training-' if suspect.split == 'training' else ''}{suspect.item}.png"


HEADINGS = ("problem", "split", "file", "label", "suggested_label", "duplicate_of", "duplicate_label", "score")


def suspect_rows(suspects: Suspects, class_names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the lines of suspects.csv, without the headings."""
    rows: list[tuple[str, ...]] = []
    for suspect in [*suspects.labels, *suspects.duplicates]:
        original = suspect.original
        rows.append(
            (
                "duplicate" if original else "label",
                suspect.split,
                csv_safe_path(suspect.id),
                _safe_cell(class_names[suspect.label]),
                "" if suspect.suggested is None else _safe_cell(class_names[suspect.suggested]),
                csv_safe_path(original.id) if original else "",
                _safe_cell(class_names[original.label]) if original else "",
                f"{suspect.score:.4f}",
            )
        )
    return rows


def _safe_cell(text: str) -> str:
    return csv_safe(escape_nonprintable(text))


def write_suspects(path: Path, suspects: Suspects, class_names: Sequence[str]) -> None:
    """Write suspects.csv.

    Args:
        path: The file.
        suspects: The images to check.
        class_names: Names of all classes.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEADINGS, *suspect_rows(suspects, class_names)])
    files.write_text(path, text.getvalue())


# Reading


def read_splits(folder: Path, classes: int) -> list[ImageFeatures]:
    """Return the stored features of a run: training images, if there are any, and test images.

    A file that is missing, damaged, too large or inconsistent is treated as absent. Of very many images an evenly spaced subset
    is returned.

    Args:
        folder: The run folder.
        classes: The number of classes.
    """
    found = []
    for read in (_read_training, _read_test):
        try:
            images = read(folder, classes)
        except Exception:  # a damaged archive can raise many types
            continue
        if images is not None and len(images.labels_N):
            found.append(images)
    total = sum(len(images.labels_N) for images in found)
    return [images.take_share(MAX_COMPARED / total) for images in found] if total > MAX_COMPARED else found


def _read_training(folder: Path, classes: int) -> ImageFeatures | None:
    stored = files.read_arrays(folder / TRAINING_FEATURES, folder, MAX_FEATURES_BYTES)
    x_NF, y_N, ids_N = stored["features"], stored["labels"], stored["ids"]
    p_N, guess_N = stored["probabilities_label"], stored["suggested"]
    if (
        not all(_is_labels(labels_N, len(x_NF), classes) for labels_N in (y_N, guess_N))
        or p_N.shape != y_N.shape
        or p_N.dtype.kind != "f"
    ):
        return None
    if not ((p_N >= 0) & (p_N <= 1.001)).all():  # false for NaN; half precision rounds
        return None
    p_N = p_N.astype(np.float64).clip(0, 1)
    suggested_N = confident_suggestions(guess_N.astype(np.int64), p_N, y_N.astype(np.int64))
    return _make_features("training", x_NF, y_N, ids_N, np.arange(len(y_N)), suggested_N, p_N, classes)


def _read_test(folder: Path, classes: int) -> ImageFeatures | None:
    stored = files.read_arrays(folder / FEATURES, folder, MAX_FEATURES_BYTES)
    predictions = files.read_arrays(folder / PREDICTIONS, folder, MAX_PREDICTIONS_BYTES)
    logits_NC, all_labels_N = predictions.get("logits"), predictions["labels"]
    if len(all_labels_N) > MAX_IMAGES:
        return None
    items_N = evenly_spaced(len(all_labels_N), len(stored["labels"]))
    if not np.array_equal(all_labels_N[items_N], stored["labels"]):
        return None
    if not _is_labels(all_labels_N, len(all_labels_N), classes):
        return None
    suggested_N, p_N = np.full(len(items_N), -1), np.zeros(len(items_N))
    if logits_NC is not None:  # otherwise there are too many classes, and only duplicates are searched
        if logits_NC.shape != (len(all_labels_N), classes) or logits_NC.dtype.kind != "f":
            return None
        rows = np.arange(len(all_labels_N))
        blocks = zip(_split(all_labels_N, classes), _softmax_blocks(logits_NC, rows), strict=True)
        all_p_N = np.concatenate([p_BC[np.arange(len(y_B)), y_B] for y_B, p_BC in blocks])
        threshold_C = confidence_thresholds(all_p_N, all_labels_N, classes)
        blocks_BC = _softmax_blocks(logits_NC, items_N)
        suggested_N = np.concatenate([confident_classes(p_BC, threshold_C) for p_BC in blocks_BC])
        p_N = all_p_N[items_N]
    ids_N = stored.get("ids", items_N)
    return _make_features("test", stored["features"], stored["labels"], ids_N, items_N, suggested_N, p_N, classes)


def _split(rows_N: IntArray, classes: int) -> list[IntArray]:
    """Return rows in blocks whose probabilities fit into memory."""
    size = max(1, min(ROWS_AT_ONCE, MAX_BLOCK_VALUES // classes))
    return [rows_N[first : first + size] for first in range(0, len(rows_N), size)]


def _softmax_blocks(logits_NC: FloatArray, rows_N: IntArray) -> Iterator[FloatArray]:
    """Yield the probabilities of images in blocks, since those of all of them can take many times the memory of the logits."""
    for rows_B in _split(rows_N, logits_NC.shape[1]):
        logits_BC = logits_NC[rows_B].astype(np.float64)
        if not np.isfinite(logits_BC).all():
            raise ValueError("logits are not finite")
        exp_BC = np.exp(logits_BC - logits_BC.max(1, keepdims=True))
        yield exp_BC / exp_BC.sum(1, keepdims=True)


def _is_labels(y_N: np.ndarray, n: int, classes: int) -> bool:
    return bool(y_N.shape == (n,) and y_N.dtype.kind in "iu" and n and 0 <= y_N.min() <= y_N.max() < classes)


def _make_features(
    split: SplitName,
    x_NF: np.ndarray,
    y_N: np.ndarray,
    ids_N: np.ndarray,
    items_N: np.ndarray,
    suggested_N: np.ndarray,
    probability_N: np.ndarray,
    classes: int,
) -> ImageFeatures | None:
    """Return the features of a split; None if shapes or types are wrong. Rows that are not finite are left out."""
    n = len(x_NF)
    if n > MAX_IMAGES or x_NF.ndim < 2 or x_NF.dtype.kind != "f" or not _is_labels(y_N, n, classes):
        return None
    if ids_N.shape != (n,) or ids_N.dtype.kind not in "iuU" or ids_N.dtype.itemsize > 4 * MAX_ID_LENGTH:
        return None
    x_NF = x_NF.reshape(n, -1)
    if not 0 < x_NF.shape[1] <= MAX_FEATURE_DIM:
        return None
    finite = np.flatnonzero((np.abs(x_NF) <= MAX_FLOAT16).all(1))  # false for NaN
    found = ImageFeatures(split, x_NF, y_N.astype(np.int64), ids_N, items_N, suggested_N, probability_N).take(finite)
    return replace(found, x_NF=found.x_NF.astype(np.float32))
