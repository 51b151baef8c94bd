"""Tests of the live page: progress of unfinished runs, rebuilding, and damaged files."""

import fcntl
import os
import re
import threading
from pathlib import Path

import pytest

from longtail import recipes, run_folder
from longtail.engine.run_lock import open_locked
from longtail.reporting import run_artifacts, server, training_curves
from longtail.reporting.page import report
from longtail.reporting.result_rows import dataset_name
from longtail.reporting.server import LivePage
from tests.report.made import FEW, Page, begin_run, log_line, make_run, under_way

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Let live pages scan at every request."""
    monkeypatch.setattr(server, "SCAN_INTERVAL", 0.0)


def read(board: LivePage) -> Page:
    return Page(board.page().decode())


def run_name(method: str, seed: int, folder: str = "") -> str:
    """Return the name of an unfinished run."""
    return f"{method}, seed {seed}" + (f" in {folder}" if folder else "")


CE, PACO = run_name("Cross-entropy", 0), run_name("PaCo", 1)
LEFT = "training time left"  # a heading


def epochs_of(row) -> tuple[int, int]:
    """Return the finished and the total epochs."""
    done, total = re.findall(r"\d+", row["epoch"][0])
    return int(done), int(total)


def test_progress_matches_log(tmp_path):
    begin_run(tmp_path / "a/seed0", 3)
    begin_run(tmp_path / "b/seed1", 0, "paco", seed=1)
    found = under_way(read(LivePage([tmp_path])))
    assert found.keys() == {CE, PACO}
    ce, paco = found[CE], found[PACO]
    assert epochs_of(ce) == (3, 8) and ce["loss"][0] == "4.000" and ce["validation, %"][0] == "51.0"
    assert float(ce[LEFT][1]) == pytest.approx((10 + 11 + 12) / 3 * 5)
    assert "0:55" in ce[LEFT][0] and ce["training, %"][0] == "–"
    assert epochs_of(paco) == (0, 8) and paco["loss"][0] == "–"


def test_run_shows_folder_and_data(tmp_path):
    folder = begin_run(tmp_path / "a/seed0", 1)
    (found,) = under_way(read(LivePage([tmp_path]))).values()
    assert found["folder"][0] == str(folder) and found["data"][0] == dataset_name(run_folder.read_started(folder))


def test_epochs_cover_all_stages_and_latest_run_is_first(tmp_path):
    for i, (total, expected) in enumerate(((30, 30), (None, 8), (2, 5))):
        run = run_folder.read_started(begin_run(tmp_path / f"{i}/seed0", 5, total=total, day=i + 1))
        assert training_curves.read_progress(run).epochs == expected
    assert list(under_way(read(LivePage([tmp_path])))) == [
        run_name("Cross-entropy", 0, f"{i}/seed0") for i in (2, 1, 0)
    ]


def test_relative_and_absolute_paths(tmp_path, monkeypatch):
    for place in ("here", "there"):
        begin_run(tmp_path / place / "seed0", 1)
    monkeypatch.chdir(tmp_path)
    found = under_way(read(LivePage([Path("here"), tmp_path / "there"])))
    assert found.keys() == {run_name("Cross-entropy", 0, f"{place}/seed0") for place in ("here", "there")}


def test_color_of_run_is_stable(tmp_path):
    """The color is the same in table, curves and legend, also when other runs start or a run has no epoch yet."""
    begin_run(tmp_path / "a/seed0", 0, day=1)
    begin_run(tmp_path / "b/seed0", 3, "paco", day=2)
    for others in range(2):
        text = str(
            training_curves.unfinished_section(
                [run_folder.read_started(folder) for folder in run_folder.find_runs(tmp_path)]
            )
        )
        lines = re.findall(r'<path d="M[^"]*L[^"]*" class="line (c\d)"><title>([^<]*)</title>', text)
        assert ("c1", run_name("PaCo", 0)) in lines
        beside = re.findall(r'class="line (c\d)"></path><path [^>]*></path></svg> (?:<[^>]*>)?PaCo, seed 0<', text)
        assert len(beside) > 2 and {*beside} == {"c1"}
        begin_run(tmp_path / f"0{others}/seed0", 2, "focal", day=3)


def test_run_starts_progresses_and_finishes(tmp_path):
    board = LivePage([tmp_path / "later"])
    empty = read(board)
    assert empty.tables == [] and str(tmp_path / "later") in empty.words() and "Waiting" in empty.words()
    for epochs in (0, 1, 2):
        before = board.version()
        begin_run(tmp_path / "later/ce/seed0", epochs)
        assert board.version() != before
        page = read(board)
        assert epochs_of(under_way(page)[CE]) == (epochs, 8)
        curves = [given["download"] for given in page.of("a") if given.get("download")]
        assert ("training_loss.csv" in curves) == (epochs > 0)
    make_run(tmp_path / "made", recipes.digits_lt("ce"), 0, FEW)
    os.replace(tmp_path / "made", tmp_path / "later/paco")
    page = read(board)
    assert len(under_way(page)) == 1 and "Summary" in page.words()
    for file in (run_folder.METRICS, run_folder.ENVIRONMENT):
        (tmp_path / "later/ce/seed0" / file).write_bytes((tmp_path / "later/paco" / file).read_bytes())
    assert under_way(read(board)) == {}


def test_page_is_cached(tmp_path, monkeypatch):
    made = make_run(tmp_path / "done/seed0", recipes.digits_lt("paco"), 0, FEW)
    log, calls, finished = begin_run(tmp_path / "going/seed0", 1) / run_folder.LOG, [], server.results_sections
    monkeypatch.setattr(server, "results_sections", lambda rows: calls.append(len(rows)) or finished(rows))
    board = LivePage([tmp_path])
    assert board.page() is board.page()
    log.write_text(log.read_text() + log_line(1))
    assert epochs_of(under_way(read(board))[CE]) == (2, 8) and calls == [1]  # results are kept while others are trained
    (made / run_folder.METRICS).write_text((made / run_folder.METRICS).read_text() + "\n")
    assert board.page() and calls == [1, 1]
    monkeypatch.setattr(server, "SCAN_INTERVAL", 60.0)
    monkeypatch.setattr(server, "fingerprint", lambda folders: pytest.fail("looked again"))
    assert board.version() == board.version()


@pytest.mark.parametrize("file", [run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.LOG, run_folder.METRICS])
def test_truncated_files(tmp_path, file):
    begin_run(tmp_path / "sound/seed0", 2)
    path = begin_run(tmp_path / "half/seed1", 3, "paco", seed=1) / file
    whole = path.read_bytes() if path.exists() else b'{"top1": 50.0, "few": 1}'
    board = LivePage([tmp_path])
    for size in {*range(0, len(whole) - 2, max(1, len(whole) // 25)), len(whole) - 2}:
        path.write_bytes(whole[:size])
        os.utime(path, ns=(size, size))
        page = read(board)
        assert CE in under_way(page)
        assert (PACO in under_way(page)) == (file == run_folder.LOG)
        assert (page.missing() != []) == (file != run_folder.LOG)


def test_incomplete_log_line_is_skipped(tmp_path):
    run = run_folder.read_started(begin_run(tmp_path / "a/seed0", 3))
    (run.folder / run_folder.LOG).write_text(log_line(0) + log_line(1) + log_line(2)[:20])
    assert len(training_curves.read_progress(run).log) == 2


@pytest.mark.parametrize(
    "content", ['{"loss": "x", "seconds": [], "epochs": {}}', '{"loss": NaN, "seconds": Infinity}']
)
def test_invalid_log_values_are_not_shown(tmp_path, content):
    log = begin_run(tmp_path / "a/seed0", 0, total=None) / run_folder.LOG
    log.write_text(content + "\n")
    (found,) = under_way(read(LivePage([tmp_path]))).values()
    assert found["loss"][0] == found[LEFT][0] == "–"


def test_damaged_run_is_reported_until_repaired(tmp_path):
    folder = make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, FEW)
    board, whole = LivePage([tmp_path]), (folder / run_folder.ENVIRONMENT).read_text()
    (folder / run_folder.ENVIRONMENT).write_text(whole.replace('"checksum"', '"another"'))
    (missing,) = read(board).missing()
    assert "checksum" in missing and str(folder) in missing
    (folder / run_folder.ENVIRONMENT).write_text(whole)
    assert "Summary" in read(board).words()


def test_unexpected_error_is_reported_until_resolved(tmp_path, monkeypatch):
    make_run(tmp_path / "a/seed0", recipes.digits_lt("ce"), 0, FEW)
    board = LivePage([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr("longtail.reporting.server.results_sections", lambda rows: {}["foreseen"])
        assert "KeyError('foreseen')" in read(board).words()
    begin_run(tmp_path / "b/seed0", 1)
    assert "Summary" in read(board).words()


def test_malicious_names_are_escaped(tmp_path):
    begin_run(tmp_path / HOSTILE.replace("/", "") / "seed0", 2)
    begin_run(tmp_path / "x" / "seed0", 2)  # then folders tell them apart
    make_run(tmp_path / "done" / "seed0", recipes.digits_lt("paco"), 0, FEW, [HOSTILE, "'\"", "&", "<b>"])
    (tmp_path / "<i>").mkdir()
    for name in (run_folder.CONFIG, run_folder.ENVIRONMENT):
        (tmp_path / "<i>" / name).write_text("{")
    page = read(LivePage([tmp_path]))
    assert len(page.of("script")) == 2 and page.of("b") == page.of("i") == []
    assert not [key for _, given in page.elements for key in given if key.startswith("on") or key == "style"]
    assert HOSTILE.replace("/", "") in page.words() and "<i>" in page.words() and HOSTILE in page.words()


def test_report_shows_unfinished_runs(tmp_path):
    begin_run(tmp_path / "runs/ce/seed0", 3)
    page = Page(report(tmp_path / "runs", tmp_path / "page.html").read_text())
    assert list(under_way(page)) == [CE] and "One unfinished" in page.words()
    make_run(tmp_path / "runs/paco/seed0", recipes.digits_lt("paco"), 0, FEW)
    page = Page(report(tmp_path / "runs", tmp_path / "page.html").read_text())
    assert list(under_way(page)) == [CE] and "Summary" in page.words()
    assert len(page.of("script")) == 1  # it is not live
    (bar,) = page.of("progress")
    assert bar["aria-label"].startswith(CE) and (bar["value"], bar["max"]) == ("3", "8")


def test_number_of_curves_is_limited(tmp_path):
    for i in range(23):
        begin_run(tmp_path / f"{i}/seed{i}", 2, seed=i, day=i + 1)
    page = read(LivePage([tmp_path]))
    assert len(under_way(page)) == 23
    drawn = [f"Cross-entropy, seed {i}" in page.text["title"] for i in range(23)]
    assert drawn == [False] * 3 + [True] * training_curves.MAX_CURVES


# Which runs are being trained


def test_run_without_process_is_stopped(tmp_path):
    folder, board = begin_run(tmp_path / "a/seed0", 2), LivePage([tmp_path])
    assert run_artifacts.is_training(folder) is None and "about" in left_of(board)  # written by hand: unknown
    with open_locked(folder):
        assert run_artifacts.is_training(folder) is True
        first = left_of(board)
    assert "about" in first and run_artifacts.is_training(folder) is False
    assert left_of(board) == "stopped"  # though no file has changed since


def left_of(board):
    board._scanned = -server.SCAN_INTERVAL  # as if a second had passed
    (row,) = under_way(read(board)).values()
    return row[LEFT][0]


def test_checking_the_lock_does_not_block_training(tmp_path):
    (tmp_path / run_folder.LOCK).touch()
    with open(tmp_path / run_folder.LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with open_locked(tmp_path):
            assert run_artifacts.is_training(tmp_path) is True
