"""The notebook is stored with its outputs, and runs from top to bottom with the same results."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from longtail import recipes, theory
from longtail.data import load

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks/paco.ipynb"
ALPHA, QUEUE, BATCH = 0.05, 256, 64
SUPCON, PACO, BEST, END = (
    "tail over head, SupCon",
    "tail over head, PaCo",
    "best P_sup",
    "P_sup in the end",
)


def stored():
    return nbformat.read(PAGE, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def remembered(notebook) -> dict:
    """Return the output of the last cell."""
    return ast.literal_eval(code(notebook)[-1].outputs[0].data["text/plain"])


def check(found: dict) -> None:
    """Check the theory with the closed forms, and the training with the statements of the text."""
    n = load(recipes.digits_lt(imbalance=40).data).train.counts
    K = theory.positives(n, QUEUE, BATCH)
    supcon, paco, best, in_the_end = (found[key] for key in (SUPCON, PACO, BEST, END))
    assert supcon == round(K.max() / K.min(), 2)
    assert paco == round(float(theory.range_of(ALPHA, K)), 2)
    assert best == round(float(n @ theory.center(ALPHA, K) / n.sum()), 3)
    assert abs(in_the_end - best) < 0.05
    few = found["percent of rare digits recognized"]
    plain = few["PaCo, no rebalance"]
    assert few["PaCo"] > few["SupCon"] + 5 and plain > few["SupCon"] and few["PaCo"] > 80


def test_it_is_stored_with_outputs():
    notebook = stored()
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert PAGE.stat().st_size < 500_000
    check(remembered(notebook))


def test_it_shows_no_local_path():
    text = "".join(output.get("text", "") for cell in code(stored()) for output in cell.outputs)
    assert text and not re.search(r"(^|\s)/\w+/", text)


def test_its_links_exist():
    text = "".join(cell.source for cell in stored().cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((PAGE.parent / link).exists() for link in links)


@pytest.mark.long
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    notebook = stored()
    for cell in code(notebook):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check(remembered(notebook))
    theories = [key for key in remembered(notebook) if key.startswith(("tail", "best"))]
    assert [remembered(notebook)[key] for key in theories] == [remembered(stored())[key] for key in theories]
