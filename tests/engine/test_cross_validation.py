"""Test the cross-validation of heads: folds, predictions, and the candidates that are dropped early."""

import json

import numpy as np
import pytest
import torch

from longtail.engine.cross_validation import (
    ALWAYS_TRAINED,
    SIGNIFICANT,
    assign_folds,
    balanced_accuracy,
    is_worse,
    join_folds,
    predict_fold,
    select_config,
)
from longtail.engine.fit_head import fit_head, head_config

COUNTS = np.array([40, 30, 20, 16, 12, 10, 8, 6, 4, 3, 2, 1])
CLASSES = len(COUNTS)
LABELS = torch.from_numpy(np.repeat(np.arange(CLASSES), COUNTS))


def make_features(noise: float = 1.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    centers_CF = 2 * torch.randn(CLASSES, 16, generator=rng)
    return centers_CF[LABELS] + noise * torch.randn(2, len(LABELS), 16, generator=rng)


def heads(*rates: float, epochs: int = 5) -> list:
    return [head_config("balanced-softmax", len(LABELS), epochs=epochs, learning_rate=rate) for rate in rates]


def test_folds_are_stratified():
    """A class with n images is held out in min(n, 5) folds, with numbers of images that differ by at most one."""
    fold_N = assign_folds(LABELS, 5, 0)
    for label, n in enumerate(COUNTS):
        sizes = [int((LABELS[fold_N == fold] == label).sum()) for fold in range(5)]
        assert sum(sizes) == (n if n > 1 else 0) and max(sizes) - min(sizes) <= 1
    assert fold_N[LABELS == CLASSES - 1].tolist() == [ALWAYS_TRAINED]
    totals = torch.bincount(fold_N[fold_N >= 0])
    assert totals.max() - totals.min() <= 1
    assert torch.equal(fold_N, assign_folds(LABELS, 5, 0)) and not torch.equal(fold_N, assign_folds(LABELS, 5, 1))


def test_a_fold_is_predicted_by_a_head_that_was_trained_on_the_others():
    x_VNF, (config,) = make_features(), heads(0.1)
    fold_N = assign_folds(LABELS, 3, 0)
    parts = [predict_fold(x_VNF, LABELS, config, CLASSES, fold_N, fold, 7) for fold in range(3)]
    for fold, part in enumerate(parts):
        train = fold_N != fold
        head = fit_head(x_VNF[:, train], LABELS[train], config, CLASSES, 7, (x_VNF[0, train], LABELS[train]))
        with torch.no_grad():
            wanted_NC = head.classify(x_VNF[0, ~train])
        assert torch.equal(part.logits_NC, wanted_NC) and torch.equal(part.y_N, LABELS[~train])
    whole = join_folds(parts)
    assert sorted(whole.rows_N.tolist()) == list(range(len(LABELS) - 1))  # without the class with a single image
    assert torch.equal(LABELS[whole.rows_N], whole.y_N)
    accuracy = [float(whole.hits()[whole.y_N == label].mean()) for label in range(CLASSES - 1)]
    assert balanced_accuracy(whole.hits(), whole.y_N.numpy())[0] == pytest.approx(100 * np.mean(accuracy))


@pytest.mark.parametrize("seed", range(20))
def test_a_candidate_is_worse_by_the_definition(seed):
    rng = np.random.default_rng(seed)
    y_N = rng.integers(0, 15, 200)
    best_N, hits_N = rng.random(200) < 0.7, rng.random(200) < 0.7 - 0.03 * (seed % 10)
    differences = [best_N[y_N == label].mean() - hits_N[y_N == label].mean() for label in np.unique(y_N)]
    error = np.sqrt(np.var(differences, ddof=1) / len(differences))
    assert is_worse(hits_N, best_N, y_N) == (np.mean(differences) > SIGNIFICANT * error)


def test_both_answers_occur_and_few_classes_decide_nothing():
    y_N, right_N, wrong_N = np.arange(60) % 12, np.ones(60, bool), np.zeros(60, bool)
    one_N = right_N.copy()
    one_N[0] = False
    assert is_worse(wrong_N, right_N, y_N) and not is_worse(one_N, right_N, y_N)
    assert not is_worse(right_N, right_N, y_N) and not is_worse(right_N, wrong_N, y_N)
    assert not is_worse(wrong_N, right_N, np.arange(60) % 9)  # nine classes


def test_a_poor_candidate_is_dropped_and_its_epochs_count_as_finished():
    x_VNF, candidates, epochs = make_features(), heads(1e-9, 0.1, 0.11), []
    found = select_config(x_VNF, LABELS, candidates, COUNTS, 5, advance=epochs.append)
    assert [result.folds for result in found.results] == [1, 5, 5] and found.selected > 0
    assert sum(epochs) == 3 * 5 * 5
    fold_N = assign_folds(LABELS, 5, 0)
    first = predict_fold(x_VNF, LABELS, candidates[0], CLASSES, fold_N, 0, 0)
    assert found.results[0].accuracy == balanced_accuracy(first.hits(), first.y_N.numpy())[0]
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["folds"] == 5 and [row["folds"] for row in stored["candidates"]] == [1, 5, 5]


def test_the_others_have_the_results_of_all_folds():
    """A candidate that is dropped has no effect on the others, and the selected one has predictions for all images."""
    x_VNF, candidates = make_features(), heads(1e-9, 0.1, 0.02)
    fold_N = assign_folds(LABELS, 5, 0)
    found = select_config(x_VNF, LABELS, candidates, COUNTS, 5)
    for number in (1, 2):
        if found.results[number].folds == 5:
            whole = join_folds(
                [predict_fold(x_VNF, LABELS, candidates[number], CLASSES, fold_N, f, 0) for f in range(5)]
            )
            wanted, error = balanced_accuracy(whole.hits(), whole.y_N.numpy())
            assert (found.results[number].accuracy, found.results[number].standard_error) == (wanted, error)
    assert found.results[found.selected].folds == 5 and len(found.out_of_fold.rows_N) == len(LABELS) - 1
    assert found.results[found.selected].accuracy == max(r.accuracy for r in found.results if r.folds == 5)


def test_of_equal_candidates_the_first_is_selected():
    found = select_config(make_features(), LABELS, heads(0.1, 0.1), COUNTS, 3)
    assert found.selected == 0 and found.results[0].accuracy == found.results[1].accuracy


def test_the_best_candidate_is_rarely_dropped():
    """Of candidates with the same true accuracy of 60 %, on the images of one fold, one in twenty is dropped at most."""
    rng = np.random.default_rng(0)
    y_N = np.repeat(np.arange(40), rng.integers(1, 8, 40))
    dropped = sum(is_worse(rng.random(len(y_N)) < 0.6, rng.random(len(y_N)) < 0.6, y_N) for _ in range(2_000))
    assert dropped < 0.05 * 2_000
