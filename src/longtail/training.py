"""Training on a recipe or on the user's images, from the command line and from Python.

`longtail train` and `longtail.train` resolve the configuration with the same functions: a recipe has fixed settings, those of
the user's images are chosen automatically, and given settings replace single values.
"""

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longtail import recipes, run_folder
from longtail.config import Config, DataConfig, list_settings
from longtail.errors import UserError, check_is_path, unknown_name
from longtail.plan import Plan
from longtail.progress import is_local_main, log_info, parse_duration, terminal_width

if TYPE_CHECKING:
    from longtail.autoconfig import ChosenConfig
    from longtail.engine.time_budget import TimeLimit

SHARED_SECTIONS = ("data", "views", "model", "optim", "train", "log")  # sections that do not depend on the method
ALL_SECTIONS = ("method", *SHARED_SECTIONS)
AUTO = "auto"  # the value of `method` that leaves the choice to cross-validation
LOCATION = ("name", "root", "train_list", "test_list")  # settings in `data` that say where the images are
SHORT_NAMES = {
    "epochs": "train.epochs",
    "lr": "optim.lr",
    "batch_size": "train.batch_size",
    "image_size": "data.image_size",
    "model": "model.name",
    "seeds": "train.seeds",
    "device": "train.device",
}
"""Short names of the most used settings. A command has those whose section it has, unless it has such a flag of its own."""


class RecipeChoice(NamedTuple):
    """The arguments that select a recipe, or one of its variants; None: not given."""

    method: str | None = None
    imbalance: float | None = None
    setting: str | None = None
    network: str | None = None
    augment: str | None = None
    strategy: int | None = None


# Training from Python


def accept_config(function: Callable[..., list[Path]]) -> Callable[..., list[Path]]:
    """Return a function that also accepts the arguments of version 0.1, `train(config, out, resume, data)`."""

    def call_with_config(
        config: Any, out: Any = None, resume: bool = False, data: Any = None, **settings: Any
    ) -> list[Path]:
        return function(config, out, resume, loaded=data, **settings)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[Path]:
        is_old = "config" in kwargs or (bool(args) and isinstance(args[0], Config) and "loaded" not in kwargs)
        return (call_with_config if is_old else function)(*args, **kwargs)

    return call


@accept_config
def train(
    data: Any = None,
    out: Path | str | None = None,
    resume: bool = False,
    *,
    test: Any = None,
    from_run: Path | str | None = None,
    loaded: Any = None,
    time_limit: str | float | None = None,
    **settings: Any,
) -> list[Path]:
    """Train one run for each seed in OUT/seedN and evaluate it, as `longtail train` does; return the run folders.

    For the user's images, settings are chosen automatically. Names of settings are those of the flags, such as
    `**{"optim.lr": 0.1}`, or one of `SHORT_NAMES`.

    Args:
        data: A recipe, a path to images, a Config, or images in memory: a tuple of images or paths and labels, a pandas
            DataFrame, a torch Dataset, or a Hugging Face Dataset or DatasetDict.
        out: The folder above the run folders; None: the default of `longtail train`.
        resume: Whether existing runs are continued; otherwise they are an error.
        test: Test images in memory; None: a fifth of each class, unless `data` contains test images.
        from_run: A run folder or a config.json to train again, in place of `data`; a run of images in memory needs both.
        loaded: The images that a Config describes: a loaded data set, or images in memory.
        time_limit: For the user's images: the time that all runs together may take, in seconds or as "90s", "10m" or "1.5h".
            Settings that are not given are reduced so that the estimated time fits.
        **settings: `method`, `imbalance`, `setting`, `network`, `augment` and `strategy`, which select a recipe, and settings.
            `model` may be an nn.Module that returns one vector per image.
    """
    from longtail.data.sources import DataSet
    from longtail.engine.train import train as train_config

    is_loaded = loaded is None or isinstance(loaded, DataSet)
    with prepare(data, out, resume, test, from_run, settings, None if is_loaded else loaded) as (plan, folder):
        limit = make_time_limit(plan, time_limit, resume)
        return train_config(plan.config, folder, resume, loaded if is_loaded else None, plan.candidates, limit)


def make_time_limit(plan: Plan, value: str | float | None, resume: bool) -> "TimeLimit | None":
    """Return the time limit of a plan; None if there is none, or if a run is continued whose settings are known.

    Args:
        plan: The plan.
        value: The time limit as the user has given it.
        resume: Whether existing runs are continued.
    """
    from longtail.engine.time_budget import TimeLimit

    if value is None:
        return None
    seconds = parse_duration(value)
    if plan.adapt is not None:
        return TimeLimit(seconds, plan)
    if resume:
        return None
    raise UserError(
        "--time-limit is for your own images, whose settings are chosen automatically: set --train.epochs instead",
        kind="conflict",
    )


def choose_config(data: Any, *, test: Any = None, **settings: Any) -> Config:
    """Return the configuration with which `longtail.train` would train. Only labels and some image headers are read.

    Args:
        data: A recipe, a path to images, a Config, or images in memory; see `train`.
        test: Test images in memory.
        **settings: See `train`.
    """
    with prepare(data, None, False, test, None, settings, None) as (plan, _):
        return plan.config


@contextlib.contextmanager
def prepare(
    data: Any,
    out: Path | str | None,
    resume: bool,
    test: Any,
    from_run: Path | str | None,
    settings: Mapping[str, Any],
    loaded: Any,
) -> Iterator[tuple[Plan, Path]]:
    """Yield the plan and the output folder of a training. Images and networks in memory are available in the context.

    The arguments are those of `train`, with the settings as a mapping; `loaded` must be images in memory.
    """
    from longtail.data.in_memory import name_images
    from longtail.models.backbones import CUSTOM, use_network

    if out is not None:
        check_is_path(out, "out")
    if not isinstance(resume, bool):
        raise UserError(f"resume has the type {type(resume).__name__}: give True or False")
    choice, given = split_settings(settings)
    network = given.get("model.name")
    network = None if isinstance(network, str) else network
    if network is not None:
        given["model.name"] = CUSTOM
    images = loaded if isinstance(data, Config) else data
    if loaded is not None and (not isinstance(data, Config) or isinstance(loaded, str | Path)):
        raise UserError(
            "loaded needs a Config as the first argument: pass the images that were loaded for it", kind="conflict"
        )
    if images is None and test is not None:
        raise UserError("test needs training images in memory: give both, or neither", kind="conflict")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_network(network))
        name = "" if images is None else stack.enter_context(name_images(images, test))
        if isinstance(data, Config):
            reject_choice(choice, "a Config")
            config = replace(data, **apply_settings(data, given)[0])
            check_memory_name(config, name)
            yield Plan(config), Path(out or default_out(config.recipe.split("/")[0], config.method.name, config))
        elif from_run is not None:
            plan, folder = prepare_stored_run(name, out, from_run, choice, given)
            check_memory_name(plan.config, name)
            yield plan, folder
        elif not name:
            raise UserError("train needs data: a recipe, a path to images, or images in memory")
        else:
            yield prepare_images(name, out, resume, choice, given)


def prepare_images(
    name: str | Path, out: Path | str | None, resume: bool, choice: RecipeChoice, given: Mapping[str, Any]
) -> tuple[Plan, Path]:
    """Return the plan and the output folder of a training on a recipe or on the user's images.

    Args:
        name: The recipe or the path to images.
        out: The folder above the run folders.
        resume: Whether existing runs are continued.
        choice: The arguments that select a recipe.
        given: Settings by name.
    """
    base = make_base(name, choice)
    resumed = find_resumed_config(base.data, out) if resume and is_automatic(name, choice) else None
    base = resumed or base
    plan = resolve_config(name, choice, base, *apply_settings(base, given), is_resumed=resumed is not None)
    options = (choice.setting, choice.network, choice.augment)
    return plan, Path(out or default_out(name, choice.method or plan.method, plan.config, *options))


def prepare_stored_run(
    name: str | Path, out: Path | str | None, from_run: Path | str, choice: RecipeChoice, given: Mapping[str, Any]
) -> tuple[Plan, Path]:
    """Return the plan and the output folder of a training with the settings of a stored run.

    Args:
        name: Must be empty, or stand for images in memory.
        out: The folder above the run folders.
        from_run: The stored run.
        choice: Must be empty, because a stored run does not select a recipe.
        given: Settings by name.
    """
    if name not in ("", recipes.IN_MEMORY):
        raise UserError(f"from_run replaces data: leave out {str(name)!r}", kind="conflict")
    reject_choice(choice, "from_run")
    stored, stored_name = load_stored_run(from_run)
    return Plan(rerun_config(stored, *apply_settings(stored, given))), Path(out or Path("runs") / stored_name)


def split_settings(settings: Mapping[str, Any]) -> tuple[RecipeChoice, dict[str, Any]]:
    """Return the arguments that select a recipe, and all others by their full names, such as "optim.lr".

    None stands for a setting that is not given.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    choice = RecipeChoice(**{name: given.pop(name) for name in RecipeChoice._fields if name in given})
    return choice, {SHORT_NAMES.get(name, name): value for name, value in given.items()}


def apply_settings(base: Config, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections of a configuration with given settings, and the values of these settings after conversion.

    Args:
        base: The configuration.
        given: Settings by name, such as {"optim.lr": 0.1}. An unknown name raises UserError.
    """
    from longtail.autoconfig import with_values

    known = [name for name in list_settings(base) if name.partition(".")[0] in ALL_SECTIONS]
    for name in given:
        if name not in known:
            raise unknown_name("setting", name, [*known, *SHORT_NAMES, *RecipeChoice._fields])
    values, seeds = dict(given), given.get("train.seeds")
    if isinstance(seeds, int | range):
        values["train.seeds"] = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    sections = {}
    for section in ALL_SECTIONS:
        own = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == section}
        sections[section] = with_values(getattr(base, section), own)
    return sections, {name: get_setting(sections, name) for name in values}


def get_setting(sections: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting such as "views.query.crop" in the sections of a configuration."""
    section, _, rest = name.partition(".")
    return functools.reduce(getattr, rest.split("."), sections[section])


def check_memory_name(config: Config, name: str | Path) -> None:
    """Raise a UserError if images in memory are given for a configuration that describes other images.

    Args:
        config: The configuration.
        name: `IN_MEMORY` if there are images in memory.
    """
    if name == recipes.IN_MEMORY and config.data.name != "memory":
        raise UserError(
            f"images in memory are given, but data.name is {config.data.name!r}: set it to 'memory'", kind="conflict"
        )


def reject_choice(choice: RecipeChoice, source: str) -> None:
    """Raise a UserError if arguments that select a recipe are given.

    Args:
        choice: The arguments.
        source: What determines the configuration in place of a recipe, for the message.
    """
    for name, value in choice._asdict().items():
        if value is not None:
            raise UserError(
                f"{name} selects a recipe and cannot be combined with {source}: set single values, such as method.alpha",
                kind="conflict",
            )


# Configurations, for the command line too


def make_base(name: str | Path, choice: RecipeChoice) -> Config:
    """Return the configuration of a recipe, or the one from which the settings of the user's images are chosen."""
    method, imbalance, setting, network, augment, strategy = choice
    if method == AUTO:
        if not is_automatic(name, choice):
            raise UserError(f"--method {AUTO} is for your own images: name a method for {name}", kind="conflict")
        method = None
    config = recipes.make(name, method=method, imbalance=imbalance, setting=setting, network=network, augment=augment)
    return config if strategy is None else recipes.with_strategy(config, strategy)


def is_automatic(name: str | Path, choice: RecipeChoice) -> bool:
    """Return whether settings are chosen automatically: for the user's images, unless a setting of recipes is given."""
    return recipes.is_user_data(name) and choice.setting is None


def resolve_config(
    name: str | Path,
    choice: RecipeChoice,
    base: Config,
    sections: Mapping[str, Any],
    given: Mapping[str, Any],
    is_resumed: bool = False,
) -> Plan:
    """Return what to train: the configuration of a recipe or of a resumed run with given settings, or an automatic choice.

    Args:
        name: A recipe or a path to images.
        choice: The arguments that select a recipe.
        base: The configuration of the recipe, or of the run that is resumed.
        sections: The sections of `base` with the given settings.
        given: The given settings by name. They are not changed.
        is_resumed: Whether `base` is the configuration of a run that is resumed.
    """
    if not is_automatic(name, choice):
        return Plan(replace(base, **sections))
    check_not_a_run(name)
    if is_resumed:
        return Plan(replace(base, **sections))
    return choose_for_images(name, sections["data"], sections["train"].device, choice, given)


def choose_for_images(
    name: str | Path, data: DataConfig, device: str, choice: RecipeChoice, given: Mapping[str, Any]
) -> Plan:
    """Choose the settings for the user's images, and log them with their reasons.

    Args:
        name: Path to the images.
        data: The `data` section with the given settings.
        device: The value of train.device.
        choice: The arguments that select a recipe.
        given: Settings that are given. They are not changed.
    """
    from longtail.autoconfig import choose_plan, inspect_data, with_values

    facts, strategy = inspect_data(data, device), choice.strategy
    plan = choose_plan(name, facts, choice.method, given, choice.imbalance, log_choices)
    if strategy is None:
        return plan
    return plan.map(lambda config: with_values(recipes.with_strategy(config, strategy), given))


def log_choices(chosen: "ChosenConfig", exclude: Collection[str] = ()) -> None:
    """Log chosen settings with their reasons, on the first process of each machine.

    Args:
        chosen: The chosen settings.
        exclude: Flags that are not listed.
    """
    if is_local_main():
        log_info("\n".join(chosen.describe(exclude, terminal_width())))


def check_not_a_run(path: str | Path) -> None:
    """Raise a UserError if the path of the images is a run folder."""
    if not os.path.exists(path):  # also if the path is too long to exist
        return
    if (Path(path) / run_folder.CONFIG).exists() or any(Path(path).glob(f"seed*/{run_folder.CONFIG}")):
        command = f"longtail train --from {shlex.quote(str(path))}"
        raise UserError(f"{path} is a run, not a folder of images: to train it again, use `{command}`", kind="conflict")


def find_resumed_config(data: DataConfig, out: Path | str | None) -> Config | None:
    """Return the configuration of the run that is resumed in an output folder, or None if there is none.

    The settings are those of the stored run. The images are those that the user names, because they may have been moved;
    different images are rejected by their checksum later.

    Args:
        data: Where the images are.
        out: The output folder; None: the default folder, whose name depends on the settings.
    """
    folders = run_folder.find_runs(out) if out is not None and os.path.exists(out) else []
    if not folders:
        return None
    stored = run_folder.load_config(folders[0])
    return replace(stored, data=replace(stored.data, **select_sections(data, LOCATION)))


def select_sections(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return some sections of a configuration, or of parsed arguments, by name."""
    return {name: getattr(config, name) for name in names}


def load_stored_run(path: Path | str) -> tuple[Config, str]:
    """Return the configuration of a run that is trained again, and the name of its default output folder."""
    path = Path(path)
    if not os.path.exists(path):
        raise UserError(
            f"--from {path} does not exist: name a run folder or a {run_folder.CONFIG}", kind="missing-file"
        )
    return run_folder.load_common_config(path), f"{path.resolve().stem}-again"


def rerun_config(stored: Config, sections: Mapping[str, Any], given: Mapping[str, Any]) -> Config:
    """Return the configuration of a stored run with given settings. The warm-up is scaled with the number of epochs.

    Args:
        stored: The configuration of the stored run.
        sections: Its sections with the given settings.
        given: The given settings by name.
    """
    config = replace(stored, **sections)
    warmup, epochs = stored.optim.warmup_epochs, config.train.epochs
    if epochs == stored.train.epochs or "optim.warmup_epochs" in given or not warmup:
        return config
    scaled = round(warmup * epochs / stored.train.epochs, 2)
    if is_local_main():
        log_info(f"--optim.warmup_epochs {scaled:g}: scaled with the number of epochs (stored run: {warmup:g})")
    return replace(config, optim=replace(config.optim, warmup_epochs=scaled))


def default_out(name: str | Path, method: str, config: Config, *options: str | None) -> Path:
    """Return the default output folder of a training: runs/NAME-METHOD-IMBALANCE-OPTIONS.

    Args:
        name: The recipe or the path to images.
        method: Name of the method.
        config: The configuration.
        *options: The setting, the network and the augmentation of a recipe, if they are given.
    """
    factor = config.data.imbalance
    is_subsampled = factor > 1 or not recipes.is_user_data(name)
    source = "memory" if str(name) == recipes.IN_MEMORY else run_folder.short_name(name)
    parts = [source, method, f"{factor:g}" if is_subsampled else None, *options]
    return Path("runs") / "-".join(filter(None, parts))
