"""Tests of metrics against plain Python loops and scikit-learn."""

import math

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score  # type: ignore[import-untyped]

from longtail import metrics
from longtail.metrics import evaluate_predicted_classes, evaluate_predictions, mean_std, paired_difference, t_quantile
from tests.raises import raises

COUNTS = [300, 20, 100, 101, 19, 20, 1]
NAMES = [f"class {c}" for c in range(7)]


@pytest.fixture(scope="module")
def case():
    """Return logits with an accuracy above one half; the last class has no test image."""
    generator = np.random.RandomState(0)
    labels = generator.randint(0, 6, 500)
    logits = generator.randn(500, 7) * 2
    logits[np.arange(500), labels] += 1.5
    return logits, labels


@pytest.fixture(scope="module")
def figures(case):
    return evaluate_predictions(*case, COUNTS, NAMES)


def slow_per_class(logits, labels):
    found = []
    for c in range(logits.shape[1]):
        hits = [int(row.argmax() == c) for row, y in zip(logits, labels, strict=True) if y == c]
        found.append(100 * sum(hits) / len(hits) if hits else None)
    return found


def slow_ece(logits, labels, bins=15):
    cells = [[] for _ in range(bins)]
    for row, y in zip(logits, labels, strict=True):
        powers = [math.exp(v - max(row)) for v in row]
        confidence = max(powers) / sum(powers)
        cell = next(b for b in range(bins) if b / bins < confidence <= (b + 1) / bins)
        cells[cell].append((confidence, float(row.argmax() == y)))
    gaps = [abs(sum(c for c, _ in cell) - sum(r for _, r in cell)) for cell in cells]
    return 100 * sum(gaps) / len(labels), [len(cell) for cell in cells]


def test_accuracies(case, figures):
    per_class = slow_per_class(*case)
    assert figures["per_class"] == pytest.approx(per_class)
    assert per_class[6] is None
    assert figures["top1"] == pytest.approx(100 * np.mean(case[0].argmax(1) == case[1]))
    assert figures["many"] == pytest.approx((per_class[0] + per_class[3]) / 2)
    assert figures["medium"] == pytest.approx((per_class[1] + per_class[2] + per_class[5]) / 3)
    assert figures["few"] == pytest.approx(per_class[4])  # class 6 is few as well, but cannot be tested
    assert (figures["counts"], figures["class_names"]) == (COUNTS, NAMES)


def test_confusion_and_f1_match_scikit_learn(case, figures):
    guess = case[0].argmax(1)
    assert figures["confusion"] == confusion_matrix(case[1], guess, labels=range(7)).tolist()
    there = np.unique(case[1])
    assert figures["macro_f1"] == pytest.approx(100 * f1_score(case[1], guess, average="macro", labels=there))


def test_f1_ignores_classes_without_test_images():
    """A class without test images does not count, whether it was predicted or not."""
    logits = np.eye(4)[[0, 1, 1, 3]]
    figures = evaluate_predictions(logits, [0, 1, 0, 0], [1] * 4, "abcd")
    expected = f1_score([0, 1, 0, 0], [0, 1, 1, 3], average="macro", labels=[0, 1])
    assert figures["macro_f1"] == pytest.approx(100 * expected)


def test_calibration(case, figures):
    ece, sizes = slow_ece(*case)
    assert figures["ece"] == pytest.approx(ece)
    assert [b["count"] for b in figures["calibration"]] == sizes
    assert figures["calibration"][0] == {"low": 0, "high": 100 / 15, "count": 0, "confidence": None, "accuracy": None}
    assert all(b["low"] < b["confidence"] <= b["high"] for b in figures["calibration"] if b["count"])


def test_shifted_priors(figures):
    order = [0, 3, 2, 1, 5, 4, 6]  # by COUNTS, equal ones in label order
    for direction, ranked in (("forward", order), ("backward", order[::-1])):
        for factor in (2, 5, 10, 25, 50):
            top = bottom = 0.0
            for rank, c in enumerate(ranked):
                if figures["per_class"][c] is not None:
                    top += factor ** (-rank / 6) * figures["per_class"][c]
                    bottom += factor ** (-rank / 6)
            assert figures["shifted"][direction][str(factor)] == pytest.approx(top / bottom)
    assert figures["shifted"]["uniform"] == pytest.approx(np.mean(figures["per_class"][:6]))


def test_empty_groups_are_none():
    figures = evaluate_predictions(np.eye(2), [0, 1], [500, 500], "ab")
    assert (figures["many"], figures["medium"], figures["few"]) == (100, None, None)


def test_perfect_and_certain():
    figures = evaluate_predictions(np.eye(3) * 1e4, [0, 1, 2], [200, 50, 5], "abc")
    assert figures["top1"] == figures["macro_f1"] == figures["shifted"]["backward"]["50"] == 100
    assert figures["ece"] == 0 and figures["calibration"][-1]["count"] == 3


def test_softmax_is_safe_for_large_and_half_precision_logits():
    logits = np.array([[6e4, -6e4], [-6e4, 6e4]], np.float16)
    assert evaluate_predictions(logits, [0, 0], [1, 1], "ab")["ece"] == pytest.approx(50)


def test_figures_are_plain_json(figures):
    import json

    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_shape_mismatch_raises(case):
    for arguments in ((*case, COUNTS[1:], NAMES), (*case, COUNTS, NAMES[1:]), (np.empty((0, 7)), [], COUNTS, NAMES)):
        with pytest.raises(ValueError, match="class names"):
            evaluate_predictions(*arguments)
    with raises("non-finite", "1", "500"):
        evaluate_predictions(np.where(np.arange(500)[:, None] == 3, np.nan, case[0]), case[1], COUNTS, NAMES)


def test_no_confusion_matrix_for_many_classes(case, figures, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_CLASSES_FOR_MATRICES", 6)  # there are 7
    many = evaluate_predictions(*case, COUNTS, NAMES)
    assert many["confusion"] is None and many | {"confusion": figures["confusion"]} == figures


def test_a_million_classes():
    """A matrix over the classes would have 10^12 entries."""
    classes = 1_000_000
    guess, truth = np.arange(100) * 7, np.arange(100) * 9_999
    figures = evaluate_predicted_classes(guess, np.full(100, 0.25), truth, np.ones(classes), range(classes))
    assert figures["top1"] == 1 and figures["ece"] == pytest.approx(24)
    assert len(figures["per_class"]) == classes and figures["per_class"][0] == 100 and figures["per_class"][1] is None
    assert figures["macro_f1"] == pytest.approx(100 / len({*truth}))


def test_mean_std():
    assert mean_std([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3)))
    assert mean_std([3.0]) == (3.0, None)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272)]
)
def test_t_quantile_matches_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=1e-6)


def test_t_quantile_of_another_level():
    assert t_quantile(5, 0.99) == pytest.approx(4.032143, abs=1e-6)


def test_paired_difference():
    mean, half = paired_difference([51.0, 53.0, 52.0, 54.0], [50.0, 50.0, 50.0, 52.0])
    assert mean == 2 and half == pytest.approx(3.182446 * math.sqrt(2 / 3) / 2, rel=1e-6)
    with pytest.raises(ValueError):
        paired_difference([1.0], [2.0])


def test_order_of_columns():
    accuracies = ["top1", "many", "medium", "few"]
    costs = ["seconds", "latency_b64", "parameters"]
    assert [*accuracies, "macro_f1", "ece", "knn_top1", *costs] == metrics.TABLE_METRICS
    assert [*accuracies, "ece", "knn_top1", *costs] == metrics.PAPER_METRICS
    assert metrics.REPORT_METRICS == ["top1", "few", "medium", "many", "macro_f1", "ece", "knn_top1"]
    assert metrics.COST_METRICS == ["latency_b64", "seconds", "peak_memory", "parameters"]
    assert metrics.TRAINING_COSTS == ["seconds", "setup_seconds", "together", "peak_memory"]


def test_bounds_of_shot_groups():
    groups = metrics.shot_groups([0, 19, 20, 100, 101])
    assert {name: mask.nonzero()[0].tolist() for name, mask in groups.items()} == {
        "many": [4],
        "medium": [2, 3],
        "few": [0, 1],
    }
