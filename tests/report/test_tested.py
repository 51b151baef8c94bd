"""How many test images a verdict rests on, and what it says where they are too few."""

import json
import re
from html import unescape

import numpy as np
import pytest

from longtail import recipes, runs
from longtail.metrics import evaluate_guesses
from longtail.report import words
from longtail.report.chapter import make_chapters
from longtail.report.table import make_rows, to_markdown
from longtail.report.tested import SOUND, TOO_FEW, basis, noise
from longtail.report.verdict import verdict
from tests.report.made import make_run

COUNTS = [300, 120, 12, 4, 3]


def give(folder, images, right, seeds=3):
    """Runs of two methods on a test set with so many images of each class; the share of each that PaCo has right."""
    for method in ("ce", "paco"):
        for seed in range(seeds):
            run = make_run(folder / f"{method}/seed{seed}", recipes.digits_lt(method), seed, COUNTS)
            y_N = np.arange(len(COUNTS)).repeat(images)
            within_N = np.concatenate([np.arange(n) for n in images])
            hit_N = within_N < np.round(np.array(right) * images)[y_N]
            guess_N = np.where(hit_N & (method == "paco"), y_N, 0)
            names = [f"class {c}" for c in range(len(COUNTS))]
            metrics = json.loads((run / runs.METRICS).read_text())
            metrics |= evaluate_guesses(guess_N, np.full(len(y_N), 0.5), y_N, COUNTS, names)
            (run / runs.METRICS).write_text(json.dumps(metrics))
    return make_rows(runs.finished(folder))


def ground(rows):
    (chapter,) = make_chapters(rows)
    return words.test_noise(chapter)


def test_noise_is_that_of_other_test_sets():
    """Against test sets drawn at random, of a network that is right on a known share of each class."""
    rng, p_T, images_T = np.random.default_rng(0), np.array([0.2, 0.5, 0.9]), np.array([60, 200, 100])
    means = 100 * (rng.binomial(images_T, p_T, (20_000, 3)) / images_T).mean(1)
    assert noise(p_T, images_T) == pytest.approx(1.96 * means.std(), rel=0.03)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certain(share):
    """Of n images without a miss another set may well have one: about 100/n points at least."""
    for n in (1, 3, 10, 1000):
        assert noise(np.array([share]), np.array([n])) > 90 / n
    assert noise(np.full(3, share), np.ones(3, int)) > 40


@pytest.mark.parametrize(
    ("each", "sound"), [(1, False), ((TOO_FEW - 2) // 3, False), (TOO_FEW // 3 + 1, False), (4000, True)]
)
def test_few_test_images_are_a_caution_and_never_good(tmp_path, each, sound):
    found = ground(give(tmp_path, [5, 5, each, each, each], [1, 1, 1, 0, 1]))
    assert (
        found.sound is sound
        and f"{3 * each:,} test images" in found.says
        and "± 0.0" not in found.says.replace("\xa0", " ")
    )
    assert ("too few to decide" in found.says) == (3 * each < TOO_FEW)


def test_no_interval_is_called_good_below_a_hundred(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "figure_noise", lambda *_: 0.1)
    for images, sound in (((SOUND - 1) // 3, False), (SOUND // 3 + 1, True)):
        rows = give(tmp_path / str(images), [5, 5, *[images] * 3], [1] * 5)
        assert ground(rows).sound is sound


def test_the_verdict_counts_tested_classes_and_their_images(tmp_path):
    rows = give(tmp_path, [9, 9, 40, 60, 0], [1, 1, 0.5, 0.25, 1])
    rare, overall, *_, worth = verdict(rows)
    base = "mean over 2 classes, 100 test images, 1 more without test images left out"
    assert f"(fewer than 20 training images; {base}) PaCo is best with 37.5 %" in rare  # by images it would be 35
    assert "Caution" not in overall and "Yes: on rare classes" in worth
    assert f" few: {base}." in to_markdown(rows)


def test_too_few_images_decide_nothing(tmp_path):
    rows = give(tmp_path, [9, 9, 1, 1, 1], [1, 1, 1, 0, 1])
    _, caution, *_, worth = verdict(rows)
    assert caution == "Caution: The rare classes have 3 test images, too few to decide which method is better there."
    assert worth == "Is PaCo worth it? No verdict: the rare classes have 3 test images, too few to decide."
    *_, rare, overall = verdict(give(tmp_path / "more", [99, 99, 1, 1, 1], [1, 1, 1, 0, 1]))
    assert "No verdict: the rare classes" in rare
    assert overall.startswith("And over all? ") and "over all test images it is" in overall
    (chapter,) = make_chapters(rows)
    page = unescape(re.sub("<[^>]*>", "", "".join(map(str, words.summary(chapter)))))
    assert "mean over 3 classes, 3 test images" in page and caution in page
    assert "3 test images (too few to decide" in to_markdown(rows)


def test_a_run_that_does_not_tell_is_believed_to_have_some(tmp_path):
    run = give(tmp_path, [9, 9, 1, 1, 0], [1] * 5, seeds=1)[0].runs[0]
    run.metrics["confusion"] = None
    found = basis(run, "few")
    assert found.images is None and not found.too_few and str(found).startswith("mean over 2 classes")
    run.metrics["counts"], run.environment["data"]["counts"] = None, None
    assert basis(run, "few") is None
