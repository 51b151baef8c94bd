"""Supervised contrastive learning (Khosla et al., 2020) with the queue of MoCo: Eq. 3 of the PaCo paper, divided by |P(i)|."""

import torch
from torch import Tensor

from longtail.losses.numerics import at_least_float32, mask_out_


def supcon_loss(
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    tau: float = 0.2,
    weight_B: Tensor | None = None,
    log_prior_M: Tensor | None = None,
) -> Tensor:
    """Return the mean of -1/|P(i)| · sum_{z+ in P(i)} log(exp(z+·T(x_i)/tau) / sum over A(i)) over anchors with positives.

    Anchors without positives are left out of the mean; if there are no others, the loss is zero.

    Args:
        contrast_BM: The products z·T(x) of anchors and samples.
        y_B: The labels of the anchors.
        y_M: The labels of the samples.
        drop_BM: A mask that is True where a sample is not in A(i).
        tau: The temperature.
        weight_B: The weight of each anchor's term, for the re-weighted baseline of the paper.
        log_prior_M: log q of each sample's class. Every exp is multiplied by q, as in Balanced Softmax.
    """
    logit_BM = at_least_float32(contrast_BM) / tau
    if log_prior_M is not None:
        logit_BM = logit_BM + log_prior_M
    logit_BM = mask_out_(logit_BM, drop_BM)
    in_P_BM = (y_B[:, None] == y_M[None, :]) & ~drop_BM
    P_B = in_P_BM.sum(1, dtype=logit_BM.dtype)
    log_p_BM = logit_BM - logit_BM.logsumexp(1, keepdim=True)
    loss_B = -torch.where(in_P_BM, log_p_BM, 0.0).sum(1) / P_B.clamp(min=1)
    if weight_B is not None:
        loss_B = weight_B * loss_B
    return loss_B.sum() / (P_B > 0).sum().clamp(min=1)
