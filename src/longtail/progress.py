"""Messages, progress of long operations, and durations.

Library code calls `log_info` and `log_warning` instead of `print`. They log to the logger "longtail": the command line writes
these messages to standard output and standard error. In Python, `logging.basicConfig(level=logging.INFO, format="%(message)s")`
displays them.
"""

import contextlib
import logging
import math
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from longtail.errors import UserError
from longtail.torchrun import read_world

T = TypeVar("T")

LOGGER = logging.getLogger("longtail")
LOG_INTERVAL = 20.0  # seconds between lines of progress that is not displayed on a terminal
MIN_ITEMS_FOR_BAR = 100
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 20, 40  # columns of a progress bar


def log_info(message: str) -> None:
    """Log a message at INFO level. The command line prints it on standard output."""
    LOGGER.info("%s", message)


def log_warning(message: str) -> None:
    """Log a message at WARNING level. The command line prints it on standard error."""
    LOGGER.warning("%s", message)


def terminal_width(is_error: bool = False) -> int | None:
    """Return the number of columns of the terminal, or None if the stream is not a terminal.

    Args:
        is_error: Whether the stream is standard error, and not standard output.
    """
    stream = sys.stderr if is_error else sys.stdout
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


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


def is_local_main() -> bool:
    """Return whether this is the only process, or the first process on this machine of those that torchrun started."""
    return read_world().local_rank == 0


def track(items: Iterable[T], total: int, description: str, unit: str = "images") -> Iterator[T]:
    """Yield items and display the progress; see `open_progress`.

    Args:
        items: The items to iterate over.
        total: The number of items.
        description: What is being done, such as "predicting".
        unit: What the items are, in the plural.
    """
    with open_progress(total, description, unit) as advance:
        for item in items:
            yield item
            advance(1)


def is_bar_shown() -> bool:
    """Return whether progress is displayed as a bar, because standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def open_progress(total: int, description: str, unit: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that is called with numbers of processed items, and display the progress on standard error.

    The display is a bar with the estimated time left on a terminal, and otherwise a line every 20 seconds. Nothing is displayed
    if this is not the main process, and no bar for fewer than 100 items.

    Args:
        total: The number of items.
        description: What is being done, such as "predicting".
        unit: What the items are, in the plural.
        show: Whether anything is displayed.
    """
    if not show or not is_local_main():
        yield lambda _: None
    elif is_bar_shown():
        with _open_bar(total, description, unit) as advance:
            yield advance
    else:
        yield _line_printer(total, description, unit)


@contextlib.contextmanager
def _open_bar(total: int, description: str, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console, start = Console(stderr=True), time.monotonic()
    texts = TextColumn("{task.description}"), TextColumn("{task.completed:,} of {task.total:,} {task.fields[unit]}")
    columns = (texts[0], BarColumn(bar_width(console.width)), texts[1], TextColumn("{task.fields[left]}"))
    disable = total < MIN_ITEMS_FOR_BAR
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(description, total=total, unit=unit, left=format_time_left(0, total, 0.0))

        def advance(items: int) -> None:
            done = int(progress.tasks[0].completed) + items
            progress.update(task, completed=done, left=format_time_left(done, total, time.monotonic() - start))

        yield advance


def _line_printer(total: int, description: str, unit: str) -> Callable[[int], None]:
    """Return a function that counts items and prints a line every 20 seconds."""
    start = printed = time.monotonic()
    done = 0

    def advance(items: int) -> None:
        nonlocal done, printed
        done, now = done + items, time.monotonic()
        if now - printed > LOG_INTERVAL:
            printed = now
            left = format_time_left(done, total, now - start)
            print(f"{description}: {done:,} of {total:,} {unit}, {left}", file=sys.stderr, flush=True)

    return advance


def bar_width(columns: int) -> int:
    """Return the width of a progress bar on a terminal with this number of columns."""
    return max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, columns // 4))


def format_time_left(done: int, total: int, seconds: float) -> str:
    """Return the estimated time left, such as "0:40 left".

    Args:
        done: The number of processed items.
        total: The number of all items.
        seconds: The time since the first item was begun.
    """
    return f"{format_duration(seconds / done * (total - done))} left" if done else "estimating the time left"


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as "2:05", or with hours, such as "1:00:00"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


# Time limits


UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)")


def parse_duration(value: str | float) -> float:
    """Return the seconds of a time limit such as "90s", "10m", "1.5h", "600" or 600. Other values are a UserError."""
    match = DURATION.fullmatch(str(value).strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"--time-limit {value}: it must be a time above zero, such as 90s, 10m or 1.5h")
    return seconds


def describe_duration(seconds: float) -> str:
    """Return a rounded duration, such as "40 s", "4 min" or "2.5 h"."""
    if seconds < 90:
        step = 10 if seconds >= 10 else 1
        return f"{max(round(seconds / step), 1) * step} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
