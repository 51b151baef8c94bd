"""How hard each class pulls at the classifier, from frequent to rare: the paper's Fig. 2, from the gradients.npz of runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.metrics import FloatArray
from longtail.reporting import reading
from longtail.reporting.chapter import SHOWN, DatasetResults
from longtail.reporting.html import Element
from longtail.reporting.parts import figure, section
from longtail.reporting.svg import Plot, Scale, around
from longtail.reporting.table import ResultRow

WORDS = (
    "Mean norm of the gradient of each class's classifier weights, over the last stage in which the classifier learns"
)

STEEP = "Head / tail: the most frequent tenth of the classes over the rarest; 1 is balanced."


class ClassGradientNorms(NamedTuple):
    """A method's gradient norms, a row for each seed (S, C), classes from the most frequent to the rarest."""

    label: str
    norms_SC: FloatArray

    @property
    def classes(self) -> int:
        return self.norms_SC.shape[1]

    @property
    def steepness(self) -> float | None:
        """The mean of the most frequent tenth of the classes over that of the rarest: 1 is balanced; None where that is 0."""
        mean_C, tenth = self.norms_SC.mean(0), -(-self.classes // 10)
        tail = mean_C[-tenth:].mean()
        return float(mean_C[:tenth].mean() / tail) if tail else None

    @property
    def named(self) -> str:
        """With what the figure is about."""
        ratio = self.steepness
        return self.label if ratio is None else f"{self.label}: head / tail {ratio:.{1 if ratio < 10 else 0}f}"

    def spread(self) -> FloatArray:
        """The lowest seed, the mean and the highest: (3, C)."""
        return np.stack([self.norms_SC.min(0), self.norms_SC.mean(0), self.norms_SC.max(0)])


def pull_of(row: ResultRow) -> ClassGradientNorms | None:
    """Of the seeds that have the file; None where none has."""
    counts = row.runs[0].metrics.get("counts") or []
    found = [norms_C for run in row.runs if (norms_C := reading.gradients(run)) is not None]
    order = np.argsort(-np.asarray(counts), kind="stable")
    known = [norms_C[order] for norms_C in found if len(norms_C) == len(counts)]
    return ClassGradientNorms(row.label, np.stack(known)) if known else None


def make_pulls(rows: Sequence[ResultRow]) -> dict[str, list[ClassGradientNorms]]:
    """By data, in the order of the rows."""
    panels: dict[str, list[ClassGradientNorms]] = {}
    for row in rows:
        if (pull := pull_of(row)) is not None:
            panels.setdefault(row.data, []).append(pull)
    return panels


def by_rank(chapter: DatasetResults) -> Element | None:
    """The section of a page; None where no run has the file."""
    found = [(row, pull) for row in chapter.rows if (pull := pull_of(row)) is not None]
    if not found:
        return None
    shows = "Gradient norms of the classes, frequent ones to the left; a flat line is balanced."
    most = max(pull.classes for _, pull in found)
    x = Scale(1, 1.02 * most)
    y = around(np.concatenate([pull.spread().ravel() for _, pull in found]).tolist(), log=True)
    plot = Plot("Gradients of the classifier", shows, x, y, "classes, from frequent to rare", "mean gradient norm")
    columns: dict[str, Sequence[Any]] = {"rank": range(1, most + 1)}
    for row, pull in found:
        shown = np.linspace(0, pull.classes - 1, min(pull.classes, SHOWN)).round().astype(int)
        low, mean, high = ([(float(c + 1), max(float(norm_C[c]), y.low)) for c in shown] for norm_C in pull.spread())
        plot.area(low, high, chapter.look(row))
        plot.marked_line(mean, chapter.look(row), row.label)
        columns |= {row.label: pull.norms_SC.mean(0).tolist()}
    words = f"{WORDS} (the paper's Fig. 2). Shaded: from the lowest seed to the highest. {STEEP}"
    legend = [(chapter.look(row), pull.named) for row, pull in found]
    return section("Gradients of the classifier", figure(plot, "gradients", columns, words, legend))
