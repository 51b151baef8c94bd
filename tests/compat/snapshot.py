"""Take a snapshot of all names that a user or a stored file depends on: flags, public names, keys, weights.

snapshot.json was written by `python -m tests.compat.snapshot` for the source code of the commit that make_fixtures.py
names, and its entries stay as they are: test_snapshot.py checks that the present code still accepts every one of them. Like
that script this one refuses other source code, and it needs the version of present.py that fits it, the first one in the
history.
Entries for later commands, names and settings are added to the file by hand (`as_json`).
"""

import json
from pathlib import Path
from typing import Any

from tests.compat import present
from tests.compat.make_fixtures import COMMIT, FIXTURES, check_source

SNAPSHOT = Path(__file__).parent / "snapshot.json"


def take_snapshot() -> dict[str, Any]:
    return {
        "commit": COMMIT,
        "flags": take_flags(),
        "names": present.list_names(),
        "config": take_configs(),
        "state": take_states(),
        "runs": {run.parent.name: present.describe_run(run) for run in sorted((FIXTURES / "runs").glob("*/seed0"))},
        "checkpoint": present.describe_checkpoint(FIXTURES / "interrupted/paco/seed0/checkpoint/state.pt"),
    }


def take_flags() -> dict[str, present.Flags]:
    """Return the flags of each verb; those of the methods are listed as of `train --method NAME`."""
    found = {verb: present.list_flags(verb) for verb in present.VERBS}
    found["train"] = {flag: entry for flag, entry in found["train"].items() if not flag.startswith("--method.")}
    for method in present.METHODS:
        flags = present.list_flags("train", method)
        found[f"train --method {method}"] = {flag: flags[flag] for flag in flags if flag.startswith("--method.")}
    return found


def take_configs() -> dict[str, Any]:
    """Return config.json of every method with dots between nested keys; entries that all methods have are stored once."""
    found = {method: flatten(present.config_tree(present.recipe(method))) for method in present.METHODS}
    first = next(iter(found.values()))
    shared = {
        key: first[key] for key in first if all(key in tree and tree[key] == first[key] for tree in found.values())
    }
    return {
        "shared": shared,
        "methods": {name: {key: tree[key] for key in tree if key not in shared} for name, tree in found.items()},
    }


def take_states() -> list[dict[str, Any]]:
    """Return the keys and shapes of the state of every method; methods with the same state are listed together."""
    groups: dict[str, list[str]] = {}
    for name in present.METHODS:
        method = present.make_method(name)
        deployed = {f"net.{key}" for key in method.net.state_dict()}
        assert deployed == {key for key in method.state_dict() if key.startswith("net.")}
        shapes = {key: list(value.shape) for key, value in method.state_dict().items()}
        groups.setdefault(json.dumps(shapes), []).append(name)
    return [{"methods": names, "shapes": json.loads(shapes)} for shapes, names in groups.items()]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, last = path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


def as_json(tree: Any, indent: int = 0) -> str:
    """Return indented JSON in which whatever fits into 110 columns is on one line."""
    line = json.dumps(tree)
    if len(line) + indent <= 110 or not isinstance(tree, dict | list):
        return line
    space = " " * (indent + 1)
    if isinstance(tree, dict):
        inside = [f"{space}{json.dumps(key)}: {as_json(value, indent + 1)}" for key, value in tree.items()]
        return "{\n" + ",\n".join(inside) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(space + as_json(value, indent + 1) for value in tree) + "\n" + " " * indent + "]"


if __name__ == "__main__":
    check_source()
    SNAPSHOT.write_text(as_json(take_snapshot()) + "\n")
