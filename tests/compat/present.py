"""Access to the present code for the compatibility tests.

Everything that these tests use of the package in addition to its public functions and its command line is imported here. If
a module moves, only this file changes, and not the tests and the snapshot.
"""

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

import longtail
from longtail import methods, nn, recipes, run_folder
from longtail.cli import compare, data, distill, docs, paper, predict, report, train
from longtail.cli.parse import parse_arguments
from longtail.config import Config, DistillationSettings, from_dict, to_dict
from longtail.config.migrate import migrate_flags
from longtail.errors import UserError
from longtail.inference import export
from longtail.paper import results, results_page
from longtail.paper.tables import TABLES
from longtail.training import ALL_SECTIONS
from tests.conftest import tiny

__all__ = ["COUNTS", "METHODS", "UserError", "export"]
METHODS = tuple(recipes.METHODS)
COUNTS = (108, 71, 48, 32, 21, 14, 9, 6, 4, 3)  # training images of each class, for networks that are not trained

Flags = dict[str, dict[str, Any]]


# Command line

VERBS: dict[str, tuple[type, tuple[str, ...]]] = {  # the class of a verb's arguments, and words for its positional ones
    "demo": (train.Demo, ()),
    "recipes": (paper.Recipes, ()),
    "train": (train.Train, ("digits-lt",)),
    "eval": (train.Eval, ("runs/x",)),
    "table": (report.Table, ("runs/x",)),
    "report": (report.Report, ("runs/x",)),
    "figure": (report.Figure, ("latency", "runs/x")),
    "watch": (report.Watch, ("runs/x",)),
    "data inspect": (data.Inspect, ("digits-lt",)),
    "data shard": (data.Shard, ("digits-lt",)),
    "compare": (compare.Compare, ("digits-lt",)),
    "distill": (distill.Distill, ("runs/x",)),
    "reproduce": (paper.Reproduce, ("cifar100-lt",)),
    "theory": (paper.Theory, ()),
    "predict": (predict.Predict, ("runs/x", "x.png")),
    "export": (predict.Export, ("runs/x",)),
    "docs": (docs.Docs, ()),
}
WORDS = {int: "1", float: "1.5", str: "x", Path: "x"}  # values for flags without a default


def default_arguments(verb: str, method: str) -> Any:
    """Return the defaults of the flags of a command; None for commands without sections."""
    config = recipes.digits_lt(method)
    sections = {name: getattr(config, name) for name in ALL_SECTIONS}
    kind = VERBS[verb][0]
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: section for name, section in sections.items() if name in fields}
    if verb == "distill":
        return kind(teachers=(Path("runs/x"),), **given | {"method": DistillationSettings()})
    first = {"train": "recipe"}.get(verb, "images")
    return kind(**{first: "digits-lt"}, **given) if given else None


def parse(verb: str, args: Sequence[str], method: str = "paco") -> Any:
    """Parse the flags of a command, which follow its positional arguments, as the command line does."""
    kind, words = VERBS[verb]
    return parse_arguments(kind, verb, [*words, *migrate_flags(list(args))[0]], default_arguments(verb, method))


def parse_training(args: Sequence[str]) -> Config:
    """Return the configuration that `longtail train ARGS` would train."""
    return train.resolve_training(migrate_flags(list(args))[0])[2].config


def list_flags(verb: str, method: str = "paco") -> Flags:
    """Return all flags of a command with the text of their defaults, and example arguments that set them."""
    values = default_arguments(verb, method)
    return dict(find_flags(VERBS[verb][0] if values is None else values))


def find_flags(section: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the flags of a dataclass, or of an instance of it, whose values then are the defaults."""
    kind = section if isinstance(section, type) else type(section)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = field.default if section is kind else getattr(section, field.name)
        notes = getattr(hints[field.name], "__metadata__", ())
        if dataclasses.is_dataclass(value):
            yield from find_flags(value, f"{prefix}{field.name}.")
        elif not any("positional" in repr(note).lower() for note in notes):
            name = next((note.name for note in notes if getattr(note, "name", None)), field.name)
            aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
            flag = {"default": as_text(value), "words": words_for(f"{prefix}{name}", value, hints[field.name])}
            if choices := choices_of(hints[field.name]):
                flag["choices"] = choices
            yield f"--{prefix}{name}", flag
            for alias in aliases:
                yield alias, flag | {"words": [alias, *flag["words"][1:]]}


def words_for(name: str, value: Any, hint: Any) -> list[str]:
    """Return a flag with its default and example arguments; those of a switch begin with the opposite of its default."""
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        both = [f"--{name}", f"--{section}{'.' if section else ''}no_{last}"]
        return both[::-1] if value else both
    if value is None:
        kinds = [kind for kind in all_types(hint) if kind in WORDS]
        return [f"--{name}", WORDS[kinds[0]]]
    return [f"--{name}", *(map(as_text, value) if isinstance(value, tuple) else [as_text(value)])]


def all_types(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from all_types(part)


def choices_of(hint: Any) -> list[str]:
    return [
        str(word) for part in all_types(hint) if typing.get_origin(part) is Literal for word in typing.get_args(part)
    ]


def as_text(value: Any) -> str:
    """Return a value as a user would type it; whole numbers have no decimals."""
    return " ".join(map(as_text, value)) if isinstance(value, tuple) else str(value).removesuffix(".0")


# Public names


def list_names() -> dict[str, list[str] | None]:
    """Return the public names with the parameters of what can be called: functions, classes and their own methods."""
    found: dict[str, list[str] | None] = {}
    every = {*longtail.__all__, *longtail._HOME, *longtail._MODULES}
    found |= {f"longtail.{name}": parameters_of(getattr(longtail, name)) for name in sorted(every)}
    for module in (nn, longtail.losses, recipes):
        for name in public_names(module):
            path = f"{module.__name__}.{name}"
            value = getattr(module, name)
            found[path] = parameters_of(value)
            if isinstance(value, type) and module is not recipes:
                found |= {f"{path}.{key}": parameters_of(method) for key, method in own_methods(value)}
    return found


def public_names(module: ModuleType) -> list[str]:
    """Return `__all__`, or the names of the module's own functions, classes and constants."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    ours = {name for name, value in values.items() if str(getattr(value, "__module__", "")).startswith(module.__name__)}
    return sorted(ours | {name for name in values if name.isupper()})


def own_methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(kind).items():
        if not name.startswith("_") and name != "extra_repr" and inspect.isfunction(value):
            yield name, value


def parameters_of(value: Any) -> list[str] | None:
    """Return the parameters of a function, class or callable module; None if it cannot be called or has no signature."""
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return None
    return [name for name in found if name not in ("self", "args", "kwargs")]


# Configurations


def read_config(tree: dict[str, Any]) -> Config:
    """Return the configuration that a config.json describes, which may be of an earlier version."""
    return from_dict(Config, tree)


def config_tree(config: Config) -> dict[str, Any]:
    """Return a configuration in the form of config.json."""
    return to_dict(config)


def recipe(method: str) -> Config:
    """Return the configuration of a method on the embedded digits."""
    return recipes.digits_lt(method)


def stored_config(path: Path) -> Config:
    """Return the configuration that `longtail train --from PATH` starts from."""
    return run_folder.load_common_config(path)


# Networks


def make_method(name: str) -> torch.nn.Module:
    """Return an untrained method on the smallest network; `net` is the part that is deployed."""
    torch.manual_seed(0)
    return methods.make(tiny(name), np.array(COUNTS))


def load_state(method: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load the state of a method from a checkpoint, which may be of an earlier version; all keys must fit."""
    method.load_state_dict(state)


# Run folders


def describe_run(folder: Path) -> dict[str, list[str]]:
    """Return the files of a run folder, and all keys inside them; a list is described by its first entry.

    Keys of metrics are written as FILE:KEY, keys of the log as STAGE:KEY, and arrays as FILE:ARRAY.
    """
    read = functools.partial(read_json, folder)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    arrays = {path.name: np.load(path).files for path in folder.glob("*.npz")}
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    metrics = ("metrics.json", "calibration.json", "examples/index.json")
    return {
        "files": sorted({name for name in files if not name.endswith(".png")})
        + sorted(f"{name}:{array}" for name, inside in arrays.items() for array in inside),
        "environment": all_keys(read("environment.json")),
        "metrics": sorted(
            f"{name}:{key}" for name in metrics if (folder / name).exists() for key in all_keys(read(name))
        ),
        "log": sorted({f"{row['stage']}:{key}" for row in log for key in row}),
    }


def describe_checkpoint(path: Path) -> list[str]:
    """Return the keys of a checkpoint; those of the method and of torch's optimizer are not followed further."""
    state = torch.load(path, weights_only=True)
    found = set(state)
    for key, value in state.items():
        if isinstance(value, dict) and key != "method":
            found |= {f"{key}.{inner}" for inner in value}
    return sorted(found)


def read_json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def all_keys(tree: Any, prefix: str = "") -> list[str]:
    """Return the keys of nested objects, joined by dots; numbers as keys and class names are left out."""
    if isinstance(tree, list):
        return all_keys(tree[0], prefix) if tree and isinstance(tree[0], dict) else []
    if not isinstance(tree, dict):
        return []
    found = []
    for key, value in tree.items():
        if not str(key).isdigit():
            found += [f"{prefix}{key}", *all_keys(value, f"{prefix}{key}.")]
    return found


# Results of `longtail reproduce`


def list_tables() -> list[str]:
    """Return the names of the tables that `longtail reproduce` can train."""
    return list(TABLES)


def read_results(path: Path) -> dict[str, Any]:
    """Return the tree of a results file, with rows and verdicts computed again from its runs."""
    tree = json.loads(path.read_text())
    tree |= results.read_results(path, tree["table"])
    rows = results_page.make_rows(tree)
    return tree | {"rows": rows, "verdicts": results_page.compare_pairs(rows, tree["table"])}


def write_page(tree: dict[str, Any]) -> str:
    """Return the Markdown page of a results file."""
    return results_page.to_markdown(tree)


def read_identity(tree: dict[str, Any]) -> Config:
    """Return the configuration that the `identity` of a recorded run describes."""
    return from_dict(Config, tree)
