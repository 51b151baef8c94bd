"""How many test images a figure rests on, and how far another test set would move it."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from longtail.metrics import TOO_FEW, FloatArray, IntArray, shot_groups
from longtail.reporting import reading
from longtail.reporting.parts import plural
from longtail.run_folder import FinishedRun
from longtail.text import escape_nonprintable

SOUND = 100  # test images; of fewer no interval is called narrow
DECIDE_NOTHING = "too few to decide which method is better there"


class Tested(NamedTuple):
    """The T classes of a group that have test images: its figure is the mean of their accuracies, each counting alike.

    All images at once are as one class: their figure is the share that is right."""

    metric: str
    classes_T: IntArray | None
    """Their indices; None: all images at once."""
    images_T: IntArray | None
    """Test images; None where the run does not tell."""
    untested: int
    """Classes of the group without a test image, which the figure leaves out."""

    @property
    def images(self) -> int | None:
        return None if self.images_T is None else int(self.images_T.sum())

    @property
    def too_few(self) -> bool:
        return self.images is not None and self.images < TOO_FEW

    @property
    def where(self) -> str:
        return "over all test images" if self.classes_T is None else "on rare classes"

    @property
    def size(self) -> str:
        who = "all classes together" if self.classes_T is None else "the rare classes"
        return f"{who} have {plural(self.images or 0, 'test image')}"

    def places(self, y_N: IntArray) -> IntArray:
        """Which of the T classes each image is of; -1 for another."""
        if self.classes_T is None:
            return np.zeros_like(y_N)
        place_C = np.full(1 + max(y_N.max(), self.classes_T.max()), -1)
        place_C[self.classes_T] = np.arange(len(self.classes_T))
        return np.asarray(place_C[y_N])

    def __str__(self) -> str:
        if self.classes_T is None:
            return self.size
        left_out = f", {self.untested:,} more without test images left out" if self.untested else ""
        images = "" if self.images is None else f", {plural(self.images, 'test image')}"
        return f"mean over {plural(len(self.classes_T), 'class')}{images}{left_out}"


def basis(run: FinishedRun, group: str) -> Tested | None:
    """None where nothing of the group was tested, or the run does not tell which classes it has."""
    counts_C, images_C, shares = reading.counts(run), reading.tested(run), run.metrics.get("per_class")
    if counts_C is None or not shares:
        return None
    group_C, known_C = shot_groups(counts_C)[group], np.array([share is not None for share in shares])
    classes_T = np.flatnonzero(group_C & known_C)
    if len(classes_T) == 0:
        return None
    images_T = None if images_C is None else images_C[classes_T]
    return Tested(group, classes_T, images_T, int((group_C & ~known_C).sum()))


def whole(run: FinishedRun) -> Tested:
    """All test images."""
    images_C = reading.tested(run)
    return Tested("top1", None, None if images_C is None else images_C.sum(keepdims=True), 0)


def noise(shares_T: FloatArray, images_T: IntArray) -> float:
    """Half the 95 % interval of a mean over classes, in points, over test sets of this size.

    The variance is the sum of p(1 - p)/n over T². A class that is all right or all wrong would have none, however few its
    images: so each counts two images more, one right and one wrong (Laplace). Class by class and not pooled, as classes of 0 %
    and 100 % with many images each are no halves; where a class has an image or two it errs on the side of doubt.
    """
    p_T = (shares_T * images_T + 1) / (images_T + 2)
    return 196 * math.sqrt(float((p_T * (1 - p_T) / images_T).sum())) / len(images_T)


def paired_noise(d_N: FloatArray, place_N: IntArray) -> float:
    """The same of the difference of two methods that answered the same images: `d_N`, from -1 to 1, by image and class.

    Here too each class counts two images more: one that only the first method has right, and one that only the second has.
    """
    n_T, sum_T, square_T = (np.bincount(place_N, weights) for weights in (None, d_N, d_N**2))
    variance_T = (square_T + 2) / (n_T + 2) - (sum_T / (n_T + 2)) ** 2
    return 196 * math.sqrt(float((variance_T / n_T).sum())) / len(n_T)


def few_rests_on(runs: Iterable[tuple[str, FinishedRun]], escape: Callable[[object], str] = escape_nonprintable) -> str:
    """Return a sentence on the number of test images behind `few`, for each data set; empty if it is not known.

    `escape` is applied to the names of data sets.
    """
    found = {data: base for data, run in runs if (base := basis(run, "few")) is not None and base.images is not None}
    said = [
        f"{base}{f' of {escape(data)}' if len(found) > 1 else ''}{f' ({DECIDE_NOTHING})' if base.too_few else ''}"
        for data, base in found.items()
    ]
    return f" few: {'; '.join(said)}." if said else ""
