"""The loss of `paco.py` for very many classes: from the factors of the products, some partners at a time.

With a million classes the matrix of the anchors' products with all centers takes more room than most networks, and its gradient
as much again. But L_i needs only sums over the partners k of an anchor,

    L_i = log Z_i - sum_k w_k log psi_k,    Z_i = sum_k psi_k,

so one pass over chunks of them gives the loss; a second one makes the products anew and gives the gradients: p_k - w_k to log
psi_k, and from there a chunk's rows of the centers' gradient and a part of the anchors'. Centers and samples are two passes of
one kind; what joins them are vectors, which autograd can differentiate.

Shapes: B anchors, C classes, M contrast samples, F features, D projected width, K partners of one kind, k a chunk of them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.losses.numerics import at_least_float32, check_labels, finite, mask_out_, of_class
from longtail.losses.paco import AT_ONCE, spread

PLAIN = 2**26  # pairs: 256 MB a matrix in float32, of which the plain loss holds two


class Samples(NamedTuple):
    """The contrast samples that anchors meet through G."""

    q_BD: Tensor
    """G(x) of the anchors."""
    z_MD: Tensor
    y_M: Tensor
    """Below 0: a queue slot not filled yet, which is in no A(i)."""
    itself_B: Tensor
    """Which of the samples each anchor is: not in its own A(i)."""


class AnchorTerms(NamedTuple):
    """What the loss has to say of each anchor; all but the first is for the log and has no gradient."""

    loss_B: Tensor
    P_sup_B: Tensor
    guess_B: Tensor
    """The class of the largest product with a center."""
    center_B: Tensor
    """The largest magnitude among its products with centers."""
    contrast_B: Tensor
    """The same among its products with samples; 0 without any."""


@torch.compiler.disable  # unrolled, the chunks would take longer to compile than they take
def chunked_terms(
    x_BF: Tensor,
    c_CF: Tensor,
    bias_C: Tensor | None,
    y_B: Tensor,
    samples: Samples | None = None,
    log_prior_C: Tensor | None = None,
    alpha: float = 0.05,
    tau: float = 0.2,
    center_tau: float = 1.0,
    smoothing: float = 0.0,
    chunk: int = 0,
) -> AnchorTerms:
    """L_i and P_sup of `paco_terms` with center_BC = F.linear(x, c, bias), contrast_BM = q @ z.T, and the drops of `samples`.

    Without samples it is Balanced Softmax, and without a prior either cross-entropy. Partners are worked on `chunk` at a time;
    0: as many as make AT_ONCE pairs. Products have the precision that the plain ones would have. L_i has a gradient of first
    order only. Labels are checked as by `paco_terms`.
    """
    check_labels(y_B, len(c_CF))
    size = chunk or max(AT_ONCE // len(y_B), 1)
    log_q_C = c_CF.new_zeros(len(c_CF)) if log_prior_C is None else finite(log_prior_C)
    log_q_C = at_least_float32(log_q_C, x_BF, x_BF if samples is None else samples.q_BD)
    origin_B = own_center(x_BF, c_CF, bias_C, log_q_C, y_B, center_tau)
    y_C = torch.arange(len(c_CF), device=y_B.device)
    spread_C, own = spread(smoothing, log_q_C.detach()), 1 - smoothing
    centers = Met(*Pass.apply(x_BF, c_CF, bias_C, log_q_C, spread_C, origin_B, y_B, y_C, None, center_tau, own, size))
    log_Z_B, pull_B, weight_B, guess_B, center_B = centers
    contrast_B = torch.zeros_like(center_B)
    if samples is not None:
        q_BD, z_MD, y_M, itself_B = samples
        met = Met(*Pass.apply(q_BD, z_MD, None, None, None, origin_B, y_B, y_M, itself_B, tau, alpha, size))
        log_Z_B = torch.logaddexp(log_Z_B, met.log_Z_B)
        pull_B, weight_B, contrast_B = pull_B + met.pull_B, weight_B + met.weight_B, met.largest_B
    P_sup_B = (centers.log_Z_B - log_Z_B).detach().exp()
    return AnchorTerms(log_Z_B - pull_B / weight_B, P_sup_B, guess_B, center_B, contrast_B)


def chunk_for(chunk: int, anchors: int, partners: int) -> int:
    """What a setting of `chunk` means for so many pairs: partners at a time, or 0 for the plain loss.

    A setting of 0 leaves up to PLAIN pairs to the plain loss, which makes each product once instead of twice.
    """
    if chunk == 0 and anchors * partners > PLAIN:
        return max(AT_ONCE // anchors, 1)
    return chunk


@torch.no_grad()
def own_center(
    x_BF: Tensor, c_CF: Tensor, bias_C: Tensor | None, log_q_C: Tensor, y_B: Tensor, center_tau: float
) -> Tensor:
    """log psi of each anchor's own center, from which all others are counted.

    The weights sum to one, so that L_i is the same from any origin; from this one a small loss is a small number, and not the
    difference of two large ones.
    """
    raw_B = torch.linalg.vecdot(x_BF.to(log_q_C.dtype), c_CF[y_B].to(log_q_C.dtype))
    return (raw_B if bias_C is None else raw_B + bias_C[y_B]) / center_tau + of_class(log_q_C, y_B)


class Met(NamedTuple):
    """What a pass over one kind of partners leaves of each anchor."""

    log_Z_B: Tensor
    """Of their psi alone, counted from the origin as all log psi are."""
    pull_B: Tensor
    """The sum of w log psi, where w is not scaled yet."""
    weight_B: Tensor
    """The sum of w."""
    guess_B: Tensor
    """The partner of the largest product."""
    largest_B: Tensor
    """The largest magnitude of a product."""


class Side(NamedTuple):
    """Anchors and one kind of partners, centers or samples: all that psi and w of a pair depend on."""

    a_BD: Tensor
    p_KD: Tensor
    bias_K: Tensor | None
    log_q_K: Tensor | None
    spread_K: Tensor | None
    """What label smoothing gives to each partner."""
    origin_B: Tensor
    """Taken from every log psi."""
    y_B: Tensor
    y_K: Tensor
    itself_B: Tensor | None
    """None: no partner is left out."""
    tau: float
    weight: float
    """The w of a partner of the anchor's class, before it is scaled."""

    def products(self, k: slice) -> Tensor:
        return F.linear(self.a_BD, self.p_KD[k], None if self.bias_K is None else self.bias_K[k])

    def pairs(self, products_Bk: Tensor, k: slice) -> tuple[Tensor, Tensor]:
        """log psi, in place of the products where they have its precision, and w."""
        log_psi_Bk = products_Bk.to(self.origin_B.dtype).div_(self.tau)
        if self.log_q_K is not None:
            log_psi_Bk += self.log_q_K[k]
        log_psi_Bk -= self.origin_B[:, None]
        w_Bk = self.weight * (self.y_B[:, None] == self.y_K[k]).to(log_psi_Bk.dtype)
        if self.spread_K is not None:
            w_Bk += self.spread_K[k]
        if self.itself_B is not None:
            column_k = torch.arange(k.start, k.start + len(self.y_K[k]), device=self.y_K.device)
            drop_Bk = (self.itself_B[:, None] == column_k) | (self.y_K[k] < 0)
            mask_out_(log_psi_Bk, drop_Bk)
            w_Bk.masked_fill_(drop_Bk, 0)
        return log_psi_Bk, w_Bk

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(self.y_K), size))


class Pass(torch.autograd.Function):
    """From a Side and the size of a chunk to what is Met. It keeps its inputs and vectors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        side, size = Side(*inputs[:-1]), inputs[-1]
        log_Z_B, best_B = (torch.full_like(side.origin_B, -math.inf) for _ in range(2))
        pull_B, weight_B, largest_B = (torch.zeros_like(log_Z_B) for _ in range(3))
        guess_B = torch.zeros_like(side.y_B)
        for k in side.chunks(size):
            products_Bk = side.products(k)
            here_B, at_B = products_Bk.max(1)
            guess_B = torch.where(here_B > best_B, k.start + at_B, guess_B)
            best_B = torch.maximum(best_B, here_B)
            largest_B = torch.maximum(largest_B, torch.maximum(here_B, -products_Bk.amin(1)))
            log_psi_Bk, w_Bk = side.pairs(products_Bk, k)
            log_Z_B = torch.logaddexp(log_Z_B, log_psi_Bk.logsumexp(1))
            weight_B += w_Bk.sum(1)
            pull_B += w_Bk.mul_(log_psi_Bk).sum(1)
            del products_Bk, log_psi_Bk, w_Bk  # before the next chunk needs the room
        *tensors, ctx.tau, ctx.weight = side
        ctx.size = size
        ctx.save_for_backward(*tensors, log_Z_B)
        ctx.mark_non_differentiable(weight_B, guess_B, largest_B)
        return Met(log_Z_B, pull_B, weight_B, guess_B, largest_B)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_Z_B: Tensor, to_pull_B: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, log_Z_B = ctx.saved_tensors
        side, wanted = Side._make([*tensors, ctx.tau, ctx.weight]), ctx.needs_input_grad
        a_grad_BD = torch.zeros_like(side.a_BD, dtype=log_Z_B.dtype)
        p_grad_KD, bias_grad_K, log_q_grad_K = (
            torch.empty_like(t) if t is not None and want else None
            for t, want in zip(side[1:4], wanted[1:4], strict=True)
        )
        for k in side.chunks(ctx.size):
            grad_Bk, w_Bk = side.pairs(side.products(k), k)
            grad_Bk.sub_(log_Z_B[:, None]).exp_().mul_(to_Z_B[:, None]).addcmul_(w_Bk, to_pull_B[:, None])
            if log_q_grad_K is not None:
                torch.sum(grad_Bk, 0, out=log_q_grad_K[k])
            grad_Bk = grad_Bk.div_(side.tau).to(side.a_BD.dtype)
            if bias_grad_K is not None:
                torch.sum(grad_Bk, 0, out=bias_grad_K[k])
            if p_grad_KD is not None:
                torch.mm(grad_Bk.T, side.a_BD, out=p_grad_KD[k])
            if wanted[0]:
                a_grad_BD += grad_Bk @ side.p_KD[k]
            del grad_Bk, w_Bk  # as above
        return a_grad_BD.to(side.a_BD.dtype), p_grad_KD, bias_grad_K, log_q_grad_K, *(None,) * 8
