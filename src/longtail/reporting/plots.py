"""Plots with Matplotlib: of finished runs, and of the theory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from longtail import files
from longtail.metrics import SHOT_GROUPS, mean_std
from longtail.reporting.class_accuracy import CLASS_BINS, Curve, bin_curve
from longtail.reporting.table import MethodPoint
from longtail.reporting.training_curves import ClassGradientNorms
from longtail.theory import closed_forms

# The colors of Okabe and Ito, which color-blind readers can tell apart; markers tell series apart in print.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GROUP_MARKERS = "^sv"  # many, medium, few
FORMATS = ("svg", "png", "pdf")


def make_figure(columns: int, size: tuple[float, float], sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes side by side, without pyplot and its global state.

    Args:
        columns: Number of axes.
        size: Width and height in inches.
        sharey: Whether the axes share the y axis.
    """
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, columns, sharey=sharey, squeeze=False)[0])


def _series_style(i: int) -> dict[str, Any]:
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}


def accuracy_by_frequency(panels: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Plot accuracy against training images per class, frequent classes on the left.

    Args:
        panels: The curves of each panel, by title.
        path: The file to write.
    """
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    size = (7.0 if len(panels) == 1 else 1 + 4.2 * len(panels), 4.2)
    figure, axes = make_figure(len(panels), size, sharey=True)
    drawn: dict[str, Line2D] = {}
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for curve in curves:
            style = _series_style(labels.index(curve.label))  # the same in every panel
            (drawn[curve.label],) = axis.plot(*bin_curve(curve), linewidth=1.6, markersize=5, **style)
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
        axis.set_title(title, loc="left", fontsize=10)
        left, right = axis.get_xlim()
        for edge in (e for e in (100, 20) if right < e < left):  # the bounds of the shot groups
            axis.axvline(edge, color="0.6", linewidth=0.8, linestyle=":")
    axes[0].set_ylim(0, 103)
    axes[0].set_ylabel("test accuracy of the class, %")
    axes[0].legend([drawn[label] for label in labels], labels, frameon=False)
    has_few_classes = max(len(c.counts) for cs in panels.values() for c in cs) <= CLASS_BINS
    point = "a class" if has_few_classes else "a tenth of the classes"
    label = f"training images of the class, rare classes on the right; each point is {point}, over all seeds"
    figure.supxlabel(label, fontsize=10)
    save_figure(figure, path)


def accuracy_by_method(panels: Mapping[str, Sequence[MethodPoint]], path: Path) -> None:
    """Plot the accuracy of each method over all images and in each shot group, with the best method on top.

    Args:
        panels: The methods of each panel, by title.
        path: The file to write.
    """
    rows, columns = max(map(len, panels.values())), len(panels)
    figure, axes = make_figure(columns, (1 + 6.5 * columns, 1.6 + 0.34 * rows))
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        heights = range(len(points))
        for group, marker, color in zip(SHOT_GROUPS, GROUP_MARKERS, COLORS[1:4], strict=True):
            drawn = [(np.mean(point.values[group]), y) for y, point in enumerate(points) if point.values[group]]
            if drawn:
                axis.plot(*zip(*drawn, strict=True), marker, color=color, markersize=6, label=group, alpha=0.9)
        means, stds = zip(*(mean_std(point.values["top1"]) for point in points), strict=True)
        bars: dict[str, Any] = {"color": COLORS[0], "markersize": 7, "capsize": 3, "label": "all, ± standard deviation"}
        axis.errorbar(means, heights, xerr=[std or 0 for std in stds], fmt="o", **bars)
        if published := [(point.published, y) for y, point in enumerate(points) if point.published is not None]:
            axis.plot(*zip(*published, strict=True), "x", color="black", markersize=7, label="all, as published")
        axis.set_yticks(heights, [point.label + (f"  ({point.rank})" if point.rank else "") for point in points])
        axis.set_xlim(left=-1)
        axis.set_xlabel("test accuracy, %, last epoch")
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, path)


def accuracy_by_latency(panels: Mapping[str, Sequence[MethodPoint]], path: Path) -> None:
    """Plot accuracy against the milliseconds for a batch of 64, as in the paper's Fig. 1; up and to the left is better.

    The time axis starts at 0 and the points have error bars, so that measurement noise between equal networks does not look
    like a difference.

    Args:
        panels: The methods of each panel, by title.
        path: The file to write.
    """
    labels = list(dict.fromkeys(point.label for points in panels.values() for point in points))
    size = (1 + 7.5 * len(panels), 2 + 0.2 * max(map(len, panels.values())))
    figure, axes = make_figure(len(panels), size)
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        known = [point for point in points if point.values["latency_b64"]]
        known.sort(key=lambda point: np.mean(point.values["top1"]))
        positions = [(float(np.mean(p.values["latency_b64"])), float(np.mean(p.values["top1"]))) for p in known]
        for point, (x, y) in zip(known, positions, strict=True):
            x_error, y_error = (mean_std(point.values[name])[1] or 0 for name in ("latency_b64", "top1"))
            style = _series_style(labels.index(point.label))
            axis.errorbar(x, y, xerr=x_error, yerr=y_error, capsize=2, markersize=6, linestyle="", **style)
        for line in group_model_sizes(known, positions):
            axis.plot(*zip(*line, strict=True), color="0.6", linewidth=1, zorder=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("milliseconds for a batch of 64")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        label_points(axis, [point.label for point in known], positions)
    axes[0].set_ylabel("test accuracy, %, last epoch")
    save_figure(figure, path)


def group_model_sizes(
    points: Sequence[MethodPoint], positions: Sequence[tuple[float, float]]
) -> list[list[tuple[float, float]]]:
    """Return the positions of each method with several model sizes ("RIDE, 2 experts", "RIDE, 3 experts"), fastest first."""
    families: dict[str, dict[float, tuple[float, float]]] = {}
    for point, position in zip(points, positions, strict=True):
        for size in point.values["parameters"][:1]:
            families.setdefault(point.label.split(",")[0], {}).setdefault(size, position)
    return [sorted(family.values()) for family in families.values() if len(family) > 1]


def label_points(axis: Axes, labels: Sequence[str], positions: Sequence[tuple[float, float]]) -> None:
    """Label points in a column on the right, each with a line to its point, because many points are close to each other.

    Args:
        axis: The axes.
        labels: Labels in the order of rising y.
        positions: Positions of the points.
    """
    if not labels:
        return
    low, high = axis.get_ylim()
    step = (high - low) / max(len(labels), 12)
    heights = [max(y, low) for _, y in positions]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + step)
    excess = max(heights[-1] - high, 0)
    heights = [h - excess * i / max(len(heights) - 1, 1) for i, h in enumerate(heights)]
    for label, (x, y), height in zip(labels, positions, heights, strict=True):
        at = (1.03, (height - low) / (high - low))
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "relpos": (0, 0.5)}
        axis.annotate(label, (x, y), at, textcoords="axes fraction", fontsize=8, va="center", arrowprops=line)


def gradient_norms(panels: Mapping[str, Sequence[ClassGradientNorms]], path: Path) -> None:
    """Plot gradient norms of the classes from frequent to rare, as in the paper's Fig. 2; a flat line is balanced.

    Args:
        panels: The methods of each panel, by title.
        path: The file to write.
    """
    figure, axes = make_figure(len(panels), (1 + 6.5 * len(panels), 4.2))
    for axis, (title, methods) in zip(axes, panels.items(), strict=True):
        for i, norms in enumerate(methods):
            rank_C, (low_C, mean_C, high_C) = np.arange(1, norms.num_classes + 1), norms.seed_range()
            style = _series_style(i)
            has_markers = norms.num_classes <= 2 * CLASS_BINS
            line = (
                style | {"markersize": 5, "linewidth": 1.6}
                if has_markers
                else {"color": style["color"], "linewidth": 1}
            )
            axis.fill_between(rank_C, low_C, high_C, color=style["color"], alpha=0.2, linewidth=0)
            axis.plot(rank_C, mean_C, label=norms.label_with_ratio, **line)
        if any(norms.norms_SC.any() for norms in methods):  # a logarithmic axis needs a positive value
            use_log_scale(axis)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("classes, from frequent to rare")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("mean gradient norm of the class's weights")
    save_figure(figure, path)


def use_log_scale(axis: Axes) -> None:
    """Make the y axis logarithmic, with as many ticks as its range needs."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else range(1, 10)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the path's extension (PNG if it is unknown)."""
    kind = path.suffix.lower().lstrip(".")
    no_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # so that files are reproducible
    with matplotlib.rc_context({"svg.hashsalt": "longtail"}), files.replace_output(path) as fresh:
        figure.savefig(fresh, dpi=150, format=kind if kind in FORMATS else "png", metadata=no_date)


# Theory


PAPER_ALPHA_K = 0.41
"""alpha·K* of ImageNet, which is the example of the paper."""


def draw_theory(counts: Sequence[int], K: Sequence[float], alphas: Sequence[float], path: Path) -> None:
    """Plot L_extra as in Fig. 4 of the paper, and the optimal pair probability of each class for several alphas.

    Args:
        counts: The number of training images of each class.
        K: The number of positives of each class.
        alphas: The alphas.
        path: The file.
    """
    figure, (left, right) = make_figure(2, (10, 4.2))
    plot_extra(left)
    plot_pairs(right, np.array(counts), np.array(K), alphas)
    save_figure(figure, path)


def draw_extra(path: Path) -> None:
    """Plot Fig. 4 of the paper, for the example of ImageNet."""
    figure, (axis,) = make_figure(1, (5.2, 4.0))
    plot_extra(axis)
    save_figure(figure, path)


def plot_extra(axis: Axes) -> None:
    """Plot L_extra over P_sup, with its minimum."""
    P_sup, value = closed_forms.extra_curve(PAPER_ALPHA_K)
    best = 1 / (1 + PAPER_ALPHA_K)
    axis.plot(P_sup, value, color=COLORS[0])
    minimum = (best, closed_forms.extra(best, PAPER_ALPHA_K))
    axis.plot(*minimum, "o", color=COLORS[3])
    axis.annotate(f"minimum at {best:.2f}", minimum, (0, 8), textcoords="offset points", ha="center")
    axis.set_title(f"$L_{{extra}}$ at $\\alpha K^* = {PAPER_ALPHA_K:g}$", loc="left", fontsize=10)
    axis.set_xlabel("$P_{sup}$, the probability of the centers")
    axis.grid(alpha=0.3)


def plot_pairs(axis: Axes, counts_C: closed_forms.Floats, K_C: closed_forms.Floats, alphas: Sequence[float]) -> None:
    """Plot the optimal probability of a positive pair over the number of training images of its class.

    Args:
        axis: The axes.
        counts_C: The number of training images of each class.
        K_C: The number of positives of each class.
        alphas: The alphas of PaCo.
    """
    order = np.argsort(-counts_C, kind="stable")
    curves = {"SupCon": closed_forms.supcon_pair(K_C)} | {
        f"PaCo, alpha {a:g}": closed_forms.pair(a, K_C) for a in alphas
    }
    for i, (label, pair_C) in enumerate(curves.items()):
        color, line = ("black", "--") if label == "SupCon" else (COLORS[(i - 1) % 6], "-")
        axis.plot(counts_C[order], 100 * pair_C[order], label=label, color=color, linestyle=line)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter("{x:g}")
        scale.set_minor_locator(NullLocator())
    axis.invert_xaxis()
    axis.set_title("optimal probability of a positive pair, %", loc="left", fontsize=10)
    axis.set_xlabel("training images of the class (rare classes on the right)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
