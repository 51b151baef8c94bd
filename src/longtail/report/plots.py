"""Plots of finished runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from longtail.metrics import mean_std
from longtail.report.cells import Curve
from longtail.report.table import Row, standing

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers tell them apart in print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
BINS = 10


def accuracy_by_frequency(panels: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Accuracy per class against its number of training images, head to the left; a panel for each draw, by its title."""
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    size = (7.0 if len(panels) == 1 else 1 + 4.2 * len(panels), 4.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    drawn: dict[str, Line2D] = {}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for curve in curves:
            i = labels.index(curve.label)  # a method looks the same in every panel
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            (drawn[curve.label],) = axis.plot(*binned(curve), linewidth=1.6, markersize=5, **look)
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
        axis.set_title(title, loc="left", fontsize=10)
        left, right = axis.get_xlim()
        for edge in (e for e in (100, 20) if right < e < left):  # the borders of the shot groups
            axis.axvline(edge, color="0.6", linewidth=0.8, linestyle=":")
    axes[0, 0].set_ylim(0, 103)
    axes[0, 0].set_ylabel("test accuracy of the class, %")
    axes[0, 0].legend([drawn[label] for label in labels], labels, frameon=False)
    point = "a class" if max(len(c.counts) for cs in panels.values() for c in cs) <= BINS else "a tenth of the classes"
    figure.supxlabel(
        f"training images of the class, rare ones to the right; each point {point}, all seeds", fontsize=10
    )
    save(figure, path)


GROUPS = {"many": "^", "medium": "s", "few": "v"}


def compared(rows: Sequence[Row], path: Path) -> None:
    """Accuracy of each method, best on top: all images, and classes with many, medium and few training images."""
    figure, axis = plt.subplots(figsize=(7.5, 1.6 + 0.34 * len(rows)), layout="constrained")
    height = list(range(len(rows)))
    for (group, marker), colour in zip(GROUPS.items(), COLOURS[1:4], strict=True):
        means = [mean_std(row.values(group))[0] if row.values(group) else None for row in rows]
        drawn = [(mean, y) for mean, y in zip(means, height, strict=True) if mean is not None]
        if drawn:
            axis.plot(*zip(*drawn, strict=True), marker, color=colour, markersize=6, label=group, alpha=0.9)
    spreads = [mean_std(row.values("top1")) for row in rows]
    axis.errorbar(
        [mean for mean, _ in spreads],
        height,
        xerr=[std or 0 for _, std in spreads],
        fmt="o",
        color=COLOURS[0],
        markersize=7,
        capsize=3,
        label="all, ± standard deviation",
    )
    axis.set_yticks(height, [row.label + mark(word) for row, word in zip(rows, standing(rows), strict=True)])
    axis.set_xlim(left=0)
    axis.set_xlabel("test accuracy, %, last epoch")
    axis.set_title(rows[0].data, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def mark(word: str) -> str:
    return f"  ({word})" if word else ""


def save(figure: Figure, path: Path) -> None:
    """Atomically: a reader sees the old picture or the new one."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    figure.savefig(fresh, dpi=150, format="png")
    plt.close(figure)
    fresh.replace(path)


def binned(curve: Curve) -> tuple[list[float], list[float]]:
    """Images and accuracy of classes of like frequency, over runs; ten bins where there are more classes."""
    counts, per_class = np.array(curve.counts), np.array(curve.per_class, dtype=float)
    order = np.argsort(-counts, kind="stable")
    order = order[~np.isnan(per_class).all(0)[order]]
    bins = np.array_split(order, min(BINS, len(order)))
    return [float(counts[b].mean()) for b in bins], [float(np.nanmean(per_class[:, b])) for b in bins]
