"""The demo, with one epoch; the long suite runs it completely."""

from dataclasses import replace

import pytest

from longtail import demo_run, recipes
from tests.conftest import tiny


def test_a_short_demo_leaves_table_and_plot(tmp_path, monkeypatch, simple_maps):
    monkeypatch.setattr(demo_run, "make_config", lambda method, seeds: tiny(method, epochs=1, seeds=seeds))
    rows = demo_run.demo(tmp_path, seeds=(0,))
    assert [row.label for row in rows] == ["Cross-entropy", "Balanced Softmax", "SupCon", "PaCo"]
    assert all((tmp_path / name).exists() for name in ("table.md", "table.json", "accuracy.png", "report.html"))
    words = "\n".join(demo_run.describe_results(rows, tmp_path))
    assert "20" in words.split() and "longtail train" in words and str(tmp_path) in words
    again = demo_run.demo(tmp_path, seeds=(0,))  # a second call finds everything done
    assert [r.values("top1") for r in again] == [r.values("top1") for r in rows]


@pytest.mark.long
def test_the_whole_demo_shows_paco_ahead_on_rare_classes(tmp_path):
    rows = {row.label: row for row in demo_run.demo(tmp_path)}
    few = {label: sum(row.values("few")) / 3 for label, row in rows.items()}
    assert few["PaCo"] > few["Cross-entropy"] + 5 and few["SupCon"] < few["Cross-entropy"]


def test_config_of_the_demo_is_the_recipe():
    recipe = recipes.digits_lt("supcon")
    assert demo_run.make_config("supcon", (3,)) == replace(recipe, train=replace(recipe.train, seeds=(3,)))
