"""Resolve the configuration of a command: a recipe, a stored run, or automatic choices for the user's images.

A command line is parsed once. Which flags exist and what their defaults are depends on the recipe, so the few flags that select
a recipe are scanned before (`scan_recipe`). Automatic choices depend on the flags that are given; they are made afterwards, and
the given values are applied on top of them.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longtail import recipes
from longtail.cli.parse import check_path, normalize_flag, scan_flags
from longtail.config import Config, DataConfig, PaCo
from longtail.plan import Plan
from longtail.training import (
    RecipeChoice,
    find_resumed_config,
    log_choices,
)


def scan_recipe(args: list[str]) -> RecipeChoice:
    """Return the flags that select a recipe; other flags are ignored.

    Args:
        args: The arguments after the recipe or the path to images.
    """
    flags = scan_flags(args, method=str, imbalance=float, setting=str, network=str, augment=str, strategy=int)
    return RecipeChoice(**flags)


def find_resumed_run(data: DataConfig, args: list[str]) -> Config | None:
    """Return the configuration of the run that --resume continues, or None if there is none.

    Args:
        data: Where the images are.
        args: The arguments after the path to the images.
    """
    flags = scan_flags(args, switches=("resume",), out=Path)
    if not flags["resume"] or flags["out"] is None:
        return None
    check_path(flags["out"])
    return find_resumed_config(data, flags["out"])


def get_given_settings(args: list[str], parsed: Any) -> dict[str, Any]:
    """Return the parsed values of the settings that are given on the command line, by flag, such as {"optim.lr": 0.1}."""
    settings = [flag.replace(".no_", ".") for flag in map(normalize_flag, args) if "." in flag]
    return {name: functools.reduce(getattr, name.split("."), parsed) for name in settings}


def choose_budget(
    name: str, data: DataConfig, device: str, given: Mapping[str, Any], imbalance: float | None
) -> Callable[[str], Plan]:
    """Choose the settings with which methods are compared on the user's images, and print the main ones with their reasons.

    Return a function that returns the plan of a method by its name.

    Args:
        name: Path to the images.
        data: The `data` section with the given flags.
        device: The value of --train.device.
        given: Settings that are given on the command line. They are not changed.
        imbalance: The value of --imbalance.
    """
    from longtail.autoconfig import choose, choose_plan, inspect_data

    facts = inspect_data(data, device)
    chosen = choose(name, facts, "paco", given, imbalance)
    # Cross-validation selects these for each method.
    selected = ("--optim.lr", "--optim.weight_decay") if chosen.candidates else ()
    log_choices(chosen, exclude=("--method", *selected))
    return lambda method: choose_plan(name, facts, method, given, imbalance)


def choose_queue_and_batch(name: str) -> dict[str, int]:
    """Return the queue length and the batch size of PaCo that `longtail train` would choose for the user's images."""
    from longtail.autoconfig import choose, inspect_data

    config = choose(name, inspect_data(recipes.make(name).data), "paco").config
    assert isinstance(config.method, PaCo)
    return {"queue": config.method.queue, "batch": config.train.batch_size}


def format_setting(name: str, value: Any) -> list[str]:
    """Return the arguments that set a value, such as ["--optim.lr", "0.1"] or ["--model.no_bias"]."""
    if isinstance(value, bool):
        section, field = name.rsplit(".", 1)
        return [f"--{section}.{'' if value else 'no_'}{field}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
