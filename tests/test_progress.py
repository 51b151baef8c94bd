"""Tests of the progress of long operations: bars on a terminal, lines elsewhere."""

import sys

import pytest

from longtail import progress
from longtail.cli.console import print_messages
from longtail.progress import bar_width, format_time_left, log_warning, open_progress, track


def test_time_left():
    assert format_time_left(25, 100, 50.0) == "2:30 left"
    assert format_time_left(100, 100, 50.0) == "0:00 left"
    assert "0" not in format_time_left(0, 100, 0.0)  # unknown


@pytest.mark.parametrize(("columns", "width"), [(40, 20), (80, 20), (120, 30), (400, 40)])
def test_bar_width(columns, width):
    assert bar_width(columns) == width


def test_lines_every_twenty_seconds(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with open_progress(1000, "evaluating", "images") as advance:
        for _ in range(10):
            now[0] += 7
            advance(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"evaluating: {n} of 1,000 images, {format_time_left(n, 1000, 0.07 * n)}" for n in (300, 600, 900)]


@pytest.mark.parametrize(("total", "is_shown"), [(99, False), (100, True)])
def test_bar_on_a_terminal(total, is_shown, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert list(track(range(total), total, "predicting")) == [*range(total)]
    assert ("predicting" in capsys.readouterr().err) == is_shown


def test_warnings_are_wrapped_on_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "--time-limit is too short: even the smallest settings take about 5 min"
    with print_messages():
        log_warning(text)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with print_messages():
        log_warning(text)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 40 and " ".join(map(str.strip, lines)) == text


def test_other_processes_are_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress, "is_local_main", lambda: False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(track(range(200), 200, "x")) == [*range(200)] and capsys.readouterr().err == ""
