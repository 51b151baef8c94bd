"""`longtail reproduce` with a test table of the embedded digits: resuming, the results file, its page, and verdicts."""

import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import longtail
from longtail import methods, recipes, run_folder
from longtail.cli import main
from longtail.data.sources import load
from longtail.errors import Interrupted
from longtail.paper import reproduce as runner
from longtail.paper import results as files
from longtail.paper.reproduce import MARGIN, estimate_seconds, reproduce, seconds_per_image
from longtail.paper.results import ResultsFile
from longtail.paper.results_page import (
    BRACKETS,
    MIXED_LENGTHS,
    compare_pairs,
    comparison_section,
    curves_by_factor,
    describe_verdict,
    list_missing,
    make_rows,
    parallel_note,
    plot_files,
    to_markdown,
    training_lengths,
)
from longtail.paper.tables import TABLES, MethodVariant, PaperTable, make_cell
from tests.expected_text import check_text
from tests.raises import fails, raises

STAND_IN = PaperTable(
    title="Digits, as a stand-in",
    recipe="digits-lt",
    setting="equal",
    methods=("paco", "balanced-softmax", "supcon"),
    imbalance=(40, 10),
    seeds=(0, 1),
)
PAPER = {("paco", 40): 91.0, ("balanced-softmax", 10): 88.8}
ONE_CELL = {"methods": ["paco"], "imbalance": [40], "epochs": 1}


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLES, "dig-its", STAND_IN)
    patch.setitem(recipes.RECIPES, "digits-lt", recipes.RECIPES["digits-lt"]._replace(published=PAPER))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    install(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train PaCo and Balanced Softmax at imbalance 40, two seeds, one epoch, once for all tests."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        asked = {"methods": ["balanced-softmax", "paco"], "imbalance": [40], "epochs": 1}
        reproduce("dig-its", root / "runs", root / "results", **asked)
    return root


@pytest.fixture
def place(trained, tmp_path):
    """Return a copy of the trained runs that a test may change."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def again(place: Path, **asked):
    return reproduce("dig-its", place / "runs", place / "results", **asked)


def stored(place: Path):
    return json.loads((place / "results/dig_its.json").read_text())


def store(place: Path, tree) -> None:
    (place / "results/dig_its.json").write_text(json.dumps(tree))


@pytest.fixture
def calls(monkeypatch):
    """Return a list of all calls of `train`: folders and seeds."""
    made = []

    def spy(config, out, resume, data):
        made.append((out.name, config.train.seeds))
        return train(config, out, resume, data)

    train = runner.train
    monkeypatch.setattr(runner, "train", spy)
    return made


@pytest.fixture
def no_training(place):
    """Check that no network was written during the test."""

    def networks():
        return {path: path.stat().st_mtime_ns for path in place.rglob(run_folder.MODEL)}

    before = networks()
    assert len(before) == 4
    yield
    assert networks() == before


# What the file holds


def test_every_run_is_recorded_as_its_folder_has_it(trained):
    tree = stored(trained)
    assert [(r["method"], r["imbalance"], r["seed"]) for r in tree["runs"]] == [
        ("paco", 40, 0),
        ("paco", 40, 1),
        ("balanced-softmax", 40, 0),
        ("balanced-softmax", 40, 1),
    ]
    for record in tree["runs"]:
        folder = trained / f"runs/{record['method']}-40-1-epochs/seed{record['seed']}"
        metrics, environment = (json.loads((folder / f"{n}.json").read_text()) for n in ("metrics", "environment"))
        found = metrics | {"parameters": environment["parameters"]}
        assert record["metrics"] == {name: found[name] for name in files.METRICS if name in found}
        assert set(files.METRICS) - set(found) == {"experts_asked", "logistic_top1"}  # of other kinds of runs
        assert record["per_class"] == metrics["per_class"] and len(record["per_class"]) == 10
        assert record["counts"] == metrics["counts"]
        for key in ("commit", "device", "precision", "versions", "started"):
            assert record[key] == environment[key]
        assert record["data"]["checksum"] == environment["data"]["checksum"]
        assert record["epochs"] == record["identity"]["train"]["epochs"] == 1
    assert tree["name"] == "dig-its" and tree["title"] == STAND_IN.title and tree["updated"].endswith("Z")
    flags = ["--methods", "balanced-softmax", "paco", "--imbalance", "40", "--epochs", "1"]
    assert shlex.split(tree["command"]) == ["longtail", "reproduce", "dig-its", *flags]


def test_rows_have_mean_deviation_and_the_distance_to_the_paper(trained):
    tree = stored(trained)
    paco, balanced = tree["rows"]
    values = [r["metrics"]["top1"] for r in tree["runs"] if r["method"] == "paco"]
    top1 = paco["metrics"]["top1"]
    assert top1["values"] == values and paco["seeds"] == [0, 1]
    assert top1["mean"] == pytest.approx(sum(values) / 2) and top1["std"] == pytest.approx(statistics.stdev(values))
    assert paco["paper"] == 91.0 and paco["difference"] == pytest.approx(sum(values) / 2 - 91.0)
    assert balanced["method"] == "balanced-softmax" and balanced["paper"] is balanced["difference"] is None


def table_lines(page: str) -> list[list[str]]:
    """Return the cells of the lines of the first table with the results."""
    first = page[page.index("| method |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]


def test_the_page_follows_from_the_file_alone(trained):
    page = (trained / "results/dig_its.md").read_text()
    assert page == to_markdown(stored(trained))
    values = [r["metrics"]["top1"] for r in stored(trained)["runs"] if r["method"] == "paco"]
    figures = {cells[0]: cells[1:] for cells in table_lines(page)}
    mean_and_paper = f"{sum(values) / 2:.1f} ± {statistics.stdev(values):.1f} (91.0)"
    assert figures["PaCo"][:2] == [mean_and_paper, "–"] and figures["SupCon"] == ["–", "–"]
    assert figures["Balanced Softmax"][1] == "– (88.8)"
    tree = stored(trained)
    check_text("test_reproduce/missing", list_missing(tree["table"], tree["rows"]))
    check_text("test_reproduce/claim", "\n".join(comparison_section(tree, 1, tree["table"]["pairs"][0])))
    assert list_missing(tree["table"], tree["rows"]) in page
    assert all(part in page for part in comparison_section(tree, 1, tree["table"]["pairs"][0]))
    assert [line.split()[-1] for line in page.splitlines() if line.startswith("### Imbalance")] == ["40"]


def test_page_shows_the_plot_if_there_is_one(place):
    shown = "](dig_its_1_epochs.png)"
    assert shown in (place / "results/dig_its.md").read_text()
    assert (place / "results/dig_its_1_epochs.png").read_bytes().startswith(b"\x89PNG")
    tree = stored(place)
    assert list(curves_by_factor(tree, 1)) == ["imbalance 40"] and not curves_by_factor(tree, 2)
    assert [(c.label, len(c.per_class)) for c in curves_by_factor(tree, 1)["imbalance 40"]] == [
        ("PaCo", 2),
        ("Balanced Softmax", 2),
    ]
    tree["runs"][0]["counts"] = None  # of an older version
    assert len(curves_by_factor(tree, 1)["imbalance 40"]) == 2
    for counts in ([5] * 10, None):  # balanced; all of an older version
        for record in tree["runs"]:
            record["counts"] = counts
        assert shown not in to_markdown(tree)


def test_panels_follow_the_table_and_leave_out_what_has_no_scores(place):
    tree = stored(place)
    for record in tree["runs"][:2]:
        record |= {"imbalance": 10, "data": record["data"] | {"checksum": "other"}}
    assert list(curves_by_factor(tree, 1)) == ["imbalance 40", "imbalance 10"]
    for record in tree["runs"][2:]:
        record["per_class"] = [None] * 10
    assert list(curves_by_factor(tree, 1)) == ["imbalance 10"]


@pytest.mark.parametrize(
    "spoilt", [{"counts": 7}, {"counts": [1, 2]}, {"counts": [None] * 10}, {"per_class": ["a"] * 10}]
)
def test_classes_that_make_no_sense_are_refused(place, spoilt):
    tree = stored(place)
    tree["runs"][0] |= spoilt
    store(place, tree)
    with raises("damaged-file", "dig_its.json", next(iter(spoilt))):
        again(place, **ONE_CELL)


def test_the_page_names_every_commit_machine_and_note(place):
    tree = stored(place)
    first, second = tree["runs"][:2]
    first |= {"commit": "aaa", "device": "Abacus", "started": "2026-01-02T00:00:00Z"}
    first["resumed"] = [{"commit": "bbb", "device": "Slide rule", "started": "2026-01-05T00:00:00Z"}]
    first["data"]["notes"] = ["warning: another file"]
    second |= {"commit": None, "command": "longtail reproduce dig-its --seeds 1", "started": "2026-01-03T00:00:00Z"}
    second["metrics"]["together"] = 3
    page = to_markdown(tree | {"runs": [first, second]})
    found = [line.removeprefix("- ") for line in page.splitlines() if line.startswith("- ")]
    wanted = ["commits aaa, bbb, unknown", "machines Abacus, Slide rule, CPU", "seeds 0 1", "warning: another file"]
    for line in (*wanted, "trained 2026-01-02 to 2026-01-05"):
        assert any(one.startswith(line) for one in found), line
    commands = [line.strip(" -`") for line in page.splitlines() if line.startswith("  - ")]
    assert len(commands) == 2 and commands[0].endswith("--epochs 1") and commands[1].endswith("--seeds 1")
    assert "(3 at" in parallel_note(tree | {"runs": [first, second]}, 1)


def test_records_of_another_process_are_kept(place):
    tree, path = stored(place), place / "results/dig_its.json"
    store(place, tree | {"runs": tree["runs"][:1]})
    book = ResultsFile(path, "dig-its", STAND_IN, "longtail reproduce dig-its")
    store(place, tree | {"runs": tree["runs"][:2]})
    book.add(tree["runs"][2:])
    assert stored(place)["runs"] == tree["runs"]


# What is not trained again


@pytest.mark.usefixtures("printed_messages")
def test_a_finished_folder_is_recorded_without_training(place, no_training, capsys):
    before = stored(place)
    (place / "results/dig_its.json").unlink()
    again(place, methods=["paco", "balanced-softmax"], imbalance=[40], epochs=1)
    after = stored(place)
    assert after["rows"] == before["rows"]
    assert [r["started"] for r in after["runs"]] == [r["started"] for r in before["runs"]]
    assert "Balanced Softmax" in capsys.readouterr().out


@pytest.mark.usefixtures("printed_messages")
def test_recorded_runs_are_skipped_without_their_folders(place, calls, capsys):
    before = (place / "results/dig_its.json").read_bytes()
    shutil.rmtree(place / "runs")
    again(place, methods=["paco", "balanced-softmax"], imbalance=[40], epochs=1)
    assert not calls and (place / "results/dig_its.json").read_bytes() == before and not (place / "runs").exists()
    assert str(place / "results/dig_its.json") in capsys.readouterr().out


@pytest.mark.usefixtures("printed_messages")
def test_only_the_missing_seed_is_trained(place, calls, capsys):
    shutil.rmtree(place / "runs")
    tree = again(place, **ONE_CELL, seeds=[0, 2, 1])
    assert calls == [("paco-40-1-epochs", (2,))] and (place / "runs/paco-40-1-epochs/seed2/metrics.json").exists()
    assert "seed 2" in capsys.readouterr().out
    assert tree == stored(place) and tree["rows"][0]["seeds"] == [0, 1, 2] and len(tree["runs"]) == 5


def test_rerun_trains_recorded_runs_again_and_keeps_the_older_folder(place, calls):
    before, folder = stored(place), place / "runs/paco-40-1-epochs"
    first = json.loads((folder / "seed0/metrics.json").read_text())
    again(place, **ONE_CELL, seeds=[0], rerun=True)
    aside = [f for f in folder.iterdir() if f.name.startswith("seed0-")]
    assert calls == [("paco-40-1-epochs", (0,))] and len(aside) == 1 and (folder / "seed1/metrics.json").exists()
    assert json.loads((aside[0] / "metrics.json").read_text()) == first
    records = [r for r in stored(place)["runs"] if (r["method"], r["seed"]) == ("paco", 0)]
    fresh = json.loads((folder / "seed0/metrics.json").read_text())
    assert len(records) == 1 and len(stored(place)["runs"]) == len(before["runs"])
    assert records[0]["metrics"]["seconds"] == fresh["seconds"] != first["seconds"]


def test_a_field_that_is_new_since_the_file_was_written_has_its_default(place, calls):
    tree = stored(place)
    for record in tree["runs"]:
        del record["identity"]["train"]["accumulate"]
    store(place, tree)
    again(place, **ONE_CELL)
    assert not calls


# What does not mix


def test_another_length_is_trained_and_has_tables_of_its_own(place, calls):
    tree = again(place, **ONE_CELL | {"epochs": 2}, seeds=[0])
    assert calls == [("paco-40-2-epochs", (0,))]
    paco = [row for row in tree["rows"] if row["method"] == "paco"]
    assert [(row["epochs"], row["seeds"], row["label"]) for row in paco] == [(2, [0], "PaCo"), (1, [0, 1], "PaCo")]
    long, short = (place / "results/dig_its.md").read_text().split("## 1 epoch\n")
    assert "2 epochs" in long and "0 1" not in long and "0 1" in short
    assert "(seed 1)" in list_missing(tree["table"], [row for row in tree["rows"] if row["epochs"] == 2])


def test_another_configuration_has_a_row_of_its_own(place, calls, monkeypatch):
    def slower(method, imbalance, setting):
        config = recipes.digits_lt(method, imbalance, setting)
        return replace(config, optim=replace(config.optim, lr=0.05))

    changed = recipes.RECIPES["digits-lt"]._replace(build=slower)
    monkeypatch.setitem(recipes.RECIPES, "digits-lt", changed)
    with raises("mismatch", "optim.lr", "0.1", "0.05"):  # the folder is the other's
        again(place, **ONE_CELL)
    shutil.rmtree(place / "runs")
    tree = again(place, **ONE_CELL, seeds=[0])
    assert calls[1:] == [("paco-40-1-epochs", (0,))]
    labels = {row["label"]: row["seeds"] for row in tree["rows"] if row["method"] == "paco"}
    assert labels == {"PaCo (optim.lr=0.1)": [0, 1], "PaCo (optim.lr=0.05)": [0]}


def test_other_images_are_refused_before_training(place, calls):
    tree = stored(place)
    tree["runs"][0]["data"]["checksum"] = "0123"
    store(place, tree)
    with raises("mismatch", "0123", "--data_root"):
        again(place, **ONE_CELL, seeds=[2])
    assert not calls


def test_images_in_a_folder_want_to_be_named(tmp_path):
    with raises("invalid-value", "tiny-imagenet-lt", "--data_root DIR"):
        reproduce("tiny-imagenet-lt", out=tmp_path / "runs", results=tmp_path / "results")


def test_precisions_do_not_mix(trained):
    tree = stored(trained)
    tree["runs"][0]["precision"] = "bf16"
    labels = [(row["label"], row["seeds"]) for row in make_rows(tree) if row["method"] == "paco"]
    assert sorted(labels) == [("PaCo (precision=bf16)", [0]), ("PaCo (precision=fp32)", [1])]


# The order, and its end


@pytest.mark.usefixtures("printed_messages")
def test_a_table_takes_over_the_runs_of_another_with_the_same_configuration(place, monkeypatch, capsys):
    changed = MethodVariant("paco", "PaCo, alpha 0.2", lambda c: replace(c, method=replace(c.method, alpha=0.2)), 33.0)
    other = replace(
        STAND_IN, methods=("paco", "alpha"), variants={"alpha": changed}, shares=("dig-its",), note="Mind this."
    )
    monkeypatch.setitem(TABLES, "other", other)
    tree = reproduce("other", place / "runs2", place / "results", imbalance=[40], epochs=1, seeds=[0, 1])
    assert str(place / "results/other.json") in capsys.readouterr().out
    assert not (place / "runs2/paco-40-1-epochs").exists()
    before = {r["seed"]: r["metrics"]["top1"] for r in stored(place)["runs"] if r["method"] == "paco"}
    assert {r["seed"]: r["metrics"]["top1"] for r in tree["runs"] if r["method"] == "paco"} == before
    assert [row["label"] for row in tree["rows"]] == ["PaCo", changed.label]
    assert [r["identity"]["method"]["alpha"] for r in tree["runs"] if r["method"] == "alpha"] == [0.2, 0.2]
    page = (place / "results/other.md").read_text()
    assert "(33.0)" in page and "Mind this." in page and BRACKETS not in page
    assert [row["difference"] for row in tree["rows"]][1] is None  # the paper's figure is for other data


def test_a_method_that_holds_images_out_has_its_own(tmp_path, monkeypatch):
    """tau-norm needs a validation split, which the other methods of the table do not have."""
    methods = ("ce", "balanced-softmax", "tau-norm", "ncm")
    monkeypatch.setitem(TABLES, "held", replace(STAND_IN, methods=methods, imbalance=(40,), seeds=(0,)))
    tree = reproduce("held", tmp_path / "runs", tmp_path / "results", epochs=1)
    assert [row["method"] for row in tree["rows"]] == list(methods)
    held_out = {r["method"]: r["identity"]["data"]["val_fraction"] for r in tree["runs"]}
    assert held_out == {"ce": 0, "balanced-softmax": 0, "tau-norm": 0.1, "ncm": 0}
    assert len({json.dumps(r["counts"]) for r in tree["runs"]}) == 1  # frequent and rare are the same for all


def test_methods_with_different_lengths_share_a_table(place, monkeypatch):
    """This is the case for methods with their authors' settings."""
    tree = stored(place)
    for record in tree["runs"]:
        if record["method"] == "paco":
            record["epochs"] = 7
    table = tree["table"] | {"mixed": True}
    mixed = files.write_results(place / "results/mixed.json", tree | {"table": table, "name": "mixed"})
    page = to_markdown(mixed)
    assert (
        training_lengths(mixed) == [MIXED_LENGTHS]
        and [line for line in page.splitlines() if line.startswith("## ")][1:] == []
    )
    assert [v["seeds"] for v in mixed["verdicts"]] == [[0, 1]]  # PaCo of 7 epochs against Balanced Softmax of 1
    with raises("unsupported", "--epochs 3", "published"):
        reproduce("published", place / "runs", place / "results", epochs=3)


def test_many_methods_are_drawn_as_dots_with_their_latency(place):
    tree = stored(place)
    names = {f"m{i}": f"method {i}" for i in range(9)}
    paco = [r for r in tree["runs"] if r["method"] == "paco"]
    table = tree["table"] | {"methods": names, "pairs": [["m1", "m0"], ["m3", "m2"]]}
    copies = [r | {"method": name} for name in names for r in paco]
    alike = files.write_results(place / "results/many.json", tree | {"runs": copies, "table": table, "name": "many"})
    assert list(plot_files(alike, 1)) == ["compared"]  # networks of one size have one latency
    for i, record in enumerate(copies):
        record["metrics"] = record["metrics"] | {"parameters": 1000 + i // len(paco)}
    drawn = files.write_results(place / "results/many.json", tree | {"runs": copies, "table": table, "name": "many"})
    assert list(plot_files(drawn, 1)) == ["compared", "latency"]
    for picture in plot_files(drawn, 1).values():
        assert (place / "results" / picture.name).stat().st_size > 10_000
        assert picture.name in to_markdown(drawn)
    assert [v["pair"] for v in drawn["verdicts"]] == table["pairs"]
    claims = [line.split() for line in to_markdown(drawn).splitlines() if line.startswith("### method")]
    assert [(line[2], line[-1]) for line in claims] == [("1", "0"), ("3", "2")]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_has_a_configuration_and_a_label(name):
    table = TABLES[name]
    configs = {cell: table.config(*cell) for cell in table.cells()}
    assert len({json.dumps(c.identity(), sort_keys=True) for c in configs.values()}) == len(configs)
    assert len(set(table.to_dict()["methods"].values())) == len(table.methods)


def test_pairs_of_equal_latency_are_about_equally_deep():
    """The depth is the number of convolutions in sequence if all experts are evaluated."""
    table = TABLES["latency"]
    deep = {}
    for method in table.methods:
        net = methods.make(table.config(method, 100), np.full(100, 5)).net
        deep[method] = sum(isinstance(m, nn.Conv2d) for m in net.modules())
    assert all(abs(deep[paco] / deep[ride] - 1) < 0.1 for paco, ride in table.pairs) and deep["paco"] == 31


def test_the_most_telling_cells_come_first():
    cells = TABLES["cifar100-lt"].cells()
    assert cells[:6] == [(m, f) for f in (100, 50, 10) for m in ("paco", "balanced-softmax")]
    assert cells[6:] == [(m, f) for m in ("ce", "paco-no-rebalance", "supcon") for f in (100, 50, 10)]
    assert {m for m, _ in TABLES["cifar100"].cells()} == {"ce", "supcon", "ce-supcon", "paco-no-rebalance"}


def test_authors_settings_are_run_where_a_figure_was_published():
    table = TABLES["published"]
    found = table.cells()
    assert all((m, f) in recipes.RECIPES["cifar100-lt"].published or m == "ce" for m, f in found)
    assert [f for m, f in found if m == "ride-3"] == [100] and [f for m, f in found if m == "bbn"] == [100, 50, 10]
    tree = {"table": table.to_dict(), "runs": [], "rows": []}
    (ride,) = [part for part in list_missing(tree["table"], tree["rows"]).split(";") if "RIDE, 3" in part]
    assert "100" in ride and "50" not in ride


def test_configurations_are_the_recipes():
    table = TABLES["cifar100-lt"]
    for method, factor in table.cells():
        assert table.config(method, factor).identity() == recipes.cifar100_lt(method, factor, "equal").identity()
    assert table.config("supcon", 50).method.linear_epochs == 100
    assert table.config("supcon", 50, 200).method.linear_epochs == 50  # the stages keep their proportion
    short = TABLES["cifar100"].config("supcon", 1, 60)
    assert (short.train.epochs, short.method.linear_epochs) == (60, 60)
    assert TABLES["cifar100"].to_dict()["published"]["ce"] == {"1": 77.9}


def slow_down(place: Path, seconds: float) -> None:
    tree = stored(place)
    for record in tree["runs"]:
        record["metrics"] |= {"seconds": seconds, "setup_seconds": 0, "together": 1}
    store(place, tree)


@pytest.mark.usefixtures("printed_messages")
def test_minutes_end_before_a_cell_that_does_not_fit(place, calls, capsys):
    slow_down(place, 600.0)  # 10 minutes a seed at imbalance 40, so above 10 at imbalance 10, whose set is larger
    tree = again(place, methods=["paco"], seeds=[0], epochs=1, minutes=10)
    said = capsys.readouterr().out
    assert not calls and str(place / "results/dig_its.json") in said
    stopped = said.splitlines()[-1]
    assert all(value in stopped for value in ("imbalance 10:", "15.4 minutes", "10.0"))
    assert len(tree["runs"]) == 4 and (place / "results/dig_its.md").exists()
    again(place, methods=["paco"], seeds=[0], epochs=1, minutes=16)
    assert calls == [("paco-10-1-epochs", (0,))]


def test_no_cell_is_started_after_the_time_limit(tmp_path, calls):
    with raises("unfinished-run", "--minutes"):
        again(tmp_path, **ONE_CELL, minutes=1e-9)
    assert not calls and not list((tmp_path / "results").iterdir())


def test_seeds_side_by_side_share_their_seconds(trained):
    record = stored(trained)["runs"][0]
    record["metrics"] |= {"seconds": 90.0, "setup_seconds": 10.0, "together": 2}
    per_image = 100 / record["data"]["images"]  # of one epoch
    for seeds, factor in ((1, 1), (2, 1), (3, 1.5), (4, 2)):
        assert seconds_per_image(record, seeds) == pytest.approx(factor * per_image)


def test_the_estimate_prefers_the_method_and_this_machine(place):
    tree = stored(place)
    for record, seconds, device in zip(tree["runs"], (1, 2, 50, 60), ("here", "there", "here", "there"), strict=True):
        record["metrics"] |= {"seconds": seconds, "setup_seconds": 0}
        record["device"] = device
    store(place, tree)
    book = ResultsFile(place / "results/dig_its.json", "dig-its", STAND_IN, "")
    cells = {m: make_cell(STAND_IN, m, 40, 1, place, None) for m in STAND_IN.methods}
    data = load(cells["paco"].config.data)

    def seconds(method):
        return estimate_seconds(book, cells[method], data, [0], False) / MARGIN

    assert seconds("paco") == pytest.approx(2) and seconds("balanced-softmax") == pytest.approx(60)
    book.device = "here"
    assert seconds("paco") == pytest.approx(1)
    assert seconds("supcon") == pytest.approx(50 * 2)  # never run: the slowest, and one epoch of a second stage


def test_the_estimate_counts_what_is_left(place):
    slow_down(place, 40.0)
    book = ResultsFile(place / "results/dig_its.json", "dig-its", STAND_IN, "")
    cell = make_cell(STAND_IN, "paco", 40, 4, place / "new", None)
    data = load(cell.config.data)

    def seconds(*seeds, rerun=False):
        return estimate_seconds(book, cell, data, seeds, rerun) / MARGIN

    assert seconds(0) == pytest.approx(160) and seconds(0, 1) == pytest.approx(320)
    begun, finished = cell.run_folder(0), cell.run_folder(1)
    begun.mkdir(parents=True)
    finished.mkdir()
    (begun / "log.jsonl").write_text("{}\n" * 3)
    (finished / "metrics.json").write_text("{}")
    assert seconds(0) == pytest.approx(40) and seconds(1) == 0 and seconds(0, 1) == pytest.approx(40)
    assert seconds(0, 1, rerun=True) == pytest.approx(320)


def test_stopped_run_reports_how_to_continue(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise Interrupted("saved: --resume continues", 15)

    monkeypatch.setattr(runner, "train", stop)
    flags = ["--methods", "paco", "--imbalance", "40", "--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert "--resume" not in fails(capsys, ["reproduce", "dig-its", *flags], "interrupted", "PaCo", code=143)


# Damage


def test_run_without_optional_entries_is_recorded(place, no_training):
    """These entries of environment.json and metrics.json are optional."""
    (place / "results/dig_its.json").unlink()
    for path in place.glob("runs/*/seed*/environment.json"):
        tree = json.loads(path.read_text())
        for key in ("parameters", "commit", "device", "versions"):
            del tree[key]
        del tree["data"]["images"], tree["data"]["notes"]
        path.write_text(json.dumps(tree))
    tree = again(place, methods=["paco"], imbalance=[40], epochs=1)
    assert len(tree["runs"]) == 2 and all(run["data"]["images"] == sum(run["counts"]) for run in tree["runs"])
    assert again(place, methods=["paco"], imbalance=[40], epochs=1)["runs"] == tree["runs"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: "{",
        lambda tree: [],
        lambda tree: tree | {"runs": {}},
        lambda tree: tree | {"updated": None},
        lambda tree: tree | {"runs": [3]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "seed": "zero"}]},
        lambda tree: tree | {"runs": [{k: v for k, v in tree["runs"][0].items() if k != "started"}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "metrics": {"seconds": 1.0}}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "metrics": {"seconds": 1.0, "top1": math.nan}}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "identity": {"train": {"epohcs": 1}}}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "data": {}}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "resumed": [{}]}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "imbalance": 39}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "seed": -1}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "seed": True}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "epochs": 0}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "per_class": [1e300]}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "counts": [-1] * 10}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "data": tree["runs"][0]["data"] | {"images": 0}}]},
        lambda tree: tree | {"runs": [{**tree["runs"][0], "data": tree["runs"][0]["data"] | {"images": 10**400}}]},
    ],
)
def test_a_damaged_file_is_one_line_and_stays(damage, place, calls, capsys):
    broken = damage(stored(place))
    (place / "results/dig_its.json").write_text(broken if isinstance(broken, str) else json.dumps(broken))
    before = (place / "results/dig_its.json").read_bytes()
    places = ["--out", str(place / "runs"), "--results", str(place / "results")]
    fails(capsys, ["reproduce", "dig-its", *places], "damaged-file", "dig_its.json")
    assert not calls and (place / "results/dig_its.json").read_bytes() == before


def test_a_place_that_cannot_be_written_is_found_before_training(tmp_path, calls):
    (tmp_path / "file").write_text("")
    with raises("not-writable", tmp_path / "file", "--results"):
        reproduce("dig-its", tmp_path / "runs", tmp_path / "file" / "results", **ONE_CELL)
    assert not calls


# Verdicts


def two_rows(ours: dict[int, float], theirs: dict[int, float]):
    """Return rows of PaCo and Balanced Softmax with these accuracies by seed, made from records of a results file."""
    methods, cell = {"paco": ours, "balanced-softmax": theirs}, {"precision": "fp32", "data": {"checksum": "0"}}
    runs = [
        cell
        | {"method": method, "imbalance": 40, "seed": seed, "epochs": 40, "metrics": {"top1": top1, "seconds": 1}}
        | {"identity": recipes.digits_lt(method).identity()}
        for method, by_seed in methods.items()
        for seed, top1 in by_seed.items()
    ]
    return make_rows({"runs": runs, "table": STAND_IN.to_dict()})


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [((1.0, 2.0, 3.0), "tied"), ((1.9, 2.0, 2.1), "ahead"), ((-1.9, -2.0, -2.1), "behind"), ((2.0, 2.5), None)],
)
def test_verdicts_are_seed_paired_with_a_t_interval(differences, outcome):
    # Seeds 7 to 9 are common, and far apart: unpaired, or paired by place, nothing would be decided.
    theirs = {7: 30.0, 8: 60.0, 9: 90.0}
    ours = {seed: theirs[seed] + d for seed, d in zip(theirs, differences, strict=False)}
    (verdict,) = compare_pairs(two_rows({0: 1.0} | ours, theirs | {3: 5.0}), STAND_IN.to_dict())
    assert verdict["outcome"] == outcome and verdict["seeds"] == list(ours)
    if outcome is None:
        assert verdict["difference"] is verdict["half_width"] is None
        return
    spread = math.sqrt(sum((d - differences[1]) ** 2 for d in differences) / 2)
    assert verdict["difference"] == pytest.approx(differences[1])
    assert verdict["half_width"] == pytest.approx(4.302653 * spread / math.sqrt(3), rel=1e-6)  # t of 2 degrees, 97.5 %


def test_verdicts_in_words():
    said = {"first": "PaCo", "second": "Balanced Softmax", "imbalance": 40, "seeds": [0, 1, 2], "half_width": 0.25}
    for difference, outcome in ((1.04, "ahead"), (-1.04, "behind"), (-0.1, "tied")):
        check_text(
            f"test_reproduce/verdict {outcome}", describe_verdict(said | {"difference": difference, "outcome": outcome})
        )


def test_rows_on_other_images_are_not_compared():
    ours, theirs = two_rows({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert compare_pairs([ours, theirs], STAND_IN.to_dict())
    assert not compare_pairs([ours, theirs | {"checksum": "1"}], STAND_IN.to_dict())


# The command


def test_the_verb_prints_the_headline_and_its_files(place, no_training, capsys, monkeypatch):
    monkeypatch.chdir(place)
    flags = ["--methods", "paco", "balanced-softmax", "--imbalance", "40", "--epochs", "1", "--out", "runs"]
    assert main(["reproduce", "dig-its", *flags]) == 0
    shown = capsys.readouterr().out
    assert STAND_IN.title in shown and "1 epoch" in shown and "(91.0)" in shown and "PaCo" in shown
    for file in ("results/dig_its.json", "results/dig_its.md", "results/dig_its_1_epochs.png"):
        assert file in shown.splitlines()[-1] and (place / file).exists()


def test_the_twin_is_public():
    assert longtail.reproduce is reproduce and "reproduce" in dir(longtail)


@pytest.mark.long  # a contract of the import linter forbids tyro, too
def test_the_twin_needs_no_tyro():
    code = """import sys; sys.modules["tyro"] = None
import longtail, longtail.paper.reproduce
assert longtail.reproduce is longtail.paper.reproduce.reproduce"""
    subprocess.run([sys.executable, "-c", code], check=True)
