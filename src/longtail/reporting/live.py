"""The live page of runs that are still being trained. It is rebuilt when their files have changed."""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from longtail import run_folder
from longtail.errors import UserError
from longtail.reporting.components import user_text
from longtail.reporting.html import Element, el
from longtail.reporting.page import (
    ReportRuns,
    assemble_page,
    drop_failing_runs,
    left_out_notes,
    page_title,
    read_runs,
    render_page,
    results_sections,
)
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.run_artifacts import is_training
from longtail.reporting.training_curves import unfinished_section

SCAN_INTERVAL = 1.0  # seconds; folders are not scanned more often, however many browsers ask
WATCHED_FILES = (  # all other files that a page shows are written before the last of these
    run_folder.CONFIG,
    run_folder.ENVIRONMENT,
    run_folder.LOG,
    run_folder.METRICS,
)


class LivePage:
    """A page of the runs at or below some paths, which need not exist yet. Threads may share it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._scan_lock, self._build_lock = threading.Lock(), threading.Lock()
        self._scanned, self._version = -SCAN_INTERVAL, ""
        self._page: tuple[str, bytes] = ("", b"")  # version and content of the last page
        self._results: tuple[str, list[Element]] = (
            "",
            [],
        )  # the expensive part, which changes only when a run finishes

    def version(self) -> str:
        """Return a string that changes when the watched files change."""
        with self._scan_lock:
            if time.monotonic() - self._scanned >= SCAN_INTERVAL:
                try:
                    self._version = fingerprint(run_folder.find_runs(self._existing_paths()))
                except UserError as error:  # folders that cannot be searched; the page shows the error
                    self._version = hashlib.sha256(str(error).encode(errors="replace")).hexdigest()[:16]
                self._scanned = time.monotonic()
            return self._version

    def page(self) -> bytes:
        """Return the current page; concurrent callers wait until it is built."""
        with self._build_lock:
            version = self.version()  # before files are read, so that later changes give another version
            if self._page[0] != version:
                self._page = version, render_page(self._build(version)).encode()
            return self._page[1]

    def _existing_paths(self) -> list[Path]:
        return [path for path in self.paths if os.path.isdir(path)]

    def _build(self, version: str) -> Element:
        try:
            title, parts, num_runs = self._content()
        except Exception as error:  # a server that runs for days must survive a file that validation does not cover
            title, num_runs = "these runs cannot be shown", 0
            parts = [el("p", "An error occurred while reading their folders: ", user_text(repr(error), max_length=300))]
        text = "Live: this page updates automatically."
        status = el("p", text, class_="live", role="status", data_version=version)
        return assemble_page(title, parts, num_runs, status)

    def _content(self) -> tuple[str, list[Element | None], int]:
        """Return title, content and number of runs."""
        ended, others = run_folder.split_finished(self._existing_paths())
        if not ended and not others:
            paths = user_text(", ".join(map(str, self.paths)), max_length=300)
            return page_title([], 0), [el("p", "There are no runs yet in ", paths, ". They will appear here.")], 0
        version, runs = fingerprint(ended), read_runs(ended, others)
        try:
            return self._parts(runs, version)
        except Exception:  # one failing run must not hide the others
            return self._parts(drop_failing_runs(runs), f"{version} in part")

    def _parts(self, runs: ReportRuns, version: str) -> tuple[str, list[Element | None], int]:
        parts = [unfinished_section(runs.started), *left_out_notes(runs), *self._results_sections(runs.rows, version)]
        return page_title(runs.rows, len(runs.started)), parts, runs.num_runs

    def _results_sections(self, rows: Sequence[ResultRow], version: str) -> list[Element]:
        if self._results[0] != version:
            self._results = version, results_sections(rows)
        return self._results[1]


def fingerprint(folders: Sequence[Path]) -> str:
    """Return a digest of the times and sizes of the watched files, and of which unfinished runs are being trained."""
    state: list[object] = [
        (str(folder), name, *_time_and_size(folder / name)) for folder in folders for name in WATCHED_FILES
    ]
    state += [is_training(folder) for folder in folders if not (folder / run_folder.METRICS).exists()]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _time_and_size(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size
