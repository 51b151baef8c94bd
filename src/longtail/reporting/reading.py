"""What a run folder may hold beside its metrics. Nothing of it is needed: None, or nothing, where it is not there or broken."""

import base64
import fcntl
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from longtail import files, run_folder
from longtail.config.migrate import migrate_log_row
from longtail.metrics import BoolArray, FloatArray, IntArray
from longtail.schema import Schema, count, find_error, number, percent, share, text

BROKEN = Exception  # a damaged archive or image fails in many ways
PAIR: Schema = {"truth": count, "predicted": count, "share": share, "items": [count]}
RARE: Schema = {"class": count, "accuracy": percent, "items": [count]}
EXAMPLES: dict[str, Any] = {"confusions": [PAIR], "best_rare": [RARE], "worst_rare": [RARE]}
FEATURES, PREDICTIONS = "features.npz", "predictions.npz"
SMALL = 4096  # bytes; a larger thumbnail is made smaller by a codec that loses a little
THUMBNAIL_LIMIT = 2**20  # bytes of a file; those that are written have at most some 20 KB
THUMBNAIL_SIDE = 512  # pixels; those that are written have at most 96
LOG_LIMIT, EPOCHS_LIMIT, ROW_VALUES = 2**24, 200_000, 1000  # bytes, lines, values in a line
INDEX_LIMIT, EXAMPLE_ROWS, EXAMPLE_IMAGES = 2**22, 50, 20  # bytes of index.json; what is shown of it
FEATURES_LIMIT, PREDICTIONS_LIMIT = 2**28, 2**30  # bytes after decompression
MOST_FEATURES, MOST_LABELS = (
    16_384,
    2**21,
)  # columns of the feature map; test images, of which 256 runs are kept in memory
LARGEST_FEATURE = 65_504  # of half precision, in which features are stored


def log(run: run_folder.StartedRun) -> list[dict[str, Any]]:
    """A row an epoch, over all stages; not what is just being written."""
    try:
        lines = files.read_bytes(run.folder / run_folder.LOG, LOG_LIMIT, run.folder).splitlines()
    except OSError:
        return []
    rows = map(_row, lines[:EPOCHS_LIMIT])
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """Numbers and words; None stands for a value that is neither, and for a line that is no row."""
    try:
        row = files.parse_json(line, ROW_VALUES)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    row = migrate_log_row(row)
    return {key: value if text(value) or (number(value) and abs(value) < 1e30) else None for key, value in row.items()}


def heard(run: run_folder.StartedRun) -> float:
    """When it last wrote: an epoch's line, or that it has begun; in seconds since 1970."""
    return max(_written(run.folder / file) for file in (run_folder.LOG, run_folder.ENVIRONMENT))


def at_work(folder: Path) -> bool | None:
    """Whether a process of this machine trains there, by the lock that it holds; None where there is no lock to look at."""
    try:
        with files.open_regular(folder / run_folder.LOCK, folder=folder) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def features(run: run_folder.FinishedRun, most: int) -> tuple[FloatArray, IntArray] | None:
    """Features of test images (N, F) and their labels (N,); of more than `most` so many at equal distances.

    Rows with values that features never have (they are stored in half precision) are left out.
    """
    try:
        stored = files.read_arrays(run.folder / FEATURES, run.folder, FEATURES_LIMIT)
        x_NF, y_N = stored["features"], stored["labels"]
        if x_NF.dtype.kind != "f" or x_NF.ndim < 2 or y_N.dtype.kind not in "iu" or y_N.shape != x_NF.shape[:1]:
            return None
        x_NF = x_NF.reshape(len(y_N), -1)
        if x_NF.shape[1] > MOST_FEATURES:
            return None
        known = (y_N >= 0) & (y_N < len(run.metrics["per_class"]))
        sound = np.flatnonzero(known & (np.abs(x_NF) <= LARGEST_FEATURE).all(1))  # false for NaN
    except BROKEN:
        return None
    some = sound[np.linspace(0, len(sound) - 1, min(len(sound), most)).round().astype(int)]
    return x_NF[some].astype(np.float64), y_N[some].astype(np.int64)


def gradients(run: run_folder.FinishedRun) -> FloatArray | None:
    """Mean norm of the gradient of each class's classifier weights (C,), in the last stage in which the classifier learned."""
    try:
        stored = files.read_arrays(run.folder / run_folder.GRADIENTS, run.folder, FEATURES_LIMIT)
        norms_EC, stages_E = stored["norms"].astype(np.float64), stored["stages"]
        if (
            stages_E.ndim != 1
            or stages_E.dtype.kind != "U"
            or norms_EC.shape != (len(stages_E), len(run.metrics["per_class"]))
        ):
            return None
        learned_E = ((norms_EC >= 0) & (norms_EC < 1e30)).all(1)  # false for NaN
        last_E = learned_E & (stages_E == stages_E[learned_E][-1])
    except BROKEN:
        return None
    return np.asarray(norms_EC[last_E].mean(0))


def examples(run: run_folder.FinishedRun) -> dict[str, list[dict[str, Any]]]:
    """index.json of the thumbnails: confusions, best_rare, worst_rare."""
    try:
        index = files.parse_json(
            files.read_text(run.folder / "examples/index.json", limit=INDEX_LIMIT, folder=run.folder)
        )
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(index, dict) or find_error(index, EXAMPLES) is not None:
        return {}
    classes = len(run.metrics["per_class"])

    def is_known(entry: dict[str, Any]) -> bool:
        return all(entry.get(key, 0) < classes for key in ("truth", "predicted", "class"))

    return {
        key: [e | {"items": e["items"][:EXAMPLE_IMAGES]} for e in index[key][:EXAMPLE_ROWS] if is_known(e)]
        for key in EXAMPLES
    }


def thumbnail(run: run_folder.FinishedRun, item: int) -> str | None:
    """Return a thumbnail as a data URI; it is decoded and encoded again, so that nothing but its pixels gets into the page."""
    try:
        data = files.read_bytes(run.folder / f"examples/{int(item)}.png", THUMBNAIL_LIMIT, run.folder)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if max(image.size) > THUMBNAIL_SIDE:
                return None
            pixels = image.convert("RGB")
        small = io.BytesIO()
        if len(data) > SMALL:
            pixels.save(small, "WEBP", quality=80)
        else:
            pixels.save(small, "PNG")
    except BROKEN:
        return None
    kind = "webp" if len(data) > SMALL else "png"
    return f"data:image/{kind};base64,{base64.b64encode(small.getvalue()).decode()}"


def counts(run: run_folder.FinishedRun) -> IntArray | None:
    """Training images of each class (C,); None for a run of an older version, which did not write them."""
    found = run.metrics.get("counts") or run.environment.get("data", {}).get("counts")
    return np.asarray(found) if found and len(found) == len(run.metrics.get("per_class", ())) else None


def tested(run: run_folder.FinishedRun) -> IntArray | None:
    """Test images of each class (C,)."""
    if run.metrics.get("confusion"):
        return np.asarray(run.metrics["confusion"]).sum(1)
    try:
        y_N = files.read_arrays(run.folder / PREDICTIONS, run.folder, PREDICTIONS_LIMIT)["labels"]
        classes = len(run.metrics["per_class"])
        if y_N.ndim != 1 or len(y_N) > MOST_LABELS or y_N.dtype.kind not in "iu":
            return None
        if len(y_N) and not 0 <= y_N.min() <= y_N.max() < classes:
            return None
        return np.bincount(y_N, minlength=classes)
    except BROKEN:
        return None


class Answers(NamedTuple):
    """Of the test images (N,): their classes, and whether the run has them right."""

    labels_N: IntArray
    right_N: BoolArray


def answers(run: run_folder.FinishedRun) -> Answers | None:
    path = run.folder / PREDICTIONS
    return _answers(path, _written(path))


@functools.lru_cache(maxsize=256)  # a page asks for the same runs again and again, and logits of many classes are large
def _answers(path: Path, _: float) -> Answers | None:
    try:
        stored = files.read_arrays(path, path.parent, PREDICTIONS_LIMIT)
        y_N = stored["labels"]
        if len(y_N) > MOST_LABELS:
            return None
        guess_N = stored["logits"].argmax(1) if "logits" in stored else stored["top_classes"][:, 0]
        sound = y_N.ndim == 1 and y_N.shape == guess_N.shape and len(y_N) > 0 and y_N.dtype.kind in "iu"
        return Answers(y_N.astype(np.int64), guess_N == y_N) if sound and y_N.min() >= 0 else None
    except BROKEN:
        return None


def skipped(run: run_folder.FinishedRun) -> int:
    """Images that could not be read."""
    try:
        return files.read_bytes(run.folder / run_folder.SKIPPED, folder=run.folder).count(b"\n")
    except OSError:
        return 0
