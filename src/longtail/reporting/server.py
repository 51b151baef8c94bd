"""`longtail watch`: the live page of runs that are still being trained, and the local server for it.

The page is rebuilt when the files of the runs have changed. The server has two paths, serves no files and listens on the
loopback interface only. It answers only requests that name this machine in their Host header; otherwise another site could
point its own name to the loopback address and read the page.
"""

import contextlib
import hashlib
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from longtail import __version__, run_folder
from longtail.errors import UserError, list_paths
from longtail.progress import log_info
from longtail.reporting.html import Element, el, user_text
from longtail.reporting.page import (
    ReportRuns,
    assemble_page,
    content_security_policy,
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


# Server


HOST = "127.0.0.1"
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)  # a tunnel may use another port
HEADERS = {
    "Content-Security-Policy": f"{content_security_policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def watch(paths: Iterable[Path | str] | Path | str, port: int = 8700) -> None:
    """Serve the page of the runs at or below `paths` to browsers on this machine until Ctrl-C; same as `longtail watch`.

    Args:
        paths: Run folders, or folders that contain runs; they need not exist yet.
        port: Port to listen on; 0 selects a free one.
    """
    folders = list_paths(paths, "paths")
    with open_server(folders, port) as server, contextlib.suppress(KeyboardInterrupt):
        where = ", ".join(map(str, folders))
        log_info(f"http://{HOST}:{server.port}/ shows {where}; press Ctrl-C to stop")
        server.serve_forever()
    log_info("Stopped watching; training continues.")


def open_server(folders: list[Path], port: int) -> "Server":
    """Return a server that is bound to a port; call its `serve_forever` to answer requests."""
    for folder in folders:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f"{folder} is not a folder: name a run folder or a folder that contains runs")
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: it must be between 0 (any free port) and 65535")
    try:
        return Server(LivePage(folders), port)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror}; choose another, or --port 0 for any free port", kind="not-writable"
        ) from error


class Server(socketserver.ThreadingTCPServer):
    """Serves one live page."""

    allow_reuse_address = True  # so that it can be restarted immediately
    daemon_threads = True

    def __init__(self, live_page: LivePage, port: int) -> None:
        self.live_page = live_page
        super().__init__((HOST, port), RequestHandler)

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class RequestHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = f"longtail/{__version__}", ""
    error_content_type = "text/plain; charset=utf-8"  # for requests that cannot be parsed
    error_message_format = "%(message)s"
    timeout = 20  # seconds that a client may be silent

    def do_GET(self) -> None:
        """Answer GET and HEAD."""
        self._send(*self._find_content())

    do_HEAD = do_GET

    def refuse(self) -> None:
        """Refuse a method that would send data."""
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse

    def _find_content(self) -> tuple[HTTPStatus, bytes, str]:
        plain = "text/plain"
        if not self._names_this_machine():
            return HTTPStatus.MISDIRECTED_REQUEST, f"use http://{HOST}:{self.server.port}/".encode(), plain
        if self.path == "/":
            return HTTPStatus.OK, self.server.live_page.page(), "text/html"
        if self.path == "/version":
            return HTTPStatus.OK, self.server.live_page.version().encode(), plain
        return HTTPStatus.NOT_FOUND, b"not found: the page is at /", plain

    def _names_this_machine(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and LOCAL_HOST.fullmatch(hosts[0]) is not None

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain", **more: str) -> None:
        self.send_response(status)
        size = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for key, value in (HEADERS | size | more).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; requests are private."""
