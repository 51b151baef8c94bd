"""Losses on the classifier's logits alone: cross-entropy (Eq. 2) and Balanced Softmax (Ren et al., 2020)."""

import torch.nn.functional as F
from torch import Tensor

from longtail.losses.numerics import at_least_float32


def cross_entropy_loss(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Mean over the batch of -log softmax(logits)_y."""
    return F.cross_entropy(at_least_float32(logits_BC), y_B)


def balanced_softmax_loss(logits_BC: Tensor, y_B: Tensor, log_prior_C: Tensor) -> Tensor:
    """Cross-entropy of logits shifted by log q(y): what remains for the logits to learn is free of the class frequencies."""
    return cross_entropy_loss(at_least_float32(logits_BC) + log_prior_C, y_B)
