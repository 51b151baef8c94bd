"""Class by class: accuracy against frequency, every class in a table, and where each method wins and loses."""

from collections.abc import Callable
from typing import Any

import numpy as np

from longtail.metrics import shot_groups
from longtail.reporting.cells import Curve, binned
from longtail.reporting.chapter import Classes, DatasetResults, per_class
from longtail.reporting.html import Element, el
from longtail.reporting.parts import TableCell, absent, figure, folded, grid, name, section, signed, table
from longtail.reporting.svg import PERCENT, Plot, Point, Scale, SeriesStyle, around
from longtail.reporting.table import ResultRow

TOLD_APART = 100  # classes whose bars have words of their own
CROWDED, LOUD = 8, 4  # of more methods than these the best so many are drawn with dots, the others thin
NO_COUNTS = "the runs do not say how many images each class has"


def by_frequency(chapter: DatasetResults) -> Element:
    """Accuracy against the number of training images: each class of one method, or bins of classes of several."""
    classes = chapter.classes
    if classes is None:
        return section("Accuracy by class frequency", absent("plot of accuracy by frequency", NO_COUNTS))
    seen = np.maximum(classes.counts[classes.order], 1)
    x = around(seen.tolist(), log=True, falling=True)
    shows = "Accuracy of the classes against their number of training images, frequent ones to the left."
    plot = Plot("Accuracy by class frequency", shows, x, PERCENT, "training images of the class", "test accuracy, %")
    shade_shots(plot)
    one = len(chapter.rows) == 1
    if one:
        _class_dots(plot, chapter.rows[0], classes)
    columns = _curves(plot, chapter, faint=one)
    legend = [(chapter.look(row), row.label) for row in chapter.rows] if not one else []
    words = "Each dot a class; the line is the mean of classes of like frequency." if one else ""
    words = words or "Each dot is the mean over a tenth of the classes (of few classes, a class) and over seeds."
    words += f" With dots: the {LOUD} best over all." if len(chapter.rows) > CROWDED else ""
    drawn = figure(plot, "accuracy_by_frequency", columns, f"Rare classes to the right. {words}{classes.some}", legend)
    return section("Accuracy by class frequency", drawn, class_table(chapter, classes))


def shade_shots(plot: Plot) -> None:
    """On an axis of training images."""
    for group, (low, high) in {"many": (100.5, np.inf), "medium": (19.5, 100.5), "few": (0, 19.5)}.items():
        left, right = max(low, plot.x.low), min(high, plot.x.high)
        if left < right:
            plot.band(left, right, group, group)


def _class_dots(plot: Plot, row: ResultRow, classes: Classes) -> None:
    share_C = per_class(row)
    shown = [c for c in classes.order if np.isfinite(share_C[c])]
    places = [(float(max(classes.counts[c], 1)), float(share_C[c])) for c in shown]
    names = [f"{classes.names[c]}: {share_C[c]:.1f} %, {classes.counts[c]:,} training images" for c in shown]
    plot.dots(places, SeriesStyle(0), names, radius=2.5 if len(shown) > TOLD_APART else 3.5)


def _curves(plot: Plot, chapter: DatasetResults, faint: bool) -> dict[str, list[object]]:
    """Draws them; their points as columns."""
    columns: dict[str, list[object]] = {"method": [], "training images": [], "accuracy": []}
    for row in chapter.rows:
        counts = row.runs[0].metrics.get("counts")
        if not counts:
            continue
        curve = binned(Curve(row.label, np.maximum(counts, 1).tolist(), [run.metrics["per_class"] for run in row.runs]))
        points: list[Point] = list(zip(*curve, strict=True))
        look = chapter.look(row)
        quiet = len(chapter.rows) > CROWDED and row not in chapter.rows[:LOUD]
        plot.line(points, look, row.label, faint or quiet)
        if not (faint or quiet):
            plot.dots(points, look, [f"{row.label}: {y:.1f} % at {x:,.0f} images" for x, y in points])
        columns["method"] += [row.label] * len(points)
        columns["training images"] += [x for x, _ in points]
        columns["accuracy"] += [y for _, y in points]
    return columns


def shade_groups(plot: Plot, counts: np.ndarray) -> None:
    """Of classes in falling order, at places 0, 1, 2, …"""
    for group, mask in shot_groups(counts).items():
        if mask.any():
            at = np.flatnonzero(mask)
            plot.band(float(at[0]), float(at[-1] + 1), group, group)


def class_table(chapter: DatasetResults, classes: Classes) -> Element:
    """Every class by every comparable method, folded away."""
    shares = [per_class(row) for row in chapter.peers]
    head = ["class", "group", "images", *(row.label for row in chapter.peers)]
    body = [
        [
            TableCell(name(classes.names[c])),
            TableCell(classes.group(c)),
            _count(classes.counts[c]),
            *(_share(s[c]) for s in shares),
        ]
        for c in classes.order
    ]
    words = f"Test accuracy of each class in percent.{classes.some}"
    return folded("Every class", table(head, body, words, tall=True), kind="every")


def _count(images: int) -> TableCell:
    return TableCell(f"{images:,}", int(images))


def _share(percent: float) -> TableCell:
    return TableCell("–") if np.isnan(percent) else TableCell(f"{percent:.1f}", round(float(percent), 2))


def wins(chapter: DatasetResults) -> Element | None:
    """Where each method is better than a reference, and where worse: than cross-entropy, or else than the best over all."""
    classes, peers = chapter.classes, chapter.peers
    if len(peers) == 1 or classes is None:
        return None
    plain = next((row for row in peers if row.runs[0].config.method.name == "ce"), None)
    reference = plain or peers[0]
    others = [row for row in peers if row is not reference]
    gains = {row.label: (per_class(row) - per_class(reference))[classes.order] for row in others}
    widest = max(float(np.nanmax(np.abs(gain), initial=1.0)) for gain in gains.values())
    y = Scale(-1.08 * widest, 1.08 * widest)
    drawn = [
        _gain_figure(row.label, reference.label, gains[row.label], classes, y, chapter.look(row)) for row in others
    ]
    title = f"Wins and losses, class by class, against {reference.label}"
    why = "There is no run of cross-entropy: the method with the most images right is the measure."
    return section(title, None if plain else el("p", why, class_="small"), _gain_table(gains, classes), grid(drawn))


def _gain_figure(
    label: str, reference: str, gain: np.ndarray, classes: Classes, y: Scale, look: SeriesStyle
) -> Element:
    shows = f"Accuracy of {label} minus that of {reference}, class by class from frequent to rare."
    labels = ("classes, from frequent to rare", "difference, points")
    plot = Plot(f"{label} minus {reference}", shows, Scale(0, len(gain)), y, *labels, x_ticks=False)
    shade_groups(plot, classes.counts[classes.order])
    known = [(i, float(g)) for i, g in enumerate(gain) if np.isfinite(g)]
    if len(gain) <= TOLD_APART:
        names = [f"{classes.names[classes.order[i]]}: {signed(g)} points" for i, g in known]
        plot.bars([(i + 0.05, i + 0.95, g) for i, g in known], look, names)
    else:
        plot.spans([(i + 0.5, 0, g) for i, g in known], look, label)
    plot.reference([(0, 0), (len(gain), 0)], "no difference")
    columns = {"class": [classes.names[c] for c in classes.order], "difference": [round(float(g), 2) for g in gain]}
    return figure(plot, "differences", columns, f"Above the line {label} is better.{classes.some}")


def _gain_table(gains: dict[str, np.ndarray], classes: Classes) -> Element:
    groups = {g: mask for g, mask in shot_groups(classes.counts[classes.order]).items() if mask.any()}
    body = []
    for label, gain in gains.items():
        better, worse = int((gain > 0).sum()), int((gain < 0).sum())
        means = [float(np.nanmean(gain[mask])) if np.isfinite(gain[mask]).any() else None for mask in groups.values()]
        numbers = [TableCell(str(better), better), TableCell(str(worse), worse)]
        numbers += [TableCell("–" if m is None else signed(m), m) for m in means]
        largest = [_extreme(gain, pick, classes) for pick in (np.nanargmax, np.nanargmin)]
        body.append([TableCell(name(label)), *numbers, *largest])
    head = ["method", "classes better", "worse", *(f"mean of {g}" for g in groups), "largest gain", "largest loss"]
    return table(head, body, "Differences of accuracy in points, means over seeds")


def _extreme(gain: np.ndarray, pick: Callable[[np.ndarray], Any], classes: Classes) -> TableCell:
    """The class that gains or loses most; – where none does."""
    at = int(pick(gain)) if np.isfinite(gain).any() else None
    if at is None or (gain[at] <= 0 if pick is np.nanargmax else gain[at] >= 0):
        return TableCell("–")
    return TableCell(el("span", name(classes.names[classes.order[at]]), f" ({signed(gain[at])})"), float(gain[at]))
