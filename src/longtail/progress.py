"""Messages and progress of long operations.

Library code calls `log_info` and `log_warning` instead of `print`. They log to the logger "longtail": the command line writes
these messages to standard output and standard error. In Python, `logging.basicConfig(level=logging.INFO, format="%(message)s")`
displays them.
"""

import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
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
    """Yield items and display the progress on standard error: a bar on a terminal, otherwise a line every 20 seconds.

    Args:
        items: The items to iterate over.
        total: The number of items. On a terminal, no bar is displayed for fewer than 100 items.
        description: What is being done, such as "predicting".
    """
    if not is_main_process():
        yield from items
        return
    if sys.stderr is not None and sys.stderr.isatty():
        yield from _track_with_bar(items, total, description)
        return
    last_printed = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last_printed > LOG_INTERVAL:
            last_printed = time.monotonic()
            print(f"{description}: {done:,} of {total:,}", file=sys.stderr, flush=True)


def _track_with_bar(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = total < MIN_ITEMS_FOR_BAR
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as progress:
        yield from progress.track(items, total)


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as "2:05", or with hours, such as "1:00:00"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
