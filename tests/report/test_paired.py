"""Tests of image-by-image comparison: whether a lead exceeds the noise of the test set."""

import json
import re
from html import unescape

import numpy as np
import pytest

from longtail import files as safe_files
from longtail import recipes, run_folder
from longtail.metrics import evaluate_predicted_classes
from longtail.reporting import run_artifacts, summary
from longtail.reporting.dataset_results import group_by_dataset
from longtail.reporting.result_rows import make_rows
from longtail.reporting.significance import (
    difference_half_width,
    explain_doubt,
    judge_paco,
    mean_half_width,
    paired_half_width,
)
from longtail.reporting.summary import is_paco_worth_it, summary_lines
from tests.expected_text import check_text
from tests.report.made import make_run

SEEDS = (0, 1, 2)


def answered(folder, method, counts, labels, right, files=True):
    """Write runs of a method that classify these images correctly in every seed; `files`: with predictions."""
    y_N, names = np.array(labels), [f"class {c}" for c in range(len(counts))]
    guess_N = np.where(right, y_N, (y_N + 1) % len(counts))
    for seed in SEEDS:
        run = make_run(folder / f"{method}/seed{seed}", recipes.digits_lt(method), seed, counts)
        metrics = json.loads((run / run_folder.METRICS).read_text())
        metrics |= evaluate_predicted_classes(guess_N, np.full(len(y_N), 0.5), y_N, counts, names)
        (run / run_folder.METRICS).write_text(json.dumps(metrics))
        if files:
            np.savez_compressed(run / run_artifacts.PREDICTIONS, logits=np.eye(len(counts))[guess_N], labels=y_N)


def first(n, right):
    return np.arange(n) < right


def concluded(folder):
    """Return the leads of the best method, the judgment on PaCo, and the results; check that both are shown."""
    rows = make_rows(run_folder.read_finished(folder))
    (dataset,) = group_by_dataset(rows)
    claims, judgment = summary.group_leads(dataset), judge_paco(dataset.comparable, dataset.support)
    shown = unescape(re.sub("<[^>]*>", "", str(summary.conclusion(dataset) or "")))
    others = [] if claims is None else [*claims.significant, *claims.likely, *claims.inconclusive]
    assert bool(others) == bool(shown) and all(label in shown for label in others)
    assert not others or claims.best in shown
    assert judgment is None or summary_lines(rows)[-1] == is_paco_worth_it(dataset.comparable, dataset.support)[0]
    return claims, judgment, dataset


def claim(sure: bool, best="PaCo", other="Cross-entropy"):
    return summary.Leads(best, [other] if sure else [], [] if sure else [other], [])


def rare(folder, n, ours, theirs, **options):
    """Compare two methods on a class with many images and a rare class with `n` test images."""
    for method, right in (("paco", ours), ("ce", theirs)):
        labels, all_right = [0] * 10 + [1] * n, np.r_[np.ones(10, bool), right]
        answered(folder, method, [500, 5], labels, all_right, **options)
    return concluded(folder)


def everything(folder, n, ours, theirs, **options):
    """Compare two methods on two frequent classes, so that all test images are judged."""
    for method, right in (("paco", first(n, ours)), ("ce", first(n, theirs))):
        answered(folder, method, [150, 150], [0] * (n // 2) + [1] * (n - n // 2), right, **options)
    return concluded(folder)


def change(folder, edit, file=run_folder.METRICS):
    for path in folder.rglob(file):
        tree = json.loads(path.read_text())
        edit(tree)
        path.write_text(json.dumps(tree))


@pytest.mark.parametrize("classes", [1, 3])
def test_interval_matches_random_test_sets(classes):
    """The interval agrees with random test sets of two methods with correlated errors."""
    rng, n, both, mine, theirs = np.random.default_rng(0), 400, 0.5, 0.2, 0.1
    kinds = rng.choice(3, (5000, classes, n), p=[both, mine, 1 - both - mine])
    d = np.where(kinds == 1, 1.0, 0.0) - (rng.random(kinds.shape) < theirs) * (kinds == 2)
    place_N = np.arange(classes).repeat(n)
    half = np.mean([paired_half_width(one.ravel(), place_N) for one in d[:50]])
    assert half == pytest.approx(1.96 * 100 * d.mean(2).mean(1).std(), rel=0.05)


def test_zero_difference_has_uncertainty():
    assert paired_half_width(np.zeros(10), np.zeros(10, int)) > 100 / 10


def test_lead_from_few_images_is_only_likely(tmp_path):
    """60 of 60 against 57 of 60 is not significant (exact McNemar test: p = 0.25)."""
    for files in (True, False):
        claims, judgment, dataset = rare(tmp_path / f"few{files}", 60, first(60, 60), first(60, 57), files=files)
        assert claims == claim(sure=False) and judgment.kind == "likely"
        assert judgment.comparison.difference == pytest.approx(5)
        check_text("test_paired/narrow", page_and_terminal(dataset))
    claims, judgment, dataset = rare(tmp_path / "more", 60, first(60, 60), first(60, 48))
    assert claims == claim(sure=True) and judgment.kind == "yes" and judgment.comparison.difference == pytest.approx(20)
    check_text("test_paired/clear", page_and_terminal(dataset))
    claims, judgment, _ = rare(tmp_path / "behind", 60, first(60, 57), first(60, 60))
    assert claims == claim(sure=False, best="Cross-entropy", other="PaCo") and judgment.kind == "likely-not"
    assert judgment.comparison.difference == pytest.approx(-5)


def page_and_terminal(dataset) -> str:
    page = unescape(re.sub("<[^>]*>", "", str(summary.conclusion(dataset))))
    return "\n".join([page, *is_paco_worth_it(dataset.comparable, dataset.support)])


def test_significant_and_inconclusive_leads_are_both_shown(tmp_path):
    rare(tmp_path, 60, first(60, 60), first(60, 48))
    labels = [0] * 10 + [1] * 60
    answered(tmp_path, "balanced-softmax", [500, 5], labels, np.r_[np.ones(10, bool), first(60, 60)])
    claims, judgment, dataset = concluded(tmp_path)
    assert {claims.best, *claims.inconclusive} == {"PaCo", "Balanced Softmax"} and claims.significant == [
        "Cross-entropy"
    ]
    assert claims.likely == [] and (judgment.kind, judgment.other) == ("tied", "Balanced Softmax")
    check_text("test_paired/undecided", page_and_terminal(dataset))


def test_comparison_is_paired_by_image(tmp_path):
    """60 against 54 % of 200 images is significant if the errors are nested, and not if they are independent."""
    n, ours, theirs = 200, first(200, 120), first(200, 108)
    for name, other, files, sure in (
        ("same", theirs, True, True),
        ("others", theirs[::-1], True, False),
        ("untold", theirs, False, False),
    ):
        claims, judgment, dataset = rare(tmp_path / name, n, ours, other, files=files)
        assert claims == claim(sure) and judgment.kind == ("yes" if sure else "likely"), name
        alone = [mean_half_width(np.array([share]), np.array([n])) for share in (0.6, 0.54)]
        half = difference_half_width(*dataset.comparable, SEEDS, dataset.support)
        assert half is None if not files else (half < np.hypot(*alone)) == sure and half < sum(alone)


@pytest.mark.parametrize("spoilt", ["torn", "other labels", "another order", "fewer", "no answers", "none"])
def test_mismatched_predictions_are_not_compared(tmp_path, spoilt):
    rare(tmp_path, 200, first(200, 120), first(200, 108))
    file = tmp_path / "ce/seed1" / run_artifacts.PREDICTIONS
    stored = dict(np.load(file))
    if spoilt == "another order":
        for path in (tmp_path / "ce").rglob(run_artifacts.PREDICTIONS):
            np.savez(path, **{name: array[::-1] for name, array in stored.items()})
    elif spoilt == "torn":
        file.write_bytes(file.read_bytes()[:100])
    elif spoilt == "none":
        file.unlink()
    else:
        changed = {"other labels": {"labels": stored["labels"][::-1]}, "no answers": {"logits": np.zeros(3)}}
        fewer = {name: array[:-1] for name, array in stored.items()}
        np.savez(file, **(fewer if spoilt == "fewer" else stored | changed[spoilt]))
    claims, judgment, dataset = concluded(tmp_path)
    assert claims == claim(sure=False) and judgment.kind == "likely"
    assert difference_half_width(*dataset.comparable, SEEDS, dataset.support) is None


def test_top_classes_are_accepted_as_predictions(tmp_path):
    rare(tmp_path, 200, first(200, 120), first(200, 108))
    for file in tmp_path.rglob(run_artifacts.PREDICTIONS):
        with np.load(file) as stored:
            labels, guess_N = stored["labels"], stored["logits"].argmax(1)
        np.savez(file, top_classes=np.stack([guess_N, 1 - guess_N], 1), labels=labels)
    assert concluded(tmp_path)[0] == claim(sure=True)


def test_predictions_are_read_once_and_only_if_needed(tmp_path, monkeypatch):
    seen, load = [], safe_files.read_arrays
    monkeypatch.setattr(safe_files, "read_arrays", lambda path, *args: seen.append(path) or load(path, *args))
    rare(tmp_path / "near", 200, first(200, 120), first(200, 108))
    assert sorted(seen) == sorted(path for path in (tmp_path / "near").rglob(run_artifacts.PREDICTIONS))
    seen.clear()
    assert rare(tmp_path / "far", 200, first(200, 180), first(200, 20))[0] == claim(sure=True) and not seen


# Where there are no rare classes


def test_without_rare_classes_all_images_are_used(tmp_path):
    claims, judgment, dataset = everything(tmp_path / "few", 20, 20, 19)
    assert claims is None and judgment.kind == "too-few-images"
    ground, (caution,) = summary.test_set_caveat(dataset), summary.test_set_cautions(dataset)
    assert (ground.kind, ground.is_good) == (caution.kind, caution.is_good) == ("test-images", False)
    assert dataset.support.num_images == 20 and "20 test" in ground.text and "20 test" in caution.text
    assert 'data-kind="test-images"' in str(summary.summarize(dataset)[1])
    claims, judgment, dataset = everything(tmp_path / "likely", 60, 60, 57)
    assert claims == claim(sure=False) and judgment.kind == "likely" and dataset.support.classes_T is None
    assert judgment.comparison.difference == pytest.approx(5)
    claims, judgment, _ = everything(tmp_path / "sure", 60, 60, 40)
    assert claims == claim(sure=True) and judgment.kind == "yes"


def test_without_class_counts_all_images_are_used(tmp_path):
    rare(tmp_path, 9, first(9, 9), first(9, 0))
    change(tmp_path, lambda tree: tree.pop("counts"))
    change(tmp_path, lambda tree: tree["data"].pop("counts"), run_folder.ENVIRONMENT)
    claims, judgment, dataset = concluded(tmp_path)
    assert dataset.rare_group == "few" and claims is None and judgment.kind == "too-few-images"
    assert dataset.support.classes_T is None and dataset.support.num_images == 19
    rare_, _, caution, _ = summary.summarize(dataset)
    assert str(dataset.support) not in str(rare_) and 'data-kind="test-images"' in str(caution)


def test_unknown_number_of_test_images_is_a_caution(tmp_path):
    everything(tmp_path, 60, 60, 0, files=False)
    change(tmp_path, lambda tree: tree.pop("confusion"))
    claims, judgment, dataset = concluded(tmp_path)
    assert claims == claim(sure=False) and judgment.kind == "likely" and dataset.support.num_images is None
    assert explain_doubt(dataset.support) in page_and_terminal(dataset)
    ground = summary.test_set_caveat(dataset)
    assert (ground.kind, ground.is_good) == ("test-images", False)


def test_methods_without_the_metric_are_ignored(tmp_path):
    rare(tmp_path, 60, first(60, 60), first(60, 57))
    change(tmp_path / "paco", lambda tree: tree.update(few=None))
    _, judgment, dataset = concluded(tmp_path)
    assert judgment is None and is_paco_worth_it(dataset.comparable, dataset.support) == []


@pytest.mark.parametrize(("counts", "said"), [([200, 50, 10, 5], "2 classes"), ([200, 60, 50, 5], "one class")])
def test_rarest_classes_without_test_images_are_named(tmp_path, counts, said):
    untested = sum(n < 20 for n in counts)
    labels = [c for c in range(4 - untested) for _ in range(30)]
    for method in ("ce", "paco"):
        answered(tmp_path, method, counts, labels, first(len(labels), 50))
    (dataset,) = group_by_dataset(make_rows(run_folder.read_finished(tmp_path)))
    (caution,) = [caution for caution in summary.test_set_cautions(dataset) if caution.kind == "untested-classes"]
    assert not caution.is_good and said in caution.text
    assert sum(caution.text in line for line in summary_lines(dataset.rows)) == 1
    answered(tmp_path / "all", "ce", counts, [*labels, *range(4)], first(len(labels) + 4, 50))
    assert "untested-classes" not in kinds_of_cautions(tmp_path / "all")


def test_classes_between_without_test_images_are_not_the_rarest(tmp_path):
    for method in ("ce", "paco"):
        answered(tmp_path, method, [200, 50, 5], [0] * 30 + [2] * 60, first(90, 50))
    assert kinds_of_cautions(tmp_path) == []


def kinds_of_cautions(folder) -> list[str]:
    (dataset,) = group_by_dataset(make_rows(run_folder.read_finished(folder)))
    return [caution.kind for caution in summary.test_set_cautions(dataset)]
