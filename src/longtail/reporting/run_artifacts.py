"""Optional files of a run folder: logs, features, predictions, gradients, and example images.

A file that is missing, damaged or too large is treated as absent: the functions return None or an empty result.
"""

import base64
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from longtail import files, run_folder
from longtail.config.migrate import migrate_log_row
from longtail.metrics import BoolArray, FloatArray, IntArray, evenly_spaced
from longtail.schema import Schema, count, find_error, number, percent, share, text
from longtail.suspects import (
    FEATURES,
    MAX_FEATURE_DIM,
    MAX_FEATURES_BYTES,
    MAX_FLOAT16,
    MAX_IMAGES,
    MAX_PREDICTIONS_BYTES,
    PREDICTIONS,
)

READ_ERRORS = Exception  # a damaged archive or image can raise many types
CONFUSION_SHAPE: Schema = {"truth": count, "predicted": count, "share": share, "items": [count]}
RARE_CLASS_SHAPE: Schema = {"class": count, "accuracy": percent, "items": [count]}
EXAMPLES_SHAPE: dict[str, Any] = {
    "confusions": [CONFUSION_SHAPE],
    "best_rare": [RARE_CLASS_SHAPE],
    "worst_rare": [RARE_CLASS_SHAPE],
}
MAX_PNG_BYTES = 4096  # larger thumbnails are compressed with losses
MAX_THUMBNAIL_BYTES = 2**20  # thumbnails that longtail writes have at most 20 KB
MAX_THUMBNAIL_SIDE = 512  # pixels; thumbnails that longtail writes have at most 96
MAX_LOG_BYTES, MAX_LOG_LINES, MAX_LOG_VALUES = 2**24, 200_000, 1000  # the last: values in a line
MAX_INDEX_BYTES, MAX_EXAMPLE_ROWS, MAX_EXAMPLE_IMAGES = 2**22, 50, 20  # limits of examples/index.json


def read_log(run: run_folder.StartedRun) -> list[dict[str, Any]]:
    """Return the log as one row per epoch over all stages; a line that is still being written is skipped."""
    try:
        lines = files.read_bytes(run.folder / run_folder.LOG, MAX_LOG_BYTES, run.folder).splitlines()
    except OSError:
        return []
    rows = map(_parse_log_line, lines[:MAX_LOG_LINES])
    return [row for row in rows if row is not None]


def _parse_log_line(line: bytes) -> dict[str, Any] | None:
    """Return a line as a row, with None in place of values that are neither numbers nor text; None if it is not a row."""
    try:
        row = files.parse_json(line, MAX_LOG_VALUES)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    row = migrate_log_row(row)
    return {key: value if text(value) or (number(value) and abs(value) < 1e30) else None for key, value in row.items()}


def last_update(run: run_folder.StartedRun) -> float:
    """Return when the run last wrote its log or started, in seconds since 1970."""
    return max(_modified(run.folder / file) for file in (run_folder.LOG, run_folder.ENVIRONMENT))


def is_training(folder: Path) -> bool | None:
    """Return whether a process on this machine holds the lock of the run folder; None if there is no readable lock."""
    if not files.HAS_LOCKS:
        return None
    try:
        with files.open_regular(folder / run_folder.LOCK, folder=folder) as file:
            files.lock(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_features(run: run_folder.FinishedRun, max_images: int) -> tuple[FloatArray, IntArray] | None:
    """Return features (N, F) and labels (N,) of test images.

    Rows with values that do not fit half precision, in which features are stored, are left out.

    Args:
        run: A finished run.
        max_images: If there are more images, an evenly spaced subset of this size is returned.
    """
    try:
        stored = files.read_arrays(run.folder / FEATURES, run.folder, MAX_FEATURES_BYTES)
        x_NF, y_N = stored["features"], stored["labels"]
        if x_NF.dtype.kind != "f" or x_NF.ndim < 2 or y_N.dtype.kind not in "iu" or y_N.shape != x_NF.shape[:1]:
            return None
        x_NF = x_NF.reshape(len(y_N), -1)
        if x_NF.shape[1] > MAX_FEATURE_DIM:
            return None
        is_known = (y_N >= 0) & (y_N < len(run.metrics["per_class"]))
        valid = np.flatnonzero(is_known & (np.abs(x_NF) <= MAX_FLOAT16).all(1))  # false for NaN
    except READ_ERRORS:
        return None
    subset = valid[evenly_spaced(len(valid), max_images)]
    return x_NF[subset].astype(np.float64), y_N[subset].astype(np.int64)


def read_gradient_norms(run: run_folder.FinishedRun) -> FloatArray | None:
    """Return the mean gradient norm of each class's classifier weights (C,), over the last stage that trains the classifier."""
    try:
        stored = files.read_arrays(run.folder / run_folder.GRADIENTS, run.folder, MAX_FEATURES_BYTES)
        norms_EC, stages_E = stored["norms"].astype(np.float64), stored["stages"]
        if (
            stages_E.ndim != 1
            or stages_E.dtype.kind != "U"
            or norms_EC.shape != (len(stages_E), len(run.metrics["per_class"]))
        ):
            return None
        trained_E = ((norms_EC >= 0) & (norms_EC < 1e30)).all(1)  # false for NaN
        last_E = trained_E & (stages_E == stages_E[trained_E][-1])
    except READ_ERRORS:
        return None
    return np.asarray(norms_EC[last_E].mean(0))


def read_examples(run: run_folder.FinishedRun) -> dict[str, list[dict[str, Any]]]:
    """Return examples/index.json, with the keys confusions, best_rare and worst_rare."""
    try:
        path = run.folder / "examples/index.json"
        index = files.parse_json(files.read_text(path, limit=MAX_INDEX_BYTES, folder=run.folder))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(index, dict) or find_error(index, EXAMPLES_SHAPE) is not None:
        return {}
    classes = len(run.metrics["per_class"])

    def is_known(entry: dict[str, Any]) -> bool:
        return all(entry.get(key, 0) < classes for key in ("truth", "predicted", "class"))

    return {
        key: [e | {"items": e["items"][:MAX_EXAMPLE_IMAGES]} for e in index[key][:MAX_EXAMPLE_ROWS] if is_known(e)]
        for key in EXAMPLES_SHAPE
    }


def read_thumbnail(run: run_folder.FinishedRun, item: int) -> str | None:
    """Return the thumbnail of a test image as a data URI."""
    return read_thumbnail_file(run, f"{int(item)}.png")


def read_thumbnail_file(run: run_folder.FinishedRun, name: str) -> str | None:
    """Return a thumbnail as a data URI. It is decoded and encoded again, so that only its pixels get into the page.

    Args:
        run: The run.
        name: The name of the file in the folder of examples.
    """
    try:
        data = files.read_bytes(run.folder / "examples" / name, MAX_THUMBNAIL_BYTES, run.folder)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if max(image.size) > MAX_THUMBNAIL_SIDE:
                return None
            pixels = image.convert("RGB")
        encoded = io.BytesIO()
        if len(data) > MAX_PNG_BYTES:
            pixels.save(encoded, "WEBP", quality=80)
        else:
            pixels.save(encoded, "PNG")
    except READ_ERRORS:
        return None
    kind = "webp" if len(data) > MAX_PNG_BYTES else "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded.getvalue()).decode()}"


def train_counts(run: run_folder.FinishedRun) -> IntArray | None:
    """Return the training images of each class (C,); None for runs of older versions, which did not store them."""
    counts = run.metrics.get("counts") or run.environment.get("data", {}).get("counts")
    return np.asarray(counts) if counts and len(counts) == len(run.metrics.get("per_class", ())) else None


def test_counts(run: run_folder.FinishedRun) -> IntArray | None:
    """Return the test images of each class (C,)."""
    if run.metrics.get("confusion"):
        return np.asarray(run.metrics["confusion"]).sum(1)
    try:
        y_N = files.read_arrays(run.folder / PREDICTIONS, run.folder, MAX_PREDICTIONS_BYTES)["labels"]
        classes = len(run.metrics["per_class"])
        if y_N.ndim != 1 or len(y_N) > MAX_IMAGES or y_N.dtype.kind not in "iu":
            return None
        if len(y_N) and not 0 <= y_N.min() <= y_N.max() < classes:
            return None
        return np.bincount(y_N, minlength=classes)
    except READ_ERRORS:
        return None


class StoredPredictions(NamedTuple):
    """Labels of the test images (N,), whether the run classifies them correctly, and the predicted classes."""

    labels_N: IntArray
    correct_N: BoolArray
    predicted_N: IntArray


def read_predictions(run: run_folder.FinishedRun) -> StoredPredictions | None:
    """Return the predictions of a run on the test images."""
    path = run.folder / PREDICTIONS
    return _read_predictions(path, _modified(path))


@functools.lru_cache(maxsize=256)  # a page needs the same runs several times, and logits of many classes are large
def _read_predictions(path: Path, _: float) -> StoredPredictions | None:
    """Read a file; the time of its last modification is part of the cache key."""
    try:
        stored = files.read_arrays(path, path.parent, MAX_PREDICTIONS_BYTES)
        y_N = stored["labels"]
        if len(y_N) > MAX_IMAGES:
            return None
        predicted_N = stored["logits"].argmax(1) if "logits" in stored else stored["top_classes"][:, 0]
        is_valid = y_N.ndim == 1 and y_N.shape == predicted_N.shape and len(y_N) > 0 and y_N.dtype.kind in "iu"
        if not is_valid or y_N.min() < 0:
            return None
        return StoredPredictions(y_N.astype(np.int64), predicted_N == y_N, predicted_N.astype(np.int64))
    except READ_ERRORS:
        return None


def count_skipped(run: run_folder.FinishedRun) -> int:
    """Return the number of images that could not be read."""
    try:
        return files.read_bytes(run.folder / run_folder.SKIPPED, folder=run.folder).count(b"\n")
    except OSError:
        return 0
