"""Flags, names, keys and weights of the version before the renaming are still accepted.

Each entry of snapshot.json is looked up in the present code, after it was translated by renames.json; what is removed or
renamed without an entry there is a failure. Old flags, configurations and weights must also be accepted as they are.
"""

import importlib
import json
from functools import reduce
from typing import Any

import pytest
import torch

from longtail.cli import main
from tests.compat import present
from tests.compat.make_fixtures import FIXTURES, RUNS
from tests.compat.renames import TABLES, rename, rename_value
from tests.compat.snapshot import SNAPSHOT, flatten, take_flags, unflatten

OLD: dict[str, Any] = json.loads(SNAPSHOT.read_text())
STATES = {name: group["shapes"] for group in OLD["state"] for name in group["methods"]}


def split_verb(entry: str) -> tuple[str, str]:
    """Return the verb and the method of an entry such as "train --method supcon"."""
    verb, _, method = entry.partition(" --method ")
    return verb, method or "paco"


# Flags


@pytest.fixture(scope="module")
def present_flags() -> dict[str, present.Flags]:
    return take_flags()


@pytest.mark.parametrize("entry", OLD["flags"])
def test_flags_are_listed_with_their_defaults_and_choices(entry, present_flags):
    flags = present_flags[entry]
    for old, stored in OLD["flags"][entry].items():
        new = rename("flags", old)
        assert new in flags, f"{entry}: {old}"
        assert flags[new]["default"] == rename_value(old, stored["default"]), f"{entry}: {old}"
        choices = {rename_value(old, choice) for choice in stored.get("choices", ())}
        assert choices <= set(flags[new].get("choices", ())), f"{entry}: {old}"


@pytest.mark.parametrize("entry", [entry for entry, flags in OLD["flags"].items() if flags])
def test_old_flags_are_parsed(entry):
    verb, method = split_verb(entry)
    flags = OLD["flags"][entry]
    words = [word for flag in flags.values() for word in flag["words"]]
    parsed = dict(present.find_flags(present.parse(verb, words, method)))
    for old, flag in flags.items():
        found = parsed[rename("flags", old)]["default"]
        if flag["default"] == "None":
            assert found.rpartition("/")[2] == flag["words"][1], f"{entry}: {old}"  # some paths are made absolute
        else:
            assert found == rename_value(old, flag["default"]), f"{entry}: {old}"


def test_a_flag_that_never_existed_is_refused():
    """Otherwise the test above could not fail."""
    with pytest.raises(present.UserError):
        present.parse("train", ["--train.not_a_flag", "1"])


@pytest.mark.parametrize("name", RUNS)
def test_old_commands_give_the_stored_configuration(name):
    stored = json.loads((FIXTURES / f"runs/{name}/seed0/config.json").read_text())
    assert present.parse_training(RUNS[name].split()) == present.read_config(stored)


# Public names


@pytest.mark.parametrize("old", OLD["names"])
def test_public_names_exist_with_their_parameters(old):
    new = rename("names", old)
    value = find_object(new)
    stored = OLD["names"][old]
    if stored is not None:
        found = present.parameters_of(value)
        missing = {rename("parameters", f"{old}.{name}").rpartition(".")[2] for name in stored} - set(found or ())
        assert not missing, f"{new} has no parameter {', '.join(sorted(missing))}"


def find_object(path: str) -> Any:
    """Return the object of a dotted path, whose first parts are modules."""
    module, _, rest = path.removeprefix("longtail.").partition(".")
    if rest and module in ("nn", "losses", "recipes"):
        return reduce(getattr, rest.split("."), importlib.import_module(f"longtail.{module}"))
    return reduce(getattr, path.split(".")[1:], importlib.import_module("longtail"))


# config.json


@pytest.mark.parametrize("method", OLD["config"]["methods"])
def test_old_configurations_are_accepted_with_their_values(method):
    old = OLD["config"]["shared"] | OLD["config"]["methods"][method]
    config = present.read_config(unflatten(old))
    found = flatten(json.loads(json.dumps(present.config_tree(config))))
    for key, value in old.items():
        expected = rename_value(key, value) if isinstance(value, str) else value
        assert found[rename("config", key)] == expected, key


def test_every_method_of_the_snapshot_is_still_there():
    assert set(OLD["config"]["methods"]) == set(STATES) <= set(present.METHODS)


def test_a_key_that_never_existed_is_refused():
    with pytest.raises(present.UserError):
        present.read_config({"train": {"not_a_key": 1}})


# Weights


@pytest.mark.parametrize("name", STATES)
def test_states_have_their_keys_and_shapes_and_are_loaded(name):
    method = present.make_method(name)
    found = {key: list(value.shape) for key, value in method.state_dict().items()}
    assert found.items() >= {rename("state", key): shape for key, shape in STATES[name].items()}.items()
    deployed = {rename("state", key) for key in STATES[name] if key.startswith("net.")}
    prefix = rename("state", "net.")
    assert {prefix + key for key in method.net.state_dict()} >= deployed
    numbers = {key: float(i + 1) for i, key in enumerate(STATES[name])}
    dtypes = {key: value.dtype for key, value in method.state_dict().items()}
    old = {
        key: torch.full(shape, numbers[key], dtype=dtypes[rename("state", key)]) for key, shape in STATES[name].items()
    }
    present.load_state(method, old)
    loaded = method.state_dict()
    assert all((loaded[rename("state", key)] == number).all() for key, number in numbers.items())


# Run folders


@pytest.fixture(scope="module")
def fresh_runs(tmp_path_factory):
    """Train the runs of the fixtures with the present code and the same commands."""
    folder = tmp_path_factory.mktemp("fresh")
    for name, arguments in RUNS.items():
        assert main(["train", *arguments.split(), "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", OLD["runs"])
def test_fresh_runs_have_all_files_and_keys(name, fresh_runs):
    found = present.describe_run(fresh_runs / name / "seed0")
    for kind, keys in OLD["runs"][name].items():
        expected = {rename_inside(kind, key) for key in keys}
        assert not expected - set(found[kind]), (kind, sorted(expected - set(found[kind])))


def rename_inside(kind: str, key: str) -> str:
    """Return the present name of FILE:KEY or STAGE:KEY, where only the key may have changed."""
    if kind in ("log", "metrics"):
        where, _, name = key.partition(":")
        return f"{where}:{rename(kind, name)}"
    return rename(kind, key)


def test_fresh_checkpoints_have_all_keys(fresh_runs):
    found = present.describe_checkpoint(fresh_runs / rename("files", "paco/seed0/checkpoint/state.pt"))
    assert not {rename("checkpoint", key) for key in OLD["checkpoint"]} - set(found)


# The table of renames


def test_only_names_of_the_snapshot_are_renamed():
    """A misspelled entry of renames.json would have no effect."""
    every = OLD["config"]["shared"].keys() | {key for tree in OLD["config"]["methods"].values() for key in tree}
    known = {
        "flags": {flag for flags in OLD["flags"].values() for flag in flags},
        "names": set(OLD["names"]),
        "parameters": {f"{name}.{key}" for name, keys in OLD["names"].items() for key in keys or ()},
        "config": set(every),
        "state": {key for shapes in STATES.values() for key in shapes},
        "checkpoint": set(OLD["checkpoint"]),
        "files": {key for run in OLD["runs"].values() for key in run["files"]} | {"paco/seed0/checkpoint/state.pt"},
        "environment": {key for run in OLD["runs"].values() for key in run["environment"]},
        "log": {key.partition(":")[2] for run in OLD["runs"].values() for key in run["log"]},
        "metrics": {key.partition(":")[2] for run in OLD["runs"].values() for key in run["metrics"]},
    }
    assert set(TABLES) == {*known, "values"}
    for kind, names in known.items():
        for old in TABLES[kind]:
            fits = any(name.startswith(old) for name in names) if old.endswith(".") else old in names
            assert fits, f"{kind}: {old}"
    for entry in TABLES["values"]:
        assert entry.partition("=")[0] in known["flags"] | known["config"], f"values: {entry}"


def test_exact_names_come_before_prefixes_and_longer_prefixes_before_shorter(monkeypatch):
    monkeypatch.setitem(TABLES, "state", {"net.": "network.", "net.trunk.": "network.backbone.", "net.trunk.a": "b"})
    monkeypatch.setitem(TABLES, "values", {"--train.execution=fused": "kernels"})
    found = [rename("state", key) for key in ("net.head.weight", "net.trunk.c", "net.trunk.a", "queue")]
    assert found == ["network.head.weight", "network.backbone.c", "b", "queue"]
    assert [rename_value("--train.execution", value) for value in ("fused", "auto")] == ["kernels", "auto"]
