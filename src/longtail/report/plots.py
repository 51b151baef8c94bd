"""Plots of finished runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from longtail.report.cells import Curve

matplotlib.use("Agg")
import matplotlib.pyplot as plt
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
    fresh = path.with_suffix(f".{os.getpid()}.tmp")  # a reader sees the old picture or the new one
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
