"""The page of runs that are still being trained: made anew when their files have changed, and not more often."""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from longtail import run_folder
from longtail.errors import UserError
from longtail.reporting.document import (
    Gathered,
    assembled,
    finished,
    gathered,
    left_out,
    text,
    title_of,
    without_failures,
)
from longtail.reporting.html import Element, el
from longtail.reporting.parts import name
from longtail.reporting.reading import at_work
from longtail.reporting.table import ResultRow
from longtail.reporting.training import unfinished

GLANCE = 1.0  # seconds for which a look at the folders is good, whoever asks
FILES = (
    run_folder.CONFIG,
    run_folder.ENVIRONMENT,
    run_folder.LOG,
    run_folder.METRICS,
)  # whatever else a page shows is older than the last


class Board:
    """What there is to see of the runs at or below some paths, which need not exist yet. Threads may share one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._looking, self._making = threading.Lock(), threading.Lock()
        self._looked, self._version = -GLANCE, ""
        self._made: tuple[str, bytes] = ("", b"")  # the last page, and its version
        self._finished: tuple[str, list[Element]] = ("", [])  # its part that changes when a run ends: images, maps

    def version(self) -> str:
        """Other files have another version."""
        with self._looking:
            if time.monotonic() - self._looked >= GLANCE:
                try:
                    self._version = stamp(run_folder.find_runs(self._there()))
                except UserError as error:  # folders that cannot be searched; the page says why
                    self._version = hashlib.sha256(str(error).encode(errors="replace")).hexdigest()[:16]
                self._looked = time.monotonic()
            return self._version

    def page(self) -> bytes:
        """The newest page. Who asks while it is being made waits for it."""
        with self._making:
            version = self.version()  # before anything is read: what is written meanwhile makes another
            if self._made[0] != version:
                self._made = version, text(self._page(version)).encode()
            return self._made[1]

    def _there(self) -> list[Path]:
        return [path for path in self.paths if os.path.isdir(path)]

    def _page(self, version: str) -> Element:
        try:
            title, parts, count = self._told()
        except Exception as error:  # a page that is open for days outlives a file that nobody foresaw
            title, count = "these runs cannot be shown", 0
            parts = [el("p", "Something in their folders is not understood: ", name(repr(error), most=300))]
        says = "Live: what a run writes appears here by itself."
        return assembled(title, parts, count, el("p", says, class_="live", role="status", data_version=version))

    def _told(self) -> tuple[str, list[Element | None], int]:
        """Title, content and number of runs."""
        ended, others = run_folder.split_finished(self._there())
        if not ended and not others:
            where = name(", ".join(map(str, self.paths)), most=300)
            return title_of([], 0), [el("p", "There is no run yet below ", where, ". It will appear here.")], 0
        version, found = stamp(ended), gathered(ended, others)
        try:
            return self._parts(found, version)
        except Exception:  # one run that no check foresaw must not hide the others
            return self._parts(without_failures(found), f"{version} in part")

    def _parts(self, found: Gathered, version: str) -> tuple[str, list[Element | None], int]:
        parts = [unfinished(found.begun), *left_out(found), *self._results(found.rows, version)]
        return title_of(found.rows, len(found.begun)), parts, found.size

    def _results(self, rows: Sequence[ResultRow], version: str) -> list[Element]:
        if self._finished[0] != version:
            self._finished = version, finished(rows)
        return self._finished[1]


def stamp(folders: Sequence[Path]) -> str:
    """Of where the files are, when they were written and how long they are, and of who trains in unfinished ones."""
    seen: list[object] = [(str(folder), name, *_written(folder / name)) for folder in folders for name in FILES]
    seen += [at_work(folder) for folder in folders if not (folder / run_folder.METRICS).exists()]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def _written(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
