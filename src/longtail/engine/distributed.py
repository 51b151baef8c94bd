"""Several processes that train one run, as torchrun starts them: NCCL between GPUs, one to a process, gloo between CPUs.

After every step all processes have the same state: weights, batch-norm averages, key network, queue. Each has its own images,
views and dropout. The first process alone writes the run folder and speaks. Whatever one process decides by itself (a signal
that reached it, a bar that wants news) is agreed upon before anyone acts on it, or the others would wait for ever.
"""

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.config import Config, differences, to_dict
from longtail.data.samplers import derive_seed, rank_and_world_size
from longtail.errors import RunError, UserError
from longtail.methods import Method
from longtail.models.collective import gather, total
from longtail.torchrun import read_full_world, read_world

T = TypeVar("T")

PATIENCE = timedelta(hours=4)  # while the first process reads, measures and writes, the others wait for it

LOCAL_SETTINGS = {
    "data": ("root", "train_list", "test_list", "workers", "decode"),
    "log": ("progress", "to", "project"),
}


def start(device: torch.device) -> torch.device:
    """Meet the other processes, where torchrun has started several; the device of this one."""
    world = read_full_world(on_gpu=device.type == "cuda")
    if world.size == 1:
        return device
    if device.type == "cuda":
        device = own_gpu(world.local_rank, world.local_size)
    if not dist.is_initialized():
        try:
            meet(device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            advice = "see --rdzv-endpoint of torchrun, and $GLOO_SOCKET_IFNAME"
            raise RunError(
                f"the processes do not find one another ({reason}): {advice}", kind="peer-failure"
            ) from error
        atexit.register(leave)
    return device


def own_gpu(rank: int, processes: int) -> torch.device:
    """Of process `rank` among those of this machine."""
    there = torch.cuda.device_count()
    if processes > there:
        raise UserError(
            f"{processes} processes share {there} GPUs: torchrun --nproc-per-node {there}, or --train.device cpu",
            kind="conflict",
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def meet(device: torch.device) -> None:
    """Where torchrun has started the processes again, at another place: what dead ones left there leads nowhere.

    How often it has is known for sure on a single machine only; $TORCH_DISABLE_SHARE_RDZV_TCP_STORE is for several.
    """
    store, rank, world = next(iter(dist.rendezvous("env://")))
    if read_world().machines == 1:
        store = dist.PrefixStore(f"attempt {read_world().restarts}", store)
    # The host's own words (decisions, errors) go by gloo, for which no device waits.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)


def counted(config: Config) -> Config:
    """With the number of processes, by which runs differ."""
    world, asked = rank_and_world_size()[1], config.train.processes
    if asked not in (1, world):
        raise UserError(
            f"--train.processes {asked}: start them with torchrun --nproc-per-node {asked} -m longtail train",
            kind="conflict",
        )
    return replace(config, train=replace(config.train, processes=world))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_first() -> bool:
    return rank_and_world_size()[0] == 0


def several() -> bool:
    return rank_and_world_size()[1] > 1


def largest(value: int) -> int:
    """Of the numbers of all processes: whatever one wishes, all do."""
    if not several():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def by_first(work: Callable[..., T], *args: Any) -> T:
    """What the first process finds is what all have, be it a value or a UserError."""
    if not several():
        return work(*args)
    found: list[Any] = [None, None]
    if is_first():
        try:
            found[0] = work(*args)
        except Exception as error:
            found[1] = (
                error
                if isinstance(error, UserError)
                else RunError(f"the first process failed: {error!r}", kind="peer-failure")
            )
            dist.broadcast_object_list(found)
            raise
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def in_turn(work: Callable[[], T]) -> T:
    """The first process of each machine, then the others: what it fetches is there for all of them."""
    if not several():
        return work()
    first = read_world().local_rank == 0
    found = [work()] if first else []
    largest(0)  # all meet here
    return found[0] if first else work()


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    if not several():
        return [value]
    found: list[Any] = [None] * rank_and_world_size()[1]
    dist.all_gather_object(found, value)
    return found


def check_same(value: object, otherwise: str) -> None:
    """Raise a RunError on every rank if a rank has another value than rank 0.

    All ranks raise the error: if one rank stopped by itself, the others would wait for it.
    """
    values = gather_objects(value)
    for rank, found in enumerate(values):
        if found != values[0]:
            raise RunError(f"rank {rank} has {otherwise}", kind="mismatch")


def check_same_settings(config: Config, out: Path | str, resume: bool) -> None:
    """Raise the same UserError on every rank if a rank was started with other settings than rank 0.

    Settings that may differ from machine to machine are not compared: where the images are, how they are decoded, and what is
    displayed.
    """
    if not several():
        return
    tree = to_dict(config)
    del tree["recipe"]
    for section, names in LOCAL_SETTINGS.items():
        for name in names:
            del tree[section][name]
    method = {"method": tree.pop("method")}  # first, because other settings follow from it
    every = gather_objects({"out": os.path.realpath(out), "resume": resume} | method | tree)
    for rank, settings in enumerate(every):
        for field, (first, other) in differences(every[0], settings).items():
            values = f"{field} is {first!r} on rank 0 and {other!r} on rank {rank}"
            raise UserError(f"{values}: start all ranks with the same arguments", kind="mismatch")


@contextlib.contextmanager
def report_lost_peer() -> Iterator[None]:
    """Raise a RunError in place of the communication error that follows when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise RunError(
            "another process has ended, and with it the run: --resume continues", kind="peer-failure"
        ) from error


def of_each(x: Tensor) -> Tensor:
    """The tensors of all processes, stacked: what a checkpoint keeps of state that is a process's own."""
    return gather(x[None]) if several() else x


def own(x_W: Tensor) -> Tensor:
    """This process's part of what `of_each` made."""
    return x_W[rank_and_world_size()[0]].clone() if several() else x_W  # torch's generators fail on a part of a tensor


def smallest(x: Tensor) -> Tensor:
    """Number by number, over all processes."""
    if several():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return x


def mean(x: Tensor) -> Tensor:
    return total(x) / rank_and_world_size()[1] if several() else x


@torch.no_grad()
def average(method: Method) -> None:
    """Gradients, and the statistics that each process has of its own images; in one conversation."""
    if not several():
        return
    mine = [p.grad for p in method.parameters() if p.grad is not None] + statistics(method)
    flat = mean(torch.cat([x.flatten() for x in mine]))
    for x, new in zip(mine, flat.split([x.numel() for x in mine]), strict=True):
        x.copy_(new.view(x.shape))


def statistics(method: Method) -> list[Tensor]:
    """Batch norm's running averages, and what else a method averages by itself; the queue is the same everywhere."""
    learned = dict(method.named_parameters())
    stored = {name: x for name, x in method.state_dict().items() if not name.startswith("queue.")}
    return [x for name, x in stored.items() if name not in learned and x.is_floating_point()]


@torch.no_grad()
def make_alike(method: Method) -> None:
    """All have what the first process has. They should already: this is for what no seed decides."""
    if several():
        for x in method.state_dict().values():
            same = x.contiguous()
            dist.broadcast(same, 0)
            x.copy_(same)


def part(method: Method, seed: int) -> None:
    """From here on the processes have the same weights and draw apart (dropout); the first as it would alone."""
    make_alike(method)
    if not is_first():
        torch.manual_seed(derive_seed("process", seed, rank_and_world_size()[0]))


def is_lost(error: Exception) -> bool:
    """Whether it is that another process has gone."""
    return several() and (isinstance(error, dist.DistError) or "gloo" in str(error).lower())
