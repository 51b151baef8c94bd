"""The table of `longtail theory`, and `alpha="auto"` from the flag to the run folder."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail import methods, recipes, run_folder, theory
from longtail.cli import main
from longtail.config import Config, PaCoSettings, from_dict, to_dict
from longtail.engine.train import train
from longtail.losses import paco_terms
from tests.conftest import tiny
from tests.raises import fails, raises
from tests.test_cli import images
from tests.theory.test_closed_forms import CIFAR, anchors, least

# The rule


@pytest.mark.parametrize(("classes", "queue", "batch"), [(1000, 8192, 256), (100, 1024, 128), (10, 0, 2)])
def test_auto_on_balanced_data_is_the_papers_example(classes, queue, batch):
    K = theory.positives([7] * classes, queue, batch)[0]
    assert theory.auto_alpha([7] * classes, queue, batch) * K == pytest.approx(0.408, abs=0.003)


@pytest.mark.parametrize("queue", [0, 1024, 65_536])
@pytest.mark.parametrize("counts", [CIFAR, [5000, 1], [1, 1], np.arange(1, 3000)], ids=len)
def test_auto_gives_the_mean_anchor_its_optimum(counts, queue):
    alpha, K = theory.auto_alpha(counts, queue, 128), theory.positives(counts, queue, 128)
    assert np.divide(counts, np.sum(counts)) @ theory.center(alpha, K) == pytest.approx(0.71, abs=0.001)
    assert 0 < alpha <= 0.41


def test_auto_gives_the_desired_P_sup_at_the_minimum_of_the_loss():
    """With counts 3 1 1, a queue of 20 and batches of one image, anchors have 13, 5 and 5 positives."""
    assert theory.positives([3, 1, 1], 20, 1).tolist() == pytest.approx([13, 5, 5])
    alpha = theory.auto_alpha([3, 1, 1], 20, 1)
    center, contrast, *labels = anchors(13, 13, 13, 5, 5)
    terms = lambda: paco_terms(center, contrast, *labels, None, alpha, 1.0)  # noqa: E731
    least(lambda: terms()[0].sum(), center, contrast)
    assert terms()[1].mean().item() == pytest.approx(0.71, abs=0.002)


def test_auto_keeps_the_optimum_with_a_longer_queue():
    short, long = (theory.auto_alpha(CIFAR, queue, 128) for queue in (1024, 8192))
    assert 0.01 < short < 0.02  # the released value and the text's
    head = [theory.center(a, theory.positives(CIFAR, n, 128)[0]) for a, n in ((short, 1024), (long, 8192))]
    assert long < short / 6 and head[1] == pytest.approx(head[0], abs=0.02)


# The table


def test_table_of_a_recipe_needs_no_data():
    table = longtail.theory.table("cifar100-lt", imbalance=50, setting="paper")
    config = recipes.cifar100_lt(imbalance=50, setting="paper")
    assert (table.queue, table.batch, table.given) == (1024, config.train.batch_size, 0.02)
    assert (max(table.counts), min(table.counts), sum(table.counts)) == (500, 10, 12_608)
    assert [table.counts[c] for c in table.head_to_tail(3)] == [500, table.counts[50], 10]
    assert table.positives["expected"] == theory.positives(table.counts, 1024, 512).tolist()
    assert [o.alpha for o in table.optima] == sorted({*theory.alpha_table.ALPHAS, table.auto, 0.02})
    assert {o.alpha: round(o.mean_P_sup, 2) for o in table.optima}[table.auto] == 0.71
    last = table.optima[-1]
    assert last.pair == pytest.approx(np.multiply(last.alpha, last.P_sup))
    assert last.range == pytest.approx(max(last.pair) / min(last.pair)) and last.range < table.supcon_range


def test_table_of_counts_and_of_what_is_counted(tmp_path):
    given = theory.table(counts=[5, 500, 50], queue=64, batch=8, alpha=[0.1])
    assert given.given is None and given.head_to_tail() == [1, 2, 0]
    assert sum(theory.table("digits-lt").counts) == 389
    assert theory.table(images(tmp_path)).counts == [5, 5]  # a fifth of six is evaluated on
    assert theory.table("imagenet-lt", counts=[9, 1]).queue == 8192
    with raises("invalid-value", "--recipe", "--counts"):
        theory.table()


# From the flag to the run folder


def with_alpha(alpha, **changes) -> Config:
    config = tiny("paco", epochs=1)
    return replace(config, method=replace(config.method, alpha=alpha, **changes))


def test_auto_goes_to_json_and_back():
    config = with_alpha("auto")
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    assert with_alpha(0.05).identity() != config.identity()


@pytest.mark.parametrize("alpha", ["Auto", None, True, 1.5, -0.1, float("nan")])
def test_other_words_are_refused(alpha):
    with raises("invalid-value", "--method.alpha", "auto"):
        PaCoSettings(alpha=alpha)


COUNTS = [40, 10, 1]


@pytest.mark.parametrize(
    ("method", "training", "counts", "batch"),
    [
        ({}, {}, COUNTS, 64),
        ({"contrast": "local"}, {"processes": 4}, COUNTS, 64),
        ({"contrast": "global"}, {"processes": 4}, COUNTS, 256),
        ({}, {"sampler": "balanced"}, [1, 1, 1], 64),
        ({}, {"sampler": "sqrt"}, np.sqrt(COUNTS), 64),
    ],
)
def test_auto_counts_all_samples_of_an_anchor(method, training, counts, batch):
    config = with_alpha("auto", **method)
    made = methods.make(replace(config, train=replace(config.train, **training)), COUNTS)
    assert made.resolved_settings() == {"alpha": theory.auto_alpha(counts, config.method.queue, batch)}
    assert made.params.alpha == made.resolved_settings()["alpha"]
    assert methods.make(with_alpha(0.3), COUNTS).resolved_settings() == {}


@pytest.mark.usefixtures("printed_messages")
def test_run_with_auto_equals_the_run_with_its_value(tmp_path, capsys):
    auto = replace(with_alpha("auto"), log=replace(tiny().log, progress="plain"))
    (folder,) = train(auto, tmp_path / "auto")
    alpha = run_folder.read_json(folder / run_folder.ENVIRONMENT)["chosen"]["alpha"]
    assert (
        alpha == theory.table("digits-lt", batch=64).auto
        and f"PaCo, alpha {alpha:g}, resnet8" in capsys.readouterr().out
    )
    assert run_folder.load_config(folder).method.alpha == "auto"
    (other,) = train(with_alpha(alpha), tmp_path / "fixed")
    assert run_folder.read_json(other / run_folder.ENVIRONMENT)["chosen"] == {}
    states = [torch.load(f / run_folder.CHECKPOINT)["method"] for f in (folder, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    lower, *_ = train(with_alpha(alpha / 2), tmp_path / "lower")
    assert not torch.equal(
        torch.load(lower / run_folder.CHECKPOINT)["method"]["net.head.weight"], states[0]["net.head.weight"]
    )


# The verb


def test_the_verb_prints_a_table_to_choose_from(capsys, tmp_path):
    assert main(["theory", "--recipe", "cifar100-lt", "--alpha", "0.02", "--json", str(tmp_path / "t.json")]) == 0
    text = capsys.readouterr().out
    for words in (
        "10,847 images of 100 classes",
        "47.20",
        "58.96",
        "59.91",
        "62 %",
        "recipe 0.01",
        "auto 0.0144",
        "37.7",
    ):
        assert words in text, words
    stored = json.loads((tmp_path / "t.json").read_text())
    assert stored == theory.table("cifar100-lt", alpha=[0.02]).to_dict() and len(stored["absent"]) == 100


def test_the_verb_takes_counts_from_files(capsys, tmp_path):
    plain, found = tmp_path / "counts.txt", tmp_path / "found.json"
    plain.write_text("500, 100\n5")
    assert main(["data", "inspect", "digits-lt", "--quick", "--json", str(found)]) == 0
    assert main(["theory", "--counts", str(plain)]) == main(["theory", "--counts", "500", "100", "5"]) == 0
    assert main(["theory", "--counts", str(found), "--queue", "256", "--batch", "64"]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("389 images", "10 classes", "queue 256", "batch 64"))


def test_given_counts_are_not_called_the_recipes(capsys):
    assert main(["theory", "--recipe", "cifar100-lt", "--counts", "500", "5"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("given counts") and "cifar100-lt" in shown
    assert theory.table(counts=[500, 5]).name == "given counts"


def test_the_verb_draws(capsys, tmp_path):
    path = tmp_path / "theory.png"
    assert main(["theory", "--counts", "500", "100", "5", "--figure", str(path)]) == 0
    assert Image.open(path).size == (1500, 630) and f"written to {path}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("args", "kind", "values"),
    [
        ([], "invalid-value", ["--recipe cifar100-lt", "--counts 500"]),
        (["--recipe", "cifar100-l"], "unknown-name", ["'cifar100-l'", "'cifar100-lt'"]),
        (["--recipe", "imagenet-lt", "--data_root", "nowhere"], "missing-file", ["nowhere"]),
        (["--counts", "nowhere.txt"], "missing-file", ["nowhere.txt", "longtail data"]),
        (["--counts", "5", "x"], "invalid-value", ["--counts 5 x"]),
        (["--counts", "5"], "invalid-value", ["--counts 5"]),
        (["--counts", "5", "0"], "invalid-value", ["--counts 5 0"]),
        (["--counts", "5", "4", "--alpha", "1"], "invalid-value", ["--alpha 1.0", "0.01"]),
        (["--counts", "5", "4", "--queue", "-1"], "invalid-value", ["--queue -1", "0"]),
        (["--counts", "5", "4", "--batch", "0"], "invalid-value", ["--batch 0", "1"]),
        (["--counts", "5", "4", "--json", "."], "not-writable", ["--json ."]),
        (["--counts", "5", "4", "--figure", "nowhere/x.png"], "not-writable", ["--figure nowhere/x.png"]),
        (["--counts", "5", "4", "--figure", "t.jpg"], "invalid-value", ["--figure t.jpg", ".svg", ".png", ".pdf"]),
    ],
)
def test_mistakes_are_one_line(args, kind, values, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["theory", *args], kind, *values)
