"""Stored configurations and checkpoints of earlier versions, brought up to the present one.

Whatever changes the layout of config.json or of a checkpoint raises the version here and adds a step that converts the version
before it. Files without a version are version 1.
"""

from typing import Any

from longtail.errors import UserError

CONFIG_VERSION = 2
"""Version of config.json. 1: no `version` key. 2: has one."""
CHECKPOINT_VERSION = 2
"""Version of checkpoint/state.pt. 1: no `version` key. 2: has one."""


def take_version(tree: dict[str, Any], newest: int, what: str) -> int:
    """Remove and return the version of a stored tree; a UserError if it is newer than this package or not a version."""
    version = tree.pop("version", 1)
    if type(version) is not int or version < 1:
        raise UserError(f"the version of {what} is {version!r}: it must be a whole number from 1")
    if version > newest:
        raise UserError(
            f"{what} has version {version}, and this longtail knows versions up to {newest}: update longtail",
            kind="unsupported",
        )
    return version


def migrate_config(tree: dict[str, Any]) -> None:
    """Convert the tree of a stored configuration of any version, in place, to the present one without its version."""
    take_version(tree, CONFIG_VERSION, "the configuration")


def migrate_checkpoint(state: dict[str, Any]) -> None:
    """Convert the state of a checkpoint of any version, in place, to the present one without its version."""
    take_version(state, CHECKPOINT_VERSION, "the checkpoint")
