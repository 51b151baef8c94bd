"""The samples that anchors are compared with, and the terms of the loss of each anchor.

Shapes: B anchors, C classes, M samples, D projected width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longtail.losses.numerics import percent_correct, row_max_abs


class ContrastSet(NamedTuple):
    """The projected anchors, the samples that they are compared with, and the position of each anchor among the samples.

    The set A(i) of anchor i contains all samples but the anchor itself and empty queue slots.
    """

    q_BD: Tensor
    """The projection G(x) of each anchor."""
    z_MD: Tensor
    """The samples."""
    y_M: Tensor
    """The labels of the samples. A label below 0 marks an empty queue slot, which belongs to no A(i)."""
    itself_B: Tensor
    """The index of each anchor among the samples."""

    def products(self) -> Tensor:
        """Return the products z·G(x) of all anchors and samples, (B, M)."""
        return self.q_BD @ self.z_MD.T

    def drop_mask(self) -> Tensor:
        """Return a mask (B, M) that is True where a sample is not in A(i)."""
        column_M = torch.arange(len(self.y_M), device=self.y_M.device)
        return (self.itself_B[:, None] == column_M) | (self.y_M < 0)


class AnchorTerms(NamedTuple):
    """The loss of each anchor, and values for the log, which have no gradient."""

    loss_B: Tensor
    P_sup_B: Tensor
    guess_B: Tensor
    """The class of the largest product with a center."""
    center_B: Tensor
    """The largest magnitude among the products with centers."""
    contrast_B: Tensor
    """The largest magnitude among the products with samples; 0 without samples."""

    @classmethod
    def from_products(cls, loss_B: Tensor, P_sup_B: Tensor, center_BC: Tensor, contrast_BM: Tensor) -> "AnchorTerms":
        """Return the terms of anchors from the result of `paco_terms` and the products of all pairs.

        Args:
            loss_B: The loss of each anchor.
            P_sup_B: The share of the centers in Z_i.
            center_BC: The products of anchors and centers.
            contrast_BM: The products of anchors and samples.
        """
        return cls(loss_B, P_sup_B, center_BC.detach().argmax(1), row_max_abs(center_BC), row_max_abs(contrast_BM))

    def summarize(self, y_B: Tensor, center_tau: float, tau: float) -> dict[str, Tensor]:
        """Return the mean loss as "loss", and values for the log.

        Args:
            y_B: The labels of the anchors.
            center_tau: The temperature of the centers.
            tau: The temperature of the samples.
        """
        return {
            "loss": self.loss_B.mean(),
            "accuracy": percent_correct(self.guess_B, y_B),
            "P_sup": self.P_sup_B.detach().mean(),
            "center_logit": self.center_B.amax() / center_tau,
            "contrast_logit": self.contrast_B.amax() / tau,
        }
