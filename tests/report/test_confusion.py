"""Tests of confusions, the confusion matrix, images to check, and the tables of the terminal after training."""

import io
import json
import re
from urllib.parse import unquote

import numpy as np
import pytest
from rich.console import Console

from longtail import recipes, run_folder
from longtail.reporting import confusion, sections
from longtail.reporting import table as tables
from longtail.reporting.confusion import Confusion, find_confusions, matrix_section
from longtail.reporting.dataset_results import group_by_dataset
from longtail.reporting.page import report
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import table, to_rich
from tests.report.made import FEW, PER_CLASS, Page, make_run

MATRIX = [[6, 2, 0, 0], [0, 8, 0, 0], [3, 0, 5, 0], [0, 4, 0, 4]]
HOSTILE = ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "x" * 300, "[red]\x1b[31m"]


@pytest.fixture
def folder(tmp_path):
    """Two seeds, of which the first has the matrix above."""
    for seed in range(2):
        make_run(tmp_path / f"runs/seed{seed}", recipes.digits_lt("ce"), seed, FEW, right=1)
    path = tmp_path / "runs/seed0" / run_folder.METRICS
    path.write_text(json.dumps(json.loads(path.read_text()) | {"confusion": MATRIX}))
    return tmp_path / "runs"


def only_row(folder):
    (row,) = make_rows(run_folder.read_finished(folder))
    return row


def write_predictions(folder, predicted_N):
    """Write predictions and features of test images, with features that agree with the predicted classes."""
    y_N, classes = np.arange(len(FEW)).repeat(PER_CLASS), len(FEW)
    logits_NC = np.where(predicted_N == y_N, 6.0, 8.0)[:, None] * np.eye(classes)[predicted_N]
    x_NF = np.random.default_rng(0).normal(size=(len(y_N), 32)) * 0.3 + 3 * np.eye(32)[predicted_N]
    ids = np.array([f"test/{i}.jpg" for i in range(len(y_N))])
    np.savez(folder / "predictions.npz", logits=logits_NC.astype(np.float32), labels=y_N, ids=ids)
    np.savez(folder / "features.npz", features=x_NF.astype(np.float16), labels=y_N, ids=ids)


def test_confusions_are_counted_over_seeds(folder):
    wanted = [Confusion(3, 1, 4, 16), Confusion(2, 0, 3, 16), Confusion(0, 1, 2, 16)]
    assert find_confusions(only_row(folder).runs) == wanted


def test_confusions_from_predictions(folder):
    """Runs with very many classes store no matrix."""
    y_N = np.arange(len(FEW)).repeat(PER_CLASS)
    predicted_N = np.where(np.arange(len(y_N)) == 3, 2, y_N)
    write_predictions(folder / "seed0", predicted_N)
    for seed in range(2):
        path = folder / f"seed{seed}" / run_folder.METRICS
        path.write_text(json.dumps(json.loads(path.read_text()) | {"confusion": None}))
    assert find_confusions(only_row(folder).runs) == [Confusion(0, 2, 1, PER_CLASS)]
    (folder / "seed0/predictions.npz").unlink()
    assert find_confusions(only_row(folder).runs) is None
    assert len(Page(str(matrix_section(only_row(folder)))).missing()) == 1


def test_matrix_has_a_field_for_each_count(folder):
    page = Page(str(matrix_section(only_row(folder))))
    fields = [a for a in page.of("rect") if a["class"] in ("hit", "miss")]
    assert [a["class"] for a in fields].count("miss") == 3 and len(fields) == 7
    assert {float(a["fill-opacity"]) for a in fields if a["class"] == "miss"} == {0.24, 0.26, 0.28}
    numbers = [re.findall(r"\d+", title) for title in page.text["title"]]
    assert ["3", "1", "4", "16", "25"] in numbers  # class, predicted class, images, images of the class, percent


def test_fields_are_pale_where_they_have_numbers(folder, monkeypatch):
    """Numbers cannot be read on dark fields."""
    for min_cell, darkest, numbers in ((20, 0.5, 7), (1_000, 1.0, 0)):
        monkeypatch.setattr(confusion, "MIN_NUMBERED_CELL", min_cell)
        page = Page(str(matrix_section(only_row(folder))))
        assert max(float(a["fill-opacity"]) for a in page.of("rect") if "fill-opacity" in a) == darkest
        assert len([a for a in page.of("text") if a.get("class") == "times"]) == numbers


def test_many_classes_are_listed(folder, monkeypatch):
    monkeypatch.setattr(confusion, "MAX_MATRIX_CLASSES", 3)
    (found,) = Page(str(matrix_section(only_row(folder)))).tables
    assert [text for text, _ in found[1]] == ["class 3", "class 1", "4", "25.0 %"]


def test_suspected_labels_are_shown(folder):
    y_N = np.arange(len(FEW)).repeat(PER_CLASS)
    predicted_N = np.where(np.arange(len(y_N)) == 9, 3, y_N)
    write_predictions(folder / "seed1", predicted_N)
    (dataset,) = group_by_dataset([only_row(folder)])
    page = Page(str(sections.check_section(dataset)))
    (found,) = page.tables
    assert [text for text, _ in found[1]][1:3] == ["class 1", "class 3"] and found[1][-1][0] == "test/9.jpg"
    (link,) = [a["href"] for a in page.of("a") if a["download"] == "suspects.csv"]
    assert unquote(link).splitlines()[1].split(",")[:5] == ["label", "test", "test/9.jpg", "class 1", "class 3"]
    assert page.missing() == []


def test_runs_without_predictions_have_a_note(folder, tmp_path):
    page = Page(report(folder, tmp_path / "page.html").read_text())
    assert [note for note in page.missing() if "predictions.npz" in note]


def test_names_are_not_interpreted(tmp_path):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, FEW, HOSTILE)
    write_predictions(tmp_path / "a/seed0", np.arange(len(FEW)).repeat(PER_CLASS)[::-1])
    page = Page(report(tmp_path / "a", tmp_path / "page.html").read_text())
    assert len(page.of("script")) == 1 and not [a for a in page.of("img") if a.get("onerror")]


def printed(*tables, width=80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(*tables, sep="\n")
    return console.file.getvalue()


def test_classes_and_confusions_in_the_terminal(folder):
    row = only_row(folder)
    classes, confusions = tables.tables_by_class([row])
    assert classes.row_count == 4 and list(classes.columns[1].cells) and confusions.row_count == 3
    assert [cell.split()[0] for cell in confusions.columns[2].cells] == ["4", "3", "2"]
    assert list(classes.columns[2].cells) == [str(PER_CLASS)] * 4
    assert tables.tables_by_class([row, row]) == []
    assert "class 3" in printed(classes, confusions)


def test_worst_and_best_of_many_classes(tmp_path):
    classes = 30
    shares = np.linspace(0, 1, classes)
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, [10] * classes, right=shares)
    row = only_row(tmp_path / "a")
    found = [float(cell.split()[0]) for cell in tables.class_accuracy_table(row).columns[3].cells]
    accuracies = sorted(row.per_class())
    shown = [*accuracies[: tables.NUM_WORST], *accuracies[-tables.NUM_BEST :]]
    np.testing.assert_allclose(found, shown, atol=0.06)


def test_hostile_names_in_the_terminal(tmp_path):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, FEW, HOSTILE, right=0)
    text = printed(*tables.tables_by_class([only_row(tmp_path / "a")]), width=70)
    assert "\x1b" not in text and "[red]" in text


def test_research_columns_are_verbose(folder):
    rows = table(folder)
    headings = {flag: [column.header for column in to_rich(rows, 200, flag).columns] for flag in (False, True)}
    assert headings[False] == ["method", "all", "few", "many", "seconds"]  # no class is medium, and there is one row
    assert {"k-NN", "ms", "ECE", "seeds"} <= {*headings[True]}
    assert headings[True][:5] == ["method", "all", "few", "medium", "many"]
