"""What the drawn cases have found, each by its shortest example."""

import json
from pathlib import Path

import pytest

import longtail
from longtail import UserError, files, recipes, runs, shapes, theory
from longtail.errors import why
from longtail.inference.priors import checked
from tests.odd.harness import ends_well
from tests.report.made import FEW, make_run

LONG = "n" * 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", LONG], "does not exist"),
        (["table", LONG], "does not exist"),
        (["watch", LONG, "--port", "70000"], "--port 70000"),
        (["report", "ZOO/runs", "-o", LONG], "File name too long"),
        (["figure", "extra", "-o", f"{LONG}.svg"], "File name too long"),
        (["train", "digits-lt", "--out", LONG], "File name too long"),
        (["data", "inspect", "cifar100", "--data.root", LONG], "CIFAR-100"),
        (["data", "shard", "ZOO/pets", "--out", LONG], "File name too long"),
        (["data", "shard", "ZOO/pets", "--out", "ZOO/dangling"], "is there already"),
        (["theory", "--counts", "ZOO/full"], "it is a device"),
        (["theory", "--counts", "ZOO/deep.json"], "no class counts"),
        (["theory", "--counts", "ZOO/huge.json"], "no class counts"),
        (["theory", "--counts", "9" * 400, "1"], "two classes or more"),
        (["theory", "--counts", "5", "1", "--queue", "9" * 400], "--queue"),
        (["predict", "ZOO/network", "ZOO/pets", "--prior", "ZOO/null"], "it is a device"),
        (["data", "inspect", "digits-lt", "--data.name", "list", "--data.train_list", "ZOO/deep.json"], "iNaturalist"),
        (["figure", "latency", "ZOO/deep.json"], "cannot read"),
    ],
)
def test_one_line_says_it(words, said, odd):
    found = ends_well(odd, words)
    assert found.code == 2 and said in found.err


def test_a_run_that_does_not_name_its_device_stands_in_the_table(tmp_path):
    folder = make_run(tmp_path / "seed0", recipes.digits_lt("ce"), 0, FEW)
    tree = json.loads((folder / runs.ENVIRONMENT).read_text())
    files.write_json(folder / runs.ENVIRONMENT, {k: v for k, v in tree.items() if k not in ("device", "commit")})
    longtail.table(folder, tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())[0]["devices"] == ["None"]


@pytest.mark.parametrize("call", [longtail.table, longtail.report], ids=["table", "report"])
def test_a_path_that_cannot_be_is_said(call, odd):
    with pytest.raises(UserError, match="choose another"):  # the reason is in the words of the Python version
        call(odd.root / "runs", Path("a\0b"))


def test_what_is_no_data_is_said():
    with pytest.raises(UserError, match="shard takes a DataConfig"):
        longtail.shard(None, "out")


def test_counts_are_whole_numbers():
    with pytest.raises(UserError, match="two classes or more"):
        theory.table(counts=[1.5, 2])


@pytest.mark.parametrize("weights", [{"a": 10**400, "b": 1}, {"a": 1.7e308, "b": 1.7e308}])
def test_weights_that_no_float_can_hold(weights):
    with pytest.raises(UserError, match=r"no weight|too large"):
        checked(weights, ("a", "b"), "the prior")


def test_shapes():
    shape = {"seed": shapes.count, "notes": shapes.maybe([shapes.text]), "by": shapes.named(shapes.number)}
    good = {"seed": 0, "by": {"x": 1.5}, "whatever": object}
    assert shapes.fault(good, shape) is None and shapes.fault(good | {"notes": ["a"]}, shape) is None
    wrong = [
        ("seed", True),
        ("seed", -1),
        ("seed", 10**400),
        ("notes", [1]),
        ("notes", "a"),
        ("by", []),
        ("by", {"x": "1"}),
    ]
    wrong += [("by", {"x": float("nan")}), ("seed", None)]
    for key, value in wrong:
        assert str(shapes.fault(good | {key: value}, shape)).startswith(f"{key} is "), (key, value)
    assert shapes.fault([], shape) == "it is []" and shapes.fault({"seed": 0}, shape) == "by is None"


def test_why():
    assert why(OSError(28, "No space left on device", "/x")) == "No space left on device"
    assert why(ValueError("a\nb")) == "a b" and why(ValueError()) == "ValueError"
