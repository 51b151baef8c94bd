"""The environment variables by which torchrun tells a process which of how many it is.

This is the only place that reads them. A value that torchrun could not have set is a UserError, which names the variable.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from longtail.errors import UserError

FIX = "start the processes with torchrun, or unset it"
LARGEST = 2**31 - 1


class World(NamedTuple):
    """The processes that train one run, as seen from one of them; the defaults describe a single process."""

    rank: int = 0
    """The number of this process among all of them."""
    size: int = 1
    """The number of processes on all machines (the world size)."""
    local_rank: int = 0
    """The number of this process among those on its machine."""
    local_size: int = 1
    """The number of processes on this machine."""
    machines: int = 1
    """The number of machines."""
    restarts: int = 0
    """The number of times that torchrun has restarted the processes."""


def read_world(variables: Mapping[str, str] | None = None) -> World:
    """Return what the environment variables say.

    Unset and empty variables have the values of a single process. A UserError says which variable is not a number, or does not
    fit to another one.
    """
    values = os.environ if variables is None else variables
    world = World(
        rank=_read_number(values, "RANK", 0),
        size=_read_number(values, "WORLD_SIZE", 1, smallest=1),
        local_rank=_read_number(values, "LOCAL_RANK", 0),
        local_size=_read_number(values, "LOCAL_WORLD_SIZE", 1, smallest=1),
        machines=_read_number(values, "GROUP_WORLD_SIZE", 1, smallest=1),
        restarts=_read_number(values, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    if values.get("RANK") and values.get("WORLD_SIZE") and world.rank >= world.size:
        raise UserError(f"RANK is {world.rank}, but WORLD_SIZE is {world.size}: {FIX}")
    if values.get("LOCAL_RANK") and values.get("LOCAL_WORLD_SIZE") and world.local_rank >= world.local_size:
        raise UserError(f"LOCAL_RANK is {world.local_rank}, but LOCAL_WORLD_SIZE is {world.local_size}: {FIX}")
    return world


def read_full_world(on_gpu: bool, variables: Mapping[str, str] | None = None) -> World:
    """Return what the environment variables say, after a check that several processes can find one another by them.

    `on_gpu` also asks for the variables that assign a GPU to each process.
    """
    values = os.environ if variables is None else variables
    world = read_world(values)
    if world.size > 1:
        needed = ["RANK", "MASTER_ADDR", "MASTER_PORT", *(["LOCAL_RANK", "LOCAL_WORLD_SIZE"] if on_gpu else [])]
        for name in needed:
            if not values.get(name):
                raise UserError(f"WORLD_SIZE is {world.size}, but {name} is not set: {FIX}")
        if _read_number(values, "MASTER_PORT", 1, smallest=1) > 65535:
            raise UserError(f"MASTER_PORT is {values['MASTER_PORT']}: it must be at most 65535: {FIX}")
    return world


def _read_number(values: Mapping[str, str], name: str, default: int, smallest: int = 0) -> int:
    text = values.get(name, "").strip()
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not smallest <= number <= LARGEST:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise UserError(f"{name} is {shown!r}: it must be a whole number of at least {smallest}: {FIX}")
    return number
