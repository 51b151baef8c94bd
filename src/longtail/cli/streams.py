"""Standard streams that are closed when the command starts, or fail while it runs."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

STANDARD_OUTPUT = "standard output"


class DiscardedOutput(io.TextIOBase):
    """A replacement for an output stream that was closed when the process started.

    Text that is written to it is discarded; `used` says whether there was any.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self.used = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.used = self.used or bool(text)
        return len(text)


class StandardOutput:
    """Standard output, whose errors say where they come from: they have the file name `STANDARD_OUTPUT`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with _naming_output():
            return self.stream.write(text)

    def flush(self) -> None:
        with _naming_output():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StandardError:
    """Standard error. Messages that cannot be written, for example because the terminal was closed, are dropped."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _naming_output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STANDARD_OUTPUT
        raise


@contextlib.contextmanager
def guard_streams() -> Iterator[None]:
    """Make the standard streams safe to use until the context ends.

    A closed descriptor is opened on the null device, because the next file that is opened would otherwise get its number, and
    stray output would be written into that file. A closed output stream is replaced by a `DiscardedOutput`; a closed standard
    input stays None.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± shows ?
    sys.stdout = StandardOutput(DiscardedOutput() if sys.stdout is None else sys.stdout)
    sys.stderr = StandardError(DiscardedOutput() if sys.stderr is None else sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _open_closed_descriptors() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def is_output_closed() -> bool:
    """Return whether standard output was closed when the command started."""
    return isinstance(getattr(sys.stdout, "stream", sys.stdout), DiscardedOutput | None)


def flush_output() -> None:
    """Write what is left in the buffer of standard output; an OSError says that it, or something before it, was lost."""
    sys.stdout.flush()
    stream = getattr(sys.stdout, "stream", None)
    if isinstance(stream, DiscardedOutput) and stream.used:
        raise OSError(errno.EBADF, "it is closed", STANDARD_OUTPUT)


def discard_output() -> None:
    """Direct what is left in the buffer of standard output to the null device; Python would write it when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
