"""The commands `train`, `eval` and `demo`.

The command line of `train` is parsed once. Which flags exist and what their defaults are depends on the recipe, so the few
flags that select a recipe are scanned before (`scan_recipe`). Automatic choices depend on the flags that are given; they are
made afterward, and the given values are applied on top of them.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from longtail import run_folder
from longtail.cli.console import make_screen, print_lines, print_next_commands, print_result_tables
from longtail.cli.parse import (
    check_data_paths,
    check_model_name,
    check_path,
    get_given_settings,
    parse_arguments,
    scan_flags,
    take_data_argument,
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
from longtail.plan import Plan
from longtail.text import escape_nonprintable
from longtail.training import (
    ALL_SECTIONS,
    RecipeChoice,
    default_out,
    find_resumed_config,
    is_automatic,
    load_stored_run,
    make_base,
    make_time_limit,
    rerun_config,
    resolve_config,
    select_sections,
)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a recipe or on your own images: one run per seed, which is evaluated at its end, in OUT/seedN."""

    recipe: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A recipe name (`longtail recipes` lists them), or a folder, shards or a list (.txt .csv .tsv .json) of your images;
    settings are then chosen automatically, and the main ones are printed with their reasons."""
    again: Annotated[Path | None, arg(name="from", metavar="RUN")] = None
    """Train with the settings of a run folder or of a config.json. Must be the first argument, in place of a recipe; flags
    override single settings."""
    method_name: Annotated[str | None, arg(name="method", metavar="NAME")] = None
    """Name of the method (`longtail recipes` lists them)."""
    imbalance: float | None = None
    """Imbalance factor: size of the largest class divided by that of the smallest class."""
    setting: str | None = None
    """Hyperparameters of the recipe: released (released code), paper (text of the paper) or equal (same for all methods)."""
    network: str | None = None
    """For ImageNet-scale recipes: one of the networks of the paper (`longtail recipes RECIPE` lists them)."""
    augment: str | None = None
    """For ImageNet-scale recipes: plain, sim, rand, rand-rand or stacked (those of the paper: `longtail recipes RECIPE`)."""
    strategy: int | None = None
    """Augmentation strategy of the paper: 1: sim/sim, 2: rand/rand, 3: rand for the query view and sim for the key view."""
    out: Path | None = None
    """Output folder (default: runs/DATA-METHOD-IMBALANCE, followed by setting, network and augmentation if given)."""
    resume: bool = False
    """Continue the runs in OUT."""
    time_limit: Annotated[str | None, arg(metavar="TIME")] = None
    """Approximate time for all runs together, such as 90s, 10m or 1.5h; for your own images only. Cached views, folds,
    candidates and epochs are reduced to fit. Settings that you give are not changed."""
    verbose: bool = False
    """Show all metrics at the end, including calibration error, k-NN accuracy, latency, and accuracy under shifted class
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
    """Train cross-entropy, Balanced Softmax, SupCon and PaCo on embedded digits, in two minutes and without a download."""

    out: Path = Path("runs/demo")
    """Output folder."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each method is trained once per seed."""


# train


def run_train(args: list[str]) -> None:
    """Run `longtail train`."""
    name, given, plan = resolve_training(args)

    from longtail.distributed import is_main_process
    from longtail.engine.train import train
    from longtail.reporting.table import table

    options = (given.setting, given.network, given.augment)
    out = given.out or default_out(name, given.method_name or plan.method, plan.config, *options)
    limit = make_time_limit(plan, given.time_limit, given.resume)
    folders = train(plan.config, out, given.resume, candidates=plan.candidates, limit=limit)
    if is_main_process():
        print_result_tables(table(folders), given.verbose)
        print_baseline(folders)
        run = shlex.quote(str(out))
        print(f"written to {escape_nonprintable(out)}")
        print_next_commands(
            (f"longtail report {run} -o report.html", "accuracy by class, confusions, images to check"),
            (f"longtail predict {run} IMAGES", "predict the classes of other images"),
            (f"longtail export {run} --to onnx", "export the network"),
        )


def print_baseline(folders: list[Path]) -> None:
    """Print the accuracy of a logistic regression on the same features, for runs that have measured it."""
    measured = [run.metrics.get("logistic_top1") for run in run_folder.read_finished(folders)]
    found = [value for value in measured if value is not None]
    if found:
        print(f"for comparison, class-balanced logistic regression on the same features: {found[0]:.1f} % accuracy")


def resolve_training(args: list[str]) -> tuple[str, Train, Plan]:
    """Return the recipe or path that is trained, the parsed arguments, and what is trained."""
    if args[:1] == ["--from"]:
        return resolve_stored_run(args)
    name = take_data_argument("train", args)
    choice = scan_recipe(args[1:])
    base = make_base(name, choice)
    resumed = find_resumed_run(base.data, args[1:]) if is_automatic(name, choice) else None
    base = resumed or base
    given = parse_arguments(Train, "train", args, Train(recipe=name, **select_sections(base, ALL_SECTIONS)))
    if given.again:
        raise UserError(f"--from {given.again} must be the first argument, in place of {name}", kind="conflict")
    check_data_paths(given.data)
    check_model_name(given.model.name)
    sections, settings = select_sections(given, ALL_SECTIONS), get_given_settings(args, given)
    return name, given, resolve_config(name, choice, base, sections, settings, resumed is not None)


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


def resolve_stored_run(args: list[str]) -> tuple[str, Train, Plan]:
    """Return the same as `resolve_training` for arguments that begin with --from."""
    if len(args) < 2:
        raise UserError(
            "--from needs a run folder or a config.json, as in `longtail train --from runs/x --optim.lr 0.01`"
        )
    check_path(args[1])
    stored, name = load_stored_run(args[1])
    defaults = Train(recipe=name, **select_sections(stored, ALL_SECTIONS))
    given = parse_arguments(Train, "train", [name, *args[2:]], defaults)
    for field in ("method_name", *RecipeChoice._fields[1:]):
        if getattr(given, field) is not None:
            raise UserError(
                f"--{field.removesuffix('_name')} selects a recipe and cannot be combined with --from: "
                "set single values, such as --method.alpha",
                kind="conflict",
            )
    given = replace(given, out=given.out or Path("runs") / name)
    settings = get_given_settings(args[2:], given)
    return name, given, Plan(rerun_config(stored, select_sections(given, ALL_SECTIONS), settings))


# eval


def run_eval(args: list[str]) -> None:
    """Run `longtail eval`."""
    given = parse_arguments(Eval, "eval", args)
    run_folder.check_exists(given.run)

    from longtail.engine.evaluate import evaluate
    from longtail.reporting.table import table

    folders = list(evaluate(given.run, given.data_root, given.device))
    print_result_tables(table(folders))


# demo


def run_demo(args: list[str]) -> None:
    """Run `longtail demo`."""
    given = parse_arguments(Demo, "demo", args)

    from longtail.demo_run import demo, describe_results, list_next_commands
    from longtail.reporting.table import to_rich

    rows = demo(given.out, given.seeds)
    screen = make_screen()
    screen.print(to_rich(rows, screen.width))
    print_lines(describe_results(rows, given.out))
    print_next_commands(*list_next_commands())
