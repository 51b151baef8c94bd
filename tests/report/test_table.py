"""Tests of tables: grouping by configuration, mean and deviation, and labels that differ."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from longtail import files, recipes, run_folder
from longtail.config import to_dict
from longtail.errors import UserError
from longtail.reporting import plots
from longtail.reporting.class_accuracy import Curve, bin_curve
from longtail.reporting.plots import accuracy_by_frequency
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import TABLE_METRICS, shifted_table, table, to_markdown, to_rich
from tests.raises import raises

PACO, CE = (recipes.cifar100_lt(method, 100) for method in ("paco", "ce"))


def write(folder, config, seed, top1, few=None, started="2026-01-01", checksum="0"):
    """Write a finished run with the files that tables read."""
    folder.mkdir(parents=True)
    shifted = {"uniform": top1, "forward": {"2": top1, "50": top1 + 1}, "backward": {"2": top1, "50": top1 - 1}}
    metrics = {
        "top1": top1,
        "many": top1 + 5,
        "medium": top1,
        "few": few,
        "macro_f1": top1,
        "ece": 3.0,
        "knn_top1": top1,
    }
    metrics |= {"seconds": 60, "counts": [200, 50, 3], "per_class": [90.0, None, 10.0], "shifted": shifted}
    environment = {"seed": seed, "commit": "abc", "device": "CPU", "started": started, "precision": "fp32"}
    environment["data"] = {"checksum": checksum}
    files.write_json(folder / run_folder.METRICS, metrics)
    files.write_json(folder / run_folder.CONFIG, to_dict(replace(config, train=replace(config.train, seeds=(seed,)))))
    files.write_json(folder / run_folder.ENVIRONMENT, environment)


@pytest.fixture
def made(tmp_path):
    paco, ce = PACO, CE
    for seed, top1 in enumerate((50.0, 52.0, 54.0)):
        write(tmp_path / f"paco/seed{seed}", paco, seed, top1, few=30.0)
    write(tmp_path / "ce/seed0", ce, 0, 40.0)
    write(tmp_path / "alpha/seed0", replace(paco, method=replace(paco.method, alpha=0.1)), 0, 51.0)
    return tmp_path


def test_rows_group_seeds_and_name_differences(made):
    rows = table([made], made)
    found = {row.runs[0].config.method: (len(row.runs), row.cell("top1"), row.cell("few")) for row in rows}
    assert rows[0].cell("all") == rows[0].cell("top1")
    with raises("unknown-name", "'alll'"):
        rows[0].cell("alll")
    assert found == {
        CE.method: (1, "40.0", "–"),
        replace(PACO.method, alpha=0.1): (1, "51.0", "–"),
        PACO.method: (3, figure(52, 2), figure(30, 0)),
    }
    assert {row.label for row in rows} == {"Cross-entropy", "PaCo (method.alpha=0.1)", "PaCo (method.alpha=0.01)"}
    (data,) = {row.data for row in rows}
    assert data.startswith("cifar100-lt,") and data.endswith("imbalance 100")
    stored = {row["method"]: row["metrics"]["top1"] for row in json.loads((made / "table.json").read_text())}
    assert stored["PaCo (method.alpha=0.01)"] == {"mean": 52.0, "std": 2.0, "values": [50.0, 52.0, 54.0]}
    lines = (made / "table.md").read_text().splitlines()
    assert any(figure(52, 2) in [cell.strip() for cell in line.split("|")] for line in lines)


def figure(mean: float, std: float) -> str:
    return f"{mean:.1f} ± {std:.1f}"


def test_different_images_and_repeated_seeds(made):
    ce = recipes.cifar100_lt("ce", 100)
    write(made / "again/seed0", ce, 0, 41.0, started="2026-01-02")
    write(made / "elsewhere/seed0", replace(ce, data=replace(ce.data, root=made)), 0, 90.0, checksum="1")
    found = {row.label: row.cell("top1") for row in table([made]) if "Cross" in row.label}
    assert found == {"Cross-entropy (images=0)": "41.0", "Cross-entropy (images=1)": "90.0"}


def test_unfinished_runs_are_left_out(made):
    (made / "ce/seed0" / run_folder.METRICS).unlink()
    assert {row.label[:4] for row in make_rows(run_folder.read_finished([made]))} == {"PaCo"}
    with raises("unfinished-run", made / "ce", "1 unfinished"):
        run_folder.read_finished([made / "ce"])


def test_unrelated_folder_is_a_user_error(tmp_path):
    for content in ("{", "{}", "[]"):
        for name in (run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.METRICS):
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError) as caught:
            table([tmp_path])
        assert caught.value.kind in ("damaged-file", "invalid-value") and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("width", [60, 80, 100, 150])
def test_narrow_terminal(made, width):
    console = Console(width=width, file=io.StringIO())
    rows = [row for row in table([made]) if "Cross" in row.label]
    console.print(to_rich(rows, width))
    console.print(shifted_table(rows, width))
    shown = console.file.getvalue()
    assert "Cross-entropy" in shown and "40.0" in shown and "…" not in shown
    assert min(width, 64) <= max(map(len, shown.splitlines())) <= width


def headings(table) -> list[str]:
    return [column.header for column in table.columns]


def test_columns_without_information_are_left_out(made):
    """Groups without a value, and numbers of seeds that are all the same, unless the table is verbose."""
    rows = {len(row.runs): [row] for row in table([made]) if "Cross" in row.label or len(row.runs) > 1}
    assert headings(to_rich(rows[1], 80)) == ["method", "all", "medium", "many"]
    assert headings(to_rich(rows[3], 80)) == ["method", "all", "few", "medium", "many"]
    assert headings(to_rich(rows[1] + rows[3], 80)) == ["method", "rank", "all", "few", "medium", "many", "seeds"]
    assert {"few", "seeds"} <= set(headings(to_rich(rows[1], 150, is_verbose=True)))


@pytest.mark.parametrize("trainable", ["all", "head"])
def test_seconds_of_heads_are_shown_in_verbose_tables_only(tmp_path, trainable):
    """Heads train in seconds: the time goes into features and cross-validation."""
    write(tmp_path / "a/seed0", replace(CE, model=replace(CE.model, trainable=trainable)), 0, 40.0)
    rows = table([tmp_path])
    assert ("seconds" in headings(to_rich(rows, 120))) == (trainable == "all")
    assert "seconds" in headings(to_rich(rows, 150, is_verbose=True))


def test_tables_and_plot(made, tmp_path):
    rows = table([made])
    assert to_rich(rows).row_count == shifted_table(rows).row_count == 3
    assert "|" not in to_markdown(rows[:1]).splitlines()[2].replace("|", "", len(TABLE_METRICS) + 4)
    curves = [Curve(r.label, r.runs[0].metrics["counts"], [run.metrics["per_class"] for run in r.runs]) for r in rows]
    for panels in ({"one": curves}, {"one": curves, "two": curves[:1]}):
        accuracy_by_frequency(panels, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob("*.tmp"))


def test_style_is_the_same_in_every_panel(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: shown.append(figure))
    one, two, three = (Curve(label, [30, 20, 10], [[50.0, 40.0, 30.0]]) for label in "abc")
    accuracy_by_frequency({"x": [one, two], "y": [two, three]}, tmp_path / "plot.png")
    left, right = shown[0].axes
    assert left.lines[1].get_color() == right.lines[0].get_color() != right.lines[1].get_color()
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["a", "b", "c"]


def test_bin_curve():
    counts = [5, 100, 50, 20, 7]
    runs = [[10, 90, 80, None, 30], [20, 80, 80, None, 50]]  # one class without test images
    assert bin_curve(Curve("x", counts, runs)) == ([100, 50, 7, 5], [85, 80, 40, 15])
    many = bin_curve(Curve("x", range(100), [[float(c) for c in range(100)]]))
    assert many[0] == many[1] == [94.5 - 10 * i for i in range(10)]
