"""Where tables are shown."""

import sys
from typing import Any

from rich.console import Console


def show_tables(rows: Any) -> None:
    from longtail.reporting.significance import group_support
    from longtail.reporting.table import shifted_table, to_rich

    screen = console()
    screen.print(to_rich(rows, screen.width))
    known = [base for row in rows if (base := group_support(row.runs[0], "few"))]
    if not any(base.is_too_small for base in known):  # so few images tell nothing of other frequencies
        screen.print(shifted_table(rows, screen.width))


class Screen(Console):
    """Leaves it to `main` that who reads has gone away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Tables keep their width where nobody's terminal limits it."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Screen(width=None if terminal else 150)
