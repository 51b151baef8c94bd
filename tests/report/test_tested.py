"""Tests of the number of test images behind a verdict."""

import json
import re
from html import unescape

import numpy as np
import pytest

from longtail import recipes, run_folder
from longtail.metrics import MIN_TEST_IMAGES, evaluate_predicted_classes
from longtail.reporting import summary
from longtail.reporting.dataset_results import group_by_dataset
from longtail.reporting.result_rows import make_rows
from longtail.reporting.significance import (
    MIN_IMAGES_FOR_GOOD,
    group_support,
    judge_paco,
    mean_half_width,
    overall_support,
)
from longtail.reporting.summary import is_paco_worth_it as worth_of
from longtail.reporting.summary import summary_lines
from longtail.reporting.table import to_markdown
from tests.expected_text import check_text
from tests.report.made import make_run

COUNTS = [300, 120, 12, 4, 3]


def give(folder, images, right, seeds=3):
    """Write runs of two methods on a test set with `images` images per class; `right` is the accuracy of PaCo by class."""
    for method in ("ce", "paco"):
        for seed in range(seeds):
            run = make_run(folder / f"{method}/seed{seed}", recipes.digits_lt(method), seed, COUNTS)
            y_N = np.arange(len(COUNTS)).repeat(images)
            within_N = np.concatenate([np.arange(n) for n in images])
            hit_N = within_N < np.round(np.array(right) * images)[y_N]
            guess_N = np.where(hit_N & (method == "paco"), y_N, 0)
            names = [f"class {c}" for c in range(len(COUNTS))]
            metrics = json.loads((run / run_folder.METRICS).read_text())
            metrics |= evaluate_predicted_classes(guess_N, np.full(len(y_N), 0.5), y_N, COUNTS, names)
            (run / run_folder.METRICS).write_text(json.dumps(metrics))
    return make_rows(run_folder.read_finished(folder))


def ground(rows):
    (dataset,) = group_by_dataset(rows)
    return summary.test_set_caveat(dataset)


def test_half_width_matches_random_test_sets():
    """The interval agrees with random test sets of a network with known accuracy."""
    rng, p_T, images_T = np.random.default_rng(0), np.array([0.2, 0.5, 0.9]), np.array([60, 200, 100])
    means = 100 * (rng.binomial(images_T, p_T, (20_000, 3)) / images_T).mean(1)
    assert mean_half_width(p_T, images_T) == pytest.approx(1.96 * means.std(), rel=0.03)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_perfect_and_zero_accuracy_have_uncertainty(share):
    """An accuracy of 0 or 100 % on n images has an uncertainty of about 100/n points."""
    for n in (1, 3, 10, 1000):
        assert mean_half_width(np.array([share]), np.array([n])) > 90 / n
    assert mean_half_width(np.full(3, share), np.ones(3, int)) > 40


@pytest.mark.parametrize(
    ("each", "sound"),
    [(1, False), ((MIN_TEST_IMAGES - 2) // 3, False), (MIN_TEST_IMAGES // 3 + 1, False), (4000, True)],
)
def test_few_test_images_are_a_caution(tmp_path, each, sound):
    rows = give(tmp_path, [5, 5, each, each, each], [1, 1, 1, 0, 1])
    found = ground(rows)
    assert (found.kind, found.is_good) == ("test-images", sound)
    assert f"{3 * each:,} test" in found.text and "± 0.0" not in found.text.replace("\xa0", " ")
    (dataset,) = group_by_dataset(rows)
    assert dataset.support.is_too_small == (3 * each < MIN_TEST_IMAGES)
    assert [caution.kind for caution in summary.test_set_cautions(dataset)] == [
        "test-images"
    ] * dataset.support.is_too_small


def test_fewer_than_100_images_are_never_good(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "accuracy_half_width", lambda *_: 0.1)
    for images, sound in (((MIN_IMAGES_FOR_GOOD - 1) // 3, False), (MIN_IMAGES_FOR_GOOD // 3 + 1, True)):
        rows = give(tmp_path / str(images), [5, 5, *[images] * 3], [1] * 5)
        assert ground(rows).is_good is sound


def test_support_counts_tested_classes_and_images(tmp_path):
    rows = give(tmp_path, [9, 9, 40, 60, 0], [1, 1, 0.5, 0.25, 1])
    (dataset,) = group_by_dataset(rows)
    base = dataset.support
    assert (len(base.classes_T), base.num_images, base.num_untested) == (2, 100, 1)
    rare, *_ = summary_lines(rows)
    assert str(base) in rare and "37.5 %" in rare  # by images it would be 35
    assert [*summary.test_set_cautions(dataset)] == [] and judge_paco(rows, base).kind == "yes"
    check_text("test_tested/basis", str(base))
    assert f" few: {base}." in to_markdown(rows)


def test_too_few_images_give_no_verdict(tmp_path):
    rows = give(tmp_path, [9, 9, 1, 1, 1], [1, 1, 1, 0, 1])
    (dataset,) = group_by_dataset(rows)
    assert (len(dataset.support.classes_T), dataset.support.num_images) == (3, 3)
    assert judge_paco(rows, dataset.support).kind == "too-few-images" and summary.group_leads(dataset) is None
    (caution,) = summary.test_set_cautions(dataset)
    assert (caution.kind, caution.is_good) == ("test-images", False)
    _, said, *_, worth = summary_lines(rows)
    assert said == f"Caution: {caution.text}"
    check_text("test_tested/too few", f"{said}\n{worth}")
    more = give(tmp_path / "more", [99, 99, 1, 1, 1], [1, 1, 1, 0, 1])
    (other,) = group_by_dataset(more)
    *_, rare, overall = summary_lines(more)
    assert [rare] == worth_of(more, other.support) and judge_paco(more, other.support).kind == "too-few-images"
    every = overall_support(more[0].runs[0])
    assert judge_paco(more, every).kind not in ("too-few-images", "too-few-seeds")
    assert overall.endswith(worth_of(more, every, question="")[0])
    page = unescape(re.sub("<[^>]*>", "", "".join(map(str, summary.summarize(dataset)))))
    assert str(dataset.support) in page and caution.text in page
    assert f"few: {dataset.support} (" in to_markdown(rows)


def test_unknown_number_of_images_is_not_too_small(tmp_path):
    run = give(tmp_path, [9, 9, 1, 1, 0], [1] * 5, seeds=1)[0].runs[0]
    run.metrics["confusion"] = None
    found = group_support(run, "few")
    assert found.num_images is None and not found.is_too_small
    assert len(found.classes_T) == 2 and "2 classes" in str(found)
    run.metrics["counts"], run.environment["data"]["counts"] = None, None
    assert group_support(run, "few") is None
