"""The loss of `paco.py` for very many classes, computed in chunks from the factors of the products.

With a million classes the matrix of the products of anchors and centers needs more memory than most networks, and its gradient
as much again. But L_i needs only sums over the partners k of an anchor,

    L_i = log Z_i - sum_k w_k log psi_k,    Z_i = sum_k psi_k,

so one pass over chunks of partners gives the loss. A second pass recomputes the products and gives the gradients: p_k - w_k for
log psi_k, and from it the rows of the centers' gradient and a part of the anchors'. Centers and samples are two passes of the
same kind (`ChunkedSums`); vectors that autograd can differentiate combine their results.

Shapes: B anchors, C classes, M contrast samples, F features, D projected width, K partners of one kind, k a chunk of them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.losses.contrast_set import AnchorTerms, ContrastSet
from longtail.losses.numerics import (
    PAIRS_AT_ONCE,
    at_least_float32,
    check_labels,
    gather_class_values,
    mask_out_,
    replace_log_zero,
    smoothing_weights,
)

MAX_PLAIN_PAIRS = 2**26
"""Pairs for which the loss is computed at once by default. A matrix of them has 256 MB in float32, and there are two."""


@torch.compiler.disable  # compiling the unrolled chunks would take longer than running them
def chunked_terms(
    x_BF: Tensor,
    c_CF: Tensor,
    bias_C: Tensor | None,
    y_B: Tensor,
    samples: ContrastSet | None = None,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    center_tau: float = 1.0,
    smoothing: float = 0.0,
    chunk: int = 0,
) -> AnchorTerms:
    """Return the result of `paco_terms` without the matrices of all pairs, and values for the log.

    Without samples the loss is Balanced Softmax, and also without a prior it is the cross-entropy. The products have the
    precision that `F.linear` and `@` give them. The loss has a gradient of first order only.

    Args:
        x_BF: The features of the anchors.
        c_CF: The class centers.
        bias_C: The bias of the products with centers.
        y_B: The labels of the anchors, from 0 to C - 1; others are an error as in `paco_terms`.
        samples: The samples that the anchors are compared with.
        log_prior_C: log q, which rebalances the centers.
        alpha: The weight of a positive sample.
        tau: The temperature of the samples.
        center_tau: The temperature of the centers.
        smoothing: The weight that label smoothing shares among all centers.
        chunk: The partners that are processed at a time; 0 for as many as make PAIRS_AT_ONCE pairs.
    """
    check_labels(y_B, len(c_CF))
    size = chunk or max(PAIRS_AT_ONCE // len(y_B), 1)
    log_q_C = c_CF.new_zeros(len(c_CF)) if log_prior_C is None else replace_log_zero(log_prior_C)
    log_q_C = at_least_float32(log_q_C, x_BF, x_BF if samples is None else samples.q_BD)
    origin_B = own_center_log_psi(x_BF, c_CF, bias_C, log_q_C, y_B, center_tau)
    y_C = torch.arange(len(c_CF), device=y_B.device)
    smooth_C, own = smoothing_weights(smoothing, log_q_C.detach()), 1 - smoothing
    centers = PartialSums(
        *ChunkedSums.apply(x_BF, c_CF, bias_C, log_q_C, smooth_C, origin_B, y_B, y_C, None, center_tau, own, size)
    )
    log_Z_B, pull_B, weight_B, guess_B, max_center_B = centers
    max_contrast_B = torch.zeros_like(max_center_B)
    if samples is not None:
        q_BD, z_MD, y_M, itself_B = samples
        sums = PartialSums(
            *ChunkedSums.apply(q_BD, z_MD, None, None, None, origin_B, y_B, y_M, itself_B, tau, alpha, size)
        )
        log_Z_B = torch.logaddexp(log_Z_B, sums.log_Z_B)
        pull_B, weight_B, max_contrast_B = pull_B + sums.pull_B, weight_B + sums.weight_B, sums.max_abs_B
    P_sup_B = (centers.log_Z_B - log_Z_B).detach().exp()
    return AnchorTerms(log_Z_B - pull_B / weight_B, P_sup_B, guess_B, max_center_B, max_contrast_B)


def chunk_for(chunk: int, anchors: int, partners: int) -> int:
    """Return how many partners to process at a time, or 0 to compute all pairs at once.

    Args:
        chunk: The setting. 0 computes up to MAX_PLAIN_PAIRS pairs at once, which needs each product once instead of twice.
        anchors: The number of anchors.
        partners: The number of centers and samples.
    """
    if chunk == 0 and anchors * partners > MAX_PLAIN_PAIRS:
        return max(PAIRS_AT_ONCE // anchors, 1)
    return chunk


@torch.no_grad()
def own_center_log_psi(
    x_BF: Tensor, c_CF: Tensor, bias_C: Tensor | None, log_q_C: Tensor, y_B: Tensor, center_tau: float
) -> Tensor:
    """Return log psi of the center of each anchor's own class, which is subtracted from every log psi.

    The weights sum to one, so L_i does not depend on what is subtracted. With this choice a small loss is a small number
    instead of the difference of two large ones.
    """
    raw_B = torch.linalg.vecdot(x_BF.to(log_q_C.dtype), c_CF[y_B].to(log_q_C.dtype))
    return (raw_B if bias_C is None else raw_B + bias_C[y_B]) / center_tau + gather_class_values(log_q_C, y_B)


class PartialSums(NamedTuple):
    """The sums of each anchor over one kind of partners."""

    log_Z_B: Tensor
    """log of the sum of psi."""
    pull_B: Tensor
    """The sum of w log psi, with w before it is normalized."""
    weight_B: Tensor
    """The sum of w."""
    guess_B: Tensor
    """The partner of the largest product."""
    max_abs_B: Tensor
    """The largest magnitude of a product."""


class Partners(NamedTuple):
    """Anchors and one kind of partners (centers or samples): everything that psi and w of a pair depend on."""

    a_BD: Tensor
    p_KD: Tensor
    bias_K: Tensor | None
    log_q_K: Tensor | None
    smooth_K: Tensor | None
    """The weight that label smoothing gives to each partner."""
    origin_B: Tensor
    """Subtracted from every log psi."""
    y_B: Tensor
    y_K: Tensor
    itself_B: Tensor | None
    """The index of each anchor among the partners, which is excluded; None if no partner is excluded."""
    tau: float
    weight: float
    """The w of a partner of the anchor's class, before it is normalized."""

    def products(self, k: slice) -> Tensor:
        """Return the products of all anchors with a chunk of partners."""
        return F.linear(self.a_BD, self.p_KD[k], None if self.bias_K is None else self.bias_K[k])

    def pairs(self, products_Bk: Tensor, k: slice) -> tuple[Tensor, Tensor]:
        """Return log psi and w of a chunk. log psi overwrites the products if it has their precision."""
        log_psi_Bk = products_Bk.to(self.origin_B.dtype).div_(self.tau)
        if self.log_q_K is not None:
            log_psi_Bk += self.log_q_K[k]
        log_psi_Bk -= self.origin_B[:, None]
        w_Bk = self.weight * (self.y_B[:, None] == self.y_K[k]).to(log_psi_Bk.dtype)
        if self.smooth_K is not None:
            w_Bk += self.smooth_K[k]
        if self.itself_B is not None:
            column_k = torch.arange(k.start, k.start + len(self.y_K[k]), device=self.y_K.device)
            drop_Bk = (self.itself_B[:, None] == column_k) | (self.y_K[k] < 0)
            mask_out_(log_psi_Bk, drop_Bk)
            w_Bk.masked_fill_(drop_Bk, 0)
        return log_psi_Bk, w_Bk

    def chunks(self, size: int) -> Iterator[slice]:
        """Yield slices of at most `size` partners."""
        return (slice(start, start + size) for start in range(0, len(self.y_K), size))


class ChunkedSums(torch.autograd.Function):
    """Maps the fields of `Partners` and the size of a chunk to `PartialSums`. It keeps its inputs and vectors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        partners, size = Partners(*inputs[:-1]), inputs[-1]
        log_Z_B, best_B = (torch.full_like(partners.origin_B, -math.inf) for _ in range(2))
        pull_B, weight_B, max_abs_B = (torch.zeros_like(log_Z_B) for _ in range(3))
        guess_B = torch.zeros_like(partners.y_B)
        for k in partners.chunks(size):
            products_Bk = partners.products(k)
            here_B, at_B = products_Bk.max(1)
            guess_B = torch.where(here_B > best_B, k.start + at_B, guess_B)
            best_B = torch.maximum(best_B, here_B)
            max_abs_B = torch.maximum(max_abs_B, torch.maximum(here_B, -products_Bk.amin(1)))
            log_psi_Bk, w_Bk = partners.pairs(products_Bk, k)
            log_Z_B = torch.logaddexp(log_Z_B, log_psi_Bk.logsumexp(1))
            weight_B += w_Bk.sum(1)
            pull_B += w_Bk.mul_(log_psi_Bk).sum(1)
            del products_Bk, log_psi_Bk, w_Bk  # frees the memory before the next chunk
        *tensors, ctx.tau, ctx.weight = partners
        ctx.size = size
        ctx.save_for_backward(*tensors, log_Z_B)
        ctx.mark_non_differentiable(weight_B, guess_B, max_abs_B)
        return PartialSums(log_Z_B, pull_B, weight_B, guess_B, max_abs_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_Z_B: Tensor, to_pull_B: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, log_Z_B = ctx.saved_tensors
        partners, wanted = Partners._make([*tensors, ctx.tau, ctx.weight]), ctx.needs_input_grad
        a_grad_BD = torch.zeros_like(partners.a_BD, dtype=log_Z_B.dtype)
        p_grad_KD, bias_grad_K, log_q_grad_K = (
            torch.empty_like(t) if t is not None and want else None
            for t, want in zip(partners[1:4], wanted[1:4], strict=True)
        )
        for k in partners.chunks(ctx.size):
            grad_Bk, w_Bk = partners.pairs(partners.products(k), k)
            grad_Bk.sub_(log_Z_B[:, None]).exp_().mul_(to_Z_B[:, None]).addcmul_(w_Bk, to_pull_B[:, None])
            if log_q_grad_K is not None:
                torch.sum(grad_Bk, 0, out=log_q_grad_K[k])
            grad_Bk = grad_Bk.div_(partners.tau).to(partners.a_BD.dtype)
            if bias_grad_K is not None:
                torch.sum(grad_Bk, 0, out=bias_grad_K[k])
            if p_grad_KD is not None:
                torch.mm(grad_Bk.T, partners.a_BD, out=p_grad_KD[k])
            if wanted[0]:
                a_grad_BD += grad_Bk @ partners.p_KD[k]
            del grad_Bk, w_Bk  # as above
        return a_grad_BD.to(partners.a_BD.dtype), p_grad_KD, bias_grad_K, log_q_grad_K, *(None,) * 8
