"""Plots of finished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from longtail import files
from longtail.metrics import mean_std
from longtail.reporting.cells import BINS, Curve, binned
from longtail.reporting.gradients import ClassGradientNorms
from longtail.reporting.table import Dot

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

# Okabe and Ito's colors, which color-blind readers can tell apart; markers tell them apart in print.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
FORMATS = ("svg", "png", "pdf")


def accuracy_by_frequency(panels: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Accuracy per class against its number of training images, head to the left; a panel for each draw, by its title."""
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    size = (7.0 if len(panels) == 1 else 1 + 4.2 * len(panels), 4.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    drawn: dict[str, Line2D] = {}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for curve in curves:
            i = labels.index(curve.label)  # a method looks the same in every panel
            look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
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


GROUPS = {"many": ("^", COLORS[1]), "medium": ("s", COLORS[2]), "few": ("v", COLORS[3])}


def compared(panels: Mapping[str, Sequence[Dot]], path: Path) -> None:
    """Accuracy of each method, best on top: all images, and classes with many, medium and few training images."""
    tall, wide = max(map(len, panels.values())), len(panels)
    figure, axes = plt.subplots(
        1, wide, figsize=(1 + 6.5 * wide, 1.6 + 0.34 * tall), squeeze=False, layout="constrained"
    )
    for axis, (title, dots) in zip(axes[0], panels.items(), strict=True):
        heights = range(len(dots))
        for group, (marker, color) in GROUPS.items():
            drawn = [(np.mean(dot.values[group]), y) for y, dot in enumerate(dots) if dot.values[group]]
            if drawn:
                axis.plot(*zip(*drawn, strict=True), marker, color=color, markersize=6, label=group, alpha=0.9)
        means, stds = zip(*(mean_std(dot.values["top1"]) for dot in dots), strict=True)
        bars = {"color": COLORS[0], "markersize": 7, "capsize": 3, "label": "all, ± standard deviation"}
        axis.errorbar(means, heights, xerr=[std or 0 for std in stds], fmt="o", **bars)
        if known := [(dot.paper, y) for y, dot in enumerate(dots) if dot.paper is not None]:
            axis.plot(*zip(*known, strict=True), "x", color="black", markersize=7, label="all, as published")
        axis.set_yticks(heights, [dot.label + (f"  ({dot.word})" if dot.word else "") for dot in dots])
        axis.set_xlim(left=-1)
        axis.set_xlabel("test accuracy, %, last epoch")
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save(figure, path)


def against_latency(panels: Mapping[str, Sequence[Dot]], path: Path) -> None:
    """Accuracy against the milliseconds that a batch of 64 takes, as the paper's Fig. 1 has it: up and left is better.

    Time begins at 0 and has its spread: equal networks differ by what else the machine does, which is not to look like more.
    """
    labels = list(dict.fromkeys(dot.label for dots in panels.values() for dot in dots))
    size = (1 + 7.5 * len(panels), 2 + 0.2 * max(map(len, panels.values())))
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, dots) in zip(axes[0], panels.items(), strict=True):
        known = sorted((dot for dot in dots if dot.values["latency_b64"]), key=lambda dot: np.mean(dot.values["top1"]))
        places = [(float(np.mean(d.values["latency_b64"])), float(np.mean(d.values["top1"]))) for d in known]
        for dot, (x, y) in zip(known, places, strict=True):
            i = labels.index(dot.label)
            look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            wide, high = (mean_std(dot.values[name])[1] or 0 for name in ("latency_b64", "top1"))
            axis.errorbar(x, y, xerr=wide, yerr=high, capsize=2, markersize=6, linestyle="", **look)
        for line in sizes_of_one(known, places):
            axis.plot(*zip(*line, strict=True), color="0.6", linewidth=1, zorder=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("milliseconds for a batch of 64")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        name_beside(axis, [dot.label for dot in known], places)
    axes[0, 0].set_ylabel("test accuracy, %, last epoch")
    save(figure, path)


def sizes_of_one(dots: Sequence[Dot], places: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The places of each method that was run in several sizes ("RIDE, 2 experts", "RIDE, 3 experts"), from fast to slow."""
    families: dict[str, dict[float, tuple[float, float]]] = {}
    for dot, place in zip(dots, places, strict=True):
        for size in dot.values["parameters"][:1]:
            families.setdefault(dot.label.split(",")[0], {}).setdefault(size, place)
    return [sorted(family.values()) for family in families.values() if len(family) > 1]


def name_beside(axis: Axes, labels: Sequence[str], places: Sequence[tuple[float, float]]) -> None:
    """Labels in a column to the right, in the order of rising y, each with a line to its point: many points lie close."""
    if not labels:
        return
    low, high = axis.get_ylim()
    step = (high - low) / max(len(labels), 12)
    heights = [max(y, low) for _, y in places]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + step)
    excess = max(heights[-1] - high, 0)
    heights = [h - excess * i / max(len(heights) - 1, 1) for i, h in enumerate(heights)]
    for label, (x, y), height in zip(labels, places, heights, strict=True):
        at = (1.03, (height - low) / (high - low))
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "relpos": (0, 0.5)}
        axis.annotate(label, (x, y), at, textcoords="axes fraction", fontsize=8, va="center", arrowprops=line)


def gradient_norms(panels: Mapping[str, Sequence[ClassGradientNorms]], path: Path) -> None:
    """Gradient norms of the classes from frequent to rare, as the paper's Fig. 2 has them: flat is balanced."""
    size = (1 + 6.5 * len(panels), 4.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, pulls) in zip(axes[0], panels.items(), strict=True):
        for i, pull in enumerate(pulls):
            rank_C, (low_C, mean_C, high_C) = np.arange(1, pull.classes + 1), pull.spread()
            color, few = COLORS[i % len(COLORS)], pull.classes <= 2 * BINS
            look = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.6} if few else {"linewidth": 1}
            axis.fill_between(rank_C, low_C, high_C, color=color, alpha=0.2, linewidth=0)
            axis.plot(rank_C, mean_C, color=color, label=pull.named, **look)
        if any(pull.norms_SC.any() for pull in pulls):  # zeros alone have no logarithm
            logarithmic(axis)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("classes, from frequent to rare")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    axes[0, 0].set_ylabel("mean gradient norm of the class's weights")
    save(figure, path)


def logarithmic(axis: Axes) -> None:
    """The heights, with as many numbers beside them as their range needs."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else range(1, 10)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def save(figure: Figure, path: Path) -> None:
    """Atomically: a reader sees the old picture or the new one. Its ending says how it is written, PNG if nothing known."""
    kind = path.suffix.lower().lstrip(".")
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # the same runs give the same file
    with matplotlib.rc_context({"svg.hashsalt": "longtail"}), files.replace_output(path) as fresh:
        figure.savefig(fresh, dpi=150, format=kind if kind in FORMATS else "png", metadata=undated)
    plt.close(figure)
