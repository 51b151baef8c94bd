"""Parametric contrastive learning: Eqs. 4 and 8 of Cui et al., ICCV 2021, in the paper's letters.

For an anchor x_i of class y the contrast partners are the samples z_k in A(i), which meet it through G, and the learnable
class centres c_k in C, which meet it through F (the identity). Each pair has a weight psi,

    psi(z_k) = exp(z_k · G(x_i) / tau)                         for samples,
    psi(c_k) = exp(c_k · F(x_i) / centre_tau) · q(k)           for centres (q: class frequency; absent in Eq. 4),

and with P(i), the samples of A(i) that share the anchor's class,

    L_i = - [ log psi(c_y) / Z_i  +  alpha · sum_{z+ in P(i)} log psi(z+) / Z_i ]  /  (1 + alpha |P(i)|),
    Z_i = sum of psi over A(i) and C.

Shapes: B anchors, M contrast samples, C classes.
"""

import torch
from torch import Tensor

from longtail.losses.numerics import at_least_float32, mask_out


def paco_terms(
    centre_BC: Tensor,
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    centre_tau: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """L_i per anchor, and P_sup per anchor: the centres' share of Z_i (at the optimum 1 / (1 + alpha·|P(i)|)).

    `centre_BC` holds the raw products c·F(x), `contrast_BM` the raw products z·G(x); `drop_BM` is True where a sample is
    not in A(i): the anchor itself, and queue slots not filled yet. `log_prior_C` is log q, the centre rebalance.
    """
    log_psi_BC = at_least_float32(centre_BC) / centre_tau
    if log_prior_C is not None:
        log_psi_BC = log_psi_BC + log_prior_C
    log_psi_BM = mask_out(at_least_float32(contrast_BM) / tau, drop_BM)
    in_P_BM = (y_B[:, None] == y_M[None, :]) & ~drop_BM

    centres_B, samples_B = log_psi_BC.logsumexp(1), log_psi_BM.logsumexp(1)
    log_Z_B = torch.logaddexp(centres_B, samples_B)
    P_B = in_P_BM.sum(1, dtype=log_Z_B.dtype)

    centre_B = log_psi_BC.gather(1, y_B[:, None]).squeeze(1) - log_Z_B
    positives_B = torch.where(in_P_BM, log_psi_BM, 0.0).sum(1) - P_B * log_Z_B
    loss_B = -(centre_B + alpha * positives_B) / (1 + alpha * P_B)
    return loss_B, torch.sigmoid(centres_B - samples_B)


def paco_loss(
    centre_BC: Tensor,
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    centre_tau: float = 1.0,
) -> Tensor:
    """The mean of L_i over the anchors."""
    return paco_terms(centre_BC, contrast_BM, y_B, y_M, drop_BM, log_prior_C, alpha, tau, centre_tau)[0].mean()
