"""The good runs that hostile cases start from, the folders of a case, and the commands that read them."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from longtail import run_folder
from tests.odd import hostile_values as values
from tests.odd.hostile_values import MARKER

FLAGS = [
    *("--method", "paco", "--train.epochs", "4", "--train.batch_size", "64", "--train.device", "cpu"),
    *("--train.checkpoint_every", "1", "--data.val_fraction", "0.2", "--log.progress", "none", "--log.gradients"),
    *("--train.ema", "0.9"),
]
HEAD_FLAGS = [
    *("--method", "balanced-softmax", "--train.epochs", "2", "--train.device", "cpu", "--log.progress", "none"),
    *("--model.trainable", "head", "--data.cached_views", "1", "--data.folds", "2"),
]
MAPPED = 30  # rows kept of features.npz: t-SNE of more takes longer than all else
THUMBNAILS = 3
EXPORT = "model.safetensors"


@dataclass(frozen=True)
class Place:
    """The folders of one case."""

    root: Path
    run: Path
    """The run folder that is changed, or for an exported file the folder that holds it."""

    @property
    def top(self) -> Path:
        """The folder that is passed to commands; they write only there and in `work`."""
        return self.root / "runs"

    @property
    def outside(self) -> Path:
        """The target of links."""
        return self.root / "outside"

    @property
    def work(self) -> Path:
        """The working directory of commands."""
        return self.root / "work"

    @property
    def images(self) -> Path:
        return self.root / "images"


@dataclass(frozen=True)
class Case:
    number: int
    base: str
    """finished, pair (two finished runs), begun, export, head (a finished run on cached features), teacher (such a run, which
    teaches another one) or fresh (such a run that has not finished)."""
    what: str
    """The change in words."""
    change: Callable[[Place, random.Random], str | None]
    """Makes the change; returns what was drawn for it."""
    commands: tuple[str, ...]
    late: bool = False
    """The change is made in the process of the command, as it depends on its process ID."""

    @property
    def on_disk(self) -> bool:
        """True for sparse files, because reading them on a memory file system may take memory."""
        return "GiB of holes" in self.what

    @property
    def endless(self) -> bool:
        """True if a file is larger than any valid one, so that a command without memory has read what it should refuse."""
        return any(word in self.what for word in ("GiB", "/dev/zero", "a bomb"))


Spec = tuple[str, str, Callable[[Place, random.Random], str | None], tuple[str, ...], dict[str, bool]]
"""Base, description, change, commands and options of a case that has no number yet."""


# Bases


def build_bases(folder: Path) -> None:
    """Train the runs and export the file that all cases start from."""
    from longtail.cli import main

    def command(*args: str | Path, code: int = 0) -> None:
        found = main(list(map(str, args)))
        assert found == code, (found, args)

    with in_folder(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command("train", "digits-lt", *FLAGS, "--out", folder / "finished")
        command("train", "digits-lt", *FLAGS, "--method", "ce", "--out", folder / "pair/other")
        with stop_after_epochs(2):
            command("train", "digits-lt", *FLAGS, "--out", folder / "begun", code=143)
        command("train", "digits-lt", *HEAD_FLAGS, "--out", folder / "head")
        (folder / "export").mkdir()
        command(
            *("export", folder / "finished", "--to", "safetensors", "--prior", "train"),
            *("-o", folder / "export" / EXPORT),
        )
    (folder / "export" / f"{EXPORT}.md").unlink()
    shutil.copytree(folder / "finished/seed0", folder / "pair/hostile/seed0")
    for run in ("finished/seed0", "pair/hostile/seed0", "pair/other/seed0", "head/seed0"):
        shorten_run(folder / run)
    shutil.copytree(folder / "head", folder / "teacher")
    write_adapter(folder / "head/seed0")
    shutil.copytree(folder / "head", folder / "fresh")
    (folder / "fresh/seed0" / run_folder.METRICS).unlink()
    complete_run(folder / "finished/seed0")
    complete_run(folder / "begun/seed0")
    make_images(folder / "images")
    make_outside(folder / "outside")


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def stop_after_epochs(epochs: int) -> Iterator[None]:
    """Send this process a SIGTERM after some epochs of a training, which then saves and ends."""
    from longtail.engine.loggers import Log

    original, seen = Log.epoch, []

    def count(self: Log, *args: Any) -> None:
        original(self, *args)
        seen.append(args)
        if len(seen) == epochs:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(Log, "epoch", count):
        yield


def shorten_run(run: Path) -> None:
    """Keep a few features and thumbnails, so that copies and reports of the run are fast."""
    with np.load(run / "features.npz") as stored:
        arrays = {name: stored[name][:: len(stored[name]) // MAPPED] for name in stored.files}
    np.savez_compressed(run / "features.npz", **arrays)  # type: ignore[arg-type]
    index = json.loads((run / "examples/index.json").read_text())
    kept = [e["items"][0] for e in index["confusions"][:THUMBNAILS]]
    for entries in index.values():
        del entries[THUMBNAILS:]
        for entry in entries:
            entry["items"] = kept[:1]
    index["confusions"][0]["items"] = kept
    (run / "examples/index.json").write_text(json.dumps(index))
    for file in (run / "examples").glob("*.png"):
        if file.stem not in map(str, kept):
            file.unlink()


def write_adapter(run: Path) -> None:
    """Write adapter.safetensors with the tensors of the head; the file that only runs with pretrained weights have."""
    header, data = values.split_safetensors((run / run_folder.MODEL).read_bytes())
    kept = {name: about for name, about in header.items() if not name.startswith(("trunk.", "__"))}
    content = b"".join(data[slice(*about["data_offsets"])] for about in kept.values())
    start = 0
    for about in kept.values():
        size = about["data_offsets"][1] - about["data_offsets"][0]
        about["data_offsets"], start = [start, start + size], start + size
    metadata = {"__metadata__": {"frozen": "0" * 64}}
    (run / run_folder.ADAPTER).write_bytes(values.join_safetensors(metadata | kept, content))


def complete_run(run: Path) -> None:
    """Add the files that only some runs have."""
    (run / run_folder.WANDB).write_text(json.dumps({"id": "0123456789ab", "epochs": 1}))
    lines = [{"id": f"train/{i}.png", "why": "truncated"} for i in range(2)]
    (run / run_folder.SKIPPED).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / run_folder.LOCK).touch()


def make_images(folder: Path) -> None:
    folder.mkdir()
    for i, side in enumerate((8, 30)):
        (folder / f"{i}.png").write_bytes(values.png_bytes((side, side), seed=i))


def make_outside(folder: Path) -> None:
    """Make the tree that no command may change or show."""
    for name in ("folder", "empty", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "secret.txt").write_text(f"{MARKER} text\n" * 3)
    (folder / "string.json").write_text(json.dumps(MARKER))
    secrets = {
        MARKER: MARKER,
        "data": {MARKER: MARKER, "checksum": MARKER},
        "seed": MARKER,
        "id": MARKER,
        "stage": MARKER,
    }
    (folder / "object.json").write_text(json.dumps(secrets))
    (folder / "secret.png").write_bytes(values.png_bytes((12, 12), MARKER))
    (folder / "folder/file.txt").write_text(f"{MARKER} in a folder\n")
    (folder / "folder/state.pt").write_text(MARKER)
    (folder / "home/.profile").write_text(f"{MARKER} at home\n")
    os.mkfifo(folder / "fifo")


def prepare(case: Case, bases: Path, root: Path) -> tuple[Place, str]:
    """Make the folders of a case, with the change unless it is made later; also return what was drawn for the change."""
    shutil.copytree(bases / case.base, root / "runs", symlinks=True)
    copy_tree(bases / "outside", root / "outside")
    shutil.copytree(bases / "images", root / "images")
    (root / "work").mkdir()
    place = Place(root, root / "runs" / {"pair": "hostile/seed0", "export": ""}.get(case.base, "seed0"))
    drawn = "" if case.late else apply_change(case, place)
    return place, drawn


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree that holds a FIFO, which `shutil.copytree` would wait for."""
    shutil.copytree(source, target, symlinks=True, ignore=lambda _, names: {"fifo"} & {*names})
    os.mkfifo(target / "fifo")


def apply_change(case: Case, place: Place) -> str:
    return case.change(place, random.Random(case.number)) or ""


# Commands


def arguments(command: str, place: Place) -> list[str]:
    """Return the arguments of a command; `board` is none of them, as it is the page of `longtail watch`."""
    export = place.top / EXPORT
    run = str(export if place.run == place.top else place.top)
    predict = ["predict", run, str(place.images), "--device", "cpu"]
    student = [
        "--out",
        "student",
        "--no-alone",
        "--train.epochs",
        "1",
        "--train.device",
        "cpu",
        "--log.progress",
        "none",
    ]
    known = {
        "distill": ["distill", run, *student],
        "report": ["report", run, "-o", "report.html"],
        "table": ["table", run],
        "predict": [*predict, "--json", "-"],
        "predict-train": [*predict, "--prior", "train", "--json", "-"],
        "predict-csv": [*predict, "--prior", "uniform", "--csv", "out.csv"],
        "predict-table": predict,
        "predict-weights": ["predict", str(place.run / run_folder.MODEL), *predict[2:], "--json", "-"],
        "export": ["export", run, "--to", "safetensors", *(["-o", "x.safetensors"] if place.run == place.top else [])],
        "eval": ["eval", run, "--device", "cpu"],
        "gradient": ["figure", "gradient", run, "-o", "gradient.svg"],
        "latency": ["figure", "latency", run, "-o", "latency.svg"],
        "from": ["train", "--from", run, "--out", "new", "--log.progress", "none"],
        "from-file": ["train", "--from", str(place.run / run_folder.CONFIG), "--out", "new", "--log.progress", "none"],
        "resume": ["train", "digits-lt", *FLAGS, "--out", run, "--resume"],
        "resume-head": ["train", "digits-lt", *HEAD_FLAGS, "--out", run, "--resume"],
        "resume-tensorboard": ["train", "digits-lt", *FLAGS, "--log.loggers", "tensorboard", "--out", run, "--resume"],
        "resume-wandb": ["train", "digits-lt", *FLAGS, "--log.loggers", "wandb", "--out", run, "--resume"],
    }
    return known[command]
