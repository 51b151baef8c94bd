"""Supervised contrastive learning (Khosla et al., 2020) in the MoCo frame: Eq. 3 of the PaCo paper, scaled by 1/|P(i)|."""

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
    """Mean over the anchors that have positives of -1/|P(i)| · sum_{z+ in P(i)} log exp(z+·T(x_i)/tau) / sum over A(i).

    An anchor without positives counts zero and is not averaged in; a batch of nothing else gives zero. With `weight_B` each
    anchor's term is multiplied by its weight; with `log_prior_M`, log q of each sample's class, every exp is multiplied by q as
    Balanced Softmax does it: both rebalance as the paper's baselines do.
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
