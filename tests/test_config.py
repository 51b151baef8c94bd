"""Configurations: conversion to and from JSON, checks of values, and identity."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longtail import config as cfg
from longtail import recipes
from longtail.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PaCoSettings,
    SupConSettings,
    TrainConfig,
    differences,
    from_dict,
    to_dict,
)
from tests.raises import raises

EVERY = [(r, m) for r in recipes.RECIPES for m in recipes.METHODS]


@pytest.mark.parametrize(("recipe", "method"), EVERY)
def test_json_round_trip(recipe, method):
    config = recipes.make(recipe, method=method)
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("change", "kind", "values"),
    [
        ({"data": {"imbalance": "x"}}, "invalid-value", ["--data.imbalance 'x'", "float"]),
        ({"data": {"imbalance": True}}, "invalid-value", ["--data.imbalance True", "float"]),
        ({"data": {"nam": "cifar10"}}, "unknown-name", ["data.nam", "'data.name'"]),
        ({"data": {"name": "cifar11"}}, "invalid-value", ["'cifar10'", "'cifar100'"]),
        ({"optim": {"milestones": [1, "a"]}}, "invalid-value", ["--optim.milestones 'a'", "float"]),
        ({"optim": {"milestones": [5, 3]}}, "invalid-value", ["--optim.milestones"]),
        ({"method": {"name": "cdt"}}, "unknown-name", ["'cdt'"]),
        ({"method": {"name": "paco", "linear_epochs": 3}}, "unknown-name", ["method.linear_epochs"]),
        ({"train": []}, "invalid-value", ["train.", "[]"]),
        ({"views": {"query": {"crop_scale": [0.5]}}}, "invalid-value", ["--views.*.crop_scale"]),
        ({"train": {"seeds": [-1]}}, "invalid-value", ["--train.seeds"]),
    ],
)
def test_bad_json_names_the_place(change, kind, values):
    with raises(kind, *values):
        from_dict(Config, change)


@pytest.mark.parametrize(
    ("make", "kind", "values"),
    [
        (lambda: DataConfig(imbalance=0.5), "invalid-value", ["--data.imbalance 0.5", "1"]),
        (lambda: DataConfig(image_size=0), "invalid-value", ["--data.image_size 0", "4", "7168"]),
        (lambda: OptimConfig(momentum=1.0), "invalid-value", ["--optim.momentum 1", "[0, 1)"]),
        (lambda: OptimConfig(nesterov=True, momentum=0.0), "invalid-value", ["--optim.nesterov", "--optim.momentum"]),
        (lambda: TrainConfig(batch_size=0), "invalid-value", ["--train.batch_size 0"]),
        (lambda: PaCoSettings(alpha=1.0), "invalid-value", ["--method.alpha 1", "0.05"]),
        (lambda: PaCoSettings(tau=0.0), "invalid-value", ["--method.tau 0", "0"]),
        (
            lambda: Config(optim=OptimConfig(schedule="step", milestones=(300,))),
            "conflict",
            ["--optim.milestones 300", "0.8"],
        ),
        (lambda: Config(method=PaCoSettings(), train=TrainConfig(batch_size=1)), "conflict", ["--train.batch_size 1"]),
        (lambda: SupConSettings(linear_epochs=0), "invalid-value", ["--method.linear_epochs 0"]),
        (lambda: ModelConfig(ghost=1), "invalid-value", ["--model.ghost 1", "2"]),
        (
            lambda: Config(model=ModelConfig(norm="sync"), method=PaCoSettings(key_norm="shuffled")),
            "conflict",
            ["--model.norm sync", "--method.key_norm"],
        ),
    ],
)
def test_errors_of_invalid_values_suggest_a_fix(make, kind, values):
    with raises(kind, *values):
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


def test_old_names_of_settings_are_found_with_a_warning():
    with pytest.warns(DeprecationWarning, match="PaCoSettings"):
        assert cfg.PaCo is PaCoSettings
    with pytest.raises(AttributeError):
        _ = cfg.Pako
