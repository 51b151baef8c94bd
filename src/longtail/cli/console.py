"""The standard streams and the terminal.

The streams may be closed when a command starts, or fail while it runs. Messages of the library, which logs them to the logger
"longtail", are printed here; see `longtail.progress`.
"""

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from longtail.errors import UserError, error_text
from longtail.progress import LOGGER, terminal_width, wrap_line
from longtail.text import escape_nonprintable

if TYPE_CHECKING:
    from longtail.reporting.table import ResultRow

STANDARD_OUTPUT = "standard output"
WIDTH_WITHOUT_TERMINAL = 150  # columns of tables that are written to a file or a pipe


# Standard streams


class DiscardedOutput(io.TextIOBase):
    """A replacement for an output stream that was closed when the process started.

    Text that is written to it is discarded. `used` is true if there was any.
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
    """A wrapper of standard output that sets the file name of its OSErrors to `STANDARD_OUTPUT`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with _name_output_in_errors():
            return self.stream.write(text)

    def flush(self) -> None:
        with _name_output_in_errors():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StandardError:
    """A wrapper of standard error that drops text that cannot be written, for example because the terminal was closed."""

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
def _name_output_in_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STANDARD_OUTPUT
        raise


@contextlib.contextmanager
def guard_streams() -> Iterator[None]:
    """Make the standard streams safe to use until the context ends.

    A closed descriptor is opened on the null device. Otherwise the next file that is opened would get its number, and output
    would be written into that file. A closed output stream is replaced by a `DiscardedOutput`; a closed standard input remains
    None.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot display ± displays ?
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
    """Flush standard output. Raise an OSError if any output could not be written."""
    sys.stdout.flush()
    stream = getattr(sys.stdout, "stream", None)
    if isinstance(stream, DiscardedOutput) and stream.used:
        raise OSError(errno.EBADF, "it is closed", STANDARD_OUTPUT)


def discard_output() -> None:
    """Redirect standard output to the null device, so that Python does not write the rest of its buffer on exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Messages


class MessageHandler(logging.Handler):
    """Print log records as plain text: warnings and errors on standard error, other messages on standard output.

    Lines are wrapped to the width of the terminal. Errors of the streams are raised, unlike those of logging's own handlers.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print_warning(record.getMessage())
        else:
            print_lines(record.getMessage().split("\n"))


@contextlib.contextmanager
def print_messages() -> Iterator[None]:
    """Print the messages of the library until the context ends."""
    handler, level, propagate = MessageHandler(), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output, wrapped to the width of the terminal. Characters that are not printable are escaped."""
    print(*(wrap_line(escape_nonprintable(line), terminal_width()) for line in lines), sep="\n", flush=True)


def print_warning(line: str) -> None:
    """Print a line on standard error, as `print_lines` does."""
    print(wrap_line(escape_nonprintable(line), terminal_width(is_error=True)), file=sys.stderr, flush=True)


def print_next_commands(*commands: tuple[str, str]) -> None:
    """Print commands to continue with, each with its purpose, which is on a line of its own if the terminal is narrow."""
    commands = tuple((escape_nonprintable(command), escape_nonprintable(purpose)) for command, purpose in commands)
    width = max(len(command) for command, _ in commands)
    lines = [f"  {command:{width}}   {purpose}" for command, purpose in commands]
    if max(map(len, lines)) > (terminal_width() or WIDTH_WITHOUT_TERMINAL):
        lines = [line for command, purpose in commands for line in (f"  {command}", f"      {purpose}")]
    print("next:", *lines, sep="\n", flush=True)


# Tables


class Screen(Console):
    """A rich console that raises BrokenPipeError; `main` handles it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_screen() -> Console:
    """Return a console for tables. Tables have a fixed width if standard output is not a terminal."""
    return Screen(width=WIDTH_WITHOUT_TERMINAL if terminal_width() is None else None)


def print_result_tables(rows: "list[ResultRow]", is_verbose: bool = False) -> None:
    """Print the table of results, and for a single method the accuracy by class and the most frequent confusions.

    Args:
        rows: The rows of the table.
        is_verbose: Whether all metrics are shown, and the table of shifted test distributions if there are enough test images
            for it.
    """
    from longtail.reporting.significance import group_support
    from longtail.reporting.table import shifted_table, tables_by_class, to_rich

    screen = make_screen()
    screen.print(to_rich(rows, screen.width, is_verbose), *tables_by_class(rows), sep="\n")
    if not is_verbose:
        return
    test_sets = [found for row in rows if (found := group_support(row.runs[0], "few"))]
    if not any(test_set.is_too_small for test_set in test_sets):
        screen.print(shifted_table(rows, screen.width))


# Output files


def check_output_files(**outputs: Path | None) -> None:
    """Raise a UserError if a file cannot be created. Called before the work whose result is written to it.

    Args:
        **outputs: Files by the names of their flags.
    """
    for flag, file in outputs.items():
        if file and (os.path.isdir(file) or not os.access(file.absolute().parent, os.W_OK)):
            raise UserError(f"--{flag} {file}: must be a file in an existing, writable folder", kind="not-writable")


@contextlib.contextmanager
def write_error_as_user_error(file: Path) -> Iterator[None]:
    """Convert an OSError that occurs while `file` is written into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file} ({error_text(error)}): name another file", kind="not-writable") from error
