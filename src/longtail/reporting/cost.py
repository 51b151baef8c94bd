"""What each method takes, and what it gives for that."""

from collections.abc import Sequence
from typing import Any

from longtail.metrics import mean_std
from longtail.reporting.chapter import DatasetResults
from longtail.reporting.html import Element, el
from longtail.reporting.parts import TableCell, figure, grid, name, plural, section, table
from longtail.reporting.svg import Plot, Scale, around
from longtail.reporting.table import ResultRow, format_mean_std

COSTS = {
    "latency_b64": ("milliseconds for a batch of 64", 1, 1.0),
    "seconds": ("seconds of training", 0, 1.0),
    "peak_memory": ("peak memory, MB", 0, 1e6),
    "parameters": ("parameters", 0, 1.0),
}  # metric -> (name, digits, unit)


def cost(chapter: DatasetResults) -> Element:
    """What each method takes, and accuracy against it; the first is the paper's Fig. 1."""
    head = ["method", *(said for said, _, _ in COSTS.values())]
    body = [[TableCell(name(row.label)), *(_cost_cell(row, m) for m in COSTS)] for row in chapter.rows]
    drawn = [f for m in ("latency_b64", "seconds", "peak_memory") if (f := _cost_figure(chapter, m)) is not None]
    notes = [el("p", text, class_="small") for text in _cost_notes(chapter.rows)]
    costs = table(head, body, "Cost, mean ± standard deviation over seeds")
    return section("Cost", costs, *notes, grid(drawn) if len(chapter.rows) > 1 else None)


def _costs(row: ResultRow, metric: str) -> list[float]:
    return [value / COSTS[metric][2] for value in row.values(metric)]


def _cost_cell(row: ResultRow, metric: str) -> TableCell:
    values = _costs(row, metric)
    shown = values[:1] if metric == "parameters" else values
    return TableCell(format_mean_std(shown, COSTS[metric][1]), mean_std(values)[0] if values else None)


def _cost_notes(rows: Sequence[ResultRow]) -> list[str]:
    found = []
    if len({tuple(row.values("parameters")[:1]) for row in rows}) == 1 < len(rows):
        found.append(
            "The networks that deploy have the same size: differences of latency between them are measurement noise."
        )
    if any(run.metrics.get("together", 1) > 1 for row in rows for run in row.runs):
        found.append(
            "Some seeds were trained side by side: seconds and memory are those of all that shared the device."
        )
    return found


def _cost_figure(chapter: DatasetResults, metric: str) -> Element | None:
    rows = [row for row in chapter.rows if _costs(row, metric)]
    if len(rows) < 2:
        return None
    label = COSTS[metric][0]
    at = [(mean_std(_costs(row, metric))[0], *mean_std(row.values("top1"))) for row in rows]
    y = around([edge for _, m, std in at for edge in (m - (std or 0), m + (std or 0))])
    shows = f"Test accuracy of {plural(len(rows), 'method')} against {label}; up and to the left is better."
    plot = Plot(
        f"Accuracy against {label}", shows, Scale(0, 1.08 * max(x for x, _, _ in at)), y, label, "test accuracy, %"
    )
    for row, (x, m, std) in zip(rows, at, strict=True):
        if std:
            plot.spans([(x, m - std, m + std)], chapter.look(row), "")
        plot.dots([(x, m)], chapter.look(row), [f"{row.label}: {m:.1f} % at {x:,.1f}"], radius=5)
    columns: dict[str, list[Any]] = {"method": [row.label for row in rows], label: [x for x, _, _ in at]}
    columns |= {"accuracy": [m for _, m, _ in at]}
    legend = [(chapter.look(row), row.label) for row in rows]
    return figure(plot, f"accuracy_against_{metric}", columns, "Up and to the left is better.", legend)
