"""Run commands in this process, and check exit code, output, and the folders that they were given."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import matplotlib
from hypothesis import HealthCheck, settings

from longtail.cli import main
from longtail.reporting.server import Server
from tests.odd import zoo

NOTED = ("predict", "export")  # commands that print something before they may fail
SECONDS = 20  # seconds that a command may take; most take some milliseconds
STEADY = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


class Hang(BaseException):
    """Raised if a command takes too long."""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Zoo:
    """The folder of odd files, which is restored after a command has changed it."""

    def __init__(self, place: Path) -> None:
        self.kept, self.root, self.place = zoo.build(place / "kept"), place / "zoo", place
        self.put_back()

    def put_back(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept, self.root, symlinks=True)
        self.known = seen(self.root)

    def changed(self) -> bool:
        return seen(self.root) != self.known

    def named_in(self, words: list[str]) -> list[str]:
        return [word.replace("ZOO", str(self.root)) for word in words]


def seen(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file."""
    found = [os.path.join(top, name) for top, inner, files in os.walk(root) for name in (*inner, *files)]
    return {
        path: (stat.st_size, stat.st_mtime_ns)
        for path in found
        for stat in (os.lstat(path),)
        if not os.path.isdir(path)
    }


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Hang(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def in_folder(parent: Path) -> Iterator[Path]:
    """Use a new and empty working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


@contextlib.contextmanager
def before_the_work(trains: bool = False) -> Iterator[None]:
    """Stop commands at the first step of training, a download, or the answer to a browser."""
    no_network = OSError(101, "Network is unreachable")
    with (
        contextlib.nullcontext() if trains else mock.patch("longtail.engine.train.Session.train_seeds"),
        mock.patch("torchvision.datasets.utils.download_url", side_effect=no_network),
        mock.patch.object(Server, "serve_forever"),
        mock.patch("longtail.inference.export.MAX_SECONDS", 0.0),
        mock.patch("longtail.inference.formats.export_program", side_effect=RuntimeError("seconds of work")),
        mock.patch.dict(os.environ, {"LONGTAIL_DATA": ""}),
    ):
        yield


def command(args: list[str], typed: bytes = b"") -> Outcome:
    """Run a command, and return its outcome; an exception fails the test."""
    out, err, keyboard = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(typed))
    with (
        within(SECONDS),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", keyboard),
    ):
        try:
            code = main(args)
        except SystemExit as stop:
            assert stop.code in (0, None) and {"--help", "-h"} & {*args}, "only --help ends so"
            code = 0
    return Outcome(code, out.getvalue(), err.getvalue())


def ends_well(there: Zoo, words: list[str], trains: bool = False) -> Outcome:
    """Check that a command succeeds, or fails with one line and writes nothing."""
    args = there.named_in(words)
    with in_folder(there.place) as here, before_the_work(trains):
        try:
            found = command(args)
        finally:
            left, changed = seen(here), there.changed()
            if changed:
                there.put_back()
        for path in left:
            assert not path.endswith(".json") or json.loads(Path(path).read_text()) is not None
    assert not (there.kept / "exploded").exists(), "a file has run code"
    assert found.code in (0, 1, 2) and "Traceback" not in found.err + found.out
    assert not [path for path in left if Path(path).name.startswith(".")], f"left behind: {left}"
    if found.code == 2:
        *notes, said = found.err.splitlines()
        assert said.startswith("longtail: ") and said.isprintable() and found.err.endswith("\n"), found.err
        assert not notes or words[0] in NOTED, found.err
        assert not left and not changed, (left, changed, found)
    return found


matplotlib.use("Agg")
