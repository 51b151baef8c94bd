"""Conversion of files and flags of earlier versions.

A change in the layout of config.json or of a checkpoint raises the version here and adds a step that converts the version
before it. Files without a version are version 1.
"""

from typing import Any

from longtail.errors import UserError

CONFIG_VERSION = 3
"""Version of config.json. 1: no `version` key. 2: has one. 3: renamed settings, see RENAMED_SETTINGS."""
CHECKPOINT_VERSION = 3
"""Version of checkpoint/state.pt. 1: no `version` key. 2: has one. 3: renamed keys."""

RENAMED_SETTINGS = {
    "log.to": "log.loggers",
    "method.centre_tau": "method.center_tau",
    "model.learns": "model.trainable",
    "train.step": "train.execution",
    "train.together": "train.parallel_seeds",
    "views.normalise": "views.normalize",
}
"""Settings of config.json versions 1 and 2, and their present names. Each is also a flag: `--log.to`."""
RENAMED_FLAGS = {f"--{old}": f"--{new}" for old, new in RENAMED_SETTINGS.items()} | {"--again": "--rerun"}
RENAMED_LOG_KEYS = {"centre_logit": "center_logit"}
"""Keys in lines of log.jsonl that were written before version 0.2."""


def take_version(tree: dict[str, Any], newest: int, what: str) -> int:
    """Remove and return the version of a stored tree; a UserError if it is newer than this package or not a version."""
    version = tree.pop("version", 1)
    if type(version) is not int or version < 1:
        raise UserError(
            f"the version of {what} is {version!r}: it must be an integer of at least 1", kind="damaged-file"
        )
    if version > newest:
        raise UserError(
            f"{what} has version {version}, but only versions up to {newest} are supported: update longtail",
            kind="unsupported",
        )
    return version


def migrate_config(tree: dict[str, Any]) -> None:
    """Convert the tree of a stored configuration of any version, in place, to the present one without its version."""
    if take_version(tree, CONFIG_VERSION, "the configuration") < 3:
        for old, new in RENAMED_SETTINGS.items():
            section, old_key = old.split(".")
            new_key = new.split(".")[1]
            if isinstance(tree.get(section), dict) and old_key in tree[section]:
                # Rebuilt to keep the order of the keys, on which the text of stored configurations depends.
                tree[section] = {new_key if key == old_key else key: value for key, value in tree[section].items()}


def migrate_checkpoint(state: dict[str, Any]) -> None:
    """Convert the state of a checkpoint of any version, in place, to the present one without its version."""
    if take_version(state, CHECKPOINT_VERSION, "the checkpoint") < 3:
        if "optimiser" in state:
            state["optimizer"] = state.pop("optimiser")
        meter = state.get("meter")
        if isinstance(meter, dict) and isinstance(meter.get("names"), list):
            meter["names"] = [RENAMED_LOG_KEYS.get(str(name), name) for name in meter["names"]]


def migrate_log_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of log.jsonl with the present names of its keys."""
    return {RENAMED_LOG_KEYS.get(key, key): value for key, value in row.items()}


def migrate_log_line(line: str) -> str:
    """Return a line of log.jsonl with the present names of its keys; a damaged line is returned as it is."""
    for old, new in RENAMED_LOG_KEYS.items():
        line = line.replace(f'"{old}":', f'"{new}":')
    return line


def migrate_flags(args: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a command with the present names of renamed flags, and the renamed flags that were
    used."""
    found, used = [], {}
    for arg in args:
        flag, equals, value = arg.partition("=")
        name = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
        plain = name.replace(".no_", ".").replace("--no_", "--")
        if plain in RENAMED_FLAGS:
            used[plain] = new = RENAMED_FLAGS[plain]
            negated = new.replace(".", ".no_") if "." in new else new.replace("--", "--no_")
            flag = new if plain == name else negated
        found.append(f"{flag}{equals}{value}")
    return found, used
