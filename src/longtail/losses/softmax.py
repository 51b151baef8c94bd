"""Losses on the logits of a classifier, computed at least in float32.

Labels must be from 0 to C - 1; others raise an IndexError (on a GPU, a device assertion). This includes -100, which the losses
of torch ignore by default. `weight_B` has the weights of the images in the mean; None stands for equal weights.

Shapes: B images, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.losses.chunked import chunk_for, chunked_terms
from longtail.losses.numerics import (
    NO_LABEL,
    at_least_float32,
    check_labels,
    gather_class_values,
    percent_correct,
    weighted_mean,
)


def softmax_objective(
    x_BF: Tensor,
    y_B: Tensor,
    classifier: nn.Linear,
    log_shift_C: Tensor | None,
    chunk: int = 0,
    weight_B: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the cross-entropy of shifted logits as "loss", and the "accuracy" in percent.

    Args:
        x_BF: The features.
        y_B: The labels, from 0 to C - 1.
        classifier: The linear classifier.
        log_shift_C: The shift of the logits of each class, for example the log of its frequency; None for no shift.
        chunk: The classes that are processed at a time; 0 chooses by their number, see `chunk_for`.
        weight_B: The weight of each image.
    """
    chunk = chunk_for(chunk, len(y_B), len(classifier.weight))
    if chunk:
        terms = chunked_terms(x_BF, classifier.weight, classifier.bias, y_B, None, log_shift_C, chunk=chunk)
        return {"loss": weighted_mean(terms.loss_B, weight_B), "accuracy": percent_correct(terms.guess_B, y_B)}
    logits_BC = classifier(x_BF)
    shifted_BC = logits_BC if log_shift_C is None else at_least_float32(logits_BC) + log_shift_C
    loss = cross_entropy_loss(shifted_BC, y_B, weight_B=weight_B)
    return {"loss": loss, "accuracy": percent_correct(logits_BC.detach().argmax(1), y_B)}


def cross_entropy_loss(
    logits_BC: Tensor, y_B: Tensor, weight_C: Tensor | None = None, weight_B: Tensor | None = None
) -> Tensor:
    """Return the mean of -log softmax(logits)_y (Eq. 2). With weights of classes or images it is a weighted mean.

    Args:
        logits_BC: The logits.
        y_B: The labels.
        weight_C: The weight of each class; None for equal weights.
        weight_B: The weight of each image.
    """
    logits_BC = at_least_float32(logits_BC)
    weight_C = None if weight_C is None else weight_C.to(logits_BC.dtype)
    if weight_B is not None:
        loss_B = F.cross_entropy(logits_BC, y_B, reduction="none", ignore_index=NO_LABEL)
        return weighted_mean(loss_B, weight_B if weight_C is None else weight_B * gather_class_values(weight_C, y_B))
    return F.cross_entropy(logits_BC, y_B, weight_C, ignore_index=NO_LABEL)


def balanced_softmax_loss(
    logits_BC: Tensor, y_B: Tensor, log_prior_C: Tensor, weight_B: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of logits plus log q(y) (Ren et al., 2020); they then need not learn class frequencies.

    Args:
        logits_BC: The logits.
        y_B: The labels.
        log_prior_C: The log of the class frequencies, log q.
        weight_B: The weight of each image.
    """
    return cross_entropy_loss(at_least_float32(logits_BC) + log_prior_C, y_B, weight_B=weight_B)


def focal_loss(
    logits_BC: Tensor,
    y_B: Tensor,
    gamma: float = 1.0,
    weight_C: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> Tensor:
    """Return the mean of -w_y (1 - p_y)^gamma log p_y (Lin et al., 2017), which gives easy images a small weight.

    Args:
        logits_BC: The logits.
        y_B: The labels.
        gamma: The exponent; 0 for the cross-entropy.
        weight_C: The weight w of each class; None for equal weights.
        weight_B: The weight of each image.
    """
    log_p_B = -F.cross_entropy(at_least_float32(logits_BC), y_B, reduction="none", ignore_index=NO_LABEL)
    loss_B = -(_one_minus_exp(log_p_B) ** gamma) * log_p_B
    return weighted_mean(loss_B if weight_C is None else weight_C[y_B] * loss_B, weight_B)


def class_balanced_focal_loss(
    logits_BC: Tensor, y_B: Tensor, weight_C: Tensor, gamma: float = 1.0, weight_B: Tensor | None = None
) -> Tensor:
    """Return the mean of w_y · sum_c (1 - q_c)^gamma (-log q_c) (Cui et al., 2019).

    q_c is the probability that the sigmoid of logit c gives to the correct answer for class c.

    Args:
        logits_BC: The logits.
        y_B: The labels.
        weight_C: The weight w of each class.
        gamma: The exponent.
        weight_B: The weight of each image.
    """
    check_labels(y_B, logits_BC.shape[1])
    truth_BC = _is_true_class(y_B, logits_BC)
    log_q_BC = F.logsigmoid(torch.where(truth_BC, 1.0, -1.0) * at_least_float32(logits_BC))
    loss_B = -(_one_minus_exp(log_q_BC) ** gamma * log_q_BC).sum(1)
    return weighted_mean(gather_class_values(weight_C, y_B) * loss_B, weight_B)


def _is_true_class(y_B: Tensor, like_BC: Tensor) -> Tensor:
    """Return a mask that is True at each image's class. Unlike torch's one_hot, this does not make the host wait."""
    return y_B[:, None] == torch.arange(like_BC.shape[1], device=y_B.device)


def _one_minus_exp(log_p: Tensor) -> Tensor:
    """Return 1 - p, at least 1e-12, because powers below 1 have no finite slope at 0."""
    return (-torch.expm1(log_p)).clamp(min=1e-12)


def ldam_margins(counts_C: Tensor, largest: float = 0.5) -> Tensor:
    """Return margins proportional to n_c^(-1/4). The rarest class with images, and classes without, get `largest`."""
    m_C = counts_C.double().clamp(min=1) ** -0.25
    return (largest * m_C / m_C[counts_C > 0].max()).clamp(max=largest).float()


def ldam_loss(
    cosine_BC: Tensor,
    y_B: Tensor,
    margin_C: Tensor,
    scale: float = 30.0,
    weight_C: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of scale · (cosine_c - m_y [c = y]) (Cao et al., 2019).

    Args:
        cosine_BC: The cosine similarities of images and classes.
        y_B: The labels.
        margin_C: The margin m of each class.
        scale: The inverse temperature.
        weight_C: The weight of each class; None for equal weights.
        weight_B: The weight of each image.
    """
    truth_BC = _is_true_class(y_B, cosine_BC)
    return cross_entropy_loss(scale * (at_least_float32(cosine_BC) - margin_C * truth_BC), y_B, weight_C, weight_B)


def label_aware_smoothing_loss(
    logits_BC: Tensor, y_B: Tensor, smooth_C: Tensor, weight_B: Tensor | None = None
) -> Tensor:
    """Return the mean of -(1 - e_y) log p_y - e_y · mean_c log p_c (Zhong et al., 2021).

    Args:
        logits_BC: The logits.
        y_B: The labels.
        smooth_C: The smoothing e of each class.
        weight_B: The weight of each image.
    """
    check_labels(y_B, logits_BC.shape[1])
    log_p_BC = at_least_float32(logits_BC).log_softmax(1)
    e_B = smooth_C[y_B]
    log_p_B = log_p_BC.gather(1, y_B[:, None])[:, 0]
    return -weighted_mean((1 - e_B) * log_p_B + e_B * log_p_BC.mean(1), weight_B)


def label_aware_smoothing(counts_C: Tensor, head: float, tail: float) -> Tensor:
    """Return the smoothing of each class: a quarter of a sine from `tail` at the smallest class to `head` at the largest.

    Args:
        counts_C: The number of training images of each class.
        head: The smoothing of the largest class.
        tail: The smoothing of the smallest class.
    """
    n_C = counts_C.double()
    done_C = (n_C - n_C.min()) / (n_C.max() - n_C.min()).clamp(min=1)
    return (tail + (head - tail) * (torch.pi / 2 * done_C).sin()).float()


def effective_number_weights(counts_C: Tensor, beta: float) -> Tensor:
    """Return weights proportional to (1 - beta) / (1 - beta^n_c) (Cui et al., 2019), with mean 1; 0 without images."""
    n_C = counts_C.double()
    w_C = torch.where(n_C > 0, (1 - beta) / (1 - beta ** n_C.clamp(min=1)), 0)
    return (w_C * len(w_C) / w_C.sum()).float()
