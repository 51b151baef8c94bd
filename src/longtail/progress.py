"""Messages and progress of long operations.

Library code calls `log_info` and `log_warning` instead of `print`. They log to the logger "longtail": the command line writes
these messages to standard output and standard error. In Python, `logging.basicConfig(level=logging.INFO, format="%(message)s")`
displays them.
"""

import contextlib
import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from longtail.torchrun import read_world

T = TypeVar("T")

LOGGER = logging.getLogger("longtail")
LOG_INTERVAL = 20.0  # seconds between lines of progress that is not displayed on a terminal
MIN_ITEMS_FOR_BAR = 100


def log_info(message: str) -> None:
    """Log a message at INFO level. The command line prints it on standard output."""
    LOGGER.info("%s", message)


def log_warning(message: str) -> None:
    """Log a message at WARNING level. The command line prints it on standard error."""
    LOGGER.warning("%s", message)


def terminal_width() -> int | None:
    """Return the number of columns of the terminal, or None if standard output is not a terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else None


def wrap_line(line: str, width: int | None) -> str:
    """Wrap a line at spaces. Continuation lines are indented by two more spaces; long words, such as paths, are not broken.

    Args:
        line: Text without line breaks.
        width: Maximum number of characters in a line; None: do not wrap.
    """
    if width is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def is_main_process() -> bool:
    """Return whether this is the only process, or the first process on this machine of those that torchrun started."""
    return read_world().local_rank == 0


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield items and display the progress on standard error; see `show_progress`.

    Args:
        items: The items to iterate over.
        total: The number of items. On a terminal, no bar is displayed for fewer than 100 items.
        description: What is being done, such as "predicting".
    """
    is_bar_needed = total >= MIN_ITEMS_FOR_BAR or not _has_terminal()
    with show_progress(total, description, is_bar_needed) as advance:
        for item in items:
            yield item
            advance(1)


@contextlib.contextmanager
def show_progress(total: int, description: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Display the progress on standard error: a bar on a terminal, otherwise a line every 20 seconds, with the time left.

    The context is a function that is called with the number of items that were finished since its last call.

    Args:
        total: The number of items.
        description: What is being done, such as "predicting".
        show: Display anything.
    """
    if not show or not is_main_process():
        yield lambda number: None
    elif _has_terminal():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda number: progress.advance(task, number)
    else:
        yield _ProgressLines(total, description)


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _ProgressLines:
    """Prints a line of progress every 20 seconds."""

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description, self.done = total, description, 0
        self.start = self.last_printed = time.monotonic()

    def __call__(self, number: int) -> None:
        self.done += number
        now = time.monotonic()
        if now - self.last_printed > LOG_INTERVAL:
            self.last_printed = now
            left = format_duration((now - self.start) / max(self.done, 1) * (self.total - self.done))
            line = f"{self.description}: {self.done:,} of {self.total:,}, {left} left"
            print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as "2:05", or with hours, such as "1:00:00"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
