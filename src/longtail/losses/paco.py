"""Parametric contrastive learning: Eqs. 4 and 8 of Cui et al., ICCV 2021, in the notation of the paper.

An anchor x_i of class y is compared with two kinds of partners: the samples z_k in A(i), by its projection G(x_i), and the
learnable class centers c_k in C, by its features F(x_i) (F is the identity). Each pair has a weight psi,

    psi(z_k) = exp(z_k · G(x_i) / tau)                         for samples,
    psi(c_k) = exp(c_k · F(x_i) / center_tau) · q(k)           for centers (q: class frequency; absent in Eq. 4),

and with P(i), the samples of A(i) that share the anchor's class,

    L_i = - [ log psi(c_y) / Z_i  +  alpha · sum_{z+ in P(i)} log psi(z+) / Z_i ]  /  (1 + alpha |P(i)|),
    Z_i = sum of psi over A(i) and C.

The factor q(k) is the rebalancing of the centers (`log_prior_C`): in training, a frequent class gets a larger share of Z_i. The
logits therefore do not learn class frequencies, and are used without a prior at test time.

L_i is a cross-entropy over all partners k of the anchor, both centers and samples,

    L_i = - sum_k w_k log p_k,    p_k = psi_k / Z_i,    w_k = (c_y: 1, z+: alpha, others: 0) / (1 + alpha |P(i)|),

and as the w_k sum to one, its gradient with respect to log psi_k is p_k - w_k. With label smoothing (GPaCo) the weight 1 of
the centers is split: the part `smoothing` is shared equally by the centers of all classes with training images, and c_y
gets the rest in addition.

Methods call `paco_objective`. It computes all pairs at once (`paco_terms`), or in chunks if there are very many classes
(`chunked.py`).

Shapes: B anchors, C classes, M contrast samples, K = C + M partners of an anchor (centers first), F features.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longtail.losses.chunked import chunk_for, chunked_terms
from longtail.losses.contrast_set import AnchorTerms, ContrastSet
from longtail.losses.numerics import (
    PAIRS_AT_ONCE,
    at_least_float32,
    check_labels,
    mask_out_,
    replace_log_zero,
    smoothing_weights,
)


class LossParams(NamedTuple):
    """The parameters of the loss; `longtail.config.PaCoSettings` describes them."""

    alpha: float = 0.05
    tau: float = 0.2
    center_tau: float = 1.0
    smoothing: float = 0.0


def paco_objective(
    x_BF: Tensor,
    y_B: Tensor,
    contrast: ContrastSet,
    centers: nn.Linear,
    log_prior_C: Tensor | None,
    params: LossParams,
    chunk: int = 0,
) -> dict[str, Tensor]:
    """Return the mean PaCo loss of the anchors as "loss", and values for the log.

    The values are the "accuracy" of the centers as a classifier in percent, the mean "P_sup" of `paco_terms`, and the largest
    magnitude of the logits of centers and samples.

    Args:
        x_BF: The features of the anchors.
        y_B: Their labels, from 0 to C - 1.
        contrast: Their projections and the samples that they are compared with.
        centers: The linear classifier whose rows are the class centers.
        log_prior_C: The log of the class frequencies, which rebalance the centers (Eq. 8); None for Eq. 4.
        params: The parameters of the loss.
        chunk: The partners that are processed at a time; 0 chooses by their number, see `chunk_for`.
    """
    chunk = chunk_for(chunk, len(y_B), len(centers.weight) + len(contrast.y_M))
    if chunk:
        terms = chunked_terms(x_BF, centers.weight, centers.bias, y_B, contrast, log_prior_C, *params, chunk=chunk)
    else:
        contrast_BM, center_BC = contrast.products(), centers(x_BF)
        losses = paco_terms(center_BC, contrast_BM, y_B, contrast.y_M, contrast.drop_mask(), log_prior_C, *params)
        terms = AnchorTerms.from_products(*losses, center_BC, contrast_BM)
    return terms.summarize(y_B, params.center_tau, params.tau)


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
    """Return the PaCo loss L_i and P_sup of each anchor.

    P_sup is the share of the centers in Z_i; at the optimum it is 1 / (1 + alpha·|P(i)|). P_sup has no gradient.
    L_i can be differentiated only once.

    Args:
        center_BC: The products c·F(x) of anchors and centers.
        contrast_BM: The products z·G(x) of anchors and samples.
        y_B: The labels of the anchors, from 0 to C - 1.
        y_M: The labels of the samples, which are only compared with those of the anchors.
        drop_BM: A mask that is True where a sample is not in A(i): the anchor itself, and empty queue slots.
        log_prior_C: log q, which rebalances the centers.
        alpha: The weight of a positive sample.
        tau: The temperature of the samples.
        center_tau: The temperature of the centers.
        smoothing: The weight that label smoothing shares among all centers.

    Raises:
        IndexError: A label of `y_B` is out of range; on a GPU this is a device assertion.
    """
    check_labels(y_B, center_BC.shape[1])
    log_q_C = center_BC.new_zeros(center_BC.shape[1]) if log_prior_C is None else replace_log_zero(log_prior_C)
    log_q_C = at_least_float32(log_q_C, center_BC, contrast_BM)  # the precision of all that follows
    return PaCoTerms.apply(center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, alpha, tau, center_tau, smoothing)


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
    """Return the PaCo loss, the mean of L_i over the anchors; `paco_terms` describes the arguments."""
    params = LossParams(alpha, tau, center_tau, smoothing)
    return paco_terms(center_BC, contrast_BM, y_B, y_M, drop_BM, log_prior_C, *params)[0].mean()


def compute_log_psi(
    center_BC: Tensor, contrast_BM: Tensor, drop_BM: Tensor, log_q_C: Tensor, tau: float, center_tau: float
) -> Tensor:
    """Return log psi of each pair, (B, K); psi is 0 where a sample is not in A(i)."""
    log_psi_BC = torch.add(log_q_C, at_least_float32(center_BC), alpha=1 / center_tau)
    log_psi_BM = mask_out_(at_least_float32(contrast_BM) / tau, drop_BM)
    return torch.cat([log_psi_BC, log_psi_BM], 1)


def compute_weights(
    y_B: Tensor, y_M: Tensor, drop_BM: Tensor, alpha: float, smooth_C: Tensor | None, like_BK: Tensor
) -> Tensor:
    """Return the weight w of each pair, in the shape and type of `like_BK`; `smooth_C` is the part from label smoothing."""
    w_BK, C = torch.zeros_like(like_BK), like_BK.shape[1] - len(y_M)
    w_BK[:, C:].masked_fill_(y_B[:, None] == y_M, alpha).masked_fill_(drop_BM, 0)
    own_B1 = torch.ones_like(w_BK[:, :1])  # the center of the anchor's class
    if smooth_C is not None:
        w_BK[:, :C] = smooth_C
        own_B1 = 1 - smooth_C.sum() + smooth_C[y_B, None]
    w_BK[:, :C].scatter_(1, y_B[:, None], own_B1)  # among the centers only, so that a label beyond them is an error
    return w_BK.div_(w_BK.sum(1, keepdim=True))


class PaCoTerms(torch.autograd.Function):
    """L_i and P_sup with an explicit gradient, which keeps only its inputs; autograd would keep a matrix for each operation."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, alpha, tau, center_tau, smoothing = inputs
        ctx.save_for_backward(center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C)
        ctx.params = alpha, tau, center_tau, smoothing
        ctx.set_materialize_grads(False)  # the gradient of P_sup is None instead of zeros
        loss_B, P_sup_B = (torch.empty_like(y_B, dtype=log_q_C.dtype) for _ in range(2))
        for i in row_blocks(center_BC, contrast_BM):
            products = center_BC[i], contrast_BM[i], drop_BM[i]
            log_p_BK = compute_log_psi(*products, log_q_C, tau, center_tau).log_softmax(1)
            w_BK = compute_weights(y_B[i], y_M, drop_BM[i], alpha, smoothing_weights(smoothing, log_q_C), log_p_BK)
            torch.sum(w_BK.mul_(log_p_BK), 1, out=loss_B[i])
            torch.sum(log_p_BK[:, : len(log_q_C)].exp_(), 1, out=P_sup_B[i])
            del log_p_BK, w_BK  # frees the memory before the next block
        ctx.mark_non_differentiable(P_sup_B)
        return -loss_B, P_sup_B  # not neg_(): compiled by torch 2.11, an output changed in place has no gradient

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_B is None:
            return (None,) * 10
        center_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C = ctx.saved_tensors
        alpha, tau, center_tau, smoothing = ctx.params
        C = len(log_q_C)
        center_grad_BC, contrast_grad_BM = torch.empty_like(center_BC), torch.empty_like(contrast_BM)
        log_q_grad_C = torch.zeros_like(log_q_C) if ctx.needs_input_grad[5] else None
        for i in row_blocks(center_BC, contrast_BM):
            p_BK = compute_log_psi(center_BC[i], contrast_BM[i], drop_BM[i], log_q_C, tau, center_tau).softmax(1)
            w_BK = compute_weights(y_B[i], y_M, drop_BM[i], alpha, smoothing_weights(smoothing, log_q_C), p_BK)
            grad_BK = p_BK.sub_(w_BK).mul_(grad_B[i, None])
            torch.div(grad_BK[:, :C], center_tau, out=center_grad_BC[i])
            torch.div(grad_BK[:, C:], tau, out=contrast_grad_BM[i])
            if log_q_grad_C is not None:
                log_q_grad_C += grad_BK[:, :C].sum(0)
            del p_BK, w_BK, grad_BK  # as above
        return center_grad_BC, contrast_grad_BM, None, None, None, log_q_grad_C, None, None, None, None


def row_blocks(center_BC: Tensor, contrast_BM: Tensor) -> Iterator[slice]:
    """Yield slices of rows that together have about PAIRS_AT_ONCE pairs, to bound the memory of the intermediate matrices."""
    B, K = len(center_BC), center_BC.shape[1] + contrast_BM.shape[1]
    size = max(PAIRS_AT_ONCE // K, 1)
    return (slice(i, i + size) for i in range(0, B, size))
