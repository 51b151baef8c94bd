"""Comparison of methods on the same images with the same budget. This is the code behind `longtail compare`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longtail import files, recipes, run_folder
from longtail.autoconfig import choose_plan, inspect_data, with_values
from longtail.config import Config, DataConfig
from longtail.data.sources import DataSet, load_cached
from longtail.engine.device import choose_device
from longtail.engine.fit_head import check_supports_features
from longtail.engine.head_runs import Backbones, find_stored_candidate
from longtail.engine.run_lock import check_folder, check_same_images, contains_run
from longtail.engine.time_budget import plan_time, read_reduced_settings
from longtail.engine.train import check_seed_folders, train
from longtail.errors import Interrupted, UserError, check_is_path
from longtail.methods import find_method, make
from longtail.plan import Plan
from longtail.progress import format_duration, log_info, log_warning, parse_duration
from longtail.recipes import ALL_METHODS, select_methods
from longtail.reporting.page import ReportRuns, write_runs
from longtail.reporting.plots import accuracy_by_method
from longtail.reporting.result_rows import ResultRow, make_rows
from longtail.reporting.table import points_by_dataset, write_table

DEFAULT_METHODS = ("ce", "balanced-softmax", "paco")
BASELINES = ("logistic-regression", "ncm")
"""Methods that are compared by default if the features of a frozen backbone are stored: each of them takes seconds."""
MIN_SECONDS_FOR_ESTIMATE = 10.0  # training time from which the remaining time is estimated


def compare(
    data: str | Path,
    methods: Sequence[str] | str | None = None,
    out: Path | str | None = None,
    seeds: Sequence[int] | None = None,
    imbalance: float | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
    budget: Callable[[str], Plan | Config] | None = None,
    time_limit: str | float | None = None,
) -> list[ResultRow]:
    """Train methods with the same budget and return the rows of their table, sorted from worst to best.

    All methods have the same backbone, epochs, augmentations and seeds. On stored features of a frozen backbone,
    cross-validation selects the settings of each method among those that `train` would try. Finished runs in `out` are not
    trained again. Writes table.md, table.json, comparison.png and report.html to `out`. If a method fails, the others are still
    trained.

    Args:
        data: A recipe, or a folder or list of images.
        methods: Names of methods; "all": all methods; None: cross-entropy, Balanced Softmax and PaCo, and on stored features
            also logistic regression and the nearest class mean.
        out: Output folder; None: runs/compare-DATA-IMBALANCE.
        seeds: Each method is trained once per seed; None: 0, 1 and 2.
        imbalance: Imbalance factor; None: that of the recipe.
        epochs: Epochs of each method; None: those of the recipe.
        change: Returns a modified configuration, for changes that apply to all methods.
        budget: Returns the plan or the configuration of a method by its name; None: the recipe's, or the one that is chosen for
            the user's images.
        time_limit: For the user's images: the time that all runs together may take, in seconds or as "90s", "10m" or "1.5h".
            Settings that are not given are reduced so that the estimated time fits.
    """
    check_is_path(data, "data")
    files.check_working_directory((Path(out or "runs"),))
    limit = None if time_limit is None else parse_duration(time_limit)
    if limit is not None and not recipes.is_user_data(data):
        raise UserError("--time-limit is only available for your own images: set --epochs instead", kind="conflict")
    if budget is None:
        given = {} if epochs is None else {"train.epochs": epochs}
        budget = make_budget(data, imbalance, given)
    plans = {
        name: as_plan(plan).map(lambda config: apply_changes(config, seeds, epochs, change))
        for name, plan in make_plans(methods, budget).items()
    }
    out = Path(out) if out else default_out(data, next(iter(plans.values())).config)
    plans = continue_plans(plans, out, limit)
    for name, plan in plans.items():
        for folder in list_run_folders(plan.config, out / name):
            check_folder(folder, plan.config, resume=True, top=out)
    loaded: dict[DataConfig, DataSet] = {}
    errors = find_unsupported({name: plan.config for name, plan in plans.items()}, out, loaded)
    for name, error in errors.items():
        if ALL_METHODS not in (methods or ()) or len(errors) == len(plans):
            raise UserError(f"{name}: {error}", kind=error.kind)
        log_warning(f"skipping {name}: {error}")
    plans = {name: plan for name, plan in plans.items() if name not in errors}
    backbones = Backbones()
    plans = plan_comparison(plans, out, loaded, backbones, limit)
    failures = train_methods(plans, out, loaded, backbones)
    if len(failures) == len(plans):
        raise next(iter(failures.values()))
    configs = {name: plan.config for name, plan in plans.items()}
    return write_results([out / name for name in configs if name not in failures], configs, out)


def make_plans(methods: Sequence[str] | str | None, budget: Callable[[str], Plan | Config]) -> dict[str, Plan | Config]:
    """Return the plans of methods by their names. The baselines are added to the default methods if features are stored.

    Args:
        methods: Names of methods; None: the default methods.
        budget: Returns the plan or the configuration of a method by its name.
    """
    names = select_methods(DEFAULT_METHODS if methods is None else methods)
    plans = {name: budget(name) for name in names}
    if methods is None and all(as_plan(plan).config.data.cached_views for plan in plans.values()):
        plans |= {name: budget(name) for name in BASELINES}
    return plans


def as_plan(plan: Plan | Config) -> Plan:
    """Return a plan; a configuration becomes one without candidates."""
    return Plan(plan) if isinstance(plan, Config) else plan


def continue_plans(plans: dict[str, Plan], out: Path, limit: float | None) -> dict[str, Plan]:
    """Return plans with the settings with which existing runs were started.

    Args:
        plans: The plans by the names of the methods.
        out: The folder in which each method has a folder.
        limit: The time limit, which has reduced settings of existing runs.
    """
    folders = {name: list_run_folders(plan.config, out / name) for name, plan in plans.items()}
    reduced = read_reduced_settings([f for found in folders.values() for f in found]) if limit else None
    found = {}
    for name, plan in plans.items():
        if reduced is not None and plan.adapt is not None:
            plan = plan.adapt(reduced)
        stored = find_stored_candidate(plan.candidates, folders[name])
        found[name] = Plan(stored) if stored else plan
    return found


def plan_comparison(
    plans: dict[str, Plan], out: Path, loaded: dict[DataConfig, DataSet], backbones: Backbones, limit: float | None
) -> dict[str, Plan]:
    """Log the estimated time of the methods that are not begun, and return the plans, reduced to a time limit.

    Args:
        plans: The plans by the names of the methods.
        out: The folder in which each method has a folder.
        loaded: Data sets that are loaded already.
        backbones: The frozen backbones that are used for training later.
        limit: The time limit in seconds. If there are runs already, their settings are used.
    """
    folders = {name: list_run_folders(plan.config, out / name) for name, plan in plans.items()}
    begun = {name for name, found in folders.items() if any(map(contains_run, found))}
    names = [name for name in plans if name not in begun]
    data = [load_cached(plans[name].config.data, loaded) for name in names]
    if not names or (limit is None and plans[names[0]].config.log.progress == "none"):
        return plans
    device, first = choose_device(plans[names[0]].config.train.device), [folders[name][0] for name in names]
    limit = None if begun else limit
    found = plan_time([plans[name] for name in names], data, first, device, backbones, limit)
    return plans | dict(zip(names, found, strict=True))


def train_methods(
    plans: dict[str, Plan], out: Path, loaded: dict[DataConfig, DataSet], backbones: Backbones
) -> dict[str, UserError]:
    """Train methods one after the other, and return the errors of those that failed.

    Args:
        plans: The plans by the names of the methods.
        out: The folder in which each method has a folder.
        loaded: Data sets that are loaded already.
        backbones: Frozen backbones, whose features all methods share.
    """
    failures: dict[str, UserError] = {}
    unfinished = [name for name, plan in plans.items() if not is_finished(plan.config, out / name)]
    names, start = list(plans), time.monotonic()
    for number, (name, plan) in enumerate(plans.items(), 1):
        remaining = sum(name in unfinished for name in names[number - 1 :])
        shared = sum(backbone.seconds for backbone in backbones.made.values())  # of features: computed once
        time_left = estimate_time_left(time.monotonic() - start - shared, len(unfinished) - remaining, remaining)
        log_info(f"method {number} of {len(plans)}: {plan.config.method.label}{time_left}")
        if failure := train_method(name, plan, out / name, loaded, backbones):
            failures[name] = failure
            log_warning(f"{name} failed: {failure}")
    return failures


def estimate_time_left(seconds: float, trained: int, remaining: int) -> str:
    """Return the estimated time of the remaining methods, in parentheses; an empty string if it is unknown or short.

    Args:
        seconds: Training time so far.
        trained: Number of methods that were trained in this time.
        remaining: Number of methods to train.
    """
    if not trained or not remaining or seconds < MIN_SECONDS_FOR_ESTIMATE:
        return ""
    return f" (about {format_duration(seconds / trained * remaining)} left for all methods)"


def train_method(
    name: str, plan: Plan, folder: Path, loaded: dict[DataConfig, DataSet], backbones: Backbones
) -> UserError | None:
    """Train the unfinished runs of a method. Return the error if it fails.

    Args:
        name: Name of the method.
        plan: Its plan.
        folder: The folder of its runs.
        loaded: Data sets that are loaded already.
        backbones: Frozen backbones, whose features all methods share.
    """
    config = plan.config
    if is_finished(config, folder):
        log_info(f"{folder} is already finished")
        return None
    try:
        data = load_cached(config.data, loaded)
        train(config, folder, resume=True, data=data, candidates=plan.candidates, backbones=backbones)
    except Interrupted as stop:
        raise stop.with_resume_hint(f"{name} (progress is saved)") from stop
    except UserError as error:
        return error
    return None


def write_results(folders: Sequence[Path], configs: dict[str, Config], out: Path) -> list[ResultRow]:
    """Write table, figure and report, and return the rows of the table.

    Args:
        folders: The folders of the methods. Only runs with the seeds of the configurations are included.
        configs: Configurations by the names of the methods.
        out: Output folder.
    """
    (seeds,) = {config.train.seeds for config in configs.values()}
    if any(config.log.progress != "none" for config in configs.values()):
        log_info("writing the table, the figure and the report")
    rows = make_rows([run for run in run_folder.read_finished(folders) if run.seed in seeds])
    write_rows(rows, out)
    return rows


def write_rows(rows: list[ResultRow], out: Path) -> None:
    """Write table, figure and report of some rows to a folder."""
    write_table(rows, out)
    with files.replace_file(out / "comparison.png") as figure:
        accuracy_by_method(points_by_dataset(rows), figure)
    with files.replace_file(out / "report.html") as fresh:
        write_runs(ReportRuns(rows), fresh)


# Methods and configurations


SEEDS = (0, 1, 2)


def make_budget(
    data: str | Path, imbalance: float | None = None, given: Mapping[str, Any] | None = None
) -> Callable[[str], Plan]:
    """Return a function that returns the plan of a method by its name.

    It is the recipe with the setting `equal`; for the user's images, the settings are chosen automatically.

    Args:
        data: A recipe, or a folder or list of images.
        imbalance: Imbalance factor; None: that of the recipe.
        given: For the user's images: settings that are not changed, by name.
    """
    if not recipes.is_user_data(data):
        return lambda method: Plan(recipes.equal_budget(data, method, imbalance))
    settings = {"train.seeds": SEEDS} | dict(given or {})
    base = with_values(recipes.make(data, imbalance=imbalance), settings)
    facts = inspect_data(base.data, base.train.device)
    return lambda method: choose_plan(data, facts, method, settings, imbalance)


def apply_changes(
    base: Config,
    seeds: Sequence[int] | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
) -> Config:
    """Return the configuration of a method with the requested changes.

    Args:
        base: The configuration of the method in the common budget.
        seeds: The seeds; None: not changed.
        epochs: Number of epochs; None: not changed. Second stages are scaled accordingly.
        change: Returns a modified configuration.
    """
    config = change(base) if change else base
    val_fraction = max(base.data.val_fraction, config.data.val_fraction)  # some methods need a validation split
    config = replace(config, data=replace(config.data, val_fraction=val_fraction))
    if seeds is not None:
        config = replace(config, train=replace(config.train, seeds=tuple(seeds)))
    return recipes.with_epochs(config, config.train.epochs if epochs is None else epochs, base.train.epochs)


def find_unsupported(configs: dict[str, Config], out: Path, loaded: dict[DataConfig, DataSet]) -> dict[str, UserError]:
    """Return the errors of methods that cannot be trained on the data or with the network, before any method is trained.

    Existing runs must be of the same images, because a table compares methods on one data set; otherwise raise a UserError.

    Args:
        configs: Configurations by the names of the methods.
        out: The folder in which each method has a folder.
        loaded: Data sets that are loaded already; others are added.
    """
    errors, is_cached = {}, any(config.data.cached_views for config in configs.values())
    for name, config in configs.items():
        data = load_cached(config.data, loaded)
        for folder in list_run_folders(config, out / name):
            check_same_images(folder, data)
        check_seed_folders({seed: out / name / f"seed{seed}" for seed in config.train.seeds})
        if not is_finished(config, out / name):
            try:
                if is_cached:
                    check_supports_features(find_method(config.method))
                make(config, data.train.counts, stored=True).check(data.val is not None)
            except UserError as error:
                errors[name] = error
    return errors


def is_finished(config: Config, folder: Path) -> bool:
    """Return whether the runs of all seeds are finished."""
    return all((run / run_folder.METRICS).exists() for run in list_run_folders(config, folder))


def list_run_folders(config: Config, folder: Path) -> list[Path]:
    """Return the run folders of a method, one for each seed, in the folder of the method."""
    return [folder / f"seed{seed}" for seed in config.train.seeds]


def default_out(data: str | Path, config: Config) -> Path:
    """Return the default output folder of a comparison."""
    factor = f"-{config.data.imbalance:g}" if config.data.imbalance > 1 else ""
    return Path("runs") / f"compare-{run_folder.short_name(data)}{factor}"
