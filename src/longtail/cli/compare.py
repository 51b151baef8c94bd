"""The command `compare`."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tyro.conf import Positional, arg

from longtail import recipes
from longtail.cli.console import make_screen, print_lines, print_next_commands
from longtail.cli.parse import (
    check_data_paths,
    check_model_name,
    get_given_settings,
    normalize_flag,
    parse_arguments,
    reject_both,
    scan_flags,
    take_data_argument,
)
from longtail.config import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, TrainConfig, ViewsConfig
from longtail.plan import Plan
from longtail.text import escape_nonprintable
from longtail.training import SHARED_SECTIONS, check_not_a_run, log_choices, select_sections


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train several methods on the same images with the same budget, and report which differences are significant."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A recipe name (`longtail recipes` lists them), or a folder, shards or a list (.txt .csv .tsv .json) of your images."""
    methods: tuple[str, ...] = ("ce", "balanced-softmax", "paco")
    """Names of methods (`longtail recipes` lists them), or all. The default also includes logistic-regression and ncm
    if the features of a frozen backbone are cached."""
    seeds: tuple[int, ...] | None = None
    """Each method is trained once per seed; tests of significance need at least three (default: 0 1 2, or --train.seeds)."""
    imbalance: float | None = None
    """Imbalance factor: size of the largest class divided by that of the smallest class."""
    epochs: int | None = None
    """Epochs of each method (default: those of the recipe, or --train.epochs); second stages are scaled accordingly."""
    time_limit: Annotated[str | None, arg(metavar="TIME")] = None
    """Approximate time for all runs together, such as 90s, 10m or 1.5h; for your own images only. Cached views, folds,
    candidates and epochs are reduced to fit. Settings that you give are not changed."""
    out: Path | None = None
    """Output folder (default: runs/compare-DATA-IMBALANCE). Runs that are finished there are not trained again."""
    data: DataConfig
    views: ViewsConfig
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig


class Comparison(NamedTuple):
    """The methods, settings and folder that a command line of `longtail compare` asks for."""

    name: str
    """The recipe or the path to images."""
    given: Compare
    """The parsed arguments."""
    sections: dict[str, Any]
    """The sections of the configuration that all methods share, by name."""
    budget: Callable[[str], Plan] | None
    """Returns the plan of a method by its name, for the user's images."""
    config: Config
    """The configuration of cross-entropy, or of the recipe with the given settings."""


def run_compare(args: list[str]) -> None:
    """Run `longtail compare`."""
    name, given, sections, budget, config = resolve_comparison(args)

    from longtail.comparison import compare, default_out
    from longtail.reporting.summary import summary_lines
    from longtail.reporting.table import to_rich

    def change(config: Config) -> Config:
        return config if budget else replace(config, **sections)

    out, screen = given.out or default_out(name, config), make_screen()
    methods = given.methods if "methods" in map(normalize_flag, args) else None
    seeds, limit = given.seeds, given.time_limit
    rows = compare(name, methods, out, seeds, given.imbalance, given.epochs, change, budget, limit)
    screen.print(to_rich(rows, screen.width))
    print_lines(summary_lines(rows))
    print_lines([f"written to {out}/table.md, {out}/table.json and {out}/comparison.png"])
    print(f"full report: {escape_nonprintable(out)}/report.html")
    best = rows[-1]
    run = shlex.quote(str(best.runs[0].folder.parent))
    print_next_commands(
        (f"longtail predict {run} IMAGES", f"predict with the best method, {best.label}"),
        (f"longtail export {run}", "export its network"),
    )


def resolve_comparison(args: list[str]) -> Comparison:
    """Return what the arguments of `longtail compare` result in. Automatic choices are printed."""
    name = take_data_argument("compare", args)
    reject_both(args, ("--epochs", "--train.epochs"), ("--seeds", "--train.seeds"), ("--imbalance", "--data.imbalance"))
    config = recipes.equal_budget(name, imbalance=scan_flags(args[1:], imbalance=float)["imbalance"])
    defaults = Compare(images=name, **select_sections(config, SHARED_SECTIONS))
    given = parse_arguments(Compare, "compare", args, defaults)
    check_not_a_run(name)
    check_data_paths(given.data)
    check_model_name(given.model.name)
    methods = recipes.select_methods(given.methods)
    sections, budget = select_sections(given, SHARED_SECTIONS), None
    if recipes.is_user_data(name):
        settings = {"train.seeds": given.train.seeds} | get_given_settings(args, given)
        if given.epochs is not None:
            settings["train.epochs"] = given.epochs
        shown = "paco" if "paco" in methods else methods[0]
        budget = choose_budget(name, given.data, given.train.device, settings, given.imbalance, shown)
        sections = select_sections(budget("ce").config, SHARED_SECTIONS)
    return Comparison(name, given, sections, budget, replace(config, **sections))


def choose_budget(
    name: str, data: DataConfig, device: str, given: Mapping[str, Any], imbalance: float | None, shown: str
) -> Callable[[str], Plan]:
    """Choose the settings with which methods are compared on the user's images, and print the main ones with their reasons.

    Return a function that returns the plan of a method by its name.

    Args:
        name: Path to the images.
        data: The `data` section with the given flags.
        device: The value of --train.device.
        given: Settings that are given on the command line. They are not changed.
        imbalance: The value of --imbalance.
        shown: The method whose settings are printed.
    """
    from longtail.autoconfig import choose, choose_plan, inspect_data

    facts = inspect_data(data, device)
    chosen = choose(name, facts, shown, given, imbalance)
    # Cross-validation selects these for each method.
    selected = ("--optim.lr", "--optim.weight_decay") if chosen.candidates else ()
    log_choices(chosen, exclude=("--method", *selected))
    return lambda method: choose_plan(name, facts, method, given, imbalance)
