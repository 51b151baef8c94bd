"""The environment variables of torchrun, which give each process its rank and the world size.

Only this module reads them. A value that torchrun could not have set is a UserError that names the variable.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from longtail.errors import UserError

HINT = "start the processes with torchrun, or unset it"
MAX_NUMBER = 2**31 - 1


class World(NamedTuple):
    """Rank and number of processes of a distributed run. The defaults describe a single process."""

    rank: int = 0
    """Rank of this process among all processes."""
    size: int = 1
    """World size: the number of processes on all machines."""
    local_rank: int = 0
    """Rank of this process among the processes on its machine."""
    local_size: int = 1
    """Number of processes on this machine."""
    machines: int = 1
    """Number of machines."""
    restarts: int = 0
    """Number of times that torchrun has restarted the processes."""


def read_world(variables: Mapping[str, str] | None = None) -> World:
    """Read rank and world size from the environment variables. Unset and empty variables have the values of a single process.

    Args:
        variables: The environment variables; by default those of this process.

    Raises:
        UserError: A variable is not a number, or contradicts another one.
    """
    values = os.environ if variables is None else variables
    world = World(
        rank=_read_number(values, "RANK", 0),
        size=_read_number(values, "WORLD_SIZE", 1, minimum=1),
        local_rank=_read_number(values, "LOCAL_RANK", 0),
        local_size=_read_number(values, "LOCAL_WORLD_SIZE", 1, minimum=1),
        machines=_read_number(values, "GROUP_WORLD_SIZE", 1, minimum=1),
        restarts=_read_number(values, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    if values.get("RANK") and values.get("WORLD_SIZE") and world.rank >= world.size:
        raise UserError(f"RANK is {world.rank}, but WORLD_SIZE is {world.size}: {HINT}")
    if values.get("LOCAL_RANK") and values.get("LOCAL_WORLD_SIZE") and world.local_rank >= world.local_size:
        raise UserError(f"LOCAL_RANK is {world.local_rank}, but LOCAL_WORLD_SIZE is {world.local_size}: {HINT}")
    return world


def read_full_world(on_gpu: bool, variables: Mapping[str, str] | None = None) -> World:
    """Read the environment variables, and check that they are sufficient for the processes to connect to each other.

    Args:
        on_gpu: Whether the variables that assign a GPU to each process are also required.
        variables: The environment variables; by default those of this process.

    Raises:
        UserError: A variable is missing or invalid.
    """
    values = os.environ if variables is None else variables
    world = read_world(values)
    if world.size > 1:
        needed = ["RANK", "MASTER_ADDR", "MASTER_PORT", *(["LOCAL_RANK", "LOCAL_WORLD_SIZE"] if on_gpu else [])]
        for name in needed:
            if not values.get(name):
                raise UserError(f"WORLD_SIZE is {world.size}, but {name} is not set: {HINT}")
        if _read_number(values, "MASTER_PORT", 1, minimum=1) > 65535:
            raise UserError(f"MASTER_PORT is {values['MASTER_PORT']}: it must be at most 65535: {HINT}")
    return world


def _read_number(values: Mapping[str, str], name: str, default: int, minimum: int = 0) -> int:
    text = values.get(name, "").strip()
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not minimum <= number <= MAX_NUMBER:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise UserError(f"{name} is {shown!r}: it must be an integer of at least {minimum}: {HINT}")
    return number
