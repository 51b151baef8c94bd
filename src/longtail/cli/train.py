"""The commands `train`, `eval` and `demo`."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from longtail import recipes, run_folder
from longtail.cli.console import make_screen, print_result_tables
from longtail.cli.parse import check_path, parse_arguments, take_data_argument
from longtail.cli.resolve_config import (
    ALL_SECTIONS,
    check_not_a_run,
    choose_config,
    find_resumed_config,
    get_given_settings,
    scale_warmup,
    scan_recipe,
    select_sections,
)
from longtail.config import (
    Config,
    DataConfig,
    LogConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from longtail.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe or your own images: one run per seed in OUT/seedN, which is evaluated at its end."""

    recipe: Positional[str]
    """A recipe name (its defaults are shown below; `longtail recipes` lists them), or a folder, shards or a list (.txt .csv
    .tsv .json) of your images; settings are then chosen automatically and printed with their reasons."""
    again: Annotated[Path | None, arg(name="from", metavar="RUN")] = None
    """Train with the settings of a run folder or of a config.json. Must be the first argument, in place of a recipe; flags
    override single settings."""
    method_name: Annotated[str | None, arg(name="method", metavar="NAME")] = None
    """Name of the method (`longtail recipes` lists them)."""
    imbalance: float | None = None
    """Imbalance factor: size of the largest class divided by that of the smallest class."""
    setting: str | None = None
    """Hyperparameters of the recipe: released, paper or equal."""
    network: str | None = None
    """For large data sets: one of the networks of the paper (`longtail recipes RECIPE` lists them)."""
    augment: str | None = None
    """For large data sets: plain, sim, rand, rand-rand or stacked (`longtail recipes RECIPE` lists those of the paper)."""
    strategy: int | None = None
    """Augmentation strategy of the paper: 1: sim/sim, 2: rand/rand, 3: rand for the query view and sim for the key view."""
    out: Path | None = None
    """Output folder (default: runs/RECIPE-METHOD-IMBALANCE, followed by setting, network and augmentation if given)."""
    resume: bool = False
    """Continue the runs in OUT."""
    verbose: bool = False
    """Show all metrics at the end: also calibration error, k-NN accuracy, latency, and accuracy under shifted class
    frequencies."""
    data: DataConfig
    views: ViewsConfig
    model: ModelConfig
    method: MethodConfig
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluate finished runs again, with their stored weights."""

    run: Positional[Path]
    """A run folder, or a folder that contains runs."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Location of the data, if they were moved."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to evaluate on."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train cross-entropy, Balanced Softmax, SupCon and PaCo on embedded digits, in a few minutes and without a download."""

    out: Path = Path("runs/demo")
    """Output folder."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each method is trained once per seed."""


# train


def run_train(args: list[str]) -> None:
    """Run `longtail train`."""
    name, given, config = resolve_training(args)

    from longtail.distributed import is_main_process
    from longtail.engine.train import train
    from longtail.reporting.table import table

    options = (given.setting, given.network, given.augment)
    out = given.out or default_out(name, given.method_name or config.method.name, config, *options)
    folders = train(config, out, given.resume)
    if is_main_process():
        print_result_tables(table(folders), given.verbose)
        run = shlex.quote(str(out))
        print(f"written to {out}")
        print(
            f"next: longtail report {run} -o report.html, longtail predict {run} IMAGES, longtail export {run} --to onnx"
        )


def resolve_training(args: list[str]) -> tuple[str, Train, Config]:
    """Return the recipe or path that is trained, the parsed arguments, and the configuration that they result in."""
    if args[:1] == ["--from"]:
        return resolve_stored_run(args)
    name = take_data_argument("train", args)
    defaults, setting = scan_recipe(name, args[1:])
    is_automatic = recipes.is_user_data(name) and setting is None
    resumed = find_resumed_config(defaults.data, args[1:]) if is_automatic else None
    defaults = resumed or defaults
    given = parse_arguments(Train, "train", args, Train(recipe=name, **select_sections(defaults, ALL_SECTIONS)))
    if given.again:
        raise UserError(f"--from {given.again} must be the first argument, in place of {name}", kind="conflict")
    if is_automatic:
        check_not_a_run(name)
    if resumed or not is_automatic:
        return name, given, replace(defaults, **select_sections(given, ALL_SECTIONS))
    settings = get_given_settings(args, given)
    config = choose_config(
        name, given.data, given.train.device, given.method_name, settings, given.imbalance, given.strategy
    )
    return name, given, config


def resolve_stored_run(args: list[str]) -> tuple[str, Train, Config]:
    """Return the same as `resolve_training` for arguments that begin with --from."""
    if len(args) < 2:
        raise UserError(
            "--from needs a run folder or a config.json, as in `longtail train --from runs/x --optim.lr 0.01`"
        )
    path = Path(args[1])
    check_path(args[1])
    if not os.path.exists(path):
        raise UserError(
            f"--from {path} does not exist: name a run folder or a {run_folder.CONFIG}", kind="missing-file"
        )
    stored, name = run_folder.load_common_config(path), f"{path.resolve().stem}-again"
    defaults = Train(recipe=name, **select_sections(stored, ALL_SECTIONS))
    given = parse_arguments(Train, "train", [name, *args[2:]], defaults)
    for field in ("method_name", "imbalance", "setting", "network", "augment", "strategy"):
        if getattr(given, field) is not None:
            raise UserError(
                f"--{field.removesuffix('_name')} selects a recipe and cannot be combined with --from: "
                "set single values, such as --method.alpha",
                kind="conflict",
            )
    given = replace(given, out=given.out or Path("runs") / name)
    config = replace(stored, **select_sections(given, ALL_SECTIONS))
    return name, given, scale_warmup(stored, config, get_given_settings(args[2:], given))


def default_out(name: str, method: str, config: Config, *options: str | None) -> Path:
    """Return the default output folder of `longtail train`.

    Args:
        name: The recipe or the path to images.
        method: Name of the method.
        config: The configuration.
        *options: Values of --setting, --network and --augment.
    """
    factor = config.data.imbalance
    is_subsampled = factor > 1 or not recipes.is_user_data(name)
    parts = [run_folder.short_name(name), method, f"{factor:g}" if is_subsampled else None, *options]
    return Path("runs") / "-".join(filter(None, parts))


# eval


def run_eval(args: list[str]) -> None:
    """Run `longtail eval`."""
    given = parse_arguments(Eval, "eval", args)

    from longtail.engine.evaluate import evaluate
    from longtail.reporting.table import table

    folders = list(evaluate(given.run, given.data_root, given.device))
    print_result_tables(table(folders))


# demo


def run_demo(args: list[str]) -> None:
    """Run `longtail demo`."""
    given = parse_arguments(Demo, "demo", args)

    from longtail.demo_run import demo, describe_results
    from longtail.reporting.table import to_rich

    rows = demo(given.out, given.seeds)
    screen = make_screen()
    screen.print(to_rich(rows, screen.width))
    print(*describe_results(rows, given.out), sep="\n")
