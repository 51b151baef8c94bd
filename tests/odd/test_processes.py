"""Real processes: pipes that close, disks that are full, signals at any moment, two runs in one folder."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from longtail import run_folder
from longtail.cli import main
from tests.odd.zoo import Bomb
from tests.processes import start_command

LONGTAIL = [sys.executable, "-m", "longtail"]
FAST = ["--train.device", "cpu", "--log.progress", "none", "--train.batch_size", "64"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def longtail(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LONGTAIL, *args], capture_output=not options, text=True, timeout=60, **options)


# Standard streams


@pytest.mark.parametrize("args", [["recipes"], ["--help"], ["theory", "--counts", "500", "100", "5"]])
def test_closed_pipe_is_not_an_error(args):
    """As with `| head`: the reader has closed the pipe before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    found = longtail(*args, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (found.returncode, found.stderr) == (141, "")


@pytest.mark.parametrize("args", [["recipes"], ["--version"]])
def test_a_full_disk_behind_standard_output_is_one_line(args):
    with open("/dev/full", "w") as full:
        found = longtail(*args, stdout=full, stderr=subprocess.PIPE)
    assert found.returncode == 1
    assert found.stderr.startswith("longtail: ") and found.stderr.count("\n") == 1
    assert "standard output" in found.stderr and os.strerror(errno.ENOSPC) in found.stderr


def test_streams_may_be_closed():
    """As with `>&- 2>&-`: output that cannot be written is an error without a traceback."""
    script = 'exec "$@" >&- 2>&- <&-'
    for args, code in ((["recipes"], 1), (["trian"], 2)):
        assert subprocess.run(["sh", "-c", script, "sh", *LONGTAIL, *args], timeout=60).returncode == code


def test_names_that_are_not_utf_8_are_shown():
    found = subprocess.run([*LONGTAIL, "train", b"\xff\xfe\x1b[31m"], capture_output=True, timeout=60)
    assert found.returncode == 2 and b"\\udcff\\udcfe\\x1b[31m" in found.stderr and found.stderr.count(b"\n") == 1


# Signals


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Make a run, and enough images for a command to be interrupted."""
    root = tmp_path_factory.mktemp("work")
    for c in ("cat", "dog"):
        (root / "pets" / c).mkdir(parents=True)
        for i in range(300):
            Image.new("RGB", (200, 200), (i % 256, 0, 0)).save(root / "pets" / c / f"{i}.png")
    assert main(["train", "digits-lt", "--method", "ce", "--train.epochs", "1", *FAST, "--out", str(root / "run")]) == 0
    return root


def commands(work: Path, out: Path) -> dict[str, tuple[list[str], Path]]:
    """Return for each verb a command that takes a while, and its output."""
    run, pets = str(work / "run"), str(work / "pets")
    return {
        "report": (["report", run, "-o", str(out / "page.html")], out / "page.html"),
        "predict": (["predict", run, pets, "--csv", str(out / "said.csv"), "--device", "cpu"], out / "said.csv"),
        "shard": (["data", "shard", pets, "--out", str(out / "shards")], out / "shards"),
        "export": (["export", run, "--to", "safetensors", "-o", str(out / "x.safetensors")], out / "x.safetensors"),
    }


def ended(args: list[str], said: Path, signum: int, after: float) -> int:
    """Return the exit code of a command that gets a signal after some seconds."""
    process = start_command(args, said)
    until = time.monotonic() + 60
    while not said.exists() and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(after)
    if process.is_alive():
        os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def content(place: Path) -> dict[str, int]:
    """Return files with their sizes; their bytes may contain the time."""
    inside = [place] if place.is_file() else sorted(place.rglob("*")) if place.exists() else []
    return {f.name: f.stat().st_size for f in inside}


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("verb", ["report", "predict", "shard", "export"])
def test_interrupted_commands_leave_complete_outputs_or_none(verb, signum, work, tmp_path):
    (tmp_path / "whole").mkdir()
    args, place = commands(work, tmp_path / "whole")[verb]
    began = time.monotonic()
    process = start_command(args, tmp_path / "whole/said")
    process.join(60)
    seconds, whole, rng = time.monotonic() - began, content(place), random.Random(verb)
    assert process.exitcode == 0 and whole
    for i in range(4):
        here = tmp_path / str(i)
        here.mkdir()
        args, place = commands(work, here)[verb]
        code = ended(args, here / "said", signum, rng.uniform(0, seconds))
        assert content(place) in ({}, whole) and code in (0, 130, -signum)
        if signum == signal.SIGINT:
            words = (here / "said").read_text()
            assert "Traceback" not in words, words
            assert {f.name for f in here.iterdir()} <= {"said", *(f.name for f in (tmp_path / "whole").iterdir())}


@pytest.mark.long
@pytest.mark.parametrize("signum", CODES)
def test_training_stops_at_a_signal_and_continues(signum, tmp_path):
    args = ["train", "digits-lt", "--method", "ce", "--train.epochs", "200", *FAST, "--out", str(tmp_path / "out")]
    process, log = start_command(args, tmp_path / "said"), tmp_path / "out/seed0" / run_folder.LOG
    until = time.monotonic() + 60
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signum)
    process.join(60)
    last = (tmp_path / "said").read_text().splitlines()[-1]
    assert process.exitcode == CODES[signum] and "--resume" in last and "Traceback" not in last
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_two_trainings_in_one_folder(tmp_path):
    """One process trains; the other fails with a one-line error and changes nothing."""
    args = ["train", "digits-lt", "--method", "ce", "--train.epochs", "8", *FAST, "--out", str(tmp_path / "out")]
    both = [start_command([*args, "--resume"], tmp_path / f"said{i}") for i in range(2)]
    for process in both:
        process.join(100)
    codes = sorted(process.exitcode for process in both)
    words = "".join((tmp_path / f"said{i}").read_text() for i in range(2))
    assert codes == [0, 2] and str(tmp_path / "out") in words and words.count("\n") == 1, (codes, words)
    assert len((tmp_path / "out/seed0" / run_folder.LOG).read_text().splitlines()) == 8
    assert (tmp_path / "out/seed0" / run_folder.METRICS).exists()


def test_tables_written_at_once_are_whole(work, tmp_path):
    several = [
        start_command(["table", str(work / "run"), "--out", str(tmp_path)], tmp_path / f"said{i}") for i in range(3)
    ]
    for process in several:
        process.join(60)
    assert [process.exitcode for process in several] == [0, 0, 0]
    assert json.loads((tmp_path / "table.json").read_text()) and not list(tmp_path.glob(".*"))


# Files that would run code


@pytest.mark.parametrize("verb", [["predict"], ["export", "--to", "safetensors"]])
def test_a_checkpoint_with_code_is_refused_and_not_run(verb, tmp_path):
    import pickle

    (tmp_path / "bomb.pth").write_bytes(pickle.dumps({"state_dict": Bomb(tmp_path / "exploded")}))
    args = [verb[0], str(tmp_path / "bomb.pth"), *([str(tmp_path)] if verb == ["predict"] else []), *verb[1:]]
    process = start_command(args, tmp_path / "said")
    process.join(60)
    assert process.exitcode == 2 and not (tmp_path / "exploded").exists()
    assert pickle.loads((tmp_path / "bomb.pth").read_bytes()) and (tmp_path / "exploded").exists()  # it would have
