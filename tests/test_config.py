"""Configurations: to JSON and back, checked where they enter, and told apart by what matters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longtail import recipes
from longtail.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PaCo,
    SupCon,
    TrainConfig,
    differences,
    from_dict,
    to_dict,
)
from longtail.errors import UserError

EVERY = [(r, m) for r in recipes.RECIPES for m in recipes.METHODS]


@pytest.mark.parametrize(("recipe", "method"), EVERY)
def test_json_round_trip(recipe, method):
    config = recipes.make(recipe, method=method)
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": {"imbalance": "x"}}, "--data.imbalance 'x': it must be float"),
        ({"data": {"imbalance": True}}, "--data.imbalance True: it must be float"),
        ({"data": {"nam": "cifar10"}}, "did you mean 'data.name'"),
        ({"data": {"name": "cifar11"}}, "'cifar10' or 'cifar100'"),
        ({"optim": {"milestones": [1, "a"]}}, "--optim.milestones 'a': it must be float"),
        ({"optim": {"milestones": [5, 3]}}, "rising shares or epochs"),
        (
            {"method": {"name": "cdt"}},
            "by the method 'cdt', which is not imported here: from Python .* has been imported",
        ),
        ({"method": {"name": "paco", "linear_epochs": 3}}, "method.linear_epochs"),
        ({"train": []}, "train. must be an object"),
        ({"views": {"query": {"crop_scale": [0.5]}}}, r"--views\.\*\.crop_scale"),
        ({"train": {"seeds": [-1]}}, "--train.seeds"),
    ],
)
def test_bad_json_names_the_place(change, says):
    with pytest.raises(UserError, match=says):
        from_dict(Config, change)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataConfig(imbalance=0.5), "--data.imbalance 0.5: it must be at least 1"),
        (lambda: DataConfig(image_size=0), "between 4 and 7168 pixels"),
        (lambda: OptimConfig(momentum=1.0), r"in \[0, 1\)"),
        (lambda: OptimConfig(nesterov=True, momentum=0.0), "add --optim.momentum"),
        (lambda: TrainConfig(batch_size=0), "--train.batch_size 0"),
        (lambda: PaCo(alpha=1.0), "try 0.01 to 0.05"),
        (lambda: PaCo(tau=0.0), "above 0"),
        (lambda: Config(optim=OptimConfig(schedule="step", milestones=(300,))), "300 is never reached, .* such as 0.8"),
        (lambda: Config(method=PaCo(), train=TrainConfig(batch_size=1)), "needs two images: try 2"),
        (lambda: SupCon(linear_epochs=0), "at least 1"),
        (lambda: ModelConfig(ghost=1), "--model.ghost 1: it must be at least 2 images"),
        (lambda: Config(model=ModelConfig(norm="sync"), method=PaCo(key_norm="shuffled")), "nothing to mix: use"),
    ],
)
def test_bad_values_say_what_to_do(make, says):
    with pytest.raises(UserError, match=says):
        make()


def test_identity_ignores_seed_place_and_display():
    config = recipes.cifar100_lt()
    same = replace(
        config,
        data=replace(config.data, root=Path("elsewhere")),
        train=replace(config.train, seeds=(7,), device="cpu"),
        log=replace(config.log, progress="none"),
    )
    other = replace(config, method=replace(config.method, alpha=0.3))
    assert same.identity() == config.identity()
    assert differences(config.identity(), other.identity()) == {"method.alpha": (0.01, 0.3)}
