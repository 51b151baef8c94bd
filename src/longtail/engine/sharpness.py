"""Sharpness-aware minimization (SAM; Foret et al., 2021).

    e = ρ · g / ‖g‖,    g = ∇L(w)

The optimizer then makes its step from w with ∇L(w + e), the gradient of the same images at the perturbed weights. A step needs
two forward and two backward passes. The norm is over all trained parameters together. What the first pass stores remains, and
what the second one stores is discarded: running statistics of batch norm, class means, keys for the queue.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longtail.methods import Method

EPS = 1e-12
"""Added to the norm of the gradient, so that a gradient of zero does not perturb the weights."""


@contextlib.contextmanager
def perturbed(method: Method, optimizer: torch.optim.Optimizer, rho: float) -> Iterator[None]:
    """Let a method have the weights w + e within the context. The gradients that are computed there remain afterward.

    Nothing waits for the host, so that a captured step may contain this.

    Args:
        method: The method, with its gradients at w, which are replaced.
        optimizer: Its optimizer, whose parameters are perturbed.
        rho: The norm ρ of the perturbation.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    buffers = list(method.buffers())
    weights_before, buffers_before = copy_tensors(weights), copy_tensors(buffers)
    lengths = [(items, len(items)) for items in method.waiting_lists()]
    perturb(weights, rho)
    optimizer.zero_grad()
    yield
    restore_tensors(weights, weights_before)
    restore_tensors(buffers, buffers_before)
    for items, length in lengths:
        del items[length:]


@torch.no_grad()
def perturb(weights: Sequence[Tensor], rho: float) -> None:
    """Add ρ · g / ‖g‖ to weights that have gradients g, in place."""
    gradients = [p.grad for p in weights if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_add_(list(weights), torch._foreach_mul(gradients, rho / (norm + EPS)))


@torch.no_grad()
def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors."""
    return [tensor.clone() for tensor in tensors]


@torch.no_grad()
def restore_tensors(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to tensors, in place."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, value in zip(tensors, values, strict=True):
        targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
        targets.append(tensor)
        sources.append(value)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)  # one kernel for many tensors
