"""`longtail compare`: the chosen methods on one set of images under one budget, and a table that says which to trust."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from longtail import files, recipes, run_folder
from longtail.autoconfig import choose, inspect_data
from longtail.config import Config, DataConfig
from longtail.data.sources import DataSet, load_once
from longtail.engine.run_lock import check_folder, check_images
from longtail.engine.train import check_seeds, train
from longtail.errors import Interrupted, UserError
from longtail.methods import make
from longtail.progress import format_duration
from longtail.reporting import document
from longtail.reporting.plots import compared
from longtail.reporting.table import ResultRow, make_dots, make_rows, write_table

USUAL = ("ce", "balanced-softmax", "paco")
ALL = "all"
WORTH_SAYING = 10.0  # seconds; of less nobody wants to know how much is left


def compare(
    data: str | Path,
    methods: Sequence[str] | str = USUAL,
    out: Path | str | None = None,
    seeds: Sequence[int] | None = None,
    imbalance: float | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
    budget: Callable[[str], Config] | None = None,
) -> list[ResultRow]:
    """Train `methods` ("all": every one) on a recipe's data or a folder of images; the rows of their table, best last.

    The twin of `longtail compare`. Backbone, epochs, augmentation and seeds (0 1 2, if not said) are the same for all: by
    `budget` if given, the recipe's, or what is chosen for a folder; `change` may make them others. What OUT has is not trained
    again. Writes OUT/table.md, OUT/table.json, OUT/comparison.png and OUT/report.html. A method that fails is named, and the
    others go on.
    """
    files.check_working_directory((Path(out or "runs"),))
    names, budget = select_methods(methods), budget or usual_budget(data, imbalance)
    configs = {name: configure(budget(name), seeds, epochs, change) for name in names}
    where = Path(out) if out else default_out(data, next(iter(configs.values())))
    for name, config in configs.items():
        for seed in config.train.seeds:
            check_folder(where / name / f"seed{seed}", config, resume=True, top=where)
    images: dict[DataConfig, DataSet] = {}
    refused = check(configs, where, images)
    for name, error in refused.items():
        if ALL not in methods or len(refused) == len(configs):
            raise UserError(f"{name}: {error}", kind=error.kind)
        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
    configs = {name: config for name, config in configs.items() if name not in refused}
    failures, began, todo = {}, time.monotonic(), [n for n, c in configs.items() if unfinished(c, where / n)]
    for number, (name, config) in enumerate(configs.items(), 1):
        left = [n for n in todo if n in list(configs)[number - 1 :]]
        said = still_to_come(time.monotonic() - began, len(todo) - len(left), len(left))
        print(f"method {number} of {len(configs)}: {config.method.label}{said}", flush=True)
        if failure := train_one(name, config, where / name, images):
            failures[name] = failure
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
    if len(failures) == len(configs):
        raise next(iter(failures.values()))
    return tabulate([where / name for name in configs if name not in failures], configs, where)


def still_to_come(seconds: float, trained: int, left: int) -> str:
    """The time of methods that are not trained yet, by those that were."""
    if not trained or not left or seconds < WORTH_SAYING:
        return ""
    return f" (in all about {format_duration(seconds / trained * left)} left, if all take as long)"


def train_one(name: str, config: Config, folder: Path, images: dict[DataConfig, DataSet]) -> UserError | None:
    """What is left of a method, if anything; why it failed, if it did."""
    if not unfinished(config, folder):
        print(f"{folder} has finished already", flush=True)
        return None
    try:
        train(config, folder, resume=True, data=load_once(config.data, images))
    except Interrupted as stop:
        raise stop.in_a_verb_that_resumes(f"{name}, and saved") from stop
    except UserError as error:
        return error
    return None


def tabulate(folders: Sequence[Path], configs: dict[str, Config], out: Path) -> list[ResultRow]:
    """Of the seeds that were asked for, whatever else the folders hold."""
    (seeds,) = {config.train.seeds for config in configs.values()}
    rows = make_rows([run for run in run_folder.finished(folders) if run.seed in seeds])
    write_table(rows, out)
    with files.replace_file(out / "comparison.png") as picture:
        compared(make_dots(rows), picture)
    with files.replace_file(out / "report.html") as page:
        document.write(document.page(document.Gathered(rows)), page)
    return rows


# What is asked for, and whether it can be


def select_methods(names: Sequence[str] | str) -> list[str]:
    """Methods, each once; "all" is all. An unknown one is an error before the first is trained."""
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    if not names:
        raise UserError("--methods without a value: name some, or all")
    for name in names:
        if "," in name:
            raise UserError(f"--methods {name}: put spaces between names, as in --methods {name.replace(',', ' ')}")
        if name != ALL:
            recipes.entry(name)
    return list(recipes.METHODS) if ALL in names else names


def usual_budget(data: str | Path, imbalance: float | None = None) -> Callable[[str], Config]:
    """The configuration of each method by its name: the recipe's one budget, or what is chosen for the user's images."""
    if recipes.is_user_data(data):
        facts = inspect_data(recipes.make(data, imbalance=imbalance).data)
        return lambda method: with_seeds(choose(data, facts, method, imbalance=imbalance).config, (0, 1, 2))
    return lambda method: recipes.equal_budget(data, method, imbalance)


def with_seeds(config: Config, seeds: Sequence[int]) -> Config:
    return replace(config, train=replace(config.train, seeds=tuple(seeds)))


def configure(
    usual: Config,
    seeds: Sequence[int] | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
) -> Config:
    """A method's configuration with what was asked for."""
    config = change(usual) if change else usual
    held_out = max(usual.data.val_fraction, config.data.val_fraction)  # by methods that choose something on it
    config = replace(config, data=replace(config.data, val_fraction=held_out))
    if seeds is not None:
        config = with_seeds(config, seeds)
    return recipes.with_epochs(config, config.train.epochs if epochs is None else epochs, usual.train.epochs)


def check(configs: dict[str, Config], where: Path, images: dict[DataConfig, DataSet]) -> dict[str, UserError]:
    """The methods that cannot be trained on these images with this network, and why: known now, not after hours.

    Runs that are there already must be of these images, or one table would have two data sets.
    """
    found = {}
    for name, config in configs.items():
        data = load_once(config.data, images)
        for seed in config.train.seeds:
            check_images(where / name / f"seed{seed}", data)
        check_seeds({seed: where / name / f"seed{seed}" for seed in config.train.seeds})
        if unfinished(config, where / name):
            try:
                make(config, data.train.counts, stored=True).check(data.val is not None)
            except UserError as error:
                found[name] = error
    return found


def unfinished(config: Config, folder: Path) -> bool:
    return not all((folder / f"seed{seed}" / run_folder.METRICS).exists() for seed in config.train.seeds)


def default_out(data: str | Path, config: Config) -> Path:
    factor = f"-{config.data.imbalance:g}" if config.data.imbalance > 1 else ""
    return Path("runs") / f"compare-{run_folder.short_name(data)}{factor}"
