"""Versions of stored configurations and checkpoints."""

import json

import pytest
import torch

from longtail import UserError, recipes, run_folder
from longtail.config import Config, from_dict, to_dict
from longtail.config.migrate import CHECKPOINT_VERSION, CONFIG_VERSION
from longtail.engine import checkpoint
from tests.conftest import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", recipes.METHODS)
def test_configurations_have_a_version_and_those_without_are_read(method):
    config = recipes.cifar100_lt(method)
    tree = to_dict(config)
    assert tree["version"] == CONFIG_VERSION and from_dict(Config, tree) == config
    del tree["version"]
    assert from_dict(Config, tree) == config and "version" not in config.identity()
    assert from_dict(Config, config.identity()).identity() == config.identity()


@pytest.mark.parametrize("version", [0, -1, CONFIG_VERSION + 1, "2", None, 2.0, True])
def test_a_configuration_of_an_unknown_version_is_refused(tmp_path, version):
    path = tmp_path / run_folder.CONFIG
    path.write_text(json.dumps(to_dict(tiny()) | {"version": version}))
    with pytest.raises(UserError):
        run_folder.load_config(path)


def test_checkpoints_have_a_version_and_those_without_are_read(tmp_path):
    path = tmp_path / "checkpoint" / "state.pt"
    checkpoint.save(path, {"step": 3})
    assert torch.load(path, weights_only=True) == {"version": CHECKPOINT_VERSION, "step": 3}
    assert checkpoint.load(path, CPU) == {"step": 3}
    torch.save({"step": 3}, path)
    assert checkpoint.load(path, CPU) == {"step": 3}
    for version in (CHECKPOINT_VERSION + 1, "x"):
        torch.save({"version": version}, path)
        with pytest.raises(UserError):
            checkpoint.load(path, CPU)
