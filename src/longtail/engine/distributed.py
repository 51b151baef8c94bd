"""Training in several processes, as torchrun starts them: NCCL between GPUs (one for each process), gloo between CPUs.

After every step all processes have the same state: weights, batch-norm averages, key network, queue. Each process has its
own images, views and dropout. Only the main process writes the run folder and prints. A decision of one process (to stop at a
signal, or to update the progress bar) is sent to all processes before any of them acts on it; otherwise they would block.
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
"""How long the other processes wait for the main process while it reads, evaluates and writes."""

LOCAL_SETTINGS = {
    "data": ("root", "train_list", "test_list", "workers", "decode"),
    "log": ("progress", "loggers", "project"),
}
"""Settings that may differ between machines."""


def start_processes(device: torch.device) -> torch.device:
    """Connect to the other processes if torchrun has started several; return the device of this process."""
    world = read_full_world(on_gpu=device.type == "cuda")
    if world.size == 1:
        return device
    if device.type == "cuda":
        device = choose_gpu(world.local_rank, world.local_size)
    if not dist.is_initialized():
        try:
            init_process_group(device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            advice = "see --rdzv-endpoint of torchrun, and $GLOO_SOCKET_IFNAME"
            raise RunError(
                f"the processes cannot connect to each other ({reason}): {advice}", kind="peer-failure"
            ) from error
        atexit.register(disconnect)
    return device


def choose_gpu(local_rank: int, processes: int) -> torch.device:
    """Return the GPU of a process, and make it the current one.

    Args:
        local_rank: The rank of the process on this machine.
        processes: The number of processes on this machine.
    """
    count = torch.cuda.device_count()
    if processes > count:
        raise UserError(
            f"{processes} processes for {count} GPUs: use torchrun --nproc-per-node {count}, or --train.device cpu",
            kind="conflict",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_process_group(device: torch.device) -> None:
    """Connect to the other processes. After a restart by torchrun a new store is used, because the old one has stale entries.

    The number of restarts is reliable on a single machine only; for several, see $TORCH_DISABLE_SHARE_RDZV_TCP_STORE.
    """
    store, number, size = next(iter(dist.rendezvous("env://")))
    if read_world().machines == 1:
        store = dist.PrefixStore(f"attempt {read_world().restarts}", store)
    # Decisions and errors of the host are sent with gloo, which does not block the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=TIMEOUT)


def disconnect() -> None:
    """Disconnect from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def with_world_size(config: Config) -> Config:
    """Return the configuration with the actual number of processes, because results depend on it."""
    asked, size = config.train.processes, world_size()
    if asked not in (1, size):
        raise UserError(
            f"--train.processes {asked}: start them with torchrun --nproc-per-node {asked} -m longtail train",
            kind="conflict",
        )
    return replace(config, train=replace(config.train, processes=size))


def check_same_settings(config: Config, out: Path | str, resume: bool) -> None:
    """Raise the same UserError on every rank if a rank was started with other settings than rank 0.

    Settings that may differ between machines are not compared: the folder of the images, how they are decoded, and what is
    displayed.

    Args:
        config: The configuration.
        out: The folder above the run folders.
        resume: Whether existing runs are continued.
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
            "a peer process exited and stopped the run; continue with --resume", kind="peer-failure"
        ) from error


@torch.no_grad()
def average_gradients(method: Method) -> None:
    """Average the gradients and the batch-norm statistics over all processes, in one call."""
    if not is_distributed():
        return
    mine = [p.grad for p in method.parameters() if p.grad is not None] + find_statistics(method)
    flat = all_mean(torch.cat([x.flatten() for x in mine]))
    for x, new in zip(mine, flat.split([x.numel() for x in mine]), strict=True):
        x.copy_(new.view(x.shape))


def find_statistics(method: Method) -> list[Tensor]:
    """Return the running averages of a method, such as those of batch norm. The queue is the same in all processes."""
    parameters = dict(method.named_parameters())
    stored = {name: x for name, x in method.state_dict().items() if not name.startswith("queue.")}
    return [x for name, x in stored.items() if name not in parameters and x.is_floating_point()]


@torch.no_grad()
def broadcast_state(method: Method) -> None:
    """Copy the state of rank 0 to all ranks. It is equal already, except for what does not depend on a seed."""
    if is_distributed():
        for x in method.state_dict().values():
            same = x.contiguous()
            dist.broadcast(same, 0)
            x.copy_(same)


def seed_per_rank(method: Method, seed: int) -> None:
    """Give all ranks the same weights, and each rank its own random numbers (dropout). Rank 0 has those of a single process."""
    broadcast_state(method)
    if not is_main_process():
        torch.manual_seed(derive_seed("process", seed, rank()))
