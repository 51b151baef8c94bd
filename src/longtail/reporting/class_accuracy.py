"""Accuracy by class: against class frequency, as a table of all classes, and gains and losses against a reference method."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.metrics import SHOT_GROUPS, shot_groups
from longtail.reporting import run_artifacts
from longtail.reporting.dataset_results import ClassList, DatasetResults
from longtail.reporting.html import (
    PERCENT,
    Element,
    Plot,
    Point,
    Scale,
    SeriesStyle,
    TableCell,
    collapsible,
    el,
    figure,
    format_signed,
    grid,
    make_scale,
    missing_note,
    section,
    table,
    user_text,
)
from longtail.reporting.result_rows import ResultRow

CLASS_BINS = 10  # of the classes, from frequent to rare
MAX_OPEN_METHODS = 6  # with more methods, the table of all classes is closed
MAX_NAMED_CLASSES = 100  # with more classes, bars have no tooltips of their own
MAX_DOTTED_METHODS, NUM_HIGHLIGHTED = 8, 4  # with more than the first number of methods, only the best few have dots
NO_COUNTS = "the runs do not store the number of training images of each class"


class Curve(NamedTuple):
    """The per-class accuracy of a method on one data set."""

    label: str
    counts: Sequence[int]
    """Training images of each class."""
    per_class: Sequence[Sequence[float | None]]
    """For each run, the accuracy of each class; None for a class without test images."""


def bin_curve(curve: Curve) -> tuple[list[float], list[float]]:
    """Return mean counts and mean accuracies of bins of classes of similar frequency; a bin is a class if there are few."""
    counts, per_class = np.array(curve.counts), np.array(curve.per_class, dtype=float)
    order = np.argsort(-counts, kind="stable")
    order = order[~np.isnan(per_class).all(0)[order]]
    bins = np.array_split(order, min(CLASS_BINS, len(order)))
    return [float(counts[b].mean()) for b in bins], [float(np.nanmean(per_class[:, b])) for b in bins]


# Accuracy against frequency


def frequency_section(dataset: DatasetResults) -> Element:
    """Return a plot of accuracy against training images, with each class of a single method, or bins of several methods."""
    classes = dataset.classes
    if classes is None:
        note = missing_note("plot of accuracy by class frequency", NO_COUNTS)
        return section("Accuracy by class frequency", note)
    counts = np.maximum(classes.counts[classes.order], 1)
    x = make_scale(counts.tolist(), log=True, is_descending=True)
    description = "Accuracy of the classes against their number of training images, frequent classes on the left."
    labels = ("training images of the class", "test accuracy, %")
    plot = Plot("Accuracy by class frequency", description, x, PERCENT, *labels)
    shade_by_count(plot)
    is_single = len(dataset.rows) == 1
    if is_single:
        _add_class_dots(plot, dataset.rows[0], classes)
        text = "Each dot is a class; the line is the mean over classes of similar frequency."
    else:
        text = "Each dot is the mean over a tenth of the classes (or a single class, if there are few) and over seeds."
    columns = _add_curves(plot, dataset, is_faint=is_single)
    legend = [] if is_single else [(dataset.style(row), row.label) for row in dataset.rows]
    if len(dataset.rows) > MAX_DOTTED_METHODS:
        text += f" Dots mark the {NUM_HIGHLIGHTED} methods with the highest overall accuracy."
    caption = f"Rare classes are on the right. {text}{classes.subset_note}"
    drawn = figure(plot, "accuracy_by_frequency", columns, caption, legend)
    return section("Accuracy by class frequency", grid([drawn, class_table(dataset, classes)], "by-class"))


def shade_by_count(plot: Plot) -> None:
    """Shade the shot groups on an axis of training images."""
    for name, group in SHOT_GROUPS.items():
        left, right = max(group.low - 0.5, plot.x.low), min(group.high + 0.5, plot.x.high)
        if left < right:
            plot.band(left, right, name, name)


def shade_by_rank(plot: Plot, counts: np.ndarray) -> None:
    """Shade the shot groups on an axis of ranks 0, 1, 2, … of classes sorted by falling counts."""
    for group, mask in shot_groups(counts).items():
        if mask.any():
            ranks = np.flatnonzero(mask)
            plot.band(float(ranks[0]), float(ranks[-1] + 1), group, group)


def _add_class_dots(plot: Plot, row: ResultRow, classes: ClassList) -> None:
    accuracy_C = row.per_class()
    shown = [c for c in classes.order if np.isfinite(accuracy_C[c])]
    points = [(float(max(classes.counts[c], 1)), float(accuracy_C[c])) for c in shown]
    names = [f"{classes.names[c]}: {accuracy_C[c]:.1f} %, {classes.counts[c]:,} training images" for c in shown]
    plot.dots(points, SeriesStyle(0), names, radius=2.5 if len(shown) > MAX_NAMED_CLASSES else 3.5)


def _add_curves(plot: Plot, dataset: DatasetResults, is_faint: bool) -> dict[str, list[object]]:
    """Add a curve for each method, and return the points as columns."""
    columns: dict[str, list[object]] = {"method": [], "training images": [], "accuracy": []}
    for row in dataset.rows:
        counts = row.runs[0].metrics.get("counts")
        if not counts:
            continue
        per_class = [run.metrics["per_class"] for run in row.runs]
        curve = bin_curve(Curve(row.label, np.maximum(counts, 1).tolist(), per_class))
        points: list[Point] = list(zip(*curve, strict=True))
        style = dataset.style(row)
        is_minor = len(dataset.rows) > MAX_DOTTED_METHODS and row not in dataset.rows[:NUM_HIGHLIGHTED]
        plot.line(points, style, row.label, is_faint or is_minor)
        if not (is_faint or is_minor):
            plot.dots(points, style, [f"{row.label}: {y:.1f} % at {x:,.0f} images" for x, y in points])
        columns["method"] += [row.label] * len(points)
        columns["training images"] += [x for x, _ in points]
        columns["accuracy"] += [y for _, y in points]
    return columns


def class_table(dataset: DatasetResults, classes: ClassList) -> Element:
    """Return a collapsible table of all classes by all comparable methods."""
    accuracies = [row.per_class() for row in dataset.comparable]
    test_C = run_artifacts.test_counts(dataset.comparable[0].runs[0])
    is_single = len(dataset.comparable) == 1
    labels = ["accuracy"] if is_single else [row.label for row in dataset.comparable]
    head = ["class", "training images", "test images", *labels, "group"]
    body = [
        [
            TableCell(user_text(classes.names[c])),
            TableCell(f"{classes.counts[c]:,}", int(classes.counts[c])),
            TableCell("–") if test_C is None else TableCell(f"{test_C[c]:,}", int(test_C[c])),
            *(_accuracy_cell(accuracy_C[c]) for accuracy_C in accuracies),
            TableCell(classes.group(c)),
        ]
        for c in classes.order
    ]
    caption = f"Test accuracy of each class in percent.{classes.subset_note}"
    is_open = len(classes.order) <= MAX_NAMED_CLASSES and len(dataset.rows) <= MAX_OPEN_METHODS
    return collapsible("All classes", table(head, body, caption, is_tall=True), is_open=is_open, kind="all-classes")


def _accuracy_cell(accuracy: float) -> TableCell:
    return TableCell("–") if np.isnan(accuracy) else TableCell(f"{accuracy:.1f}", round(float(accuracy), 2))


# Gains and losses


def gains_section(dataset: DatasetResults) -> Element | None:
    """Return the per-class differences of each method from a reference: cross-entropy if present, or else the best method.

    None if there is nothing to compare.
    """
    classes, rows = dataset.classes, dataset.comparable
    if len(rows) == 1 or classes is None:
        return None
    cross_entropy = next((row for row in rows if row.runs[0].config.method.name == "ce"), None)
    reference = cross_entropy or rows[0]
    others = [row for row in rows if row is not reference]
    gains = {row.label: (row.per_class() - reference.per_class())[classes.order] for row in others}
    largest = max(float(np.nanmax(np.abs(gain), initial=1.0)) for gain in gains.values())
    y = Scale(-1.08 * largest, 1.08 * largest)
    figures = [
        _gain_figure(row.label, reference.label, gains[row.label], classes, y, dataset.style(row)) for row in others
    ]
    title = f"Gains and losses by class, against {reference.label}"
    reason = "There is no run with cross-entropy, so the method with the highest overall accuracy is the reference."
    note = None if cross_entropy else el("p", reason, class_="small")
    return section(title, note, _gain_table(gains, classes), grid(figures))


def _gain_figure(
    label: str, reference: str, gain: np.ndarray, classes: ClassList, y: Scale, style: SeriesStyle
) -> Element:
    description = f"Accuracy of {label} minus that of {reference}, by class, from frequent to rare."
    labels = ("classes, from frequent to rare", "difference, points")
    plot = Plot(f"{label} minus {reference}", description, Scale(0, len(gain)), y, *labels, x_ticks=False)
    shade_by_rank(plot, classes.counts[classes.order])
    known = [(i, float(g)) for i, g in enumerate(gain) if np.isfinite(g)]
    if len(gain) <= MAX_NAMED_CLASSES:
        names = [f"{classes.names[classes.order[i]]}: {format_signed(g)} points" for i, g in known]
        plot.bars([(i + 0.05, i + 0.95, g) for i, g in known], style, names)
    else:
        plot.strokes([(i + 0.5, 0, g) for i, g in known], style, label)
    plot.reference([(0, 0), (len(gain), 0)], "no difference")
    columns = {"class": [classes.names[c] for c in classes.order], "difference": [round(float(g), 2) for g in gain]}
    return figure(plot, "differences", columns, f"Above the line, {label} is better.{classes.subset_note}")


def _gain_table(gains: dict[str, np.ndarray], classes: ClassList) -> Element:
    groups = {g: mask for g, mask in shot_groups(classes.counts[classes.order]).items() if mask.any()}
    body = []
    for label, gain in gains.items():
        better, worse = int((gain > 0).sum()), int((gain < 0).sum())
        means = [float(np.nanmean(gain[mask])) if np.isfinite(gain[mask]).any() else None for mask in groups.values()]
        numbers = [TableCell(str(better), better), TableCell(str(worse), worse)]
        numbers += [TableCell("–" if m is None else format_signed(m), m) for m in means]
        extremes = [_extreme_cell(gain, argmax, classes) for argmax in (np.nanargmax, np.nanargmin)]
        body.append([TableCell(user_text(label)), *numbers, *extremes])
    head = ["method", "classes better", "worse", *(f"mean of {g}" for g in groups), "largest gain", "largest loss"]
    return table(head, body, "Differences in accuracy in points, averaged over seeds")


def _extreme_cell(gain: np.ndarray, argmax: Callable[[np.ndarray], Any], classes: ClassList) -> TableCell:
    """Return the class with the largest gain (np.nanargmax) or loss (np.nanargmin); an en dash if there is none."""
    i = int(argmax(gain)) if np.isfinite(gain).any() else None
    if i is None or (gain[i] <= 0 if argmax is np.nanargmax else gain[i] >= 0):
        return TableCell("–")
    name = user_text(classes.names[classes.order[i]])
    return TableCell(el("span", name, f" ({format_signed(gain[i])})"), float(gain[i]))
