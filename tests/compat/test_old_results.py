"""The committed files in results/ can be read, and their pages can be made again with the same figures.

tests/test_reproduce.py tests how such files are made, on a table of its own; these are the committed ones.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat import present
from tests.compat.renames import rename

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(RESULTS.glob("*.json"))
REPRODUCED = [path for path in FILES if "table" in json.loads(path.read_text())]


def name_of(path: Path) -> str:
    return path.stem


def numbers_in(text: str) -> list[str]:
    """Return all numbers of a text in order; a sign is included if it is before a number and after a space."""
    return re.findall(r"(?:(?<=[ (|])[-−+])?\d[\d,]*(?:\.\d+)?", text)


def test_every_table_has_a_results_file_and_a_page():
    others = {"README", "own_images"}  # benchmarks/own_images.py writes the latter
    assert {path.stem for path in REPRODUCED} == {name.replace("-", "_") for name in present.list_tables()}
    assert {path.stem for path in REPRODUCED} == {path.stem for path in RESULTS.glob("*.md")} - others


@pytest.mark.parametrize("path", REPRODUCED, ids=name_of)
def test_rows_and_verdicts_follow_from_the_recorded_runs(path):
    stored, found = json.loads(path.read_text()), present.read_results(path)
    assert len(found["runs"]) == len(stored["runs"]) > 0
    for part in ("rows", "verdicts"):
        new = list(leaves(found[part]))
        old = [
            ("/".join(rename("metrics", key) for key in place.split("/")), value)
            for place, value in leaves(stored[part])
        ]
        assert [place for place, _ in new] == [place for place, _ in old], part
        for (place, value), (_, expected) in zip(new, old, strict=True):
            assert value == (pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected), place


def leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of nested lists and objects with their paths."""
    if isinstance(tree, dict | list):
        inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in inside:
            yield from leaves(value, f"{place}/{key}")
    else:
        yield place, tree


@pytest.mark.parametrize("path", REPRODUCED, ids=name_of)
def test_pages_have_the_committed_figures(path):
    committed = path.with_suffix(".md").read_text()
    written = present.write_page(present.read_results(path))
    assert numbers_in(written) == numbers_in(committed)
    assert len(numbers_in(committed)) > 50


def test_a_changed_figure_is_noticed():
    path = RESULTS / "cifar100_lt.json"
    tree = present.read_results(path)
    tree["rows"][0]["metrics"]["top1"]["values"][0] += 1
    assert numbers_in(present.write_page(tree)) != numbers_in(path.with_suffix(".md").read_text())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_recorded_configuration_is_accepted(path):
    """This includes files of benchmarks that were written by even earlier versions, with fewer keys."""
    found = list(identities(json.loads(path.read_text())))
    for tree in found:
        config = present.read_identity(tree)
        assert config.method.name == tree["method"]["name"] and config.train.epochs == tree["train"]["epochs"]
    assert found or path not in REPRODUCED


def identities(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if isinstance(tree.get("identity"), dict):
            yield tree["identity"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from identities(part)
