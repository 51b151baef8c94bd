"""From arguments to a configuration: a recipe's own, a stored run's, or for a path what is chosen, with the reasons printed."""

import functools
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from longtail import recipes, run_folder
from longtail.cli.arguments import Compare, Inspect, Train
from longtail.cli.parsing import check_path, name_first, parse, scanned
from longtail.config import Config, OptimConfig, PaCo
from longtail.errors import UserError
from longtail.progress import columns, is_main_process, wrapped

SHARED = ("data", "views", "model", "optim", "train", "log")  # sections that all methods have alike
EVERY = ("method", *SHARED)
PLACE = ("name", "root", "train_list", "test_list")  # where images lie


def train_arguments(args: list[str]) -> tuple[str, Train, Config]:
    """What is trained, as the user calls it; all that was said; and the configuration that it comes to."""
    if args[:1] == ["--from"]:
        return stored_arguments(args)
    name = name_first("train", args)
    config = chosen_recipe(name, args[1:])
    given = parse(Train, "train", args, Train(recipe=name, **sections_of(config, *EVERY)))
    if given.again:
        raise UserError(f"--from {given.again}: it comes first, instead of {name}", kind="conflict")
    if recipes.is_user_data(name) and given.setting is None:
        if (Path(name) / run_folder.CONFIG).exists() or any(Path(name).glob(f"seed*/{run_folder.CONFIG}")):
            again = f"longtail train --from {shlex.quote(name)}"
            raise UserError(f"{name} is a run, not a folder of images: `{again}` trains it anew", kind="conflict")
        config = chosen_for(name, args, given)
        given = parse(Train, "train", args, Train(recipe=name, **sections_of(config, *EVERY)))
    return name, given, replace(config, **sections_of(given, *EVERY))


def stored_arguments(args: list[str]) -> tuple[str, Train, Config]:
    """A run once more, with the flags that follow."""
    if len(args) < 2:
        raise UserError(
            "--from names a run folder or a config.json, as in `longtail train --from runs/x --optim.lr 0.01`"
        )
    check_path(args[1])
    if not os.path.exists(args[1]):
        raise UserError(
            f"--from {args[1]} does not exist: name a run folder or a {run_folder.CONFIG}", kind="missing-file"
        )
    config, name = run_folder.load_common_config(Path(args[1])), f"{Path(args[1]).resolve().stem}-again"
    given = parse(Train, "train", [name, *args[2:]], Train(recipe=name, **sections_of(config, *EVERY)))
    for flag in ("method_name", "imbalance", "setting", "network", "augment", "strategy"):
        if getattr(given, flag) is not None:
            flag = flag.removesuffix("_name")
            raise UserError(
                f"--{flag} chooses a recipe, and --from has one: use flags of sections, such as --method.alpha",
                kind="conflict",
            )
    given = replace(given, out=given.out or Path("runs") / name, optim=warmed_up(config, args[2:], given))
    return name, given, replace(config, **sections_of(given, *EVERY))


def warmed_up(stored: Config, args: list[str], given: Train) -> OptimConfig:
    """At another length the rate rises for the same share of it, unless the user says how long."""
    values, before = given_values(args, given), stored.optim.warmup_epochs
    if given.train.epochs == stored.train.epochs or "optim.warmup_epochs" in values or not before:
        return given.optim
    now = round(before * given.train.epochs / stored.train.epochs, 2)
    say([f"--optim.warmup_epochs {now:g}: the same share of the training as in the stored run ({before:g})"])
    return replace(given.optim, warmup_epochs=now)


def chosen_recipe(name: str, args: list[str]) -> Config:
    """The recipe with its own arguments; section flags are applied after it, so that nothing derived from these is stale."""
    choices = scanned(args, method=str, imbalance=float, setting=str, network=str, augment=str, strategy=int)
    strategy = choices.pop("strategy")
    config = recipes.make(name, **choices)
    return config if strategy is None else recipes.with_strategy(config, strategy)


def chosen_for(name: str, args: list[str], given: Train) -> Config:
    """For the user's images; one that is resumed goes on as it was chosen when it began, with the images that are named now:
    they may have been moved, and others are refused by their checksum."""
    if given.resume and given.out and given.out.exists() and (begun := run_folder.find_runs(given.out)):
        stored = run_folder.load_config(begun[0])
        return replace(stored, data=replace(stored.data, **{key: getattr(given.data, key) for key in PLACE}))

    from longtail.autoconfig import choose, inspect_data

    values = given_values(args, given)
    chosen = choose(name, inspect_data(given.data, given.train.device), given.method_name, values, given.imbalance)
    say(chosen.lines(width=columns()))
    config = chosen.config
    return config if given.strategy is None else recipes.with_strategy(config, given.strategy)


def budget_for(name: str, args: list[str], given: Compare) -> Callable[[str], Config]:
    """The same choices for every method that is compared."""
    from longtail.autoconfig import choose, inspect_data

    facts, values = inspect_data(given.data, given.train.device), given_values(args, given)
    if given.epochs is not None:
        values["train.epochs"] = given.epochs
    chosen = choose(name, facts, "paco", values, given.imbalance)
    say(chosen.lines(without="--method", width=columns()))
    return lambda method: choose(name, facts, method, values, given.imbalance).config


def given_values(args: list[str], given: Any) -> dict[str, Any]:
    """The flags of sections among the arguments, each with its value as it was understood."""
    flags = [arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")]
    switched = [flag.replace(".no_", ".") for flag in flags if "." in flag]
    return {flag: functools.reduce(getattr, flag.split("."), given) for flag in switched}


def expected(name: str, args: list[str], given: Inspect, all_read: bool) -> list[str]:
    """What `longtail train` would choose for these images, and how to begin."""
    from longtail.autoconfig import choose, inspect_data

    words = [word for flag, value in given_values(args, given).items() for word in as_typed(flag, value)]
    images = " ".join([*map(shlex.quote, [name, *words]), *([] if all_read else ["--data.on_error skip"])])
    return [
        *(wrapped(line, columns()) for line in choose(name, inspect_data(given.data)).lines(width=columns())),
        "next:",
        f"  longtail train {images}      PaCo with these choices",
        f"  longtail compare {images}    is it worth it? cross-entropy, Balanced Softmax and PaCo, three seeds each",
    ]


def as_typed(flag: str, value: Any) -> list[str]:
    """A flag and its value, as they stand on a command line."""
    if isinstance(value, bool):
        section, field = flag.rsplit(".", 1)
        return [f"--{section}.{'' if value else 'no_'}{field}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def contrast_for(name: str) -> dict[str, int]:
    """Queue and batch of PaCo on these images, as `longtail train` would choose them."""
    from longtail.autoconfig import choose, inspect_data

    config = choose(name, inspect_data(recipes.make(name).data), "paco").config
    assert isinstance(config.method, PaCo)
    return {"queue": config.method.queue, "batch": config.train.batch_size}


def say(lines: list[str]) -> None:
    if is_main_process():
        print(*(wrapped(line, columns()) for line in lines), sep="\n", flush=True)


def sections_of(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}
