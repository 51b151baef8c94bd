"""Parametric contrastive learning: Eqs. 4 and 8 of Cui et al., ICCV 2021, in the paper's letters.

For an anchor x_i of class y the contrast partners are the samples z_k in A(i), which meet it through G, and the learnable
class centers c_k in C, which meet it through F (the identity). Each pair has a weight psi,

    psi(z_k) = exp(z_k · G(x_i) / tau)                         for samples,
    psi(c_k) = exp(c_k · F(x_i) / center_tau) · q(k)           for centers (q: class frequency; absent in Eq. 4),

and with P(i), the samples of A(i) that share the anchor's class,

    L_i = - [ log psi(c_y) / Z_i  +  alpha · sum_{z+ in P(i)} log psi(z+) / Z_i ]  /  (1 + alpha |P(i)|),
    Z_i = sum of psi over A(i) and C.

This is a cross-entropy over all partners k of the anchor, centers and samples alike,

    L_i = - sum_k w_k log p_k,    p_k = psi_k / Z_i,    w_k = (c_y: 1, z+: alpha, others: 0) / (1 + alpha |P(i)|),

and since the w_k sum to one, its gradient with respect to log psi_k is p_k - w_k. With label smoothing (GPaCo) the centers'
weight of 1 is shared out: the part `smoothing` goes to all centers alike, the rest to c_y.

Shapes: B anchors, C classes, M contrast samples, K = C + M partners of an anchor, the centers first.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longtail.losses.numerics import at_least_float32, check_labels, finite, mask_out_

AT_ONCE = 2**22  # pairs: 16 MB a matrix in float32; larger ones are worked on some rows at a time


def paco_terms(
    center_BC: Tensor,
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    center_tau: float = 1.0,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """L_i per anchor, and P_sup per anchor: the centers' share of Z_i (at the optimum 1 / (1 + alpha·|P(i)|)).

    `center_BC` holds the raw products c·F(x), `contrast_BM` the raw products z·G(x); `drop_BM` is True where a sample is
    not in A(i): the anchor itself, and queue slots not filled yet. `log_prior_C` is log q, the center rebalance.
    P_sup is for the log and has no gradient; L_i has one of first order only. Labels `y_B` must be from 0 to C - 1, or it is an
    IndexError (on a GPU a device assertion); those of `y_M` are only compared with them.
    """
    check_labels(y_B, center_BC.shape[1])
    log_q_C = center_BC.new_zeros(center_BC.shape[1]) if log_prior_C is None else finite(log_prior_C)
    log_q_C = at_least_float32(log_q_C, center_BC, contrast_BM)  # the precision of all that follows
    return Terms.apply(center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, alpha, tau, center_tau, smoothing)


def paco_loss(
    center_BC: Tensor,
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    center_tau: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    """The mean of L_i over the anchors."""
    numbers = alpha, tau, center_tau, smoothing
    return paco_terms(center_BC, contrast_BM, y_B, y_M, drop_BM, log_prior_C, *numbers)[0].mean()


def log_psi(
    center_BC: Tensor, contrast_BM: Tensor, drop_BM: Tensor, log_q_C: Tensor, tau: float, center_tau: float
) -> Tensor:
    """(B, K), log psi of each pair; what is not in A(i) has psi = 0."""
    log_psi_BC = torch.add(log_q_C, at_least_float32(center_BC), alpha=1 / center_tau)
    log_psi_BM = mask_out_(at_least_float32(contrast_BM) / tau, drop_BM)
    return torch.cat([log_psi_BC, log_psi_BM], 1)


def weights(
    y_B: Tensor, y_M: Tensor, drop_BM: Tensor, alpha: float, spread_C: Tensor | None, like_BK: Tensor
) -> Tensor:
    """(B, K), the w of each pair; `spread_C` is what label smoothing gives to every center."""
    w_BK, C = torch.zeros_like(like_BK), like_BK.shape[1] - len(y_M)
    w_BK[:, C:].masked_fill_(y_B[:, None] == y_M, alpha).masked_fill_(drop_BM, 0)
    own_B1 = torch.ones_like(w_BK[:, :1])  # the anchor's own center
    if spread_C is not None:
        w_BK[:, :C] = spread_C
        own_B1 = 1 - spread_C.sum() + spread_C[y_B, None]
    w_BK[:, :C].scatter_(1, y_B[:, None], own_B1)  # of the centers alone: a label beyond them is an error
    return w_BK.div_(w_BK.sum(1, keepdim=True))


def spread(smoothing: float, log_q_C: Tensor) -> Tensor | None:
    """The share of each center in label smoothing: alike for all classes that occur."""
    if not smoothing:
        return None
    there_C = (log_q_C > torch.finfo(log_q_C.dtype).min).to(log_q_C.dtype)
    return smoothing * there_C / there_C.sum()


class Terms(torch.autograd.Function):
    """L_i and P_sup, with the gradient written out: autograd would keep a matrix for every step, this keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, alpha, tau, center_tau, smoothing = inputs
        ctx.save_for_backward(center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C)
        ctx.numbers = alpha, tau, center_tau, smoothing
        ctx.set_materialize_grads(False)  # P_sup has none, not zeros
        loss_B, P_sup_B = (torch.empty_like(y_B, dtype=log_q_C.dtype) for _ in range(2))
        for i in blocks(center_BC, contrast_BM):
            log_p_BK = log_psi(center_BC[i], contrast_BM[i], drop_BM[i], log_q_C, tau, center_tau).log_softmax(1)
            w_BK = weights(y_B[i], y_M, drop_BM[i], alpha, spread(smoothing, log_q_C), log_p_BK)
            torch.sum(w_BK.mul_(log_p_BK), 1, out=loss_B[i])
            torch.sum(log_p_BK[:, : len(log_q_C)].exp_(), 1, out=P_sup_B[i])
            del log_p_BK, w_BK  # before the next block needs the room
        ctx.mark_non_differentiable(P_sup_B)
        return -loss_B, P_sup_B  # not neg_(): compiled by torch 2.11, an output changed in place has no gradient

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_B is None:
            return (None,) * 10
        center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C = ctx.saved_tensors
        alpha, tau, center_tau, smoothing = ctx.numbers
        C = len(log_q_C)
        center_grad_BC, contrast_grad_BM = torch.empty_like(center_BC), torch.empty_like(contrast_BM)
        log_q_grad_C = torch.zeros_like(log_q_C) if ctx.needs_input_grad[5] else None
        for i in blocks(center_BC, contrast_BM):
            p_BK = log_psi(center_BC[i], contrast_BM[i], drop_BM[i], log_q_C, tau, center_tau).softmax(1)
            grad_BK = p_BK.sub_(weights(y_B[i], y_M, drop_BM[i], alpha, spread(smoothing, log_q_C), p_BK)).mul_(
                grad_B[i, None]
            )
            torch.div(grad_BK[:, :C], center_tau, out=center_grad_BC[i])
            torch.div(grad_BK[:, C:], tau, out=contrast_grad_BM[i])
            if log_q_grad_C is not None:
                log_q_grad_C += grad_BK[:, :C].sum(0)
            del p_BK, grad_BK  # as above
        return center_grad_BC, contrast_grad_BM, None, None, None, log_q_grad_C, None, None, None, None


def blocks(center_BC: Tensor, contrast_BM: Tensor) -> Iterator[slice]:
    """Rows to work on at a time: those of AT_ONCE pairs."""
    B, K = len(center_BC), center_BC.shape[1] + contrast_BM.shape[1]
    size = max(AT_ONCE // K, 1)
    return (slice(i, i + size) for i in range(0, B, size))
