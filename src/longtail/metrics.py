"""Metrics of a classifier on long-tailed data, and the registry of all metrics that runs store and reports show.

Computed from predictions and class counts: top-1, many/medium/few, per-class accuracy, macro F1, calibration error, and
accuracy under shifted test priors. Accuracies, F1 scores, confidences and calibration errors are percentages from 0 to 100.
This module needs NumPy only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longtail.errors import UserError

# Shapes: N test images, C classes.
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

CALIBRATION_BINS = 15  # of equal width over the confidence, as in Guo et al. 2017
MAX_CLASSES_FOR_MATRICES = 1_000  # with more classes no (C, C) or (N, C) matrix is stored
SHIFT_FACTORS = (2, 5, 10, 25, 50)  # imbalance factors of the shifted test priors, as in LADE (Hong et al. 2021)
MIN_TEST_IMAGES = 50  # with fewer images an accuracy near 50 % has an uncertainty of 14 points or more


@dataclass(frozen=True)
class ShotGroup:
    """A range of training images per class, both ends included (the bounds of OLTR, Liu et al. 2019)."""

    low: float
    high: float
    description: str


SHOT_GROUPS = {
    "many": ShotGroup(101, math.inf, "more than 100"),
    "medium": ShotGroup(20, 100, "20 to 100"),
    "few": ShotGroup(0, 19, "fewer than 20"),
}


@dataclass(frozen=True)
class Metric:
    """How a metric is stored and shown."""

    key: str
    """Name in metrics.json."""
    heading: str
    """Column heading in tables."""
    digits: int = 1
    """Digits after the decimal point."""
    description: str = ""
    """Explanation for captions; the three shot groups are explained together with `top1`."""
    higher_is_better: bool = False
    is_percentage: bool = False
    is_required: bool = False
    """Every record of a reproduced table has it."""
    is_training_cost: bool = False
    """Measured while training, and kept when a run is evaluated again."""
    stored_in: Literal["metrics", "environment"] = "metrics"
    """The file of a run folder that holds it."""
    in_tables: bool = False
    """Shown in table.md, in the terminal and in the report."""
    min_width: int = 0
    """Terminal width in columns from which tables show it."""
    in_paper_details: bool = False
    """Shown in the detailed tables of reproduced results."""
    cost_position: int | None = None
    """Position in the cost table of the report; None: not shown there."""
    cost_unit: float = 1.0
    """Stored values are divided by this in the cost table."""


def _accuracy(key: str, heading: str, description: str = "", **options: Any) -> Metric:
    options = {"higher_is_better": True, "in_paper_details": True} | options
    return Metric(key, heading, 1, description, is_percentage=True, in_tables=True, **options)


_ACCURACIES = (
    "accuracy over all images, and mean over classes with many (>100), medium (20-100) and few (<20) training images"
)
_REGISTRY = [
    _accuracy("top1", "all", _ACCURACIES, is_required=True),
    *(_accuracy(group, group) for group in SHOT_GROUPS),
    _accuracy("macro_f1", "F1", "macro F1", min_width=170, in_paper_details=False),
    _accuracy("ece", "ECE", "expected calibration error (lower is better)", higher_is_better=False, min_width=100),
    _accuracy("knn_top1", "k-NN", "k-NN accuracy of the features", min_width=170),
    Metric(
        "seconds",
        "seconds",
        0,
        "seconds of training",
        is_required=True,
        is_training_cost=True,
        in_tables=True,
        min_width=130,
        in_paper_details=True,
        cost_position=1,
    ),
    Metric(
        "setup_seconds",
        "setup seconds",
        description="seconds of compilation and capture, or of computing features and cross-validation",
        is_training_cost=True,
    ),
    Metric("together", "parallel seeds", 0, "seeds trained in parallel on the device", is_training_cost=True),
    Metric(
        "peak_memory",
        "peak memory, MB",
        0,
        "peak memory, MB",
        is_training_cost=True,
        cost_position=2,
        cost_unit=1e6,
    ),
    Metric(
        "latency_b64",
        "ms",
        description="milliseconds for a batch of 64",
        in_tables=True,
        min_width=130,
        in_paper_details=True,
        cost_position=0,
    ),
    Metric(
        "parameters",
        "parameters",
        0,
        "parameters",
        stored_in="environment",
        in_tables=True,
        min_width=130,
        in_paper_details=True,
        cost_position=3,
    ),
    Metric(
        "logistic_top1",
        "logistic regression",
        description="accuracy of a class-balanced logistic regression on the same features",
        higher_is_better=True,
        is_percentage=True,
    ),
    Metric("experts_asked", "experts", description="mean number of experts evaluated per image"),
]
METRICS = {metric.key: metric for metric in _REGISTRY}
"""All metrics by key, in the order in which tables show them."""

TABLE_METRICS = [key for key, metric in METRICS.items() if metric.in_tables]
PAPER_METRICS = [key for key, metric in METRICS.items() if metric.in_paper_details]
COST_METRICS = sorted(
    (key for key, metric in METRICS.items() if metric.cost_position is not None),
    key=lambda key: METRICS[key].cost_position or 0,
)
TRAINING_COSTS = [key for key, metric in METRICS.items() if metric.is_training_cost]
# few before many: a phone shows the first two columns
REPORT_METRICS = ["top1", *reversed(SHOT_GROUPS)]
REPORT_METRICS += [key for key in TABLE_METRICS if METRICS[key].is_percentage and key not in REPORT_METRICS]


def shot_groups(counts: npt.ArrayLike) -> dict[str, BoolArray]:
    """Return a mask over the classes for each group: many (> 100 training images), medium (20 to 100) and few (< 20)."""
    n = np.asarray(counts)
    return {name: (n >= group.low) & (n <= group.high) for name, group in SHOT_GROUPS.items()}


def evaluate_predictions(
    logits: npt.ArrayLike, labels: npt.ArrayLike, counts: npt.ArrayLike, class_names: Sequence[str]
) -> dict[str, Any]:
    """Compute the metrics of `metrics.json` that follow from logits.

    Args:
        logits: Array (N, C).
        labels: Classes (N,) of the test images.
        counts: Training images (C,) of each class.
        class_names: Names of the C classes.

    Raises:
        UserError: If a logit is not finite.
    """
    scores_NC, images = np.asarray(logits, np.float64), len(np.asarray(labels))
    if scores_NC.shape != (images, len(class_names)):
        shapes = f"logits {scores_NC.shape}, {images} labels, {len(class_names)} class names"
        raise ValueError(f"shapes do not match: {shapes}")
    check_finite_logits(np.logical_not(np.isfinite(scores_NC).all(1)))
    return evaluate_predicted_classes(scores_NC.argmax(1), top_confidence(scores_NC), labels, counts, class_names)


def evaluate_predicted_classes(
    predicted: npt.ArrayLike,
    confidences: npt.ArrayLike,
    labels: npt.ArrayLike,
    counts: npt.ArrayLike,
    class_names: Sequence[str],
) -> dict[str, Any]:
    """Compute the metrics of `metrics.json` from predicted classes and their probabilities.

    A value is None where there is nothing to average: a shot group without classes, or a class without test images. The rows
    of `confusion` are the true classes, its values numbers of images; with more than MAX_CLASSES_FOR_MATRICES classes it is
    None (predictions.npz has the same information).

    Args:
        predicted: Predicted class (N,) of each test image.
        confidences: Probability (N,) of the predicted class, from 0 to 1.
        labels: True classes (N,).
        counts: Training images (C,) of each class.
        class_names: Names of the C classes.
    """
    guess_N, p_N, y_N, n_C = _to_arrays(predicted, confidences, labels, counts, class_names)
    hits_C, images_C, guessed_C = (np.bincount(c_N, minlength=len(n_C)) for c_N in (y_N[guess_N == y_N], y_N, guess_N))
    acc_C = _class_accuracies(hits_C, images_C)
    bins = _calibration(p_N, guess_N == y_N)
    accuracies = {
        "top1": 100 * float(np.mean(guess_N == y_N)),
        **{group: _mean(acc_C[mask]) for group, mask in shot_groups(n_C).items()},
    }
    return accuracies | {
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
    """Return mean and sample standard deviation (n - 1); the deviation of a single value is None."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired_difference(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the mean of first - second and half the width of its t interval.

    Args:
        first: Values of one method, one per seed; at least two.
        second: Values of the other method for the same seeds.
        level: Confidence level.
    """
    mean, std = mean_std([a - b for a, b in zip(first, second, strict=True)])
    if std is None:
        raise ValueError("an interval needs at least two differences")
    return mean, t_quantile(len(first) - 1, level) * std / math.sqrt(len(first))


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Return the t with P(|T| < t) = level, for an integer number of degrees of freedom."""
    low, high = 0.0, math.pi / 2  # angles: t = sqrt(freedom) * tan(angle), and the probability rises with the angle
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _central_probability(angle: float, freedom: int) -> float:
    """Return P(|T| < t) as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sin, cos = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cos if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos * cos * (k - 1) / k
        total += term
    if not odd:
        return sin * total
    return 2 / math.pi * (angle + (sin * total if freedom > 1 else 0.0))


def evenly_spaced(n: int, most: int) -> IntArray:
    """Return the indices of n items, or `most` evenly spaced ones if there are more."""
    return np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)


def _to_arrays(
    predicted: npt.ArrayLike,
    confidences: npt.ArrayLike,
    labels: npt.ArrayLike,
    counts: npt.ArrayLike,
    class_names: Sequence[str],
) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    """Convert the arguments to arrays and check that their shapes match."""
    guess, y, n = (np.asarray(values, np.int64) for values in (predicted, labels, counts))
    p = np.asarray(confidences, np.float64)
    if not guess.shape == p.shape == y.shape or len(n) != len(class_names) or len(y) == 0:
        shapes = f"predicted {guess.shape}, labels {y.shape}, counts {n.shape}, {len(class_names)} class names"
        raise ValueError(f"shapes do not match: {shapes}")
    return guess, p, y, n


def check_finite_logits(broken_N: BoolArray) -> None:
    """Raise a UserError if an image has logits that are not finite.

    argmax treats NaN as the largest value, so a diverged run would otherwise look like one with a low accuracy.
    """
    if broken_N.any():
        images = f"{broken_N.sum()} of {len(broken_N)} images"
        raise UserError(f"the logits of {images} are not finite: the run diverged, lower --optim.lr", kind="non-finite")


def _confusion(y_N: IntArray, guess_N: IntArray, classes: int) -> IntArray:
    flat = np.bincount(y_N * classes + guess_N, minlength=classes * classes)
    return flat.reshape(classes, classes).astype(np.int64)


def _class_accuracies(hits_C: IntArray, images_C: IntArray) -> FloatArray:
    """Return the accuracy of each class, NaN for a class without test images."""
    return np.where(images_C > 0, 100 * hits_C / np.maximum(images_C, 1), np.nan)


def _mean(acc: FloatArray) -> float | None:
    """Return the mean over the classes that have test images."""
    known = acc[~np.isnan(acc)]
    return float(known.mean()) if len(known) else None


def _macro_f1(hits_C: IntArray, images_C: IntArray, guessed_C: IntArray) -> float:
    """Return the mean F1 over the classes that have test images, as for the means of shot groups."""
    tested = images_C > 0
    return 100 * float(np.mean(2 * hits_C[tested] / (images_C + guessed_C)[tested]))


def top_confidence(logits_NC: npt.ArrayLike) -> FloatArray:
    """Return the largest softmax probability of each row, in (0, 1].

    With the maximum subtracted, its numerator is exp(0).
    """
    scores_NC = np.asarray(logits_NC, np.float64)
    return np.asarray(1 / np.exp(scores_NC - scores_NC.max(1, keepdims=True)).sum(1))


def _calibration(confidence_N: FloatArray, right_N: BoolArray) -> list[dict[str, Any]]:
    """Return bins (low, high] of the confidence with the mean confidence and the accuracy of their images."""
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    bin_N = np.searchsorted(edges[1:-1], confidence_N, side="left")
    return [
        _bin(edges[b], edges[b + 1], confidence_N[bin_N == b], right_N[bin_N == b]) for b in range(CALIBRATION_BINS)
    ]


def _bin(low: float, high: float, confidence: FloatArray, right: BoolArray) -> dict[str, Any]:
    has_images = len(right) > 0
    return {
        "low": 100 * float(low),
        "high": 100 * float(high),
        "count": len(right),
        "confidence": 100 * float(confidence.mean()) if has_images else None,
        "accuracy": 100 * float(right.mean()) if has_images else None,
    }


def _expected_calibration_error(bins: list[dict[str, Any]]) -> float:
    images = sum(b["count"] for b in bins)
    return float(sum(b["count"] / images * abs(b["confidence"] - b["accuracy"]) for b in bins if b["count"]))


def _shifted(acc_C: FloatArray, counts_C: IntArray) -> dict[str, Any]:
    """Return the accuracy on test sets skewed like the training set (forward) or the opposite way (backward)."""
    last = max(len(counts_C) - 1, 1)
    rank_C = np.empty(len(counts_C))
    rank_C[np.argsort(-counts_C, kind="stable")] = np.arange(len(counts_C))
    return {
        "forward": {str(f): _weighted_mean(acc_C, f ** (-rank_C / last)) for f in SHIFT_FACTORS},
        "uniform": _mean(acc_C),
        "backward": {str(f): _weighted_mean(acc_C, f ** (rank_C / last - 1)) for f in SHIFT_FACTORS},
    }


def _weighted_mean(acc_C: FloatArray, weight_C: FloatArray) -> float:
    """Return the weighted mean over the classes that have test images."""
    tested = ~np.isnan(acc_C)
    return float(np.average(acc_C[tested], weights=weight_C[tested]))
