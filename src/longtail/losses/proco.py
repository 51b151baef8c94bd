"""Probabilistic contrast (ProCo; Du et al., TPAMI 2024): the contrast of an anchor with infinitely many samples of each class.

The unit features of a class are modeled by a von Mises-Fisher distribution with mean direction mu_c and concentration kappa_c,
which are estimated from the mean of the features of the class, of length R_c (D: width of the features):

    mu_c = mean_c / R_c,    kappa_c = D · R_c / (1 - R_c²),  at most MAX_KAPPA.

The expectation of exp(z·f/tau) over samples z of class c is then known in closed form. Its logarithm is the logit of class c,

    l_c(f) = log C(kappa_c) - log C(|kappa_c · mu_c + f/tau|),    -log C(k) = log I_v(k) - v · log k + constant,    v = D/2 - 1,

and the loss is Balanced Softmax on these logits. I_v is the modified Bessel function of the first kind.

log( I_v(k) / k^v ) is an entire function of k². For orders of at least MIN_ORDER it is computed by the uniform asymptotic
expansion of Debye (NIST Digital Library of Mathematical Functions, 10.41), whose error is below 1e-11 for all k. For smaller
orders the recurrence I_{n-1}(k) = (2n/k) I_n(k) + I_{n+1}(k) continues downward, in which direction it is stable. Everything is
computed in float64: with a concentration of 1e5, l_c is the difference of two numbers near 1e5.

Shapes: B anchors, C classes, D width of the features.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.losses.numerics import at_least_float32
from longtail.losses.softmax import balanced_softmax_loss

MAX_KAPPA = 1e5
"""The largest concentration. The estimate is infinite for a class whose features are all equal."""
MIN_ORDER = 24
"""The smallest order for which the asymptotic expansion is used."""
TERMS = 6
"""The number of terms of the expansion after the first."""


def proco_loss(z_BD: Tensor, y_B: Tensor, mean_CD: Tensor, log_prior_C: Tensor, tau: float = 0.1) -> Tensor:
    """Return the contrastive loss of ProCo: Balanced Softmax on the contrast logits of unit features.

    Args:
        z_BD: The features of the anchors, of length 1.
        y_B: Their labels, from 0 to C - 1.
        mean_CD: The mean of the unit features of each class; zero for a class without features.
        log_prior_C: The log of the class frequencies.
        tau: The temperature.
    """
    return balanced_softmax_loss(proco_logits(z_BD, mean_CD, tau), y_B, log_prior_C)


def proco_logits(z_BD: Tensor, mean_CD: Tensor, tau: float = 0.1) -> Tensor:
    """Return the contrast logits of ProCo, l_c, for each anchor and class (B, C).

    A class with a mean of zero has a uniform distribution, so that its logit is the same for all features of length 1.

    Args:
        z_BD: The features of the anchors.
        mean_CD: The mean of the unit features of each class.
        tau: The temperature.
    """
    exact_BD, mean_CD = z_BD.double(), mean_CD.double()
    order = z_BD.shape[1] / 2 - 1
    R_C = torch.linalg.vector_norm(mean_CD, dim=1)
    mu_CD = mean_CD / R_C.clamp(min=torch.finfo(R_C.dtype).tiny)[:, None]
    kappa_C = concentration(R_C, z_BD.shape[1])
    squared_B1 = exact_BD.square().sum(1, keepdim=True) / tau**2
    squared_BC = kappa_C**2 + 2 / tau * kappa_C * (exact_BD @ mu_CD.T) + squared_B1
    logits_BC = log_bessel(squared_BC.clamp(min=0), order) - log_bessel(kappa_C**2, order)
    return logits_BC.to(at_least_float32(z_BD).dtype)


def concentration(R_C: Tensor, width: int) -> Tensor:
    """Return the concentration of a distribution of unit features from the length of their mean.

    Args:
        R_C: The length of the mean of each class. Values of 1 or more, by rounding, give MAX_KAPPA.
        width: The width of the features.
    """
    rest_C = (1 - R_C**2).clamp(min=width / (2 * MAX_KAPPA))  # which keeps the quotient finite
    return (width * R_C / rest_C).clamp(max=MAX_KAPPA)


def log_bessel(squared: Tensor, order: float) -> Tensor:
    """Return log( I_v(k) / k^v ) of k² in float64. The derivative is that of k², I_{v+1}(k) / (2k I_v(k)), also at 0.

    Args:
        squared: The squares k² of the arguments.
        order: The order v, at least -1/2.
    """
    return LogBessel.apply(squared, order)


class LogBessel(torch.autograd.Function):
    """Computes `log_bessel`, and keeps its derivative for the backward pass. It has a gradient of first order only."""

    @staticmethod
    def forward(ctx: Any, squared: Tensor, order: float) -> Tensor:
        value, ratio = bessel_value_and_ratio(squared, order)
        ctx.save_for_backward(ratio)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ratio,) = ctx.saved_tensors
        return grad * ratio / 2, None


def bessel_value_and_ratio(squared: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """Return log( I_v(k) / k^v ) and I_{v+1}(k) / (k I_v(k)).

    With r_n = I_{n+1}(k) / (k I_n(k)) the recurrence is r_{n-1} = 1 / (2n + k² r_n), which is regular at k = 0.

    Args:
        squared: The squares k² of the arguments.
        order: The order v.
    """
    squared = squared.double()
    steps = max(math.ceil(MIN_ORDER - order), 0)
    value, following = (_log_bessel_by_expansion(squared, order + steps + i) for i in (0, 1))
    ratio = (following - value).exp()
    for n in range(steps, 0, -1):
        ratio = 1 / (2 * (order + n) + squared * ratio)
        value = value - ratio.log()
    return value, ratio


def _log_bessel_by_expansion(squared: Tensor, order: float) -> Tensor:
    """Return log( I_v(k) / k^v ) for a large order v.

    With w = sqrt(1 + (k/v)²) it is  v (w - log(1 + w)) - v log v - log(2 pi v w) / 2 + log(sum over j of u_j(1/w) / v^j).
    """
    w = (1 + squared / order**2).sqrt()
    p, total = 1 / w, torch.zeros_like(w)
    for coefficient in reversed(_expansion_coefficients(order)):
        total = total * p + coefficient
    constant = order * math.log(order) + math.log(2 * math.pi * order) / 2
    return order * (w - torch.log1p(w)) - constant - w.log() / 2 + total.log()


def _expansion_coefficients(order: float) -> tuple[float, ...]:
    """Return the coefficients of p, p², … in the sum over j of u_j(p) / v^j, beginning with the constant.

    u_0 = 1, and u_{j+1}(p) = p² (1 - p²) u_j'(p) / 2 + integral from 0 to p of (1 - 5 t²) u_j(t) dt / 8.
    """
    u, total = [1.0], [0.0] * (3 * TERMS + 1)
    for j in range(TERMS + 1):
        for power, value in enumerate(u):
            total[power] += value / order**j
        following = [0.0] * (len(u) + 3)
        for power, value in enumerate(u):
            following[power + 1] += value * (power / 2 + 1 / (8 * (power + 1)))
            following[power + 3] -= value * (power / 2 + 5 / (8 * (power + 3)))
        u = following
    return tuple(total)
