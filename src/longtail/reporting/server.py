"""`longtail watch`: the report page of runs that are still being trained, for browsers on this machine.

It is no web server: it knows two paths, serves no file, listens on the loopback interface alone, and answers only who asked
for it by that name: another site may give its own name this machine's address, and would then read the page.
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
from longtail.reporting.document import policy
from longtail.reporting.live import Board

HERE = "127.0.0.1"
OWN_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)  # a tunnel may have another port
HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def watch(paths: Iterable[Path | str] | Path | str, port: int = 8700) -> None:
    """Show the runs at or below `paths` to browsers on this machine until Ctrl-C. The twin of `longtail watch`.

    The paths need not exist yet; port 0 is any free one.
    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    with serve(folders, port) as server, contextlib.suppress(KeyboardInterrupt):
        where = ", ".join(map(str, folders))
        log_info(f"http://{HERE}:{server.port}/ shows {where}; Ctrl-C ends it")
        server.serve_forever()
    log_info("Stopped watching; training continues.")


def serve(folders: list[Path], port: int) -> "Server":
    """Listens already; `serve_forever` answers."""
    for folder in folders:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UserError(f"{folder} is no folder: name a run folder or a folder that holds runs")
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: it must be between 0 (any free one) and 65535")
    try:
        return Server(Board(folders), port)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror}; choose another, or --port 0 for any free one", kind="not-writable"
        ) from error


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # at once after an earlier one has ended
    daemon_threads = True

    def __init__(self, board: Board, port: int) -> None:
        self.board = board
        super().__init__((HERE, port), Answer)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That a browser has gone away is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    """To one request."""

    server: Server
    server_version, sys_version = f"longtail/{__version__}", ""
    error_content_type = "text/plain; charset=utf-8"  # where there was no request that could be understood
    error_message_format = "%(message)s"
    timeout = 20  # seconds that a client may keep silent

    def do_GET(self) -> None:
        self._answer(*self._found())

    do_HEAD = do_GET

    def refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse

    def _found(self) -> tuple[HTTPStatus, bytes, str]:
        plain = "text/plain"
        if not self._asked_for_by_name():
            return HTTPStatus.MISDIRECTED_REQUEST, f"ask for it as http://{HERE}:{self.server.port}/".encode(), plain
        if self.path == "/":
            return HTTPStatus.OK, self.server.board.page(), "text/html"
        if self.path == "/version":
            return HTTPStatus.OK, self.server.board.version().encode(), plain
        return HTTPStatus.NOT_FOUND, b"there is / and nothing else", plain

    def _asked_for_by_name(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and OWN_NAME.fullmatch(hosts[0]) is not None

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain", **more: str) -> None:
        self.send_response(status)
        size = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for key, value in (HEADERS | size | more).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Who asked for what is nobody's concern."""
