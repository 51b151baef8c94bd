"""Training in several processes, as torchrun starts them: NCCL between GPUs (one for each process), gloo between CPUs.

After every step all processes have the same state: weights, batch-norm averages, key network, queue. Each has its own images,
views and dropout. Only the main process writes the run folder and prints. A decision that one process makes by itself (for a
signal, or a progress bar that is due) is shared with all before anyone acts on it, or the others would wait forever.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.config import Config, differences, to_dict
from longtail.data.samplers import derive_seed
from longtail.distributed import (
    all_mean,
    gather_objects,
    is_distributed,
    is_main_process,
    is_peer_failure,
    rank,
    world_size,
)
from longtail.errors import RunError, UserError
from longtail.methods import Method
from longtail.torchrun import read_full_world, read_world

TIMEOUT = timedelta(hours=4)
"""The time that processes wait for the main process while it reads, measures and writes."""

LOCAL_SETTINGS = {
    "data": ("root", "train_list", "test_list", "workers", "decode"),
    "log": ("progress", "to", "project"),
}
"""Settings that may differ from machine to machine."""


def start_processes(device: torch.device) -> torch.device:
    """Connect to the other processes if torchrun has started several; return the device of this process."""
    world = read_full_world(on_gpu=device.type == "cuda")
    if world.size == 1:
        return device
    if device.type == "cuda":
        device = own_gpu(world.local_rank, world.local_size)
    if not dist.is_initialized():
        try:
            init_process_group(device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            advice = "see --rdzv-endpoint of torchrun, and $GLOO_SOCKET_IFNAME"
            raise RunError(
                f"the processes do not find one another ({reason}): {advice}", kind="peer-failure"
            ) from error
        atexit.register(leave)
    return device


def own_gpu(local_rank: int, processes: int) -> torch.device:
    """Return the GPU of a process, by its number among the processes of this machine."""
    there = torch.cuda.device_count()
    if processes > there:
        raise UserError(
            f"{processes} processes share {there} GPUs: torchrun --nproc-per-node {there}, or --train.device cpu",
            kind="conflict",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_process_group(device: torch.device) -> None:
    """Connect to the other processes. After a restart by torchrun a new store is used, as the old one is of dead processes.

    The number of restarts is reliable on a single machine only; for several there is $TORCH_DISABLE_SHARE_RDZV_TCP_STORE.
    """
    store, number, size = next(iter(dist.rendezvous("env://")))
    if read_world().machines == 1:
        store = dist.PrefixStore(f"attempt {read_world().restarts}", store)
    # Decisions and errors of the host are sent by gloo, for which no device has to wait.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=TIMEOUT)


def leave() -> None:
    """Disconnect from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def with_world_size(config: Config) -> Config:
    """Return the configuration with the number of processes, on which results depend."""
    asked, size = config.train.processes, world_size()
    if asked not in (1, size):
        raise UserError(
            f"--train.processes {asked}: start them with torchrun --nproc-per-node {asked} -m longtail train",
            kind="conflict",
        )
    return replace(config, train=replace(config.train, processes=size))


def check_same_settings(config: Config, out: Path | str, resume: bool) -> None:
    """Raise the same UserError on every rank if a rank was started with other settings than rank 0.

    Settings that may differ from machine to machine are not compared: where the images are, how they are decoded, and what is
    displayed.
    """
    if not is_distributed():
        return
    tree = to_dict(config)
    del tree["recipe"]
    for section, names in LOCAL_SETTINGS.items():
        for name in names:
            del tree[section][name]
    method = {"method": tree.pop("method")}  # first, because other settings follow from it
    every = gather_objects({"out": os.path.realpath(out), "resume": resume} | method | tree)
    for number, settings in enumerate(every):
        for field, (first, other) in differences(every[0], settings).items():
            values = f"{field} is {first!r} on rank 0 and {other!r} on rank {number}"
            raise UserError(f"{values}: start all ranks with the same arguments", kind="mismatch")


@contextlib.contextmanager
def report_peer_failure() -> Iterator[None]:
    """Raise a RunError in place of the communication error that follows when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        raise RunError(
            "another process has ended, and with it the run: --resume continues", kind="peer-failure"
        ) from error


@torch.no_grad()
def average_gradients(method: Method) -> None:
    """Average gradients, and the statistics that each process has of its own images, over all processes in one call."""
    if not is_distributed():
        return
    mine = [p.grad for p in method.parameters() if p.grad is not None] + find_statistics(method)
    flat = all_mean(torch.cat([x.flatten() for x in mine]))
    for x, new in zip(mine, flat.split([x.numel() for x in mine]), strict=True):
        x.copy_(new.view(x.shape))


def find_statistics(method: Method) -> list[Tensor]:
    """Return batch norm's running averages and other averages of a method; the queue is the same in all processes."""
    parameters = dict(method.named_parameters())
    stored = {name: x for name, x in method.state_dict().items() if not name.startswith("queue.")}
    return [x for name, x in stored.items() if name not in parameters and x.is_floating_point()]


@torch.no_grad()
def broadcast_state(method: Method) -> None:
    """Copy the state of rank 0 to all ranks. It should be equal already, except for what no seed determines."""
    if is_distributed():
        for x in method.state_dict().values():
            same = x.contiguous()
            dist.broadcast(same, 0)
            x.copy_(same)


def seed_per_rank(method: Method, seed: int) -> None:
    """Give all ranks the same weights, and each rank its own random numbers (dropout); rank 0 has those of a single process."""
    broadcast_state(method)
    if not is_main_process():
        torch.manual_seed(derive_seed("process", seed, rank()))
