"""Plots of the theory of the paper, which need no runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from longtail.reporting.plots import COLORS, save_figure
from longtail.theory import closed_forms

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
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_extra(left, PAPER_ALPHA_K)
    plot_pairs(right, np.array(counts), np.array(K), alphas)
    save_figure(figure, path)


def draw_extra(path: Path) -> None:
    """Plot Fig. 4 of the paper, for the example of ImageNet."""
    figure = Figure(figsize=(5.2, 4.0), layout="constrained")
    axis = figure.subplots()
    plot_extra(axis, PAPER_ALPHA_K)
    save_figure(figure, path)


def plot_extra(axis: Axes, alpha_K: float) -> None:
    """Plot L_extra over P_sup, with its minimum."""
    P_sup, value = closed_forms.extra_curve(alpha_K)
    best = 1 / (1 + alpha_K)
    axis.plot(P_sup, value, color=COLORS[0])
    minimum = (best, closed_forms.extra(best, alpha_K))
    axis.plot(*minimum, "o", color=COLORS[3])
    axis.annotate(f"minimum at {best:.2f}", minimum, (0, 8), textcoords="offset points", ha="center")
    axis.set_title(f"$L_{{extra}}$ at $\\alpha K^* = {alpha_K:g}$", loc="left", fontsize=10)
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
