"""Regression tests for errors that random cases have found, each with its shortest example."""

import errno
import json
import os
from pathlib import Path

import pytest

import longtail
from longtail import files, recipes, run_folder, schema, theory
from longtail.errors import error_text
from longtail.inference.priors import normalize_weights
from tests.odd.harness import ends_well
from tests.raises import raises
from tests.report.made import FEW, make_run

LONG = "n" * 300
TOO_LONG = os.strerror(errno.ENAMETOOLONG)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", LONG], LONG),
        (["table", LONG], LONG),
        (["watch", LONG, "--port", "70000"], "--port 70000"),
        (["report", "ZOO/runs", "-o", LONG], TOO_LONG),
        (["figure", "extra", "-o", f"{LONG}.svg"], TOO_LONG),
        (["train", "digits-lt", "--out", LONG], TOO_LONG),
        (["data", "inspect", "cifar100", "--data.root", LONG], "CIFAR-100"),
        (["data", "shard", "ZOO/pets", "--out", LONG], TOO_LONG),
        (["data", "shard", "ZOO/pets", "--out", "ZOO/dangling"], "--out"),
        (["theory", "--counts", "ZOO/full"], "device"),
        (["theory", "--counts", "ZOO/deep.json"], "deep.json"),
        (["theory", "--counts", "ZOO/huge.json"], "huge.json"),
        (["theory", "--counts", "9" * 400, "1"], "--counts"),
        (["theory", "--counts", "5", "1", "--queue", "9" * 400], "--queue"),
        (["predict", "ZOO/network", "ZOO/pets", "--prior", "ZOO/null"], "device"),
        (["data", "inspect", "digits-lt", "--data.name", "list", "--data.train_list", "ZOO/deep.json"], "iNaturalist"),
        (["figure", "latency", "ZOO/deep.json"], "deep.json"),
    ],
)
def test_one_line_says_it(words, said, odd):
    found = ends_well(odd, words)
    assert found.code == 2 and said in found.err


def test_run_without_a_device_is_in_the_table(tmp_path):
    folder = make_run(tmp_path / "seed0", recipes.digits_lt("ce"), 0, FEW)
    tree = json.loads((folder / run_folder.ENVIRONMENT).read_text())
    files.write_json(folder / run_folder.ENVIRONMENT, {k: v for k, v in tree.items() if k not in ("device", "commit")})
    longtail.table(folder, tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())[0]["devices"] == ["None"]


@pytest.mark.parametrize("call", [longtail.table, longtail.report], ids=["table", "report"])
def test_invalid_path_is_reported(call, odd):
    with raises("not-writable"):  # the wording of the reason depends on the Python version
        call(odd.root / "runs", Path("a\0b"))


def test_shard_without_data_is_an_error():
    with raises("invalid-value", "DataConfig", "NoneType"):
        longtail.shard(None, "out")


def test_counts_are_whole_numbers():
    with raises("invalid-value"):
        theory.table(counts=[1.5, 2])


@pytest.mark.parametrize("weights", [{"a": 10**400, "b": 1}, {"a": 1.7e308, "b": 1.7e308}])
def test_weights_that_no_float_can_hold(weights):
    with raises("invalid-value", "the prior"):
        normalize_weights(weights, ("a", "b"), "the prior")


def test_shapes():
    shape = {"seed": schema.count, "notes": schema.optional([schema.text]), "by": schema.mapping_of(schema.number)}
    good = {"seed": 0, "by": {"x": 1.5}, "whatever": object}
    assert schema.find_error(good, shape) is None and schema.find_error(good | {"notes": ["a"]}, shape) is None
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
        assert str(schema.find_error(good | {key: value}, shape)).startswith(f"{key} is "), (key, value)
    assert schema.find_error([], shape).endswith(" []") and schema.find_error({"seed": 0}, shape).split()[0] == "by"


def test_why():
    assert error_text(OSError(28, "no space", "/x")) == os.strerror(28)
    assert error_text(ValueError("a\nb")) == "a b" and error_text(ValueError()) == "ValueError"
