"""What is drawn for a batch: tensors of any shape from a generator, on its device."""

import torch
from torch import Tensor


def uniform(shape: tuple[int, ...], low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=rng, device=rng.device)


def bernoulli(shape: tuple[int, ...], probability: float | Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device) < probability


def randint(shape: tuple[int, ...], end: int, rng: torch.Generator) -> Tensor:
    """Whole numbers from 0 up to, not including, `end`."""
    return torch.randint(end, shape, generator=rng, device=rng.device)


def sign(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return 1.0 - 2.0 * bernoulli(shape, 0.5, rng)
