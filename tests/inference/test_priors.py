"""Class frequencies from files and mappings: what is missing, unknown, doubled or no number is said with its fix."""

import json

import numpy as np
import pytest

from longtail.errors import UserError
from longtail.inference.priors import make_prior, named

NAMES, COUNTS = ("cat", "dog, wild", "Ähre"), np.array([6, 3, 1])


def test_the_two_that_need_no_file():
    np.testing.assert_allclose(make_prior("uniform", NAMES, COUNTS).shares_C, [1 / 3] * 3)
    np.testing.assert_allclose(make_prior("train", NAMES, COUNTS).shares_C, [0.6, 0.3, 0.1])
    with pytest.raises(UserError, match="not known here"):
        make_prior("train", NAMES, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'cat,1\n"dog, wild",3\nÄhre,0\n'),
        ("a.csv", '\ufeffclass,weight\nÄhre,0\r\ncat,0.25\r\n"dog, wild",0.75\r\n\r\n'),
        ("a.json", json.dumps({"cat": 2, "dog, wild": 6.0, "Ähre": 0})),
    ],
)
def test_files(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    prior = make_prior(str(tmp_path / name), NAMES, COUNTS)
    assert prior.name == name
    np.testing.assert_allclose(prior.shares_C, [0.25, 0.75, 0])


GOOD = {"cat": 1, "dog, wild": 1, "Ähre": 1}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"cat": 1}, "no weight for 2 of 3 classes"),
        (GOOD | {"dog wild": 1}, "did you mean 'dog, wild'"),
        (GOOD | {"cat": -1}, "class 'cat': -1 is no weight"),
        (GOOD | {"cat": "many"}, "'many' is no weight"),
        (GOOD | {"cat": None}, "None is no weight"),
        (GOOD | {"cat": True}, "True is no weight"),
        (GOOD | {"cat": float("nan")}, "nan is no weight"),
        (GOOD | {"cat": float("inf")}, "inf is no weight"),
        (dict.fromkeys(GOOD, 0), "all weights are 0"),
        ([1, 2, 3], "write an object"),
    ],
)
def test_what_is_wrong_in_json_is_said(tree, words, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=words):
        make_prior(tmp_path / "a.json", NAMES, COUNTS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cat,1\ndog, wild,1\n", "names with commas"),
        ("cat,1\ncat,2\n", "twice"),
        ("", "3 of 3 classes"),
        ("\0", "no line"),
    ],
)
def test_what_is_wrong_in_csv_is_said(text, words, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        make_prior(tmp_path / "a.csv", NAMES, COUNTS)


def test_files_that_are_none(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    for path, words in (("a.json", "no JSON"), ("a.csv", "no text"), ("unifrom", "--prior takes uniform")):
        with pytest.raises(UserError, match=words):
            make_prior(tmp_path / path, NAMES, COUNTS)


def test_in_words():
    assert named(np.full(3, 1 / 3), COUNTS) == "all classes alike"
    assert named(COUNTS / 10, COUNTS) == "the frequencies of the training images"
    assert named(np.array([0.5, 0.3, 0.2]), COUNTS).startswith("frequencies between")
    assert named(COUNTS / 10, None).startswith("frequencies between")
