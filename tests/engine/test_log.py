"""The file log.jsonl, and the progress display."""

import json
import sys

import pytest
from rich.progress import BarColumn

from longtail.engine.loggers import Log, format_duration, summary, truncate_log
from tests.expected_text import check_text

ROW = {"stage": "train", "epoch": 4, "epochs": 9, "loss": 1.25, "accuracy": 50.0, "P_sup": 0.7, "lr": 0.1}
ROW |= {"seconds": 2.0, "images_per_second": 1234.5}


def test_a_line_an_epoch_and_plain_lines_when_piped(tmp_path, capsys):
    with Log(tmp_path / "log.jsonl", 90, "plain", "PaCo, seed 0") as log:
        log.epoch(50, ROW, 75)
        log.epoch(90, ROW | {"epoch": 8}, 0)
    assert [json.loads(line)["epoch"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [4, 8]
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("9/9", "1.250", "50.0 %", "1,234 images/s"))
    assert "\x1b" not in shown


def test_within_a_long_epoch_a_pipe_hears_once_a_minute(tmp_path, capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Log(tmp_path / "log.jsonl", 90, "plain", "x") as log, Log(tmp_path / "none", 90, "none", "") as silent:
        for _ in range(40):
            now[0] += 5
            assert not silent.is_due()
            if log.is_due():
                log.show(7, ROW, 3725)
        log.epoch(
            10, ROW | {"val_accuracy": 40.0}, 3600
        )  # soon after such a line, with the values that it did not have
    *within, end = capsys.readouterr().err.splitlines()
    assert within == [f"x  {summary(ROW)}  1:02:05 left"] * 3 and "40.0 %" in end


def test_a_bar_shows_the_same(tmp_path, capsys):
    with Log(tmp_path / "log.jsonl", 90, "bar", "PaCo, seed 0") as log:
        log.epoch(50, ROW, 75)
        assert (
            log.bar is not None and log.bar.tasks[0].completed == 50 and "loss 1.25" in log.bar.tasks[0].fields["now"]
        )


@pytest.mark.parametrize("terminal", [True, False])
def test_auto_is_a_bar_on_a_terminal_and_lines_elsewhere(terminal, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Log(tmp_path / "log.jsonl", 90, "auto", "x") as log:
        assert (log.bar is not None) == terminal and log.plain != terminal
        assert not terminal or log.bar.tasks[0].fields["left"]  # before the first step


@pytest.mark.parametrize("columns", [80, 120, 170])
def test_a_line_with_a_bar_fits(columns, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with Log(None, 90, "bar", "Balanced Softmax, seed 0") as log:
        log.show(50, ROW | {"val_accuracy": 40.0}, 75)
        task = log.bar.tasks[0]
        (bar,) = (column for column in log.bar.columns if isinstance(column, BarColumn))
        assert bar.bar_width >= 20 and "1:15" in task.fields["left"]
        parts = [task.description, "x" * bar.bar_width, task.fields["left"], task.fields["now"]]
        assert len(" ".join(parts)) <= columns


def test_truncate_drops_later_and_incomplete_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": 2}\n{"ep')
    truncate_log(path, 2)
    assert path.read_text().splitlines(keepends=True) == ['{"epoch": 0}\n', '{"epoch": 1}\n']


def test_a_narrow_terminal_gets_the_least():
    check_text("test_log/narrow", summary(ROW, narrow=True))


def test_summary_and_clock():
    check_text("test_log/summary", summary(ROW))
    assert "acc" not in summary({k: v for k, v in ROW.items() if k != "accuracy"})
    assert [format_duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
