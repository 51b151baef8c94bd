"""Gradient norms of the classifier by class, from frequent to rare, as in the paper's Fig. 2, from gradients.npz of runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.metrics import FloatArray
from longtail.reporting import run_artifacts
from longtail.reporting.components import figure, section
from longtail.reporting.dataset_results import MAX_CLASSES_SHOWN, DatasetResults
from longtail.reporting.html import Element
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.svg import Plot, Scale, make_scale

CAPTION = (
    "Mean gradient norm of each class's classifier weights, over the last stage that trains the classifier "
    "(as in the paper's Fig. 2). Shaded: range over seeds. Head / tail: the most frequent tenth of the classes divided by the "
    "rarest tenth; 1 is balanced."
)


class ClassGradientNorms(NamedTuple):
    """Gradient norms of a method, one row per seed (S, C), classes from frequent to rare."""

    label: str
    norms_SC: FloatArray

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.norms_SC.shape[1]

    @property
    def head_tail_ratio(self) -> float | None:
        """Mean of the most frequent tenth of the classes divided by that of the rarest tenth; None if the latter is 0."""
        mean_C, tenth = self.norms_SC.mean(0), -(-self.num_classes // 10)
        tail = mean_C[-tenth:].mean()
        return float(mean_C[:tenth].mean() / tail) if tail else None

    @property
    def label_with_ratio(self) -> str:
        """The label for legends."""
        ratio = self.head_tail_ratio
        return self.label if ratio is None else f"{self.label}: head / tail {ratio:.{1 if ratio < 10 else 0}f}"

    def seed_range(self) -> FloatArray:
        """Return minimum, mean and maximum over seeds (3, C)."""
        return np.stack([self.norms_SC.min(0), self.norms_SC.mean(0), self.norms_SC.max(0)])


def class_gradient_norms(row: ResultRow) -> ClassGradientNorms | None:
    """Return the norms of the seeds that have gradients.npz; None if none has."""
    counts = row.runs[0].metrics.get("counts") or []
    found = [norms_C for run in row.runs if (norms_C := run_artifacts.read_gradient_norms(run)) is not None]
    order = np.argsort(-np.asarray(counts), kind="stable")
    known = [norms_C[order] for norms_C in found if len(norms_C) == len(counts)]
    return ClassGradientNorms(row.label, np.stack(known)) if known else None


def gradient_norms_by_dataset(rows: Sequence[ResultRow]) -> dict[str, list[ClassGradientNorms]]:
    """Return the norms for each data set, in the order of the rows."""
    panels: dict[str, list[ClassGradientNorms]] = {}
    for row in rows:
        if (norms := class_gradient_norms(row)) is not None:
            panels.setdefault(row.data, []).append(norms)
    return panels


def gradient_section(dataset: DatasetResults) -> Element | None:
    """Return the section of a page; None if no run has gradients.npz."""
    found = [(row, norms) for row in dataset.rows if (norms := class_gradient_norms(row)) is not None]
    if not found:
        return None
    description = "Gradient norms of the classes, frequent classes on the left; a flat line is balanced."
    num_classes = max(norms.num_classes for _, norms in found)
    x = Scale(1, 1.02 * num_classes)
    y = make_scale(np.concatenate([norms.seed_range().ravel() for _, norms in found]).tolist(), log=True)
    labels = ("classes, from frequent to rare", "mean gradient norm")
    plot = Plot("Gradients of the classifier", description, x, y, *labels)
    columns: dict[str, Sequence[Any]] = {"rank": range(1, num_classes + 1)}
    for row, norms in found:
        shown = np.linspace(0, norms.num_classes - 1, min(norms.num_classes, MAX_CLASSES_SHOWN)).round().astype(int)
        low, mean, high = (
            [(float(c + 1), max(float(norm_C[c]), y.low)) for c in shown] for norm_C in norms.seed_range()
        )
        plot.area(low, high, dataset.style(row))
        plot.marked_line(mean, dataset.style(row), row.label)
        columns |= {row.label: norms.norms_SC.mean(0).tolist()}
    legend = [(dataset.style(row), norms.label_with_ratio) for row, norms in found]
    return section("Gradients of the classifier", figure(plot, "gradients", columns, CAPTION, legend))
