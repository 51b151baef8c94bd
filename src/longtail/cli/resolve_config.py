"""Resolve the configuration of a command: a recipe, a stored run, or automatic choices for the user's images.

A command line is parsed once. Which flags exist and what their defaults are depends on the recipe, so the few flags that select
a recipe are scanned before (`scan_recipe`). Automatic choices depend on the flags that are given; they are made afterwards, and
the given values are applied on top of them.
"""

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longtail import recipes, run_folder
from longtail.cli.console import print_on_main_process
from longtail.cli.parse import check_path, scan_flags
from longtail.config import Config, DataConfig, PaCo
from longtail.errors import UserError
from longtail.progress import terminal_width

SHARED_SECTIONS = ("data", "views", "model", "optim", "train", "log")  # sections that do not depend on the method
ALL_SECTIONS = ("method", *SHARED_SECTIONS)
LOCATION = ("name", "root", "train_list", "test_list")  # settings in `data` that say where the images are


def select_sections(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return some sections of a configuration, or of parsed arguments, by name."""
    return {name: getattr(config, name) for name in names}


def scan_recipe(name: str, args: list[str]) -> tuple[Config, str | None]:
    """Return the configuration that the flags of recipes select, and the value of --setting; other flags are ignored.

    Args:
        name: A recipe or a path to images.
        args: The arguments after the name.
    """
    selected = scan_flags(args, method=str, imbalance=float, setting=str, network=str, augment=str, strategy=int)
    strategy = selected.pop("strategy")
    config = recipes.make(name, **selected)
    return config if strategy is None else recipes.with_strategy(config, strategy), selected["setting"]


def find_resumed_config(data: DataConfig, args: list[str]) -> Config | None:
    """Return the configuration of the run that --resume continues, or None if there is none.

    The settings are those of the stored run. The images are those that the command names, because they may have been moved;
    different images are rejected by their checksum later.

    Args:
        data: Where the images are.
        args: The arguments after the path to the images.
    """
    flags = scan_flags(args, switches=("resume",), out=Path)
    if not flags["resume"] or flags["out"] is None:
        return None
    check_path(flags["out"])
    folders = run_folder.find_runs(flags["out"]) if flags["out"].exists() else []
    if not folders:
        return None
    stored = run_folder.load_config(folders[0])
    return replace(stored, data=replace(stored.data, **select_sections(data, LOCATION)))


def get_given_settings(args: list[str], parsed: Any) -> dict[str, Any]:
    """Return the parsed values of the settings that are given on the command line, by flag, such as {"optim.lr": 0.1}."""
    flags = [arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    settings = [flag.replace(".no_", ".") for flag in flags if "." in flag]
    return {name: functools.reduce(getattr, name.split("."), parsed) for name in settings}


def choose_config(
    name: str,
    data: DataConfig,
    device: str,
    method: str | None,
    given: Mapping[str, Any],
    imbalance: float | None,
    strategy: int | None,
) -> Config:
    """Choose the settings for the user's images, and print the main ones with their reasons.

    Args:
        name: Path to the images.
        data: The `data` section with the given flags.
        device: The value of --train.device.
        method: The value of --method.
        given: Settings that are given on the command line. They are not changed.
        imbalance: The value of --imbalance.
        strategy: The value of --strategy.
    """
    from longtail.autoconfig import choose, inspect_data, with_values

    chosen = choose(name, inspect_data(data, device), method, given, imbalance)
    print_on_main_process(chosen.describe(width=terminal_width()))
    if strategy is None:
        return chosen.config
    return with_values(recipes.with_strategy(chosen.config, strategy), given)


def choose_budget(
    name: str, data: DataConfig, device: str, given: Mapping[str, Any], imbalance: float | None
) -> Callable[[str], Config]:
    """Choose the settings with which methods are compared on the user's images, and print the main ones with their reasons.

    Return a function that returns the configuration of a method by its name.

    Args:
        name: Path to the images.
        data: The `data` section with the given flags.
        device: The value of --train.device.
        given: Settings that are given on the command line. They are not changed.
        imbalance: The value of --imbalance.
    """
    from longtail.autoconfig import choose, inspect_data

    facts = inspect_data(data, device)
    chosen = choose(name, facts, "paco", given, imbalance)
    print_on_main_process(chosen.describe(exclude="--method", width=terminal_width()))
    return lambda method: choose(name, facts, method, given, imbalance).config


def choose_queue_and_batch(name: str) -> dict[str, int]:
    """Return the queue length and the batch size of PaCo that `longtail train` would choose for the user's images."""
    from longtail.autoconfig import choose, inspect_data

    config = choose(name, inspect_data(recipes.make(name).data), "paco").config
    assert isinstance(config.method, PaCo)
    return {"queue": config.method.queue, "batch": config.train.batch_size}


def check_not_a_run(path: str) -> None:
    """Raise a UserError if the path of the images is a run folder."""
    if (Path(path) / run_folder.CONFIG).exists() or any(Path(path).glob(f"seed*/{run_folder.CONFIG}")):
        command = f"longtail train --from {shlex.quote(path)}"
        raise UserError(f"{path} is a run, not a folder of images: to train it again, use `{command}`", kind="conflict")


def scale_warmup(stored: Config, config: Config, given: Mapping[str, Any]) -> Config:
    """Scale the warm-up of a stored run to another number of epochs, unless it is given, and print the new value.

    Args:
        stored: The configuration of the stored run.
        config: The configuration to train.
        given: Settings that are given on the command line.
    """
    warmup, epochs = stored.optim.warmup_epochs, config.train.epochs
    if epochs == stored.train.epochs or "optim.warmup_epochs" in given or not warmup:
        return config
    scaled = round(warmup * epochs / stored.train.epochs, 2)
    print_on_main_process(
        [f"--optim.warmup_epochs {scaled:g}: scaled with the number of epochs (stored run: {warmup:g})"]
    )
    return replace(config, optim=replace(config.optim, warmup_epochs=scaled))


def format_setting(name: str, value: Any) -> list[str]:
    """Return the arguments that set a value, such as ["--optim.lr", "0.1"] or ["--model.no_bias"]."""
    if isinstance(value, bool):
        section, field = name.rsplit(".", 1)
        return [f"--{section}.{'' if value else 'no_'}{field}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
