"""Stratified cross-validation of heads on stored features: selection of a configuration, and calibration.

Each image is predicted once, by a head that was not trained on it. The predictions of all folds are pooled, and the accuracy is
the mean over the classes, so that frequent and rare classes count alike. The test set is never used.

Shapes: V views, N images, F features, C classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.config import Config
from longtail.data.samplers import derive_seed
from longtail.engine.fit_head import count_epochs, fit_head
from longtail.engine.predictions import calibrate, compute_logits
from longtail.metrics import shot_groups

ALWAYS_TRAINED = -1
"""The fold of images that are never held out, because their class has no other image."""
SIGNIFICANT = 2.0
"""The difference in standard errors from which a candidate is dropped."""
MIN_CLASSES = 10
"""The number of classes from which candidates are dropped."""


class OutOfFold(NamedTuple):
    """The predictions for training images by heads that were not trained on them."""

    logits_NC: Tensor
    prior_C: Tensor
    """The class frequencies that the logits assume."""
    y_N: Tensor
    rows_N: Tensor
    """The index of each image among the training images. Images of classes with a single image are missing."""

    def hits(self) -> np.ndarray:
        """Return for each image whether its class has the largest logit."""
        return (self.logits_NC.argmax(1) == self.y_N).cpu().numpy()


class CandidateResult(NamedTuple):
    """The result of one candidate: accuracies in percent, with the standard error of the first."""

    label: str
    settings: dict[str, Any]
    """The settings in which the candidates differ, by flag."""
    accuracy: float
    standard_error: float
    many: float | None
    medium: float | None
    few: float | None
    folds: int
    """The folds that it completed before it was dropped; all folds if it was not."""


class Selection(NamedTuple):
    """The results of all candidates, and the selected one."""

    results: list[CandidateResult]
    selected: int
    folds: int
    single_image_classes: int
    """Classes with one image, which cannot be evaluated."""
    out_of_fold: OutOfFold
    """The predictions of the selected candidate."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of cross_validation.json."""
        return {
            "folds": self.folds,
            "selected": self.selected,
            "single_image_classes": self.single_image_classes,
            "candidates": [result._asdict() for result in self.results],
        }


def assign_folds(y_N: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each image, with the images of each class spread as evenly as possible.

    A class with fewer images than folds is held out in as many folds as it has images. The image of a class with one image is
    in every training set, and its fold is `ALWAYS_TRAINED`.

    Args:
        y_N: The labels.
        folds: The number of folds.
        seed: The seed of the draw.
    """
    rng = torch.Generator().manual_seed(derive_seed("folds", seed))
    fold_N = torch.full((len(y_N),), ALWAYS_TRAINED)
    first = 0
    for label in y_N.unique().tolist():
        rows = (y_N == label).nonzero()[:, 0]
        if len(rows) == 1:
            continue
        shuffled = rows[torch.randperm(len(rows), generator=rng)]
        fold_N[shuffled] = (first + torch.arange(len(rows))) % folds
        first += len(rows)  # the next class continues with the next fold, so that folds have similar sizes
    return fold_N


def predict_fold(
    views_VNF: Tensor,
    y_N: Tensor,
    config: Config,
    classes: int,
    fold_N: Tensor,
    fold: int,
    seed: int,
    advance: Callable[[int], None] = lambda _: None,
) -> OutOfFold:
    """Return the predictions for the plain images of a fold, by a head that is trained on the other folds.

    Args:
        views_VNF: The features of the training images; view 0 is the plain image.
        y_N: The labels.
        config: The configuration of the head.
        classes: The number of classes.
        fold_N: The fold of each image.
        fold: The fold.
        seed: The seed of the fit.
        advance: Called with numbers of finished epochs, for a progress display. A fit without epochs counts as one.
    """
    held = (fold_N == fold).to(y_N.device)
    train, test = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
    val = (views_VNF[0, train], y_N[train])  # for methods that select a setting: the images outside of the fold
    method = fit_head(views_VNF[:, train], y_N[train], config, classes, seed, val, lambda _: advance(1))
    if not count_epochs(method):
        advance(1)
    with torch.no_grad():
        logits_NC = torch.cat(list(compute_logits(method.classify, views_VNF[0, test], classes)))
    return OutOfFold(logits_NC, method.prior(), y_N[test], test)


def join_folds(parts: Sequence[OutOfFold]) -> OutOfFold:
    """Return the predictions of several folds together."""
    logits_NC, y_N, rows_N = (torch.cat([getattr(p, name) for p in parts]) for name in ("logits_NC", "y_N", "rows_N"))
    return OutOfFold(logits_NC, parts[-1].prior_C, y_N, rows_N)


def balanced_accuracy(hits_N: np.ndarray, y_N: np.ndarray, chosen_C: np.ndarray | None = None) -> tuple[float, float]:
    """Return the mean accuracy of the classes in percent, and its standard error.

    The error is that of independent images. The variance of a class is estimated with one success and one failure added,
    because a class with two images would often have a variance of zero.

    Args:
        hits_N: For each image, whether it is predicted correctly.
        y_N: The labels.
        chosen_C: The classes to average over, as a mask; None for all. Classes without images are left out.
    """
    n_C = np.bincount(y_N) if chosen_C is None else np.bincount(y_N, minlength=len(chosen_C))
    used_C = n_C > 0 if chosen_C is None else (n_C > 0) & chosen_C
    if not used_C.any():
        return float("nan"), float("nan")
    right_C = np.bincount(y_N, hits_N.astype(float), minlength=len(n_C))[used_C]
    n_C = n_C[used_C]
    p_C = (right_C + 1) / (n_C + 2)
    error = np.sqrt((p_C * (1 - p_C) / n_C).sum()) / len(n_C)
    return float(100 * (right_C / n_C).mean()), float(100 * error)


def select_config(
    views_VNF: Tensor,
    y_N: Tensor,
    candidates: Sequence[Config],
    counts_C: np.ndarray,
    folds: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> Selection:
    """Compare configurations by cross-validation, and select the one with the highest balanced accuracy.

    All candidates have the same folds. After each fold, candidates that are significantly worse than the best one so far are
    dropped (`is_worse`), which saves most of the time with many images. Of those with the highest accuracy, the first one is
    selected.

    Args:
        views_VNF: The features of the training images.
        y_N: The labels.
        candidates: The configurations, in the order of preference.
        counts_C: The number of training images of each class.
        folds: The number of folds.
        seed: The seed of folds and fits.
        advance: Called with numbers of finished epochs. The epochs of fits that are left out count as finished.
    """
    fold_N = assign_folds(y_N.cpu(), folds, seed)
    used = sorted(set(fold_N.tolist()) - {ALWAYS_TRAINED})
    parts: list[list[OutOfFold]] = [[] for _ in candidates]
    epochs = [0] * len(candidates)  # the finished epochs of each candidate
    remaining = list(range(len(candidates)))
    best = 0
    for done, fold in enumerate(used, start=1):
        for number in remaining:

            def count(n: int, number: int = number) -> None:
                epochs[number] += n
                advance(n)

            config = candidates[number]
            parts[number].append(predict_fold(views_VNF, y_N, config, len(counts_C), fold_N, fold, seed, count))
        found = {number: join_folds(parts[number]) for number in remaining}
        labels = found[best].y_N.cpu().numpy()
        accuracy = {number: balanced_accuracy(each.hits(), labels)[0] for number, each in found.items()}
        best = max(remaining, key=lambda number: (accuracy[number], -number))
        worse = [n for n in remaining if n != best and is_worse(found[n].hits(), found[best].hits(), labels)]
        remaining = [number for number in remaining if number not in worse]
        for number in worse:
            advance(epochs[number] // done * (len(used) - done))
    varied = find_varied_settings(candidates)
    results = [
        evaluate_candidate(config, join_folds(parts[number]), counts_C, varied[number], len(parts[number]))
        for number, config in enumerate(candidates)
    ]
    return Selection(results, best, folds, int((counts_C == 1).sum()), join_folds(parts[best]))


def is_worse(hits_N: np.ndarray, best_N: np.ndarray, y_N: np.ndarray) -> bool:
    """Return whether a candidate is worse than the best one by more than `SIGNIFICANT` standard errors.

    The differences of the classes in accuracy are averaged, and the standard error is that of independent classes. With few
    classes it is unreliable, and no candidate is worse.

    Args:
        hits_N: For each image, whether the candidate predicts it correctly.
        best_N: The same for the best candidate.
        y_N: The labels.
    """
    n_C = np.bincount(y_N)
    d_C = np.bincount(y_N, best_N.astype(float) - hits_N)[n_C > 0] / n_C[n_C > 0]
    if len(d_C) < MIN_CLASSES:
        return False
    return bool(d_C.mean() > SIGNIFICANT * d_C.std(ddof=1) / np.sqrt(len(d_C)))


def evaluate_candidate(
    config: Config, found: OutOfFold, counts_C: np.ndarray, settings: dict[str, Any], folds: int
) -> CandidateResult:
    """Return the result of a candidate.

    Args:
        config: The configuration.
        found: Its predictions.
        counts_C: The number of training images of each class.
        settings: The settings that distinguish the candidate.
        folds: The number of folds of the predictions.
    """
    hits_N, y_N = found.hits(), found.y_N.cpu().numpy()
    accuracy, error = balanced_accuracy(hits_N, y_N)
    groups = {name: balanced_accuracy(hits_N, y_N, mask)[0] for name, mask in shot_groups(counts_C).items()}
    shown = {name: None if np.isnan(value) else value for name, value in groups.items()}
    return CandidateResult(config.method.label, settings, accuracy, error, **shown, folds=folds)


def find_varied_settings(candidates: Sequence[Config]) -> list[dict[str, Any]]:
    """Return for each candidate the settings in which the candidates differ: method, rate, length and weight decay."""
    settings = [
        {
            "method": config.method.name,
            "optim.lr": config.optim.lr,
            "optim.weight_decay": config.optim.weight_decay,
            "train.epochs": config.train.epochs,
        }
        for config in candidates
    ]
    varied = [key for key in settings[0] if len({row[key] for row in settings}) > 1]
    return [{key: row[key] for key in varied} for row in settings]


def calibrate_out_of_fold(found: OutOfFold) -> dict[str, Any]:
    """Return the content of calibration.json: the temperature that calibrates the predictions of a cross-validation."""
    logits_NC = found.logits_NC
    return calibrate(lambda: iter([logits_NC]), found.y_N, found.prior_C)._asdict()
