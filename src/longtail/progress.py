"""How far a long walk over many items has come: a bar on a terminal, and elsewhere a line now and then."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from longtail.torchrun import read_world

T = TypeVar("T")

EVERY = 20.0  # seconds between lines where there is no terminal


def columns() -> int | None:
    """Of the terminal that is written to; None where there is none."""
    there = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if there else None


def wrapped(line: str, width: int | None) -> str:
    """Broken at words, what follows a little further in; a word that is too long, such as a path, stays whole."""
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
    """One process does, or of those that torchrun has started on this machine the first."""
    return read_world().local_rank == 0


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, one by one; of few items nothing is shown."""
    if not is_main_process():
        yield from items
        return
    if sys.stderr is not None and sys.stderr.isatty():
        yield from _bar(items, total, what)
        return
    told = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)


def _bar(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=total < 100) as progress:
        yield from progress.track(items, total)


def format_duration(seconds: float) -> str:
    """As in 2:05 and 1:00:00."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
