"""The Python in the README and in docs/ runs as it stands there."""

import re
from pathlib import Path

import pytest

from longtail import recipes
from longtail.report.table import table

ROOT = Path(__file__).parents[1]
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    for page in ("README.md", "docs/methods.md", "docs/use.md")
}


def run(block: str, page: str, place: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    exec(compile(block, page, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", BLOCKS["README.md"])
def test_block_runs(block, tmp_path, monkeypatch):
    run(block, "README.md", tmp_path, monkeypatch)


def test_both_commands_are_shown():
    text = (ROOT / "README.md").read_text()
    assert len(BLOCKS["README.md"]) == 2 and "make demo" in text and "make test" in text and "pip install ." in text


def test_the_worked_example_of_a_method_is_short_and_learns(tmp_path, monkeypatch, capsys):
    (block,) = BLOCKS["docs/methods.md"]
    assert len(block.splitlines()) < 40
    monkeypatch.setitem(recipes.METHODS, "cdt", None)  # which the block replaces, and which is gone after the test
    run(block, "docs/methods.md", tmp_path, monkeypatch)
    found = {row.label: row for row in table([tmp_path / "runs/cdt"])}
    assert found.keys() == {"Cross-entropy", "CDT"} and min(found["CDT"].values("top1")) > 40
    assert found["CDT"].values("top1") != found["Cross-entropy"].values("top1")


def test_the_page_on_use_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    run("\n".join(BLOCKS["docs/use.md"]), "docs/use.md", tmp_path, monkeypatch)
    assert (tmp_path / "out.csv").exists() and (tmp_path / "digits.safetensors.md").exists()
    assert "Prediction(" in capsys.readouterr().out


def test_every_method_stands_in_the_docs():
    text = (ROOT / "docs/methods.md").read_text()
    assert [
        name for name in recipes.METHODS if f"`{name}`" not in text and f"`{name.split('-')[0]}-*`" not in text
    ] == []
