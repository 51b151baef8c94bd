"""Whether a lead would outlast other test images, on the page and in a terminal: by the answers to each image."""

import json
import re
from html import unescape

import numpy as np
import pytest

from longtail import files as safe_files
from longtail import recipes, run_folder
from longtail.metrics import evaluate_guesses
from longtail.reporting import reading, words
from longtail.reporting.chapter import make_chapters
from longtail.reporting.paired import difference_noise, doubt
from longtail.reporting.table import make_rows
from longtail.reporting.tested import noise, paired_noise
from longtail.reporting.verdict import judge, verdict, worth
from tests.expected_text import check_text
from tests.report.made import make_run

SEEDS = (0, 1, 2)


def answered(folder, method, counts, labels, right, files=True):
    """Runs of a method that has these images right, in every seed; `files`: with their predictions."""
    y_N, names = np.array(labels), [f"class {c}" for c in range(len(counts))]
    guess_N = np.where(right, y_N, (y_N + 1) % len(counts))
    for seed in SEEDS:
        run = make_run(folder / f"{method}/seed{seed}", recipes.digits_lt(method), seed, counts)
        metrics = json.loads((run / run_folder.METRICS).read_text())
        metrics |= evaluate_guesses(guess_N, np.full(len(y_N), 0.5), y_N, counts, names)
        (run / run_folder.METRICS).write_text(json.dumps(metrics))
        if files:
            np.savez_compressed(run / reading.PREDICTIONS, logits=np.eye(len(counts))[guess_N], labels=y_N)


def first(n, right):
    return np.arange(n) < right


def concluded(folder):
    """Return what is claimed of the best method, the judgment on PaCo, and the chapter; both are said as they are."""
    rows = make_rows(run_folder.read_finished(folder))
    (chapter,) = make_chapters(rows)
    claims, judgment = words.sort_claims(chapter), judge(chapter.peers, chapter.tested)
    shown = unescape(re.sub("<[^>]*>", "", str(words.conclusion(chapter) or "")))
    others = [] if claims is None else [*claims.clear, *claims.narrow, *claims.undecided]
    assert bool(others) == bool(shown) and all(label in shown for label in others)
    assert not others or claims.best in shown
    assert judgment is None or verdict(rows)[-1] == worth(chapter.peers, chapter.tested)[0]
    return claims, judgment, chapter


def claim(sure: bool, best="PaCo", other="Cross-entropy"):
    return words.Claims(best, [other] if sure else [], [] if sure else [other], [])


def rare(folder, n, ours, theirs, **options):
    """A class of many images, and a rare one of `n` test images."""
    for method, right in (("paco", ours), ("ce", theirs)):
        labels, all_right = [0] * 10 + [1] * n, np.r_[np.ones(10, bool), right]
        answered(folder, method, [500, 5], labels, all_right, **options)
    return concluded(folder)


def everything(folder, n, ours, theirs, **options):
    """Two classes of many images each: what is judged are all test images."""
    for method, right in (("paco", first(n, ours)), ("ce", first(n, theirs))):
        answered(folder, method, [150, 150], [0] * (n // 2) + [1] * (n - n // 2), right, **options)
    return concluded(folder)


def change(folder, edit, file=run_folder.METRICS):
    for path in folder.rglob(file):
        tree = json.loads(path.read_text())
        edit(tree)
        path.write_text(json.dumps(tree))


@pytest.mark.parametrize("classes", [1, 3])
def test_the_interval_is_that_of_other_test_sets(classes):
    """Against test sets drawn at random, of methods that are right on the same images more often than not."""
    rng, n, both, mine, theirs = np.random.default_rng(0), 400, 0.5, 0.2, 0.1
    kinds = rng.choice(3, (5000, classes, n), p=[both, mine, 1 - both - mine])
    d = np.where(kinds == 1, 1.0, 0.0) - (rng.random(kinds.shape) < theirs) * (kinds == 2)
    place_N = np.arange(classes).repeat(n)
    half = np.mean([paired_noise(one.ravel(), place_N) for one in d[:50]])
    assert half == pytest.approx(1.96 * 100 * d.mean(2).mean(1).std(), rel=0.05)


def test_no_difference_is_not_certain():
    assert paired_noise(np.zeros(10), np.zeros(10, int)) > 100 / 10


def test_what_a_few_images_decide_is_only_likely(tmp_path):
    """60 of 60 against 57 of 60: three images in one direction are nothing (exact McNemar test: p = 0.25)."""
    for files in (True, False):
        claims, judgment, chapter = rare(tmp_path / f"few{files}", 60, first(60, 60), first(60, 57), files=files)
        assert claims == claim(sure=False) and judgment.kind == "likely"
        assert judgment.found.difference == pytest.approx(5)
        check_text("test_paired/narrow", page_and_terminal(chapter))
    claims, judgment, chapter = rare(tmp_path / "more", 60, first(60, 60), first(60, 48))
    assert claims == claim(sure=True) and judgment.kind == "yes" and judgment.found.difference == pytest.approx(20)
    check_text("test_paired/clear", page_and_terminal(chapter))
    claims, judgment, _ = rare(tmp_path / "behind", 60, first(60, 57), first(60, 60))
    assert claims == claim(sure=False, best="Cross-entropy", other="PaCo") and judgment.kind == "likely-not"
    assert judgment.found.difference == pytest.approx(-5)


def page_and_terminal(chapter) -> str:
    page = unescape(re.sub("<[^>]*>", "", str(words.conclusion(chapter))))
    return "\n".join([page, *worth(chapter.peers, chapter.tested)])


def test_what_is_undecided_is_said_beside_what_is_sure(tmp_path):
    rare(tmp_path, 60, first(60, 60), first(60, 48))
    labels = [0] * 10 + [1] * 60
    answered(tmp_path, "balanced-softmax", [500, 5], labels, np.r_[np.ones(10, bool), first(60, 60)])
    claims, judgment, chapter = concluded(tmp_path)
    assert {claims.best, *claims.undecided} == {"PaCo", "Balanced Softmax"} and claims.clear == ["Cross-entropy"]
    assert claims.narrow == [] and (judgment.kind, judgment.other) == ("tied", "Balanced Softmax")
    check_text("test_paired/undecided", page_and_terminal(chapter))


def test_methods_are_compared_image_by_image(tmp_path):
    """60 against 54 % of 200 images: much where the one has all right that the other has, little where it has others."""
    n, ours, theirs = 200, first(200, 120), first(200, 108)
    for name, other, files, sure in (
        ("same", theirs, True, True),
        ("others", theirs[::-1], True, False),
        ("untold", theirs, False, False),
    ):
        claims, judgment, chapter = rare(tmp_path / name, n, ours, other, files=files)
        assert claims == claim(sure) and judgment.kind == ("yes" if sure else "likely"), name
        alone = [noise(np.array([share]), np.array([n])) for share in (0.6, 0.54)]
        half = difference_noise(*chapter.peers, SEEDS, chapter.tested)
        assert half is None if not files else (half < np.hypot(*alone)) == sure and half < sum(alone)


@pytest.mark.parametrize("spoilt", ["torn", "other labels", "another order", "fewer", "no answers", "none"])
def test_answers_that_do_not_fit_are_not_compared(tmp_path, spoilt):
    rare(tmp_path, 200, first(200, 120), first(200, 108))
    file = tmp_path / "ce/seed1" / reading.PREDICTIONS
    stored = dict(np.load(file))
    if spoilt == "another order":
        for path in (tmp_path / "ce").rglob(reading.PREDICTIONS):
            np.savez(path, **{name: array[::-1] for name, array in stored.items()})
    elif spoilt == "torn":
        file.write_bytes(file.read_bytes()[:100])
    elif spoilt == "none":
        file.unlink()
    else:
        changed = {"other labels": {"labels": stored["labels"][::-1]}, "no answers": {"logits": np.zeros(3)}}
        fewer = {name: array[:-1] for name, array in stored.items()}
        np.savez(file, **(fewer if spoilt == "fewer" else stored | changed[spoilt]))
    claims, judgment, chapter = concluded(tmp_path)
    assert claims == claim(sure=False) and judgment.kind == "likely"
    assert difference_noise(*chapter.peers, SEEDS, chapter.tested) is None


def test_the_largest_logits_are_answers_too(tmp_path):
    rare(tmp_path, 200, first(200, 120), first(200, 108))
    for file in tmp_path.rglob(reading.PREDICTIONS):
        with np.load(file) as stored:
            labels, guess_N = stored["labels"], stored["logits"].argmax(1)
        np.savez(file, top_classes=np.stack([guess_N, 1 - guess_N], 1), labels=labels)
    assert concluded(tmp_path)[0] == claim(sure=True)


def test_a_file_is_read_once_and_only_where_it_may_matter(tmp_path, monkeypatch):
    seen, load = [], safe_files.read_arrays
    monkeypatch.setattr(safe_files, "read_arrays", lambda path, *args: seen.append(path) or load(path, *args))
    rare(tmp_path / "near", 200, first(200, 120), first(200, 108))
    assert sorted(seen) == sorted(path for path in (tmp_path / "near").rglob(reading.PREDICTIONS))
    seen.clear()
    assert rare(tmp_path / "far", 200, first(200, 180), first(200, 20))[0] == claim(sure=True) and not seen


# Where there are no rare classes


def test_without_rare_classes_all_test_images_are_judged(tmp_path):
    claims, judgment, chapter = everything(tmp_path / "few", 20, 20, 19)
    assert claims is None and judgment.kind == "too-few-images"
    ground, (caution,) = words.test_noise(chapter), words.cautions(chapter)
    assert (ground.kind, ground.sound) == (caution.kind, caution.sound) == ("test-images", False)
    assert chapter.tested.images == 20 and "20 test" in ground.says and "20 test" in caution.says
    assert 'data-kind="test-images"' in str(words.summary(chapter)[1])
    claims, judgment, chapter = everything(tmp_path / "likely", 60, 60, 57)
    assert claims == claim(sure=False) and judgment.kind == "likely" and chapter.tested.classes_T is None
    assert judgment.found.difference == pytest.approx(5)
    claims, judgment, _ = everything(tmp_path / "sure", 60, 60, 40)
    assert claims == claim(sure=True) and judgment.kind == "yes"


def test_where_classes_have_no_counts_all_test_images_are_judged(tmp_path):
    rare(tmp_path, 9, first(9, 9), first(9, 0))
    change(tmp_path, lambda tree: tree.pop("counts"))
    change(tmp_path, lambda tree: tree["data"].pop("counts"), run_folder.ENVIRONMENT)
    claims, judgment, chapter = concluded(tmp_path)
    assert chapter.rare == "few" and claims is None and judgment.kind == "too-few-images"
    assert chapter.tested.classes_T is None and chapter.tested.images == 19
    rare_, _, caution, _ = words.summary(chapter)
    assert str(chapter.tested) not in str(rare_) and 'data-kind="test-images"' in str(caution)


def test_an_unknown_number_of_test_images_is_a_caution(tmp_path):
    everything(tmp_path, 60, 60, 0, files=False)
    change(tmp_path, lambda tree: tree.pop("confusion"))
    claims, judgment, chapter = concluded(tmp_path)
    assert claims == claim(sure=False) and judgment.kind == "likely" and chapter.tested.images is None
    assert doubt(chapter.tested) in page_and_terminal(chapter)
    ground = words.test_noise(chapter)
    assert (ground.kind, ground.sound) == ("test-images", False)


def test_a_method_without_the_figure_is_not_asked_after(tmp_path):
    rare(tmp_path, 60, first(60, 60), first(60, 57))
    change(tmp_path / "paco", lambda tree: tree.update(few=None))
    _, judgment, chapter = concluded(tmp_path)
    assert judgment is None and worth(chapter.peers, chapter.tested) == []


@pytest.mark.parametrize(("counts", "said"), [([200, 50, 10, 5], "2 classes"), ([200, 60, 50, 5], "one class")])
def test_rarest_classes_without_test_images_are_named(tmp_path, counts, said):
    untested = sum(n < 20 for n in counts)
    labels = [c for c in range(4 - untested) for _ in range(30)]
    for method in ("ce", "paco"):
        answered(tmp_path, method, counts, labels, first(len(labels), 50))
    (chapter,) = make_chapters(make_rows(run_folder.read_finished(tmp_path)))
    (caution,) = [caution for caution in words.cautions(chapter) if caution.kind == "untested-classes"]
    assert not caution.sound and said in caution.says
    assert sum(caution.says in line for line in verdict(chapter.rows)) == 1
    answered(tmp_path / "all", "ce", counts, [*labels, *range(4)], first(len(labels) + 4, 50))
    assert "untested-classes" not in kinds_of_cautions(tmp_path / "all")


def test_classes_between_without_test_images_are_not_the_rarest(tmp_path):
    for method in ("ce", "paco"):
        answered(tmp_path, method, [200, 50, 5], [0] * 30 + [2] * 60, first(90, 50))
    assert kinds_of_cautions(tmp_path) == []


def kinds_of_cautions(folder) -> list[str]:
    (chapter,) = make_chapters(make_rows(run_folder.read_finished(folder)))
    return [caution.kind for caution in words.cautions(chapter)]
