"""The demo, with one epoch; the long suite runs it completely."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longtail import demo_run, recipes
from longtail.config import Config
from tests.conftest import tiny

ROOT = Path(__file__).parents[1]


def test_a_short_demo_leaves_table_and_plot(tmp_path, monkeypatch, simple_maps):
    monkeypatch.setattr(demo_run, "make_config", lambda method, seeds: tiny(method, epochs=1, seeds=seeds))
    rows = demo_run.demo(tmp_path, seeds=(0,))
    assert [row.label for row in rows] == ["Cross-entropy", "Balanced Softmax", "SupCon", "PaCo"]
    assert all(
        (tmp_path / name).exists()
        for name in ("table.md", "table.json", "accuracy.png", "comparison.png", "report.html")
    )
    words = "\n".join(demo_run.describe_results(rows, tmp_path))
    assert "20" in words.split() and f"{tmp_path}/report.html" in words
    again = demo_run.demo(tmp_path, seeds=(0,))  # a second call finds everything done
    assert [r.values("top1") for r in again] == [r.values("top1") for r in rows]


@pytest.mark.long
def test_the_whole_demo_shows_paco_ahead_on_rare_classes(tmp_path):
    rows = {row.label: row for row in demo_run.demo(tmp_path)}
    few = {label: sum(row.values("few")) / 3 for label, row in rows.items()}
    assert few["PaCo"] > few["Cross-entropy"] + 5 and few["SupCon"] < few["Cross-entropy"]


def test_settings_of_the_demo_are_equal_for_all_methods():
    configs = {method: demo_run.make_config(method, (3,)) for method in demo_run.METHODS}
    for method, config in configs.items():
        recipe = recipes.digits_lt(method)
        assert config.train == replace(recipe.train, epochs=80, seeds=(3,))
        assert (
            (config.optim, config.views, config.model, config.data)
            == (*get_shared_settings(recipe),)
            == (*get_shared_settings(configs["ce"]),)
        )
    assert configs["paco"].method == replace(recipes.digits_lt("paco").method, alpha="auto")
    assert configs["supcon"].method.linear_epochs == 2 * recipes.digits_lt("supcon").method.linear_epochs


def get_shared_settings(config: Config) -> tuple[object, ...]:
    return config.optim, config.views, config.model, config.data


def test_settings_of_the_demo_were_best_on_validation_images():
    rows = json.loads((ROOT / "results/demo.json").read_text())["rows"]

    def mean_over_methods(row):
        return np.mean([np.mean(row["validation"][method]) for method in demo_run.METHODS])

    best, config = max(rows, key=mean_over_methods), demo_run.make_config("ce", (0,))
    assert (best["epochs"], best["lr"]) == (config.train.epochs, config.optim.lr)
