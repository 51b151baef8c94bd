"""Statistical comparison of methods: seed-paired differences, the uncertainty from the size of the test set, and rankings.

A lead is checked in two ways. The 95 % t interval of the seed-paired difference shows whether it could come from the seeds;
if the interval contains zero, the methods are tied. The interval over test sets of the same size shows whether it could come
from the choice of test images.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from longtail.metrics import MIN_TEST_IMAGES, FloatArray, IntArray, paired_difference, shot_groups
from longtail.reporting import run_artifacts
from longtail.reporting.html import format_count
from longtail.reporting.result_rows import ResultRow
from longtail.run_folder import FinishedRun
from longtail.text import escape_nonprintable

MIN_SEEDS = 3  # common seeds that a verdict needs
MIN_IMAGES_FOR_GOOD = 100  # test images; with fewer, the size of the test set is never called good
TOO_FEW_TO_DECIDE = "too few to decide which method is better there"
TIES_LEGEND = (
    "best: the highest mean; tied: the 95 % interval of its seed-paired difference from the best contains zero "
    "(at least three common seeds)."
)
DIFFERENT_LENGTH, DIFFERENT_IMAGES = "different length", "different images"
PACO_LABEL = "PaCo"

# Uncertainty from seeds


class SeedComparison(NamedTuple):
    """The seed-paired difference of two methods; the last three fields are None if there are too few common seeds."""

    seeds: list[int]
    """Common seeds."""
    difference: float | None = None
    """Mean of first - second."""
    half_width: float | None = None
    """Half the width of the 95 % t interval."""
    outcome: Literal["ahead", "tied", "behind"] | None = None


def compare_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> SeedComparison:
    """Compare two methods by their values per seed; they are tied if the interval of first - second contains zero."""
    seeds = [s for s in first if s in second]
    if len(seeds) < MIN_SEEDS:
        return SeedComparison(seeds)
    mean, half = paired_difference([first[s] for s in seeds], [second[s] for s in seeds])
    return SeedComparison(seeds, mean, half, "tied" if abs(mean) <= half else "ahead" if mean > 0 else "behind")


def rank_labels(values_by_seed: Sequence[Mapping[int, float]]) -> list[str]:
    """Label each method: "best", "tied" with the best, empty if it is behind, or "no verdict" if it has too few seeds.

    The best is chosen among the methods with enough seeds. If there are fewer than two of them, all labels are empty.
    """
    enough = [i for i, by_seed in enumerate(values_by_seed) if len(by_seed) >= MIN_SEEDS]
    if len(enough) < 2:
        return [""] * len(values_by_seed)
    best = max(enough, key=lambda i: sum(values_by_seed[i].values()) / len(values_by_seed[i]))
    labels = {"ahead": "", "tied": "tied", "behind": "", None: "no verdict"}
    found = [labels[compare_seeds(by_seed, values_by_seed[best]).outcome] for by_seed in values_by_seed]
    return ["best" if i == best else label for i, label in enumerate(found)]


class ComparisonKey(NamedTuple):
    """Rows with equal keys can be compared."""

    data: str
    images: str
    """Checksum of the images."""
    epochs: int


def comparison_key(row: ResultRow) -> ComparisonKey:
    """Return the comparison key of a row."""
    return ComparisonKey(row.data, row.runs[0].environment["data"]["checksum"], row.runs[0].config.train.epochs)


def why_not_comparable(keys: Sequence[ComparisonKey]) -> list[str]:
    """Return for each row why it is not compared with the others; empty for the rows that are.

    The most frequent key of each data set is compared; among equally frequent keys, the one with the longest training.
    """
    times, main = Counter(keys), dict[str, ComparisonKey]()
    for key in sorted(times, key=lambda key: (times[key], key.epochs, key.images)):
        main[key.data] = key
    labels = {True: "", False: DIFFERENT_LENGTH}
    return [labels[key == main[key.data]] if key.images == main[key.data].images else DIFFERENT_IMAGES for key in keys]


def rank_rows(rows: Sequence[ResultRow], metric: str = "top1") -> list[str]:
    """Return the rank label of each row among the comparable rows of its data set, or why it is not comparable."""
    labels = why_not_comparable([comparison_key(row) for row in rows])
    for data in {row.data for row in rows}:
        comparable = [i for i, row in enumerate(rows) if row.data == data and not labels[i]]
        for i, label in zip(comparable, rank_labels([rows[i].by_seed(metric) for i in comparable]), strict=True):
            labels[i] = label
    return labels


def explain_labels(labels: Collection[str]) -> str:
    """Return sentences that explain the labels of rows, with a leading space; empty if there is nothing to explain."""
    excluded = ", ".join(label for label in (DIFFERENT_LENGTH, DIFFERENT_IMAGES) if label in labels)
    legend = f" {TIES_LEGEND}" if "best" in labels else ""
    return legend + (f" {excluded}: not compared with the others." if excluded else "")


class Ranking(NamedTuple):
    """The best row by one metric, and its lead over each of the others, smallest lead first."""

    best: ResultRow
    others: list[tuple[ResultRow, SeedComparison]]

    def with_outcome(self, *outcomes: str | None) -> list[tuple[ResultRow, SeedComparison]]:
        """Return the other rows for which the comparison with the best has one of these outcomes."""
        return [(row, comparison) for row, comparison in self.others if comparison.outcome in outcomes]


def rank_methods(rows: Sequence[ResultRow], metric: str) -> Ranking:
    """Rank rows by a metric; the best is chosen among rows with enough seeds if there are at least two of them."""
    scored = sorted((row for row in rows if row.values(metric)), key=lambda row: -row.mean(metric))
    enough = [row for row in scored if len(row.by_seed(metric)) >= MIN_SEEDS]
    best = enough[0] if len(enough) > 1 else scored[0]
    others = [row for row in scored if row is not best]
    return Ranking(best, [(row, compare_seeds(best.by_seed(metric), row.by_seed(metric))) for row in others])


# Uncertainty from the size of the test set


class Support(NamedTuple):
    """The classes and test images behind a metric.

    The accuracy of a shot group is the mean over its T classes that have test images. The accuracy over all test images is
    treated as that of a single class.
    """

    metric: str
    classes_T: IntArray | None
    """Indices of the classes; None: all test images together."""
    images_T: IntArray | None
    """Test images of each class; None if the run does not store them."""
    num_untested: int
    """Classes of the group without test images, which the metric leaves out."""

    @property
    def num_images(self) -> int | None:
        """Number of test images."""
        return None if self.images_T is None else int(self.images_T.sum())

    @property
    def is_too_small(self) -> bool:
        """True if there are too few test images for a verdict."""
        return self.num_images is not None and self.num_images < MIN_TEST_IMAGES

    @property
    def scope(self) -> str:
        """The images that the metric covers, for use in a sentence."""
        return "over all test images" if self.classes_T is None else "on rare classes"

    @property
    def size(self) -> str:
        """A clause on the number of test images."""
        subject = "all classes together" if self.classes_T is None else "the rare classes"
        return f"{subject} have {format_count(self.num_images or 0, 'test image')}"

    def class_positions(self, y_N: IntArray) -> IntArray:
        """Return for each image the position of its class among the T classes, -1 if it is not one of them."""
        if self.classes_T is None:
            return np.zeros_like(y_N)
        position_C = np.full(1 + max(y_N.max(), self.classes_T.max()), -1)
        position_C[self.classes_T] = np.arange(len(self.classes_T))
        return np.asarray(position_C[y_N])

    def __str__(self) -> str:
        if self.classes_T is None:
            return self.size
        left_out = (
            f"; {format_count(self.num_untested, 'class')} without test images not included"
            if self.num_untested
            else ""
        )
        images = "" if self.num_images is None else f", {format_count(self.num_images, 'test image')}"
        return f"mean over {format_count(len(self.classes_T), 'class')}{images}{left_out}"


def group_support(run: FinishedRun, group: str) -> Support | None:
    """Return the support of a shot group; None if no class of it was tested or the run does not store class counts."""
    counts_C, images_C = run_artifacts.train_counts(run), run_artifacts.test_counts(run)
    per_class = run.metrics.get("per_class")
    if counts_C is None or not per_class:
        return None
    group_C, tested_C = shot_groups(counts_C)[group], np.array([accuracy is not None for accuracy in per_class])
    classes_T = np.flatnonzero(group_C & tested_C)
    if len(classes_T) == 0:
        return None
    images_T = None if images_C is None else images_C[classes_T]
    return Support(group, classes_T, images_T, int((group_C & ~tested_C).sum()))


def overall_support(run: FinishedRun) -> Support:
    """Return the support of the accuracy over all test images."""
    images_C = run_artifacts.test_counts(run)
    return Support("top1", None, None if images_C is None else images_C.sum(keepdims=True), 0)


def mean_half_width(accuracy_T: FloatArray, images_T: IntArray) -> float:
    """Return half the 95 % interval of a mean over classes, in points, over test sets of this size.

    The variance is the sum of p(1 - p)/n over T². A class with accuracy 0 or 1 would have no variance, however few images it
    has, so two images are added to each class, one right and one wrong (Laplace). The classes are not pooled, because classes
    with accuracies 0 and 1 and many images each have no uncertainty. The estimate is conservative for classes with one or
    two images.

    Args:
        accuracy_T: Accuracy of each class, from 0 to 1.
        images_T: Test images of each class.
    """
    p_T = (accuracy_T * images_T + 1) / (images_T + 2)
    return 196 * math.sqrt(float((p_T * (1 - p_T) / images_T).sum())) / len(images_T)


def paired_half_width(d_N: FloatArray, class_N: IntArray) -> float:
    """Return half the 95 % interval of the difference of two methods on the same images, in points.

    Two images are added to each class, one that only the first method has right and one that only the second has right.

    Args:
        d_N: Difference of correctness for each image, from -1 to 1.
        class_N: Class of each image.
    """
    n_T, sum_T, square_T = (np.bincount(class_N, weights) for weights in (None, d_N, d_N**2))
    variance_T = (square_T + 2) / (n_T + 2) - (sum_T / (n_T + 2)) ** 2
    return 196 * math.sqrt(float((variance_T / n_T).sum())) / len(n_T)


def describe_few_support(
    runs: Iterable[tuple[str, FinishedRun]], escape: Callable[[object], str] = escape_nonprintable
) -> str:
    """Return a sentence on the number of test images behind `few`, for each data set; empty if it is not known.

    Args:
        runs: Pairs of a data set's name and a run on it.
        escape: Applied to the names of data sets.
    """
    found = {
        data: support
        for data, run in runs
        if (support := group_support(run, "few")) is not None and support.num_images is not None
    }
    parts = [
        f"{support}{f' of {escape(data)}' if len(found) > 1 else ''}"
        f"{f' ({TOO_FEW_TO_DECIDE})' if support.is_too_small else ''}"
        for data, support in found.items()
    ]
    return f" few: {'; '.join(parts)}." if parts else ""


def exceeds_test_set_noise(first: ResultRow, second: ResultRow, comparison: SeedComparison, support: Support) -> bool:
    """Return whether the difference of two methods is larger than other test images could explain.

    Args:
        first: One method.
        second: The other method.
        comparison: Their seed-paired difference.
        support: Classes and images behind the metric; without a known number of images the result is False.
    """
    lead = abs(comparison.difference or 0)
    separate = [accuracy_half_width(row, support) for row in (first, second)]
    if lead > sum(separate):  # no pairing gives a wider interval, so the predictions need not be read
        return True
    paired = difference_half_width(first, second, comparison.seeds, support)
    return lead > (math.hypot(*separate) if paired is None else paired)


def explain_doubt(support: Support) -> str:
    """Return a clause on why a lead that does not exceed the noise of the test set is only likely."""
    unknown = "the number of test images is not known"
    return unknown if support.images_T is None else "the gap is within test-set sampling noise"


def accuracy_half_width(row: ResultRow, support: Support) -> float:
    """Return half the 95 % interval of a method's accuracy over such test sets; infinite if their size is unknown."""
    if support.images_T is None:
        return math.inf
    accuracy_T = np.array([row.mean("top1")]) if support.classes_T is None else row.per_class()[support.classes_T]
    return mean_half_width(accuracy_T / 100, support.images_T)


def difference_half_width(first: ResultRow, second: ResultRow, seeds: Sequence[int], support: Support) -> float | None:
    """Return half the 95 % interval of the difference of two methods over such test sets, in points.

    None if the predictions are missing or belong to different images.

    Args:
        first: One method.
        second: The other method.
        seeds: Seeds to average over.
        support: Classes and images behind the metric.
    """
    ours, theirs = _mean_correctness(first, seeds), _mean_correctness(second, seeds)
    if ours is None or theirs is None or not np.array_equal(ours[0], theirs[0]):
        return None
    class_N = support.class_positions(ours[0])
    covered_N = class_N >= 0
    if support.images_T is None or not np.array_equal(np.bincount(class_N[covered_N]), support.images_T):
        return None
    return paired_half_width((ours[1] - theirs[1])[covered_N], class_N[covered_N])


def _mean_correctness(row: ResultRow, seeds: Sequence[int]) -> tuple[IntArray, FloatArray] | None:
    """Return the labels (N,) of the test images, and the fraction of seeds that classify each of them correctly."""
    every = [run_artifacts.read_predictions(run) for run in row.runs if run.seed in seeds]
    known = [found for found in every if found is not None]
    if len(known) < len(every) or not all(np.array_equal(found.labels_N, known[0].labels_N) for found in known):
        return None
    return known[0].labels_N, np.mean([found.correct_N for found in known], axis=0)


# PaCo against the other methods


class Judgment(NamedTuple):
    """PaCo compared with the best of the other methods."""

    kind: Literal["yes", "likely", "tied", "likely-not", "no", "too-few-seeds", "too-few-images"]
    other: str
    """Label of the best of the other methods."""
    comparison: SeedComparison


def judge_paco(rows: Sequence[ResultRow], support: Support) -> Judgment | None:
    """Compare PaCo with the best of the other methods; None if there is no PaCo or no other method."""
    metric = support.metric
    scored = [row for row in rows if row.values(metric)]
    paco_rows = [row for row in scored if row.label.startswith(PACO_LABEL)]
    others = [row for row in scored if row not in paco_rows]
    if not paco_rows or not others:
        return None
    best, paco = rank_methods(others, metric).best, rank_methods(paco_rows, metric).best
    comparison = compare_seeds(paco.by_seed(metric), best.by_seed(metric))
    if comparison.outcome is None:
        return Judgment("too-few-seeds", best.label, comparison)
    if support.is_too_small:
        return Judgment("too-few-images", best.label, comparison)
    if comparison.outcome == "tied":
        return Judgment("tied", best.label, comparison)
    if exceeds_test_set_noise(paco, best, comparison, support):
        return Judgment("yes" if comparison.outcome == "ahead" else "no", best.label, comparison)
    return Judgment("likely" if comparison.outcome == "ahead" else "likely-not", best.label, comparison)
