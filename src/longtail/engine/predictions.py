"""What a network says of images: all logits, or the largest ones where classes are many. N images, F features, C classes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.metrics import MAX_CLASSES_FOR_MATRICES, check_finite_logits, top_confidence

LOGITS_AT_ONCE = 2**26  # 256 MB in float32
TOP = 20  # logits kept of an image where classes are many


class Predictions(NamedTuple):
    guess_N: np.ndarray
    confidence_N: np.ndarray
    """The probability of the guess, up to 1."""
    kept: dict[str, np.ndarray]
    """What predictions.npz has of them: `logits` (N, C). Of more than MANY classes `top_logits` and `top_classes` (N, TOP),
    the largest first, and `log_sum_exp` (N,) of all logits: exp(top_logits - log_sum_exp) are probabilities."""


def predict(classify: Callable[[Tensor], Tensor], x_NF: Tensor, classes: int) -> Predictions:
    """Of images with these features; logits that are not finite are a UserError."""
    look = _largest if classes > MAX_CLASSES_FOR_MATRICES else _whole
    parts = [look(logits) for logits in logits_of(classify, x_NF, classes)]
    check_finite_logits(np.concatenate([part.pop("broken") for part in parts]))
    kept = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if classes <= MAX_CLASSES_FOR_MATRICES:
        return Predictions(kept["logits"].argmax(1), top_confidence(kept["logits"]), kept)
    best_N = kept["top_logits"][:, 0].astype(np.float64)
    return Predictions(kept["top_classes"][:, 0], np.exp(best_N - kept["log_sum_exp"]).clip(max=1), kept)


def logits_of(classify: Callable[[Tensor], Tensor], x_NF: Tensor, classes: int) -> Iterator[Tensor]:
    """Of all images at once, or of some at a time where that would take too much memory."""
    return (classify(part_NF).float() for part_NF in x_NF.split(max(LOGITS_AT_ONCE // classes, 1)))


def _whole(logits_NC: Tensor) -> dict[str, np.ndarray]:
    return _arrays(logits=logits_NC, broken=_broken(logits_NC))


def _largest(logits_NC: Tensor) -> dict[str, np.ndarray]:
    values, classes = logits_NC.topk(TOP)
    return _arrays(
        top_logits=values,
        top_classes=classes.to(torch.int32),
        log_sum_exp=logits_NC.logsumexp(1),
        broken=_broken(logits_NC),
    )


def _broken(logits_NC: Tensor) -> Tensor:
    return ~logits_NC.isfinite().all(1)


def _arrays(**tensors: Tensor) -> dict[str, np.ndarray]:
    return {name: t.cpu().numpy() for name, t in tensors.items()}
