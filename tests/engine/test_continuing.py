"""Resumed runs: another number of threads, folders of other seeds, and a terminal that was closed."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import longtail
from longtail import run_folder
from longtail.config import Config
from longtail.engine import signals
from longtail.engine.environment import read_thread_count
from longtail.engine.signals import StopSignals
from longtail.engine.train import train
from longtail.errors import Interrupted
from tests.conftest import tiny
from tests.engine.test_train import DATA, log_of
from tests.raises import raises


def unfinished(out: Path, **train_changes) -> Path:
    """Train a run, remove its metrics, and return its folder."""
    (folder,) = train(tiny("ce", epochs=1, **train_changes), out, data=DATA)
    (folder / run_folder.METRICS).unlink()
    return folder


def loud(config: Config) -> Config:
    return replace(config, log=replace(config.log, progress="plain"))


@pytest.fixture
def own_threads():
    """Restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Threads


def environment(folder: Path) -> dict:
    return json.loads((folder / run_folder.ENVIRONMENT).read_text())


def numbers_said(line: str) -> list[int]:
    """Return the numbers in the parentheses of a line."""
    return [int(number) for number in re.findall(r"\d+", line.partition("(")[2])]


@pytest.mark.usefixtures("printed_messages")
def test_another_number_of_threads_is_reported_and_recorded(tmp_path, capsys, own_threads):
    torch.set_num_threads(1)
    folder = unfinished(tmp_path)
    assert environment(folder)["threads"] == 1
    torch.set_num_threads(2)
    capsys.readouterr()
    train(loud(tiny("ce", epochs=1)), tmp_path, resume=True, data=DATA)
    said = [line for line in capsys.readouterr().out.splitlines() if "rounding" in line]
    assert len(said) == 1 and numbers_said(said[0]) == [2, 1]
    assert [read_thread_count(entry) for entry in environment(folder)["resumed"]] == [2]
    (folder / run_folder.METRICS).unlink()
    torch.set_num_threads(1)  # some steps were trained with two
    train(loud(tiny("ce", epochs=1)), tmp_path, resume=True, data=DATA)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "rounding" in line]
    assert numbers_said(said) == [1, 1, 2]


@pytest.mark.usefixtures("printed_messages")
def test_the_same_number_of_threads_is_not_mentioned(tmp_path, capsys):
    unfinished(tmp_path)
    train(loud(tiny("ce", epochs=1)), tmp_path, resume=True, data=DATA)
    assert "rounding" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "threads"),
    [
        ({"threads": 3, "device": "CPU, threads: 2"}, 3),
        ({"device": "CPU, threads: 2"}, 2),
        ({"threads": "many", "device": "CPU, threads: 2"}, 2),
        ({"device": "NVIDIA H200"}, None),
        ({"device": "CPU, threads: " + "9" * 5000}, None),
        ({}, None),
    ],
)
def test_the_number_of_threads_that_is_stored(entry, threads):
    assert read_thread_count(entry) == threads


# Seeds


@pytest.mark.parametrize("finished", [False, True])
def test_a_renamed_folder_is_not_continued(finished, tmp_path):
    folder = unfinished(tmp_path)
    if finished:
        train(tiny("ce", epochs=1), tmp_path, resume=True, data=DATA)
    folder.rename(tmp_path / "seed1")
    before = {path.name: path.read_bytes() for path in (tmp_path / "seed1").glob("*.*")}
    with raises("mismatch", tmp_path / "seed1", "seed 0", "seed 1"):
        train(tiny("ce", epochs=1, seeds=(1,)), tmp_path, resume=True, data=DATA)
    assert {path.name: path.read_bytes() for path in (tmp_path / "seed1").glob("*.*")} == before
    (tmp_path / "seed1").rename(folder)
    train(tiny("ce", epochs=1), tmp_path, resume=True, data=DATA)
    assert (folder / run_folder.METRICS).exists()


def test_a_folder_that_is_renamed_meanwhile_is_not_continued(tmp_path, monkeypatch):
    """The seeds are checked again when a run begins, because the first check may have been hours before."""
    folder, config = unfinished(tmp_path), tiny("ce", epochs=1, seeds=(1,))
    monkeypatch.setattr(
        "longtail.engine.train.find_unfinished", lambda folders, *_: (folder.rename(folders[1]), folders)[1]
    )
    with raises("mismatch", "seed 0", "seed 1"):
        train(config, tmp_path, resume=True, data=DATA)


def test_a_comparison_does_not_take_the_run_of_another_seed(tmp_path):
    def change(config: Config) -> Config:
        small = tiny("ce")
        return replace(config, train=replace(config.train, device="cpu", batch_size=64), log=small.log)

    longtail.compare("digits-lt", ["ce"], tmp_path, seeds=[0], epochs=1, change=change)
    (tmp_path / "ce/seed0").rename(tmp_path / "ce/seed1")
    with raises("mismatch", tmp_path / "ce/seed1", "seed 0"):
        longtail.compare("digits-lt", ["ce"], tmp_path, seeds=[1], epochs=1, change=change)


# A terminal that is closed


def test_signals_are_given_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
        assert stop.signum == signal.SIGHUP
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert Interrupted("", signal.SIGHUP).exit_code == 129


def test_an_ignored_signal_stays_ignored():
    """This is the case under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert stop.signum is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_platforms_without_the_signal(monkeypatch):
    monkeypatch.delattr(signals.signal, "SIGHUP")
    assert signals.handled_signals() == [signal.SIGINT, signal.SIGTERM]


def own_terminal() -> None:
    """Make standard input the controlling terminal of this new process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.long  # the signal itself has faster tests
def test_closed_terminal_saves_and_resume_continues(tmp_path):
    """The terminal of a process with a progress bar is closed; the resumed run equals an uninterrupted one."""
    config = tiny("paco", epochs=8, checkpoint_every=100)
    (whole,) = train(config, tmp_path / "whole", data=DATA)
    flags = [
        "--train.epochs",
        "8",
        "--train.batch_size",
        "64",
        "--train.device",
        "cpu",
        "--train.checkpoint_every",
        "100",
    ]
    command = [
        sys.executable,
        "-m",
        "longtail",
        "train",
        "digits-lt",
        "--method",
        "paco",
        "--out",
        str(tmp_path / "run"),
    ]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*command, *flags],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=own_terminal,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    os.close(slave)
    log, until = tmp_path / "run/seed0" / run_folder.LOG, time.monotonic() + 100
    reader = threading.Thread(target=read_until, args=(master, lambda: log.exists() and log.read_text()), daemon=True)
    reader.start()
    reader.join(100)
    assert process.poll() is None and time.monotonic() < until
    os.close(master)
    assert process.wait(100) == 128 + signal.SIGHUP
    saved = torch.load(tmp_path / "run/seed0" / run_folder.CHECKPOINT, weights_only=True)["step"]
    assert 0 < saved < 8 * 6 and not (tmp_path / "run/seed0" / run_folder.METRICS).exists()
    (folder,) = train(run_folder.load_config(tmp_path / "run/seed0"), tmp_path / "run", resume=True, data=DATA)
    one, two = (load_file(each / run_folder.MODEL) for each in (folder, whole))
    assert log_of(folder) == log_of(whole) and all(torch.equal(one[k], two[k]) for k in one)


def read_until(master: int, done) -> None:
    """Read the output of a terminal until `done`; otherwise the process in it would block."""
    os.set_blocking(master, False)
    while not done():
        try:
            os.read(master, 2**16)
        except BlockingIOError:
            time.sleep(0.002)
        except OSError:  # the process has ended
            return
