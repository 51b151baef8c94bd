"""Communication between the processes that train one network, with torch.distributed.

All processes must call these functions in the same order, with tensors of the same shape. Without torch.distributed there is
one process, of rank 0, and every function returns what it would return for that process alone.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.errors import RunError, UserError

T = TypeVar("T")


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return rank(), world_size()


def is_main_process() -> bool:
    """Return whether this process has rank 0, which alone writes files and prints."""
    return rank() == 0


def is_distributed() -> bool:
    """Return whether there are several processes."""
    return world_size() > 1


# Tensors


def only_if_distributed(work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Decorate a function that communicates: it does nothing in a single process, and is not compiled."""
    uncompiled = torch.compiler.disable(work)

    @functools.wraps(work)
    def communicate(x: Tensor) -> Tensor:
        return x if world_size() == 1 else uncompiled(x)

    return communicate


@only_if_distributed
def all_gather(x: Tensor) -> Tensor:
    """Return the tensors of all ranks, joined along the first axis in the order of ranks, without gradient."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


@only_if_distributed
def gather_with_grad(x: Tensor) -> Tensor:
    """Return what `all_gather` returns, with a gradient: that of x is the sum of the gradients of all ranks."""
    return _Gather.apply(x)


@only_if_distributed
def all_sum(x: Tensor) -> Tensor:
    """Return the sum over all ranks, without gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_sum(grad).chunk(world_size())[rank()]


def all_mean(x: Tensor) -> Tensor:
    """Return the mean over all ranks, without gradient."""
    return all_sum(x) / world_size() if is_distributed() else x


def all_min(x: Tensor) -> Tensor:
    """Return the smallest value of each element over all ranks."""
    if is_distributed():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return x


def all_max(value: int) -> int:
    """Return the largest of the numbers of all ranks."""
    if not is_distributed():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def stack_ranks(x: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first axis; with one process the tensor itself.

    A checkpoint stores state that differs between ranks in this way.
    """
    return all_gather(x[None]) if is_distributed() else x


def take_own_rank(x_W: Tensor) -> Tensor:
    """Return the part of this rank in the result of `stack_ranks`."""
    return x_W[rank()].clone() if is_distributed() else x_W  # torch's generators do not accept a view


# Objects and control flow


def run_on_main(work: Callable[..., T], *args: Any) -> T:
    """Call a function on rank 0 and return its result on all ranks; a UserError is raised on all ranks as well."""
    if not is_distributed():
        return work(*args)
    found: list[Any] = [None, None]
    if is_main_process():
        try:
            found[0] = work(*args)
        except Exception as error:
            failed = RunError(f"the main process failed: {error!r}", kind="peer-failure")
            found[1] = error if isinstance(error, UserError) else failed
            dist.broadcast_object_list(found)
            raise
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def local_main_first(work: Callable[[], T]) -> T:
    """Call a function on one process of each machine first, and then on the others, for example to download a file once."""
    if not is_distributed():
        return work()
    from longtail.torchrun import read_world  # for several processes only

    is_first = read_world().local_rank == 0
    results = [work()] if is_first else []
    all_max(0)  # a barrier
    return results[0] if is_first else work()


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def check_same(value: object, otherwise: str) -> None:
    """Raise a RunError on every rank if a rank has another value than rank 0.

    All ranks raise the error: if one rank stopped by itself, the others would wait for it.

    Args:
        value: The value of this rank.
        otherwise: What a rank with another value has, for the message.
    """
    values = gather_objects(value)
    for number, found in enumerate(values):
        if found != values[0]:
            raise RunError(f"rank {number} has {otherwise}", kind="mismatch")


def is_peer_failure(error: Exception) -> bool:
    """Return whether an error reports that another process has exited."""
    return is_distributed() and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())
