"""What a page tells of one data set: the methods that were trained on it, and their classes from head to tail."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longtail.metrics import FloatArray, IntArray, mean_std, shot_groups
from longtail.reporting import reading
from longtail.reporting.svg import SeriesStyle
from longtail.reporting.table import ResultRow, place_of
from longtail.reporting.tested import Tested, basis, whole
from longtail.reporting.ties import why_not_comparable
from longtail.run_folder import FinishedRun

SHOWN = 1_000  # classes that are drawn and listed, at most
GROUPS = {"many": "more than 100", "medium": "20 to 100", "few": "fewer than 20"}  # training images
RARE = ("few", "medium")  # the rarest first


@dataclass(frozen=True)
class Classes:
    """Names and training images of all classes, and which of them are shown: all, or some at equal distances."""

    names: list[str]
    counts: IntArray
    order: IntArray
    """From the most frequent to the rarest."""

    @property
    def some(self) -> str:
        """What to say where not all are shown."""
        every = len(self.counts)
        return "" if len(self.order) == every else f" {len(self.order):,} of the {every:,} classes, at equal distances."

    def group(self, c: int) -> str:
        return next(name for name, mask in shot_groups(self.counts[[c]]).items() if mask[0])


@dataclass(frozen=True)
class DatasetResults:
    data: str
    rows: tuple[ResultRow, ...]
    """Best first."""

    @cached_property
    def peers(self) -> tuple[ResultRow, ...]:
        """The rows that can be compared: on the same images, equally long; the most numerous where there are several sets."""
        apart = why_not_comparable([place_of(row) for row in self.rows])
        return tuple(row for row, word in zip(self.rows, apart, strict=True) if not word)

    @cached_property
    def rare(self) -> str | None:
        """The group of the rarest classes that anything is known of; None where all classes have many images."""
        return next((group for group in RARE if any(row.values(group) for row in self.peers)), None)

    @cached_property
    def classes(self) -> Classes | None:
        return classes_of(self.peers[0].runs[0])

    @cached_property
    def tested(self) -> Tested:
        """What a verdict rests on: the rare classes; all test images where there are none, or it is not told which they are."""
        first = self.peers[0].runs[0]
        return (basis(first, self.rare) if self.rare else None) or whole(first)

    @cached_property
    def unseen(self) -> dict[str, int]:
        """Groups of rarer classes of which none has test images, with the number of their classes."""
        first, found = self.peers[0].runs[0], dict[str, int]()
        if self.classes:
            found = {group: int(mask.sum()) for group, mask in shot_groups(self.classes.counts).items()}
        rarer = RARE[: RARE.index(self.rare)] if self.rare else RARE
        return {group: found[group] for group in rarer if found.get(group) and basis(first, group) is None}

    def look(self, row: ResultRow) -> SeriesStyle:
        return SeriesStyle(self.rows.index(row))


def make_chapters(rows: Sequence[ResultRow]) -> list[DatasetResults]:
    by_data: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_data.setdefault(row.data, []).append(row)
    return [DatasetResults(data, tuple(sorted(own, key=lambda r: -mean(r, "top1")))) for data, own in by_data.items()]


def classes_of(run: FinishedRun) -> Classes | None:
    """None where the run does not tell how many images each class has."""
    counts = reading.counts(run)
    if counts is None:
        return None
    every = len(counts)
    names = [str(name) for name in run.metrics.get("class_names") or range(every)]
    order = np.argsort(-counts, kind="stable")
    return Classes(names, counts, order[np.linspace(0, every - 1, min(every, SHOWN)).round().astype(int)])


def mean(row: ResultRow, metric: str) -> float:
    return mean_std(row.values(metric))[0]


def per_class(row: ResultRow) -> FloatArray:
    """Accuracy of each class (C,), mean over seeds; NaN for a class without test images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing is NaN, as it should be
        return np.asarray(np.nanmean(np.array([run.metrics["per_class"] for run in row.runs], dtype=float), axis=0))
