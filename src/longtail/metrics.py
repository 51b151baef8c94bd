"""From logits and class counts: top-1, many/medium/few, per class, macro-F1, calibration, shifted test priors.

Every accuracy, F1, confidence and calibration error here is a percentage, from 0 to 100. NumPy only.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.errors import UserError

# Shapes: N test images, C classes.
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

BINS = 15  # of equal width over the confidence, as in Guo et al. 2017
MAX_CLASSES_FOR_MATRICES = 1_000  # classes; of more no matrix is kept, be it classes by classes or images by classes
SHIFTS = (2, 5, 10, 25, 50)  # imbalance factors of the shifted test priors, as in LADE (Hong et al. 2021)


TOO_FEW = 50  # test images; of fewer a share of a half is not known within 14 points, whatever the seeds say


def shot_groups(counts: npt.ArrayLike) -> dict[str, BoolArray]:
    """Masks over the classes: more than 100, 20 to 100, and fewer than 20 training images (OLTR's bounds)."""
    n = np.asarray(counts)
    return {"many": n > 100, "medium": (n >= 20) & (n <= 100), "few": n < 20}


def evaluate_predictions(
    logits: npt.ArrayLike, labels: npt.ArrayLike, counts: npt.ArrayLike, class_names: Sequence[str]
) -> dict[str, Any]:
    """All figures of `metrics.json` that follow from logits (N, C); `counts` (C,) are those of the training set.

    Logits that are not finite are a UserError.
    """
    scores_NC, images = np.asarray(logits, np.float64), len(np.asarray(labels))
    if scores_NC.shape != (images, len(class_names)):
        shapes = f"logits {scores_NC.shape}, {images} labels, {len(class_names)} class names"
        raise ValueError(f"these do not belong together: {shapes}")
    refuse_broken(np.logical_not(np.isfinite(scores_NC).all(1)))
    return evaluate_guesses(scores_NC.argmax(1), confidence(scores_NC), labels, counts, class_names)


def evaluate_guesses(
    guesses: npt.ArrayLike,
    confidences: npt.ArrayLike,
    labels: npt.ArrayLike,
    counts: npt.ArrayLike,
    class_names: Sequence[str],
) -> dict[str, Any]:
    """The same from the class that is guessed for each image (N,) and its probability (N,).

    Percentages throughout. None stands where there is nothing to average: a shot group without a class, a class without a test
    image. `confusion` counts images, its rows are the truth; of more than MANY classes it is None, as predictions.npz tells.
    """
    guess_N, p_N, y_N, n_C = _checked(guesses, confidences, labels, counts, class_names)
    hits_C, images_C, guessed_C = (np.bincount(c_N, minlength=len(n_C)) for c_N in (y_N[guess_N == y_N], y_N, guess_N))
    acc_C = _class_accuracies(hits_C, images_C)
    bins = _calibration(p_N, guess_N == y_N)
    return {
        "top1": 100 * float(np.mean(guess_N == y_N)),
        **{group: _mean(acc_C[mask]) for group, mask in shot_groups(n_C).items()},
        "per_class": [None if np.isnan(a) else float(a) for a in acc_C],
        "counts": n_C.tolist(),
        "class_names": list(class_names),
        "macro_f1": _macro_f1(hits_C, images_C, guessed_C),
        "ece": _expected_calibration_error(bins),
        "calibration": bins,
        "confusion": _confusion(y_N, guess_N, len(n_C)).tolist() if len(n_C) <= MAX_CLASSES_FOR_MATRICES else None,
        "shifted": _shifted(acc_C, n_C),
    }


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1) over seeds; one value has no deviation."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired_difference(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of first - second over the seeds they share, and half the width of its t interval; two seeds at least."""
    mean, std = mean_std([a - b for a, b in zip(first, second, strict=True)])
    if std is None:
        raise ValueError("one difference has no interval")
    return mean, t_quantile(len(first) - 1, level) * std / math.sqrt(len(first))


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = level, for whole degrees of freedom."""
    low, high = 0.0, math.pi / 2  # angles: t = sqrt(freedom) * tan(angle), and the probability rises with the angle
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < t), a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sin, cos = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cos if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    if not odd:
        return sin * total
    return 2 / math.pi * (angle + (sin * total if freedom > 1 else 0.0))


def _checked(
    guesses: npt.ArrayLike,
    confidences: npt.ArrayLike,
    labels: npt.ArrayLike,
    counts: npt.ArrayLike,
    class_names: Sequence[str],
) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    guess, y, n = (np.asarray(whole, np.int64) for whole in (guesses, labels, counts))
    p = np.asarray(confidences, np.float64)
    if not guess.shape == p.shape == y.shape or len(n) != len(class_names) or len(y) == 0:
        shapes = f"guesses {guess.shape}, labels {y.shape}, counts {n.shape}, {len(class_names)} class names"
        raise ValueError(f"these do not belong together: {shapes}")
    return guess, p, y, n


def refuse_broken(broken_N: BoolArray) -> None:
    """Whose logits are not finite: argmax would take a NaN for the largest, and a diverged run would pass for a poor one."""
    if broken_N.any():
        which = f"{broken_N.sum()} of {len(broken_N)} images"
        raise UserError(f"the logits of {which} are not finite: the run diverged, lower --optim.lr", kind="non-finite")


def _confusion(y_N: IntArray, guess_N: IntArray, classes: int) -> IntArray:
    flat = np.bincount(y_N * classes + guess_N, minlength=classes * classes)
    return flat.reshape(classes, classes).astype(np.int64)


def _class_accuracies(hits_C: IntArray, images_C: IntArray) -> FloatArray:
    """Accuracy of each class, NaN where it has no test image."""
    return np.where(images_C > 0, 100 * hits_C / np.maximum(images_C, 1), np.nan)


def _mean(acc: FloatArray) -> float | None:
    """Mean over the classes that have test images."""
    known = acc[~np.isnan(acc)]
    return float(known.mean()) if len(known) else None


def _macro_f1(hits_C: IntArray, images_C: IntArray, guessed_C: IntArray) -> float:
    """Mean F1 over the classes that have test images, as the means of shot groups are."""
    there = images_C > 0
    return 100 * float(np.mean(2 * hits_C[there] / (images_C + guessed_C)[there]))


def confidence(logits_NC: npt.ArrayLike) -> FloatArray:
    """Largest softmax probability of each row, in (0, 1]: with the maximum subtracted its numerator is exp(0)."""
    scores_NC = np.asarray(logits_NC, np.float64)
    return np.asarray(1 / np.exp(scores_NC - scores_NC.max(1, keepdims=True)).sum(1))


def _calibration(confidence_N: FloatArray, right_N: BoolArray) -> list[dict[str, Any]]:
    """Bins (low, high] of the confidence, with the mean confidence and the accuracy of the images in each."""
    edges = np.linspace(0, 1, BINS + 1)
    bin_N = np.searchsorted(edges[1:-1], confidence_N, side="left")
    return [_bin(edges[b], edges[b + 1], confidence_N[bin_N == b], right_N[bin_N == b]) for b in range(BINS)]


def _bin(low: float, high: float, confidence: FloatArray, right: BoolArray) -> dict[str, Any]:
    full = len(right) > 0
    return {
        "low": 100 * float(low),
        "high": 100 * float(high),
        "count": len(right),
        "confidence": 100 * float(confidence.mean()) if full else None,
        "accuracy": 100 * float(right.mean()) if full else None,
    }


def _expected_calibration_error(bins: list[dict[str, Any]]) -> float:
    images = sum(b["count"] for b in bins)
    return float(sum(b["count"] / images * abs(b["confidence"] - b["accuracy"]) for b in bins if b["count"]))


def _shifted(acc_C: FloatArray, counts_C: IntArray) -> dict[str, Any]:
    """Accuracy on a long-tailed test set: as the training set is (forward), or against it (backward)."""
    last = max(len(counts_C) - 1, 1)
    rank_C = np.empty(len(counts_C))
    rank_C[np.argsort(-counts_C, kind="stable")] = np.arange(len(counts_C))
    return {
        "forward": {str(f): _weighted(acc_C, f ** (-rank_C / last)) for f in SHIFTS},
        "uniform": _mean(acc_C),
        "backward": {str(f): _weighted(acc_C, f ** (rank_C / last - 1)) for f in SHIFTS},
    }


def _weighted(acc_C: FloatArray, weight_C: FloatArray) -> float:
    tested = ~np.isnan(acc_C)
    return float(np.average(acc_C[tested], weights=weight_C[tested]))
