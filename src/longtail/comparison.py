"""Comparison of methods on the same images with the same budget. This is the code behind `longtail compare`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from longtail import files, recipes, run_folder
from longtail.autoconfig import choose, inspect_data
from longtail.config import Config, DataConfig
from longtail.data.sources import DataSet, load_cached
from longtail.engine.run_lock import check_folder, check_images
from longtail.engine.train import check_seeds, train
from longtail.errors import Interrupted, UserError
from longtail.methods import make
from longtail.progress import format_duration, log_info, log_warning
from longtail.recipes import ALL_METHODS, select_methods
from longtail.reporting.page import ReportRuns, build_page, write_page
from longtail.reporting.plots import accuracy_by_method
from longtail.reporting.result_rows import ResultRow, make_rows
from longtail.reporting.table import points_by_dataset, write_table

DEFAULT_METHODS = ("ce", "balanced-softmax", "paco")
MIN_SECONDS_FOR_ESTIMATE = 10.0  # training time from which the remaining time is estimated


def compare(
    data: str | Path,
    methods: Sequence[str] | str = DEFAULT_METHODS,
    out: Path | str | None = None,
    seeds: Sequence[int] | None = None,
    imbalance: float | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
    budget: Callable[[str], Config] | None = None,
) -> list[ResultRow]:
    """Train methods with the same budget and return the rows of their table, sorted from worst to best.

    All methods have the same backbone, epochs, augmentations and seeds. Finished runs in `out` are not trained again. Writes
    table.md, table.json, comparison.png and report.html to `out`. If a method fails, the others are still trained.

    Args:
        data: A recipe, or a folder or list of images.
        methods: Names of methods; "all": all methods.
        out: Output folder; None: runs/compare-DATA-IMBALANCE.
        seeds: Each method is trained once per seed; None: 0, 1 and 2.
        imbalance: Imbalance factor; None: that of the recipe.
        epochs: Epochs of each method; None: those of the recipe.
        change: Returns a modified configuration, for changes that apply to all methods.
        budget: Returns the configuration of a method by its name; None: the recipe's, or the one chosen for a folder.
    """
    files.check_working_directory((Path(out or "runs"),))
    names, budget = select_methods(methods), budget or make_budget(data, imbalance)
    configs = {name: apply_changes(budget(name), seeds, epochs, change) for name in names}
    out = Path(out) if out else default_out(data, next(iter(configs.values())))
    for name, config in configs.items():
        for seed in config.train.seeds:
            check_folder(out / name / f"seed{seed}", config, resume=True, top=out)
    loaded: dict[DataConfig, DataSet] = {}
    errors = find_unsupported(configs, out, loaded)
    for name, error in errors.items():
        if ALL_METHODS not in methods or len(errors) == len(configs):
            raise UserError(f"{name}: {error}", kind=error.kind)
        log_warning(f"skipping {name}: {error}")
    configs = {name: config for name, config in configs.items() if name not in errors}
    failures = train_methods(configs, out, loaded)
    if len(failures) == len(configs):
        raise next(iter(failures.values()))
    return write_results([out / name for name in configs if name not in failures], configs, out)


def train_methods(configs: dict[str, Config], out: Path, loaded: dict[DataConfig, DataSet]) -> dict[str, UserError]:
    """Train methods one after the other, and return the errors of those that failed.

    Args:
        configs: Configurations by the names of the methods.
        out: The folder in which each method has a folder.
        loaded: Data sets that are loaded already.
    """
    failures: dict[str, UserError] = {}
    unfinished = [name for name, config in configs.items() if not is_finished(config, out / name)]
    names, start = list(configs), time.monotonic()
    for number, (name, config) in enumerate(configs.items(), 1):
        remaining = sum(name in unfinished for name in names[number - 1 :])
        time_left = estimate_time_left(time.monotonic() - start, len(unfinished) - remaining, remaining)
        log_info(f"method {number} of {len(configs)}: {config.method.label}{time_left}")
        if failure := train_method(name, config, out / name, loaded):
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


def train_method(name: str, config: Config, folder: Path, loaded: dict[DataConfig, DataSet]) -> UserError | None:
    """Train the unfinished runs of a method. Return the error if it fails.

    Args:
        name: Name of the method.
        config: Its configuration.
        folder: The folder of its runs.
        loaded: Data sets that are loaded already.
    """
    if is_finished(config, folder):
        log_info(f"{folder} is finished already")
        return None
    try:
        train(config, folder, resume=True, data=load_cached(config.data, loaded))
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
    rows = make_rows([run for run in run_folder.read_finished(folders) if run.seed in seeds])
    write_table(rows, out)
    with files.replace_file(out / "comparison.png") as figure:
        accuracy_by_method(points_by_dataset(rows), figure)
    with files.replace_file(out / "report.html") as fresh:
        write_page(build_page(ReportRuns(rows)), fresh)
    return rows


# Methods and configurations


def make_budget(data: str | Path, imbalance: float | None = None) -> Callable[[str], Config]:
    """Return a function that returns the configuration of a method by its name.

    It is the recipe with the setting `equal`; for the user's images, the settings are chosen automatically.

    Args:
        data: A recipe, or a folder or list of images.
        imbalance: Imbalance factor; None: that of the recipe.
    """
    if recipes.is_user_data(data):
        facts = inspect_data(recipes.make(data, imbalance=imbalance).data)
        return lambda method: with_seeds(choose(data, facts, method, imbalance=imbalance).config, (0, 1, 2))
    return lambda method: recipes.equal_budget(data, method, imbalance)


def with_seeds(config: Config, seeds: Sequence[int]) -> Config:
    """Return a configuration with other seeds."""
    return replace(config, train=replace(config.train, seeds=tuple(seeds)))


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
        config = with_seeds(config, seeds)
    return recipes.with_epochs(config, config.train.epochs if epochs is None else epochs, base.train.epochs)


def find_unsupported(configs: dict[str, Config], out: Path, loaded: dict[DataConfig, DataSet]) -> dict[str, UserError]:
    """Return the errors of methods that cannot be trained on the data or with the network, before any method is trained.

    Existing runs must be of the same images, because a table compares methods on one data set; otherwise raise a UserError.

    Args:
        configs: Configurations by the names of the methods.
        out: The folder in which each method has a folder.
        loaded: Data sets that are loaded already; others are added.
    """
    errors = {}
    for name, config in configs.items():
        data = load_cached(config.data, loaded)
        for seed in config.train.seeds:
            check_images(out / name / f"seed{seed}", data)
        check_seeds({seed: out / name / f"seed{seed}" for seed in config.train.seeds})
        if not is_finished(config, out / name):
            try:
                make(config, data.train.counts, stored=True).check(data.val is not None)
            except UserError as error:
                errors[name] = error
    return errors


def is_finished(config: Config, folder: Path) -> bool:
    """Return whether the runs of all seeds are finished."""
    return all((folder / f"seed{seed}" / run_folder.METRICS).exists() for seed in config.train.seeds)


def default_out(data: str | Path, config: Config) -> Path:
    """Return the default output folder of a comparison."""
    factor = f"-{config.data.imbalance:g}" if config.data.imbalance > 1 else ""
    return Path("runs") / f"compare-{run_folder.short_name(data)}{factor}"
