"""The paper's theory, drawn: what no run is needed for."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from longtail.reporting.plots import COLORS, make_figure, save_figure
from longtail.theory import closed_forms

EXAMPLE = 0.41  # alpha·K* of full ImageNet, the paper's own


def draw_theory(counts: Sequence[int], K: Sequence[float], alphas: Sequence[float], path: Path) -> None:
    """L_extra as the paper's Fig. 4 has it, and each class's optimal pair probability by alpha; K are its positives."""
    figure, (left, right) = make_figure(2, (10, 4.2))
    plot_extra(left, EXAMPLE)
    plot_pairs(right, np.array(counts), np.array(K), alphas)
    save_figure(figure, path)


def draw_extra(path: Path) -> None:
    figure, (axis,) = make_figure(1, (5.2, 4.0))
    plot_extra(axis, EXAMPLE)
    save_figure(figure, path)


def plot_extra(axis: Axes, alpha_K: float) -> None:
    P_sup, value = closed_forms.extra_curve(alpha_K)
    best = 1 / (1 + alpha_K)
    axis.plot(P_sup, value, color=COLORS[0])
    least = (best, closed_forms.extra(best, alpha_K))
    axis.plot(*least, "o", color=COLORS[3])
    axis.annotate(f"least at {best:.2f}", least, (0, 8), textcoords="offset points", ha="center")
    axis.set_title(f"$L_{{extra}}$ at $\\alpha K^* = {alpha_K:g}$", loc="left", fontsize=10)
    axis.set_xlabel("$P_{sup}$, the share of the centers")
    axis.grid(alpha=0.3)


def plot_pairs(axis: Axes, counts_C: closed_forms.Floats, K_C: closed_forms.Floats, alphas: Sequence[float]) -> None:
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
    axis.set_xlabel("training images of the class, rare ones to the right")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
