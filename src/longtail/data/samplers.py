"""Sampling: which images an epoch uses, and in which order.

The order is a function of labels, seed and epoch only, and is drawn on the CPU, so that it is the same on all devices.
Dimensions: N images, C classes.
"""

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtail.config import Sampler


def derive_seed(purpose: str, *parts: int) -> int:
    """Return a 63-bit seed that is independent for every purpose and every combination of parts (run seed, stage, step, …)."""
    digest = hashlib.sha256(f"{purpose} {parts}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def class_shares(sampler: "Sampler", counts_C: Tensor, done: float = 0.0) -> Tensor:
    """Return the probability with which a sampler draws each class.

    Args:
        sampler: The sampler.
        counts_C: The number of images of each class.
        done: The progress of the training stage from 0 to 1, which the progressive sampler depends on.
    """
    n_C = counts_C.double()
    present_C = (n_C > 0).double()
    if sampler == "progressive":
        return (1 - done) * class_shares("uniform", counts_C) + done * class_shares("balanced", counts_C)
    weight_C = {
        "uniform": n_C,
        "balanced": present_C,
        "sqrt": n_C.sqrt(),
        "reversed": present_C / n_C.clamp(min=1),
    }[sampler]
    return weight_C / weight_C.sum()


def sample_by_class(shares_C: Tensor, y_N: Tensor, rng: torch.Generator) -> Tensor:
    """Draw N images with replacement: first a class by its probability, then one of its images uniformly.

    Args:
        shares_C: The probability of each class.
        y_N: The labels of all images.
        rng: The random generator.

    Returns:
        The indices of the images (N).
    """
    n_C = torch.bincount(y_N, minlength=len(shares_C))
    c_N = torch.multinomial(shares_C, len(y_N), replacement=True, generator=rng)
    within_class_N = (torch.rand(len(y_N), generator=rng, dtype=torch.float64) * n_C[c_N]).long()
    by_class_N, first_C = y_N.argsort(stable=True), n_C.cumsum(0) - n_C
    return by_class_N[first_C[c_N] + within_class_N]


def epoch_order(
    sampler: "Sampler",
    y_N: Tensor,
    seed: int,
    epoch: int,
    done: float = 0.0,
    purpose: str = "order",
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """Return the indices of the images that one process uses in an epoch, in their order.

    All processes draw the same order and take every `world_size`-th image of it; a remainder is dropped, so that all of them
    have the same number of images.

    Args:
        sampler: The sampler.
        y_N: The labels of all images.
        seed: The seed of the run.
        epoch: The epoch, counted over all stages.
        done: The progress of the stage from 0 to 1; see `class_shares`.
        purpose: A name that distinguishes loaders of the same run from each other.
        rank: The rank of the process.
        world_size: The number of processes.
    """
    rng = torch.Generator().manual_seed(derive_seed(purpose, seed, epoch))
    if sampler == "uniform":
        order_N = torch.randperm(len(y_N), generator=rng)
    else:
        order_N = sample_by_class(class_shares(sampler, torch.bincount(y_N), done), y_N, rng)
    return order_N[: len(order_N) // world_size * world_size][rank::world_size]
