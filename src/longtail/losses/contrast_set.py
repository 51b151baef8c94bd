"""The samples that the anchors of a batch are compared with. B anchors, M samples, D projected width."""

from typing import NamedTuple

import torch
from torch import Tensor


class ContrastSet(NamedTuple):
    """The projected anchors, the samples that they are compared with, and which of these samples each anchor is itself.

    The set A(i) of anchor i contains all samples but the anchor itself and empty queue slots.
    """

    q_BD: Tensor
    """The projection G(x) of each anchor."""
    z_MD: Tensor
    """The samples."""
    y_M: Tensor
    """The labels of the samples. A label below 0 marks an empty queue slot, which belongs to no A(i)."""
    itself_B: Tensor
    """The index of the sample that each anchor is itself."""

    def products(self) -> Tensor:
        """Return the products z·G(x) of all anchors and samples, (B, M)."""
        return self.q_BD @ self.z_MD.T

    def drop_mask(self) -> Tensor:
        """Return a mask (B, M) that is True where a sample is not in A(i)."""
        column_M = torch.arange(len(self.y_M), device=self.y_M.device)
        return (self.itself_B[:, None] == column_M) | (self.y_M < 0)
