"""Which images an epoch sees, and in which order: a function of labels, seed and epoch alone, drawn on the CPU so that all
devices agree. N images, C classes."""

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.distributed import rank, world_size

if TYPE_CHECKING:
    from longtail.config import Sampler


def derive_seed(purpose: str, *parts: int) -> int:
    """63 bits that depend on what they are for and on all parts (run seed, stage, step, …), and resemble no neighbor's."""
    digest = hashlib.sha256(f"{purpose} {parts}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def class_shares(sampler: "Sampler", counts_C: Tensor, done: float = 0.0) -> Tensor:
    """The share of the draws that each class gets; `done` is how far training has come, from 0 to 1."""
    n_C = counts_C.double()
    there_C = (n_C > 0).double()
    if sampler == "progressive":
        return (1 - done) * class_shares("uniform", counts_C) + done * class_shares("balanced", counts_C)
    weight_C = {
        "uniform": n_C,
        "balanced": there_C,
        "sqrt": n_C.sqrt(),
        "reversed": there_C / n_C.clamp(min=1),
    }[sampler]
    return weight_C / weight_C.sum()


def draw(shares_C: Tensor, y_N: Tensor, rng: torch.Generator) -> Tensor:
    """As many images as there are, with replacement: a class by its share, then any of its images."""
    n_C = torch.bincount(y_N, minlength=len(shares_C))
    c_N = torch.multinomial(shares_C, len(y_N), replacement=True, generator=rng)
    which_N = (torch.rand(len(y_N), generator=rng, dtype=torch.float64) * n_C[c_N]).long()
    by_class_N, first_C = y_N.argsort(stable=True), n_C.cumsum(0) - n_C
    return by_class_N[first_C[c_N] + which_N]


def place() -> tuple[int, int]:
    """Which of how many processes this one is."""
    return rank(), world_size()


def epoch_order(
    sampler: "Sampler",
    y_N: Tensor,
    seed: int,
    epoch: int,
    done: float = 0.0,
    purpose: str = "order",
    rank: int = 0,
    world: int = 1,
) -> Tensor:
    """The images that process `rank` of `world` sees in an epoch: every world-th of a common order, all equally many."""
    rng = torch.Generator().manual_seed(derive_seed(purpose, seed, epoch))
    if sampler == "uniform":
        order_N = torch.randperm(len(y_N), generator=rng)
    else:
        order_N = draw(class_shares(sampler, torch.bincount(y_N), done), y_N, rng)
    return order_N[: len(order_N) // world * world][rank::world]
