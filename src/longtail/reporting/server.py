"""`longtail watch`: a local server for the page of runs that are still being trained.

The server has two paths, serves no files and listens on the loopback interface only. It answers only requests that name this
machine in their Host header; otherwise another site could point its own name to the loopback address and read the page.
"""

import contextlib
import os
import re
import socketserver
import sys
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from longtail import __version__
from longtail.errors import UserError
from longtail.progress import log_info
from longtail.reporting.live import LivePage
from longtail.reporting.page import content_security_policy

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
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
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
