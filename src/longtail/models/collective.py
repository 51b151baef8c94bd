"""What several processes that train one network hand one another, by torch.distributed; one process keeps what it has.

All of them call the same functions in the same order, with tensors of the same shape.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.data.samplers import rank_and_world_size


def among_several(work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Nothing to do for one process; and no compiler follows a conversation."""
    apart = torch.compiler.disable(work)

    @functools.wraps(work)
    def where_needed(x: Tensor) -> Tensor:
        return x if rank_and_world_size()[1] == 1 else apart(x)

    return where_needed


@among_several
def gather(x: Tensor) -> Tensor:
    """The tensors of all processes, joined along the first axis in rank order; without gradient."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


@among_several
def gather_with_gradient(x: Tensor) -> Tensor:
    """As `gather`; the gradient of x is the sum of what all processes have for it."""
    return _Gather.apply(x)


@among_several
def total(x: Tensor) -> Tensor:
    """The sum over all processes; without gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank, world = rank_and_world_size()
        return total(grad).chunk(world)[rank]
