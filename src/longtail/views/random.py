"""Random tensors of any shape, drawn from a generator on its device."""

import torch
from torch import Tensor


def uniform(shape: tuple[int, ...], low: float, high: float, rng: torch.Generator) -> Tensor:
    """Draw floats from the uniform distribution on [low, high)."""
    return low + (high - low) * torch.rand(shape, generator=rng, device=rng.device)


def bernoulli(shape: tuple[int, ...], probability: float | Tensor, rng: torch.Generator) -> Tensor:
    """Draw booleans that are true with this probability."""
    return torch.rand(shape, generator=rng, device=rng.device) < probability


def randint(shape: tuple[int, ...], end: int, rng: torch.Generator) -> Tensor:
    """Draw integers from 0 to `end` - 1."""
    return torch.randint(end, shape, generator=rng, device=rng.device)


def random_sign(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw 1 or -1 with equal probability."""
    return 1.0 - 2.0 * bernoulli(shape, 0.5, rng)
