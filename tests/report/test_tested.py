"""How many test images a verdict rests on, and what it says where they are too few."""

import json
import re
from html import unescape

import numpy as np
import pytest

from longtail import recipes, run_folder
from longtail.metrics import evaluate_guesses
from longtail.reporting import words
from longtail.reporting.chapter import make_chapters
from longtail.reporting.table import make_rows, to_markdown
from longtail.reporting.tested import SOUND, TOO_FEW, basis, noise, whole
from longtail.reporting.verdict import judge, verdict
from longtail.reporting.verdict import worth as worth_of
from tests.expected_text import check_text
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
            metrics = json.loads((run / run_folder.METRICS).read_text())
            metrics |= evaluate_guesses(guess_N, np.full(len(y_N), 0.5), y_N, COUNTS, names)
            (run / run_folder.METRICS).write_text(json.dumps(metrics))
    return make_rows(run_folder.read_finished(folder))


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
    rows = give(tmp_path, [5, 5, each, each, each], [1, 1, 1, 0, 1])
    found = ground(rows)
    assert (found.kind, found.sound) == ("test-images", sound)
    assert f"{3 * each:,} test" in found.says and "± 0.0" not in found.says.replace("\xa0", " ")
    (chapter,) = make_chapters(rows)
    assert chapter.tested.too_few == (3 * each < TOO_FEW)
    assert [caution.kind for caution in words.cautions(chapter)] == ["test-images"] * chapter.tested.too_few


def test_no_interval_is_called_good_below_a_hundred(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "figure_noise", lambda *_: 0.1)
    for images, sound in (((SOUND - 1) // 3, False), (SOUND // 3 + 1, True)):
        rows = give(tmp_path / str(images), [5, 5, *[images] * 3], [1] * 5)
        assert ground(rows).sound is sound


def test_the_verdict_counts_tested_classes_and_their_images(tmp_path):
    rows = give(tmp_path, [9, 9, 40, 60, 0], [1, 1, 0.5, 0.25, 1])
    (chapter,) = make_chapters(rows)
    base = chapter.tested
    assert (len(base.classes_T), base.images, base.untested) == (2, 100, 1)
    rare, *_ = verdict(rows)
    assert str(base) in rare and "37.5 %" in rare  # by images it would be 35
    assert [*words.cautions(chapter)] == [] and judge(rows, base).kind == "yes"
    check_text("test_tested/basis", str(base))
    assert f" few: {base}." in to_markdown(rows)


def test_too_few_images_decide_nothing(tmp_path):
    rows = give(tmp_path, [9, 9, 1, 1, 1], [1, 1, 1, 0, 1])
    (chapter,) = make_chapters(rows)
    assert (len(chapter.tested.classes_T), chapter.tested.images) == (3, 3)
    assert judge(rows, chapter.tested).kind == "too-few-images" and words.sort_claims(chapter) is None
    (caution,) = words.cautions(chapter)
    assert (caution.kind, caution.sound) == ("test-images", False)
    _, said, *_, worth = verdict(rows)
    assert said == f"Caution: {caution.says}"
    check_text("test_tested/too few", f"{said}\n{worth}")
    more = give(tmp_path / "more", [99, 99, 1, 1, 1], [1, 1, 1, 0, 1])
    (other,) = make_chapters(more)
    *_, rare, overall = verdict(more)
    assert [rare] == worth_of(more, other.tested) and judge(more, other.tested).kind == "too-few-images"
    every = whole(more[0].runs[0])
    assert judge(more, every).kind not in ("too-few-images", "too-few-seeds")
    assert overall.endswith(worth_of(more, every, ask="")[0])
    page = unescape(re.sub("<[^>]*>", "", "".join(map(str, words.summary(chapter)))))
    assert str(chapter.tested) in page and caution.says in page
    assert f"few: {chapter.tested} (" in to_markdown(rows)


def test_a_run_that_does_not_tell_is_believed_to_have_some(tmp_path):
    run = give(tmp_path, [9, 9, 1, 1, 0], [1] * 5, seeds=1)[0].runs[0]
    run.metrics["confusion"] = None
    found = basis(run, "few")
    assert found.images is None and not found.too_few
    assert len(found.classes_T) == 2 and "2 classes" in str(found)
    run.metrics["counts"], run.environment["data"]["counts"] = None, None
    assert basis(run, "few") is None
