"""Processes on this machine that communicate with gloo, for tests; the results of a function in each of them."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longtail.engine.distributed import disconnect

ROOT = Path(__file__).parents[1]
# Children of a server that has imported torch and loaded the digits once: a start takes a fraction of a second.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["longtail.engine.train", "pytest", "tests.engine.test_train"])


def start(work, *args: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that runs `work(*args)`."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # the children import `work` by its name
    process = SERVER.Process(target=work, args=args)
    process.start()
    return process


def start_command(args: list[str], said: Path) -> multiprocessing.process.BaseProcess:
    """Start a process that runs `longtail ARGS`; its standard error is written to a file."""
    return start(_command, args, said)


def _command(args: list[str], said: Path) -> None:
    from longtail.cli import (
        main,
    )  # imported here, because a machine for GPU tests may lack dependencies of the command line

    with open(said, "w", buffering=1) as sys.stderr:
        sys.exit(main(args))


def together(world: int, folder: Path, work, *args: Any) -> list[Any]:
    """Return the results of `work(*args)` in `world` processes, in rank order; they are tensors and plain values."""
    folder.mkdir(parents=True, exist_ok=True)
    children = [start(_child, rank, world, folder, work, args) for rank in range(world)]
    for child in children:
        child.join(120)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0] * world, codes
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _child(rank: int, world: int, folder: Path, work, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.save(work(*args), folder / f"{rank}.pt")
    disconnect()
