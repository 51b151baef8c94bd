"""What a run folder may hold beside its metrics. Nothing of it is needed: None, or nothing, where it is not there or broken."""

import base64
import fcntl
import functools
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from longtail import runs
from longtail.metrics import BoolArray, FloatArray, IntArray
from longtail.shapes import Shape, count, fault, number, text

BROKEN = Exception  # a damaged archive or image fails in many ways
PAIR: Shape = {"truth": count, "predicted": count, "share": number, "items": [count]}
RARE: Shape = {"class": count, "accuracy": number, "items": [count]}
EXAMPLES: Shape = {"confusions": [PAIR], "best_rare": [RARE], "worst_rare": [RARE]}
FEATURES, PREDICTIONS = "features.npz", "predictions.npz"
SMALL = 4096  # bytes; a larger thumbnail is made smaller by a codec that loses a little


def log(run: runs.Begun) -> list[dict[str, Any]]:
    """A row an epoch, over all stages; not what is just being written."""
    try:
        lines = (run.folder / runs.LOG).read_bytes().splitlines()
    except OSError:
        return []
    rows = map(_row, lines)
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """Numbers and words; None stands for a value that is neither, and for a line that is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return {key: value if number(value) or text(value) else None for key, value in row.items()}


def heard(run: runs.Begun) -> float:
    """When it last wrote: an epoch's line, or that it has begun; in seconds since 1970."""
    return max(_written(run.folder / file) for file in (runs.LOG, runs.ENVIRONMENT))


def at_work(folder: Path) -> bool | None:
    """Whether a process of this machine trains there, by the lock that it holds; None where there is no lock to look at."""
    try:
        with open(folder / runs.LOCK) as file:
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


def features(run: runs.Run, most: int) -> tuple[FloatArray, IntArray] | None:
    """Features of test images (N, F) and their labels (N,); of more than `most` so many at equal distances."""
    try:
        with np.load(run.folder / FEATURES, allow_pickle=False) as stored:
            x_NF, y_N = np.asarray(stored["features"], np.float64), np.asarray(stored["labels"], np.int64)
        known = (y_N >= 0) & (y_N < len(run.metrics["per_class"]))
        sound = np.flatnonzero(known & np.isfinite(x_NF.reshape(len(y_N), -1)).all(1))
    except BROKEN:
        return None
    some = sound[np.linspace(0, len(sound) - 1, min(len(sound), most)).round().astype(int)]
    return x_NF[some].reshape(len(some), -1), y_N[some]


def gradients(run: runs.Run) -> FloatArray | None:
    """Mean norm of the gradient of each class's classifier weights (C,), in the last stage in which the classifier learnt."""
    try:
        with np.load(run.folder / runs.GRADIENTS, allow_pickle=False) as stored:
            norms_EC, stages_E = np.asarray(stored["norms"], np.float64), np.asarray(stored["stages"])
        learnt_E = np.isfinite(norms_EC).all(1)
        last_E = learnt_E & (stages_E == stages_E[learnt_E][-1])
    except BROKEN:
        return None
    return np.asarray(norms_EC[last_E].mean(0))


def examples(run: runs.Run) -> dict[str, list[dict[str, Any]]]:
    """index.json of the thumbnails: confusions, best_rare, worst_rare."""
    try:
        index = json.loads((run.folder / "examples/index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) and fault(index, EXAMPLES) is None else {}


def thumbnail(run: runs.Run, item: int) -> str | None:
    """As a data URI."""
    try:
        data, kind = (run.folder / f"examples/{int(item)}.png").read_bytes(), "png"
        if len(data) > SMALL:
            data, kind = _webp(data), "webp"
    except BROKEN:
        return None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _webp(png: bytes) -> bytes:
    smaller = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(smaller, "WEBP", quality=80)
    return smaller.getvalue()


def counts(run: runs.Run) -> IntArray | None:
    """Training images of each class (C,); None for a run of an older version, which did not write them."""
    found = run.metrics.get("counts") or run.environment.get("data", {}).get("counts")
    return np.asarray(found) if found and len(found) == len(run.metrics.get("per_class", ())) else None


def tested(run: runs.Run) -> IntArray | None:
    """Test images of each class (C,)."""
    if run.metrics.get("confusion"):
        return np.asarray(run.metrics["confusion"]).sum(1)
    try:
        with np.load(run.folder / PREDICTIONS, allow_pickle=False) as stored:
            return np.bincount(stored["labels"], minlength=len(run.metrics["per_class"]))
    except BROKEN:
        return None


class Answers(NamedTuple):
    """Of the test images (N,): their classes, and whether the run has them right."""

    labels_N: IntArray
    right_N: BoolArray


def answers(run: runs.Run) -> Answers | None:
    path = run.folder / PREDICTIONS
    return _answers(path, _written(path))


@functools.lru_cache(maxsize=256)  # a page asks for the same runs again and again, and logits of many classes are large
def _answers(path: Path, _: float) -> Answers | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            y_N = np.asarray(stored["labels"], np.int64)
            guess_N = stored["logits"].argmax(1) if "logits" in stored else stored["top_classes"][:, 0]
    except BROKEN:
        return None
    sound = y_N.ndim == 1 and y_N.shape == guess_N.shape and len(y_N) > 0 and y_N.min() >= 0
    return Answers(y_N, guess_N == y_N) if sound else None


def skipped(run: runs.Run) -> int:
    """Images that could not be read."""
    try:
        return len((run.folder / runs.SKIPPED).read_bytes().splitlines())
    except OSError:
        return 0
