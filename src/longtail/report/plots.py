"""Plots of finished runs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from longtail.report.table import Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers tell them apart in print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
BINS = 10


def accuracy_by_frequency(rows: Sequence[Row], path: Path) -> None:
    """Accuracy per class against its number of training images, head to the left; many classes are averaged in ten bins."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for i, row in enumerate(rows):
        counts = np.array(row.runs[0].metrics["counts"])
        per_class = np.array(
            [r.metrics["per_class"] for r in row.runs], dtype=float
        )  # a class without test images: nan
        order = np.argsort(-counts, kind="stable")
        order = order[~np.isnan(per_class).all(0)[order]]
        bins = np.array_split(order, min(BINS, len(order)))
        x, y = [counts[b].mean() for b in bins], [np.nanmean(per_class[:, b]) for b in bins]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axis.plot(x, y, label=row.label, color=colour, marker=marker, linewidth=1.6, markersize=5)
    axis.set_xscale("log")
    axis.invert_xaxis()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("training images of the class (rare classes to the right)")
    axis.set_ylabel("test accuracy of the class, %")
    axis.set_ylim(0, 103)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    axis.set_title(rows[0].data, loc="left", fontsize=10)
    for edge in (100, 20):  # the borders of the shot groups
        axis.axvline(edge, color="0.6", linewidth=0.8, linestyle=":")
    figure.savefig(path, dpi=150)
    plt.close(figure)
