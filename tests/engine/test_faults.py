"""Faults of long trainings in real processes: killed at a random time, a full disk."""

import errno
import os
import random
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longtail import files, run_folder
from longtail.engine.train import train
from tests.conftest import tiny
from tests.engine.test_train import log_of
from tests.processes import start, start_command

EPOCHS = 8


def start_run(method: str, out: Path):
    return start(train, tiny(method, epochs=EPOCHS), out, True)


def finish(method: str, out: Path) -> float:
    """Train to the end, and return the seconds that it took."""
    began = time.monotonic()
    process = start_run(method, out)
    process.join(120)
    assert process.exitcode == 0
    return time.monotonic() - began


def wait_for(there, process, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < until:
        if there():
            return True
    return False


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the folder and the seconds of an uninterrupted run by method."""
    found = {}
    for method in ("paco", "crt"):
        folder = tmp_path_factory.mktemp(method)
        finish(method, folder / "warm")  # the server starts
        found[method] = folder / "whole" / "seed0", finish(method, folder / "whole")
    return found


def equal(one: Path, two: Path) -> bool:
    a, b = (load_file(folder / run_folder.MODEL) for folder in (one, two))
    return log_of(one) == log_of(two) and all(torch.equal(a[name], b[name]) for name in a)


def unfinished_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint is being written, or was when its process was killed."""
    return any((folder / run_folder.CHECKPOINT).parent.glob(f"{files.TEMPORARY_PREFIX}*"))


def killed_once(method: str, out: Path, whole: Path, seconds: float, rng: random.Random, while_saving: bool) -> str:
    """Kill a run and resume it; the result must equal the uninterrupted run. Return when it was killed."""
    process, folder = start_run(method, out), out / "seed0"
    if while_saving:
        epoch, log = rng.randrange(EPOCHS), folder / run_folder.LOG
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > epoch, process)
        met = wait_for(lambda: unfinished_checkpoint(folder), process)
    else:
        process.join(rng.uniform(0, seconds))
        met = False
    process.kill()
    process.join(60)
    half = unfinished_checkpoint(folder)
    finish(method, out)
    assert equal(folder, whole) and not [*folder.rglob(f"{files.TEMPORARY_PREFIX}*")]
    return "half saved" if half else "saving" if met else "elsewhere"


def kill_many(times: int, unbroken, tmp_path: Path, seed: int) -> None:
    rng, where = random.Random(seed), []
    for i in range(times):
        method = ("paco", "crt")[i % 2]
        where.append(killed_once(method, tmp_path / str(i), *unbroken[method], rng, while_saving=i % 3 != 1))
    print({place: where.count(place) for place in where})
    assert "half saved" in where  # a part of one was on the disk


def test_runs_killed_at_three_times_are_resumed(unbroken, tmp_path):
    kill_many(3, unbroken, tmp_path, seed=0)


@pytest.mark.long
def test_runs_killed_at_fifty_times_are_resumed(unbroken, tmp_path):
    kill_many(50, unbroken, tmp_path, seed=1)


def test_killed_again_and_again(unbroken, tmp_path):
    """A run that is killed again and again still ends with the result of an uninterrupted run."""
    whole, seconds = unbroken["paco"]
    for _ in range(20):
        process = start_run("paco", tmp_path)
        process.join(0.6 * seconds)
        if not process.is_alive():
            break
        process.kill()
        process.join(60)
    finish("paco", tmp_path)
    assert equal(tmp_path / "seed0", whole)


def test_a_full_disk_leaves_the_last_checkpoint(unbroken, tmp_path):
    """A limit on the size of files replaces a full disk: the log fits, a checkpoint does not."""
    flags = ["--train.checkpoint_every", "1", "--train.device", "cpu", "--log.progress", "none"]
    command = ["train", "digits-lt", "--method", "paco", "--train.epochs", str(EPOCHS), "--out", str(tmp_path), *flags]
    process, folder = start_command(command, tmp_path / "said"), tmp_path / "seed0"
    saved = folder / run_folder.CHECKPOINT
    assert wait_for(saved.exists, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    process.join(100)
    errors = (tmp_path / "said").read_text()
    last = errors.splitlines()[-1]
    assert process.exitcode == 1 and "Traceback" not in errors
    assert str(saved) in last and os.strerror(errno.EFBIG) in last and "--resume" in last
    assert 1 <= len(log_of(folder)) < EPOCHS
    finish("paco", tmp_path)
    assert equal(folder, unbroken["paco"][0])
