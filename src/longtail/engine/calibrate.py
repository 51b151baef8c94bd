"""A temperature that makes probabilities honest (Guo et al., 2017), found on validation images. N images, C classes.

Validation images are as long-tailed as the rest. Each class counts alike, or the frequent ones would decide; and as that is
asking about a world in which classes are alike, the frequencies that the logits stand for are taken off first. So a network
whose logits are the true posterior of long-tailed data has the temperature 1, as it should.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.metrics import check_finite_logits

LIMIT = 20.0  # the temperature lies between its inverse and it
HALVINGS = 50  # of that range, in logarithms


class Calibration(NamedTuple):
    temperature: float
    """What logits are divided by."""
    images: int
    classes: int
    """Of those that have a validation image."""
    nll: float
    """Mean over these classes of the negative log-likelihood, in nats; and with the temperature:"""
    calibrated_nll: float


def calibrate(logits: Callable[[], Iterable[Tensor]], y_N: Tensor, prior_C: Tensor) -> Calibration:
    """By the logits of validation images, made anew some rows at a time, and the frequencies that they stand for."""
    shift_C = -prior_C.double().log().to(y_N.device)
    n_C = torch.bincount(y_N, minlength=len(prior_C))
    weight_N = 1 / (n_C[y_N] * (n_C > 0).sum()).double()

    def sums(sharpness: float) -> tuple[float, float]:
        """The negative log-likelihood, and its slope: it is convex in the sharpness, the inverse of the temperature."""
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

    sharpness = best_sharpness(lambda s: sums(s)[1])
    return Calibration(1 / sharpness, len(y_N), int((n_C > 0).sum()), sums(1.0)[0], sums(sharpness)[0])


def best_sharpness(slope: Callable[[float], float]) -> float:
    """Where a rising slope is zero. Where every image is recognized with ease it is nowhere, and 1 is as good as any; where
    the logits mislead, it is as low as may be."""
    if slope(LIMIT) <= 0:
        return 1.0
    if slope(1 / LIMIT) >= 0:
        return 1 / LIMIT
    low, high = -math.log(LIMIT), math.log(LIMIT)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp((low + high) / 2)
