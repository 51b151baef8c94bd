"""Confusions between classes: counts, the matrix as a heat map, and a table for data sets of many classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.metrics import IntArray
from longtail.reporting import run_artifacts
from longtail.reporting.html import (
    Element,
    TableCell,
    collapsible,
    data_link,
    el,
    format_coordinate,
    format_count,
    missing_note,
    table,
    user_text,
)
from longtail.reporting.result_rows import ResultRow
from longtail.run_folder import FinishedRun

MAX_MATRIX_CLASSES = 60  # with more classes, the names are not readable
MAX_LISTED = 100  # rows of the table of confusions
MAX_NAME = 22  # characters of a class name at the matrix
MATRIX_SIDE, MIN_CELL, MAX_CELL = 640, 13, 30  # units
LETTER = 6.0  # units per letter of a class name
MIN_NUMBERED_CELL = 20  # units; smaller cells have no number
MAX_SMALL_CLASSES = 15  # with more classes, the matrix takes the full width
NO_CONFUSIONS = "metrics.json and predictions.npz have no predicted classes"


class Confusion(NamedTuple):
    """How often test images of a class are predicted as another one, summed over seeds."""

    truth: int
    predicted: int
    times: int
    images: int
    """Test images of the true class, summed over seeds."""


def find_confusions(runs: Sequence[FinishedRun]) -> list[Confusion] | None:
    """Return the confusions of runs, the most frequent first; None if no run stores its predictions."""
    pairs_K2, times_K = _predicted_pairs(runs)
    if not len(times_K):
        return None
    images_C = np.bincount(pairs_K2[:, 0], times_K).astype(np.int64)
    found = [
        Confusion(int(truth), int(predicted), int(times), int(images_C[truth]))
        for (truth, predicted), times in zip(pairs_K2, times_K, strict=True)
        if truth != predicted
    ]
    return sorted(found, key=lambda c: (-c.times, -c.times / c.images, c.truth, c.predicted))


def _predicted_pairs(runs: Sequence[FinishedRun]) -> tuple[IntArray, IntArray]:
    """Return the pairs of true and predicted class (K, 2) of the test images, and how often each occurs (K,)."""
    pairs, times = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.int64)]
    for run in runs:
        if run.metrics.get("confusion"):
            matrix_CC = np.array(run.metrics["confusion"], dtype=np.int64)
            pairs.append(np.argwhere(matrix_CC))
            times.append(matrix_CC[matrix_CC > 0])
        elif stored := run_artifacts.read_predictions(run):
            both_N2 = np.stack([stored.labels_N, stored.predicted_N], 1)
            valid_N = ((both_N2 >= 0) & (both_N2 < len(run.metrics["per_class"]))).all(1)
            pairs.append(both_N2[valid_N])
            times.append(np.ones(int(valid_N.sum()), np.int64))
    distinct_K2, position = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    totals = np.bincount(position.reshape(-1), np.concatenate(times), len(distinct_K2)).astype(np.int64)
    return distinct_K2, totals


def confusion_matrix(runs: Sequence[FinishedRun]) -> IntArray | None:
    """Return the confusion matrix (C, C), summed over the runs that store it; None if none does. Rows are the true classes."""
    stored = [run.metrics["confusion"] for run in runs if run.metrics.get("confusion")]
    return np.sum(np.array(stored, dtype=np.int64), axis=0) if stored else None


def matrix_section(row: ResultRow) -> Element:
    """Return the confusion matrix of a method as a heat map, or a table of confusions if there are many classes."""
    matrix_CC, names = confusion_matrix(row.runs), class_names(row.runs[0])
    if matrix_CC is not None and len(matrix_CC) <= MAX_MATRIX_CLASSES:
        counts = run_artifacts.train_counts(row.runs[0])
        order = np.arange(len(matrix_CC)) if counts is None else np.argsort(-counts, kind="stable")
        return _heat_map(matrix_CC[np.ix_(order, order)], [names[c] for c in order], len(row.runs))
    confusions = find_confusions(row.runs)
    if confusions is None:
        return missing_note("confusion matrix", NO_CONFUSIONS)
    return _confusion_list(confusions, names, len(row.runs))


def class_names(run: FinishedRun) -> list[str]:
    """Return the names of all classes."""
    names = run.metrics.get("class_names") or []
    return [str(name) for name in names] or [f"class {c}" for c in range(len(run.metrics["per_class"]))]


def _heat_map(matrix_CC: IntArray, names: Sequence[str], seeds: int) -> Element:
    classes, images_C = len(names), matrix_CC.sum(1)
    shown = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in names]
    margin = 28 + LETTER * max(map(len, shown))
    cell = min(max(MATRIX_SIDE / classes, MIN_CELL), MAX_CELL)
    side, marks = classes * cell, []
    is_numbered = cell >= MIN_NUMBERED_CELL
    palest, darkest = (0.2, 0.5) if is_numbered else (0.15, 1.0)  # numbers cannot be read on dark fields
    for i, j in np.argwhere(matrix_CC):
        times, images = int(matrix_CC[i, j]), int(images_C[i])
        share = times / images
        said = f"{times:,} of {images:,} ({100 * share:.0f} %)"
        text = f"{names[i]}: {said} correct" if i == j else f"{names[i]} predicted as {names[j]}: {said}"
        x, y = margin + j * cell, margin + i * cell
        marks.append(
            el(
                "rect",
                el("title", text),
                x=format_coordinate(x),
                y=format_coordinate(y),
                width=format_coordinate(cell),
                height=format_coordinate(cell),
                fill_opacity=f"{palest + (darkest - palest) * share:.2f}",
                class_="hit" if i == j else "miss",
            )
        )
        if is_numbered:
            middle = {"x": format_coordinate(x + cell / 2), "y": format_coordinate(y + cell / 2 + 4)}
            marks.append(el("text", f"{times:,}", **middle, text_anchor="middle", class_="times"))
    labels = []
    edge = format_coordinate(margin - 4)
    for i, name in enumerate(shown):
        baseline = format_coordinate(margin + (i + 0.5) * cell + 4)
        labels.append(el("text", name, x=edge, y=baseline, text_anchor="end"))
        labels.append(el("text", name, transform=f"translate({baseline} {edge}) rotate(-90)"))
    center = format_coordinate(margin + side / 2)
    axes = (
        el("text", "predicted class", x=center, y=12, text_anchor="middle", class_="label"),
        el("text", "true class", transform=f"translate(12 {center}) rotate(-90)", text_anchor="middle", class_="label"),
    )
    frame = {"x": format_coordinate(margin), "y": format_coordinate(margin)}
    frame |= {"width": format_coordinate(side), "height": format_coordinate(side)}
    total = format_coordinate(margin + side + 2)
    svg = el(
        "svg",
        el("title", "Confusion matrix"),
        el("desc", "Test images by true class (rows) and predicted class (columns)."),
        *axes,
        *labels,
        el("rect", **frame, class_="ground"),
        *marks,
        viewBox=f"0 0 {total} {total}",
        role="img",
        class_="matrix large" if classes > MAX_SMALL_CLASSES else "matrix",
    )
    caption = (
        f"{_sum_note(seeds)}Rows are true classes and columns predicted classes, both from frequent to rare. Correct images "
        "are on the diagonal. The stronger the color, the larger the share of the true class. "
    )
    data: dict[str, list[Any]] = {"class": list(names)}
    data |= {f"predicted as {name}": matrix_CC[:, i].tolist() for i, name in enumerate(names)}
    readout = el("p", "Hover over a cell, or tap it, to see its values.", class_="readout", aria_live="polite")
    scrolled = el("div", svg, class_="scroll", tabindex=0, role="region", aria_label="Confusion matrix")
    below = el("figcaption", el("strong", "Confusion matrix."), f" {caption}", data_link("confusion_matrix", data))
    return el("figure", readout, scrolled, below, class_="wide")


def _confusion_list(confusions: Sequence[Confusion], names: Sequence[str], seeds: int) -> Element:
    body = [
        [
            TableCell(user_text(names[c.truth])),
            TableCell(user_text(names[c.predicted])),
            TableCell(f"{c.times:,}", c.times),
            TableCell(f"{100 * c.times / c.images:.1f} %", 100 * c.times / c.images),
        ]
        for c in confusions[:MAX_LISTED]
    ]
    columns: dict[str, list[Any]] = {
        "class": [names[c.truth] for c in confusions],
        "predicted as": [names[c.predicted] for c in confusions],
        "images": [c.times for c in confusions],
    }
    caption = f"{_sum_note(seeds)}Test images of a class that were predicted as another class"
    listed = table(["class", "predicted as", "images", "share of the class"], body, caption, is_tall=True)
    title = f"Confusions ({format_count(min(len(confusions), MAX_LISTED), 'pair')})"
    return collapsible(title, listed, el("p", data_link("confusions", columns), class_="small"))


def _sum_note(seeds: int) -> str:
    return f"Summed over {seeds} seeds. " if seeds > 1 else ""
