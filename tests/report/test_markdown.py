"""Names in Markdown are rendered literally, never as markup or HTML."""

import copy
import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

import longtail
from longtail import recipes, run_folder
from longtail.paper import results_page
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import to_markdown
from longtail.text import escape_markdown, escape_nonprintable, markdown_table, quote_markdown
from tests.inference.made import finished_run, folder_config, photographs
from tests.odd.harness import STEADY
from tests.report.made import FEW, make_run

RESULTS = Path(__file__).parents[2] / "results"
IMAGE = "<img src=x onerror=alert(1)>"
NAMES = [
    IMAGE,
    "<script>alert(1)</script>",
    "a & b &lt; &amp;",
    "`code`",
    "[link](javascript:alert(1))",
    "![picture](http://127.0.0.1/x)",
    "a|b",
    "a\\|b",
    "*bold* **x** _it_ __y__ ~~z~~",
    "<http://127.0.0.1>",
    "trailing\\",
    "line\nbreak",
]
RENDER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render


def cells(text: str) -> list[str]:
    """Return the cells of a rendered table; a tag inside a cell is a failure."""
    found = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", RENDER(text), re.DOTALL)
    assert not any("<" in cell for cell in found), found
    return [html.unescape(cell) for cell in found]


@pytest.mark.parametrize("name", NAMES)
def test_cell_renders_name(name):
    assert cells(markdown_table(["method", "n"], [[name, "1.0±0.1"]])) == [
        "method",
        "n",
        escape_nonprintable(name),
        "1.0±0.1",
    ]


@STEADY
@given(st.text(st.sampled_from("ab_*`[]()<>&|\\~! #-+1.:/\"'=\n"), min_size=1, max_size=12))
def test_names_are_rendered_literally(name):
    shown = escape_nonprintable(name).strip()  # Markdown ignores spaces around a cell
    assert cells(markdown_table(["method", "n"], [[name, "–"]])) == ["method", "n", shown, "–"]
    (text,) = re.findall(r"<p>(.*)</p>", RENDER(f"x {escape_markdown(name)} x"))
    assert html.unescape(text) == f"x {escape_nonprintable(name)} x"


@STEADY
@given(st.text("ab` \\<", min_size=1, max_size=10).filter(lambda text: text.strip()))
def test_code_is_rendered_literally(text):
    (found,) = re.findall(r"<code>(.*)</code>", RENDER(f"x {quote_markdown(text)} x"))
    assert html.unescape(found).strip() == text.strip()


def test_text_without_markup_is_unchanged():
    for text in (
        "52.0 ± 2.0",
        "–",
        "k-NN",
        "PaCo (method.alpha=0.01, model.name=resnet32_cifar)",
        "cifar100-lt, imbalance 100",
    ):
        assert escape_markdown(text) == text
    assert quote_markdown("longtail train") == "`longtail train`"


@pytest.mark.parametrize("name", [name for name in NAMES if "/" not in name])
def test_table_of_runs(name, tmp_path):
    """The names of data sets and networks come from users."""
    for i, data in enumerate((name, "other")):
        config = recipes.digits_lt("ce" if i else "paco")
        config = replace(config, data=replace(config.data, name="folder", root=Path("/nowhere") / data, imbalance=1))
        make_run(tmp_path / f"{i}/seed0", replace(config, model=replace(config.model, name=name)), 0, FEW)
    written = to_markdown(make_rows(run_folder.read_finished(tmp_path)))
    found = cells(written)
    assert escape_nonprintable(name) in found and "other" in found
    assert "<img" not in RENDER(written) and "<a" not in RENDER(written) and "<code>" not in RENDER(written)


def test_page_of_reproduced_table():
    """All text of a results file is untrusted."""
    tree = json.loads((RESULTS / "cifar100_lt.json").read_text())
    assert results_page.to_markdown(tree) == (RESULTS / "cifar100_lt.md").read_text()
    spoilt, plain = copy.deepcopy(tree), RENDER(results_page.to_markdown(tree))
    spoilt["updated"] = spoilt["runs"][0]["command"] = spoilt["runs"][0]["precision"] = IMAGE
    spoilt["runs"][0] |= {"device": IMAGE, "commit": IMAGE, "started": "<b>bold</b>"}
    spoilt["runs"][0]["identity"]["model"]["name"] = IMAGE
    spoilt["runs"][0]["data"]["notes"] = [f"{IMAGE} `x` [y](z)"]
    for row in spoilt["rows"]:
        row["label"] += IMAGE
    for verdict in spoilt["verdicts"]:
        verdict["first"] += IMAGE
    found = RENDER(results_page.to_markdown(spoilt))
    assert found.count("<img") == plain.count("<img") and "<b>" not in found and found.count("&lt;img") > 8
    assert found.count("<a ") == plain.count("<a ")


def test_terminal_labels_have_no_markup():
    """Rich markup in labels is not interpreted in the terminal."""
    tree = json.loads((RESULTS / "cifar100_lt.json").read_text())
    for row in tree["rows"]:
        row["label"] = "[/red]"
    screen = Console(file=io.StringIO(), width=150)
    for table in results_page.to_rich(tree):
        screen.print(table)
    assert screen.file.getvalue().count("[/red]") > 0


def test_model_card(tmp_path):
    """Class names come from folder names."""
    config = folder_config(photographs(tmp_path / "data", n=(12, 6, 4)), "ce", image_size=32)
    folder = finished_run(tmp_path / "run/seed0", config)
    path = folder / run_folder.METRICS
    metrics = json.loads(path.read_text())
    names = [IMAGE, "`a` [b](c) | d", "e & f"]
    path.write_text(json.dumps(metrics | {"class_names": names}))
    done = longtail.export(folder, "safetensors", tmp_path / "x.safetensors")
    found = RENDER(next(tmp_path.glob("*.md")).read_text())
    assert done and "<img" not in found and "<a " not in found
    assert all(f"<td>{html.escape(name)}</td>" in found for name in names)
