"""Class frequencies from files and mappings: missing, unknown and duplicate classes, and invalid numbers are errors."""

import json
import tracemalloc

import numpy as np
import pytest

from longtail import files
from longtail.errors import UserError
from longtail.inference.priors import describe_frequencies, make_prior
from tests.expected_text import check_text
from tests.raises import raises

NAMES, COUNTS = ("cat", "dog, wild", "Ähre"), np.array([6, 3, 1])


def test_the_two_that_need_no_file():
    np.testing.assert_allclose(make_prior("uniform", NAMES, COUNTS).shares_C, [1 / 3] * 3)
    np.testing.assert_allclose(make_prior("train", NAMES, COUNTS).shares_C, [0.6, 0.3, 0.1])
    with raises("invalid-value"):
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
    ("tree", "kind", "values"),
    [
        ({"cat": 1}, "invalid-value", ["2 of", "3 classes", "Ähre"]),
        (GOOD | {"dog wild": 1}, "unknown-name", ["'dog wild'", "'dog, wild'"]),
        (GOOD | {"cat": -1}, "invalid-value", ["class 'cat'", "-1"]),
        (GOOD | {"cat": "many"}, "invalid-value", ["class 'cat'", "'many'"]),
        (GOOD | {"cat": None}, "invalid-value", ["class 'cat'", "None"]),
        (GOOD | {"cat": True}, "invalid-value", ["class 'cat'", "True"]),
        (GOOD | {"cat": float("nan")}, "invalid-value", ["class 'cat'", "nan"]),
        (GOOD | {"cat": float("inf")}, "invalid-value", ["class 'cat'", "inf"]),
        (dict.fromkeys(GOOD, 0), "invalid-value", ["0"]),
        ([1, 2, 3], "damaged-file", []),
        (GOOD | {"cat": 10**400}, "invalid-value", ["class 'cat'"]),
        (GOOD | {"cat": {}}, "invalid-value", ["class 'cat'"]),
        (dict.fromkeys(GOOD, 1e308), "invalid-value", []),
    ],
)
def test_errors_in_json_files(tree, kind, values, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(tree))
    with raises(kind, "a.json", *values):
        make_prior(tmp_path / "a.json", NAMES, COUNTS)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("cat,1\ndog, wild,1\n", "damaged-file", ["dog, wild,1"]),
        ("cat,1\ncat,2\n", "damaged-file", ["'cat'"]),
        ("", "invalid-value", ["3 of", "3 classes"]),
        ("\0", "damaged-file", []),
    ],
)
def test_errors_in_csv_files(text, kind, values, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with raises(kind, "a.csv", *values):
        make_prior(tmp_path / "a.csv", NAMES, COUNTS)


def test_invalid_files_of_priors(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "many.json").write_text("[" + "[]," * files.MAX_JSON_VALUES + "[]]")
    for name in ("deep.json", "many.json"):
        with pytest.raises(UserError):
            make_prior(tmp_path / name, NAMES, COUNTS)
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    for path, kind in (("a.json", "damaged-file"), ("a.csv", "damaged-file"), ("unifrom", "missing-file")):
        with raises(kind, tmp_path / path):
            make_prior(tmp_path / path, NAMES, COUNTS)


class Compared(str):
    """A class name that counts its comparisons."""

    __slots__ = ()
    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_classes_are_not_compared_with_each_other():
    names = tuple(Compared(f"class {number}") for number in range(1000))
    Compared.count = 0
    make_prior({f"class {number}": 1 for number in range(1000)}, names, None)
    assert Compared.count < 10_000


def test_invalid_csv_row_is_found_without_reading_the_others(tmp_path):
    (tmp_path / "a.csv").write_text("a\n" * 500_000)
    tracemalloc.start()
    try:
        with raises("damaged-file", "'a'"):
            make_prior(tmp_path / "a.csv", NAMES, COUNTS)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_in_words():
    alike, trained = describe_frequencies(np.full(3, 1 / 3), COUNTS), describe_frequencies(COUNTS / 10, COUNTS)
    between = describe_frequencies(np.array([0.5, 0.3, 0.2]), COUNTS)
    check_text("test_priors/names", "\n".join([alike, trained, between]))
    assert len({alike, trained, between}) == 3 and describe_frequencies(COUNTS / 10, None) == between
