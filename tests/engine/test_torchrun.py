"""`torchrun -m longtail train` as a user starts it: it learns, survives the loss of a process, and stops at signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longtail import run_folder
from longtail.engine.train import train
from tests.engine.test_faults import equal
from tests.engine.test_train import log_of
from tests.processes import together

WORLD, EPOCHS = 2, 16
FLAGS = ["--method", "paco", "--train.batch_size", "32", "--train.checkpoint_every", "1"]


def torchrun(
    out: Path, *more: str, restarts: int = 0, epochs: int = EPOCHS, device: str = "cpu"
) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [sys.executable, *launcher, "--max-restarts", str(restarts), "-m", "longtail", "train", "digits-lt"]
    flags = [
        *FLAGS,
        "--train.epochs",
        str(epochs),
        "--train.device",
        device,
        "--log.progress",
        "plain",
        "--out",
        str(out),
        *more,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    said = open(f"{out}.txt", "w")  # noqa: SIM115
    return subprocess.Popen([*command, *flags], env=environment, stdout=said, stderr=subprocess.STDOUT, text=True)


def wait_for(there, process: subprocess.Popen[str], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert process.poll() is None and time.monotonic() < until, Path(process.args[-1]).name
        time.sleep(0.02)


def pid_of(rank: int, parent: int) -> int:
    """Return the process id of a rank that torchrun has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if mine and f"RANK={rank}" in folder.joinpath("environ").read_text().split("\0"):
                return int(folder.name)
        except OSError:  # gone meanwhile
            continue
    raise AssertionError(f"no process of rank {rank}")


def resumed_at(said: Path) -> list[int]:
    """Return the steps at which the run was continued, from its output."""
    return [int(step) for step in re.findall(r" at step (\d+) of", said.read_text())]


def resumed(out: Path) -> list[str]:
    return [str(folder) for folder in train(run_folder.load_config(out / "seed0"), out, resume=True)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return an uninterrupted run; its output is stored next to it."""
    out = tmp_path_factory.mktemp("torchrun") / "whole"
    assert torchrun(out).wait(120) == 0
    return out


def check_run(out: Path, epochs: int) -> float:
    """Check the files of a run and that one process printed; return its accuracy."""
    said, folder = Path(f"{out}.txt").read_text(), out / "seed0"
    assert said.count("images per class") == said.count("written to") == said.count(f"{epochs}/{epochs}") == 1
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    assert sum(map(sum, metrics["confusion"])) == 400
    assert len(log_of(folder)) == epochs and run_folder.load_config(folder).train.processes == WORLD
    return metrics["top1"]


def test_processes_make_one_run_and_one_speaks(tmp_path):
    out = tmp_path / "short"
    assert torchrun(out, epochs=2).wait(120) == 0
    check_run(out, 2)


@pytest.mark.long
def test_processes_learn(whole):
    assert check_run(whole, EPOCHS) > 70


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_killed_then_all_are_stopped_and_nothing_is_lost(victim, whole, tmp_path):
    out, folder, said = tmp_path / "broken", tmp_path / "broken/seed0", tmp_path / "broken.txt"
    process = torchrun(out, "--resume", restarts=1)
    try:
        wait_for((folder / run_folder.CHECKPOINT).exists, process)
        saved = torch.load(folder / run_folder.CHECKPOINT, weights_only=True)["step"]
        os.kill(pid_of(victim, process.pid), signal.SIGKILL)
        wait_for(lambda: resumed_at(said), process)
        assert resumed_at(said)[0] >= saved
        lines = len(log_of(folder))
        wait_for(lambda: len(log_of(folder)) > lines, process)
        workers = [pid_of(rank, process.pid) for rank in range(WORLD)]
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    (stopped,) = re.findall(r"longtail: stopped at step (\d+) and saved", said.read_text())
    assert torch.load(folder / run_folder.CHECKPOINT, weights_only=True)["step"] == int(stopped)
    together(WORLD, tmp_path / "ranks", resumed, out)
    assert equal(folder, whole / "seed0")


def test_other_verbs_are_not_for_several_processes():
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "longtail", "table", "x"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "torchrun" in done.stderr and "Traceback" not in done.stderr
