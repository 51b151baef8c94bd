"""The commands that display finished runs: `report`, `table`, `figure` and `watch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from longtail.cli.console import print_result_tables
from longtail.cli.parse import parse_arguments
from longtail.errors import UserError
from longtail.text import escape_nonprintable


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a self-contained HTML report of runs: results, the best method, and how reliable the differences are."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain runs."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """Output file."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Make a table of finished runs, with mean and standard deviation over seeds."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain runs."""
    out: Path | None = None
    """Output folder of table.md and table.json (default: the first of RUNS)."""
    verbose: bool = False
    """Show all metrics, including calibration error, k-NN accuracy, latency, and accuracy under shifted class frequencies."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Draw a figure of the paper from your runs: latency, gradient, framework, extra."""

    name: Positional[str | None] = None
    """latency (Fig. 1: accuracy against the inference time of a batch of 64), gradient (Fig. 2: classifier gradients by class,
    of runs trained with --log.gradients), framework (Fig. 3) or extra (Fig. 4: L_extra). The last two need no runs."""
    runs: Positional[tuple[Path, ...]] = ()
    """Run folders, or folders that contain runs; for latency also the results of a reproduced table, such as
    results/latency.json."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Output file: .svg, .png or .pdf (default: NAME.svg)."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Serve the report of running trainings to a browser on this machine, with live updates."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain runs; they need not exist yet."""
    port: int = 8700
    """Port on 127.0.0.1; 0: any free port."""


def run_report(args: list[str]) -> None:
    """Run `longtail report`."""
    given = parse_arguments(Report, "report", args)
    check_runs(given.runs, "longtail report runs -o report.html")

    from longtail.reporting.page import report

    print(f"written to {escape_nonprintable(report(given.runs, given.out))}")


def run_table(args: list[str]) -> None:
    """Run `longtail table`."""
    given = parse_arguments(Table, "table", args)
    check_runs(given.runs, "longtail table runs")

    from longtail.reporting.table import table

    out = given.out or given.runs[0]
    shown = escape_nonprintable(out)
    print_result_tables(table(given.runs, out), given.verbose)
    print(f"written to {shown}/table.md and {shown}/table.json")


def run_figure(args: list[str]) -> None:
    """Run `longtail figure`."""
    given = parse_arguments(Figure, "figure", args)
    if not given.name:
        raise UserError(
            "the name of a figure is required (latency, gradient, framework or extra): `longtail figure extra`"
        )

    from longtail.paper.figures import figure

    print(f"written to {escape_nonprintable(figure(given.name, given.runs, given.out))}")


def run_watch(args: list[str]) -> None:
    """Run `longtail watch`."""
    given = parse_arguments(Watch, "watch", args)
    check_runs(given.runs, "longtail watch runs")

    from longtail.reporting.server import watch

    watch(given.runs, given.port)


def check_runs(runs: tuple[Path, ...], example: str) -> None:
    """Raise a UserError if no runs are given; it contains an example of a correct command."""
    if not runs:
        raise UserError(f"at least one run folder is required: `{example}`")
