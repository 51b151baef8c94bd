"""Whether a lead would outlast other test images: both methods answered the same ones, and are compared image by image."""

import math
from collections.abc import Sequence

import numpy as np

from longtail.metrics import FloatArray, IntArray
from longtail.reporting import reading
from longtail.reporting.chapter import mean, per_class
from longtail.reporting.table import ResultRow
from longtail.reporting.tested import Tested, noise, paired_noise
from longtail.reporting.ties import Verdict


def holds(first: ResultRow, second: ResultRow, found: Verdict, base: Tested) -> bool:
    """Whether they are further apart than other test images could bring them; no, where it is not known how many there are."""
    lead, alone = abs(found.difference or 0), [figure_noise(row, base) for row in (first, second)]
    if lead > sum(alone):  # no pairing comes to more: the files need not be read
        return True
    paired = difference_noise(first, second, found.seeds, base)
    return lead > (math.hypot(*alone) if paired is None else paired)


def doubt(base: Tested) -> str:
    """Why a lead that does not hold is only likely."""
    unknown = "how many test images that rests on is not known"
    return unknown if base.images_T is None else "by less than other test images could change"


def figure_noise(row: ResultRow, base: Tested) -> float:
    """Half the 95 % interval, in points, of one method's figure over such test sets; infinite where their size is not known."""
    if base.images_T is None:
        return math.inf
    shares_T = np.array([mean(row, "top1")]) if base.classes_T is None else per_class(row)[base.classes_T]
    return noise(shares_T / 100, base.images_T)


def difference_noise(first: ResultRow, second: ResultRow, seeds: Sequence[int], base: Tested) -> float | None:
    """The same of a difference over these seeds; None where the runs do not tell what they answered, or had other images."""
    ours, theirs = _answers(first, seeds), _answers(second, seeds)
    if ours is None or theirs is None or not np.array_equal(ours[0], theirs[0]):
        return None
    place_N = base.places(ours[0])
    here_N = place_N >= 0
    if base.images_T is None or not np.array_equal(np.bincount(place_N[here_N]), base.images_T):
        return None
    return paired_noise((ours[1] - theirs[1])[here_N], place_N[here_N])


def _answers(row: ResultRow, seeds: Sequence[int]) -> tuple[IntArray, FloatArray] | None:
    """Of the test images (N,): their classes, and the share of seeds that have them right."""
    every = [reading.answers(run) for run in row.runs if run.seed in seeds]
    known = [found for found in every if found is not None]
    if len(known) < len(every) or not all(np.array_equal(found.labels_N, known[0].labels_N) for found in known):
        return None
    return known[0].labels_N, np.mean([found.right_N for found in known], axis=0)
