"""Predictions of a network, and the temperature that calibrates their probabilities.

Shapes: N images, F features, C classes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.metrics import MAX_CLASSES_FOR_MATRICES, check_finite_logits, top_confidence

LOGITS_AT_ONCE = 2**26
"""Logits that are computed at a time: 256 MB in float32."""
STORED_LOGITS = 20
"""The number of logits that are stored of each image if there are many classes."""
MAX_TEMPERATURE = 20.0
"""The largest temperature; the smallest is its inverse."""
BISECTIONS = 50
"""Steps of the search for the temperature."""


class Predictions(NamedTuple):
    """The predictions for N images."""

    guess_N: np.ndarray
    confidence_N: np.ndarray
    """The probability of the predicted class, up to 1."""
    kept: dict[str, np.ndarray]
    """The arrays that predictions.npz stores: `logits` (N, C). With more than MAX_CLASSES_FOR_MATRICES classes, `top_logits`
    and `top_classes` (N, STORED_LOGITS) in descending order, and `log_sum_exp` (N,) of all logits; probabilities are
    exp(top_logits - log_sum_exp)."""


def predict(classify: Callable[[Tensor], Tensor], x_NF: Tensor, classes: int) -> Predictions:
    """Return the predictions for images.

    Args:
        classify: Maps features to logits.
        x_NF: The features of the images.
        classes: The number of classes.

    Raises:
        UserError: A logit is not finite.
    """
    to_arrays = _largest_logits if classes > MAX_CLASSES_FOR_MATRICES else _all_logits
    parts = [to_arrays(logits) for logits in compute_logits(classify, x_NF, classes)]
    check_finite_logits(np.concatenate([part.pop("broken") for part in parts]))
    kept = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if classes <= MAX_CLASSES_FOR_MATRICES:
        return Predictions(kept["logits"].argmax(1), top_confidence(kept["logits"]), kept)
    best_N = kept["top_logits"][:, 0].astype(np.float64)
    return Predictions(kept["top_classes"][:, 0], np.exp(best_N - kept["log_sum_exp"]).clip(max=1), kept)


def compute_logits(classify: Callable[[Tensor], Tensor], x_NF: Tensor, classes: int) -> Iterator[Tensor]:
    """Yield the logits of chunks of images, which limits the memory; usually there is one chunk.

    Args:
        classify: Maps features to logits.
        x_NF: The features of the images.
        classes: The number of classes.
    """
    return (classify(part_NF).float() for part_NF in x_NF.split(max(LOGITS_AT_ONCE // classes, 1)))


def _all_logits(logits_NC: Tensor) -> dict[str, np.ndarray]:
    return _to_numpy(logits=logits_NC, broken=_non_finite_rows(logits_NC))


def _largest_logits(logits_NC: Tensor) -> dict[str, np.ndarray]:
    values, classes = logits_NC.topk(STORED_LOGITS)
    return _to_numpy(
        top_logits=values,
        top_classes=classes.to(torch.int32),
        log_sum_exp=logits_NC.logsumexp(1),
        broken=_non_finite_rows(logits_NC),
    )


def _non_finite_rows(logits_NC: Tensor) -> Tensor:
    return ~logits_NC.isfinite().all(1)


def _to_numpy(**tensors: Tensor) -> dict[str, np.ndarray]:
    return {name: t.cpu().numpy() for name, t in tensors.items()}


# Calibration


class Calibration(NamedTuple):
    """The temperature of a network, and the validation images that it was fitted to."""

    temperature: float
    """The number that logits are divided by."""
    images: int
    classes: int
    """The number of classes that have a validation image."""
    nll: float
    """The negative log-likelihood in nats, averaged over these classes, without the temperature."""
    calibrated_nll: float
    """The same with the temperature."""


def calibrate(logits: Callable[[], Iterable[Tensor]], y_N: Tensor, prior_C: Tensor) -> Calibration:
    """Fit a temperature that calibrates probabilities (Guo et al., 2017) to validation images.

    Validation images are as long-tailed as the training images. All classes get the same weight, because otherwise the frequent
    ones would decide. Equal weights assume equal class frequencies, so the log of the frequencies that the logits assume is
    subtracted from the logits first. A network that gives the true posterior of long-tailed data then has the temperature 1.

    Args:
        logits: Returns the logits of the images in chunks of rows. It is called several times.
        y_N: The labels of the images.
        prior_C: The class frequencies that the logits assume.
    """
    shift_C = -prior_C.double().log().to(y_N.device)
    n_C = torch.bincount(y_N, minlength=len(prior_C))
    weight_N = 1 / (n_C[y_N] * (n_C > 0).sum()).double()

    def likelihood(sharpness: float) -> tuple[float, float]:
        """Return the negative log-likelihood and its slope; it is convex in the sharpness, the inverse of the temperature."""
        nll, slope, row = 0.0, 0.0, 0
        for part in logits():
            z_NC = part.double()
            y, weight = y_N[row : row + len(z_NC), None], weight_N[row : row + len(z_NC)]
            check_finite_logits((~z_NC.isfinite().all(1)).cpu().numpy())
            log_p_NC = (sharpness * z_NC + shift_C).log_softmax(1)
            mean_N = (log_p_NC.exp() * z_NC).sum(1)
            nll -= float(log_p_NC.gather(1, y)[:, 0] @ weight)
            slope += float((mean_N - z_NC.gather(1, y)[:, 0]) @ weight)
            row += len(z_NC)
        return nll, slope

    sharpness = best_sharpness(lambda s: likelihood(s)[1])
    return Calibration(1 / sharpness, len(y_N), int((n_C > 0).sum()), likelihood(1.0)[0], likelihood(sharpness)[0])


def best_sharpness(slope: Callable[[float], float]) -> float:
    """Return the zero of an increasing slope, by bisection.

    If the slope is negative everywhere, because all images are recognized easily, the result is 1. If it is positive
    everywhere, because the logits mislead, the result is the smallest sharpness.
    """
    if slope(MAX_TEMPERATURE) <= 0:
        return 1.0
    if slope(1 / MAX_TEMPERATURE) >= 0:
        return 1 / MAX_TEMPERATURE
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp((low + high) / 2)
