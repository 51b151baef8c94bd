"""Results on one data set: the methods that were trained on it, which of them can be compared, and its classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longtail.metrics import IntArray, evenly_spaced, shot_groups
from longtail.reporting import run_artifacts
from longtail.reporting.html import SeriesStyle
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.significance import Support, comparison_key, group_support, overall_support, why_not_comparable
from longtail.run_folder import FinishedRun

MAX_CLASSES_SHOWN = 1_000  # in plots and tables
RARE_GROUPS = ("few", "medium")  # the rarest first


@dataclass(frozen=True)
class ClassList:
    """Names and training images of all classes, and the classes that are shown."""

    names: list[str]
    counts: IntArray
    order: IntArray
    """Indices of the classes shown, from frequent to rare: all of them, or an evenly spaced subset."""

    @property
    def subset_note(self) -> str:
        """A sentence for captions if only a subset is shown."""
        total = len(self.counts)
        return "" if len(self.order) == total else f" {len(self.order):,} of the {total:,} classes, evenly spaced."

    def group(self, c: int) -> str:
        """Return the shot group of a class."""
        return next(name for name, mask in shot_groups(self.counts[[c]]).items() if mask[0])


@dataclass(frozen=True)
class DatasetResults:
    """The rows of one data set."""

    data: str
    rows: tuple[ResultRow, ...]
    """Best first."""

    @cached_property
    def comparable(self) -> tuple[ResultRow, ...]:
        """The rows that are compared with each other: same images, same length of training."""
        reasons = why_not_comparable([comparison_key(row) for row in self.rows])
        return tuple(row for row, reason in zip(self.rows, reasons, strict=True) if not reason)

    @cached_property
    def rare_group(self) -> str | None:
        """The rarest shot group with results; None if all tested classes have many training images."""
        return next((group for group in RARE_GROUPS if any(row.values(group) for row in self.comparable)), None)

    @cached_property
    def classes(self) -> ClassList | None:
        """The classes; None if the runs do not store the class counts."""
        return read_classes(self.comparable[0].runs[0])

    @cached_property
    def support(self) -> Support:
        """The support of the verdict: the rare classes, or all test images if there are no rare classes or no class counts."""
        first = self.comparable[0].runs[0]
        return (group_support(first, self.rare_group) if self.rare_group else None) or overall_support(first)

    @cached_property
    def untested_groups(self) -> dict[str, int]:
        """Number of classes in each shot group that is rarer than `rare_group` and has no test images."""
        first, sizes = self.comparable[0].runs[0], dict[str, int]()
        if self.classes:
            sizes = {group: int(mask.sum()) for group, mask in shot_groups(self.classes.counts).items()}
        rarer = RARE_GROUPS[: RARE_GROUPS.index(self.rare_group)] if self.rare_group else RARE_GROUPS
        return {group: sizes[group] for group in rarer if sizes.get(group) and group_support(first, group) is None}

    def style(self, row: ResultRow) -> SeriesStyle:
        """Return the color and marker of a row in all plots."""
        return SeriesStyle(self.rows.index(row))


def group_by_dataset(rows: Sequence[ResultRow]) -> list[DatasetResults]:
    """Group rows by data set, each with its best row first."""
    by_data: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_data.setdefault(row.data, []).append(row)
    return [DatasetResults(data, tuple(sorted(own, key=lambda r: -r.mean("top1")))) for data, own in by_data.items()]


def read_classes(run: FinishedRun) -> ClassList | None:
    """Return the classes of a run; None if it does not store the class counts."""
    counts = run_artifacts.train_counts(run)
    if counts is None:
        return None
    total = len(counts)
    names = [str(name) for name in run.metrics.get("class_names") or range(total)]
    order = np.argsort(-counts, kind="stable")
    return ClassList(names, counts, order[evenly_spaced(total, MAX_CLASSES_SHOWN)])
