"""Long tails drawn from balanced sets, by the rule of LDAM (Cao et al. 2019) that the field has kept. NumPy only."""

import hashlib

import numpy as np
import numpy.typing as npt

from longtail.metrics import shot_groups

__all__ = ["PROFILES", "checksum", "draw", "exponential_counts", "shot_groups", "step_counts", "validation_split"]

IntArray = npt.NDArray[np.int64]


def exponential_counts(largest: int, classes: int, factor: float) -> IntArray:
    """Images per class, falling from `largest` to `largest / factor` by a constant ratio; at least 1."""
    # Truncated by int() in double precision, as in the released code: rounding would give other sets.
    last = max(classes - 1, 1)
    return np.array([max(1, int(largest * (1 / factor) ** (c / last))) for c in range(classes)], np.int64)


def step_counts(largest: int, classes: int, factor: float) -> IntArray:
    """Images per class: `largest` in the first half, `largest / factor` in the rarer half; at least 1."""
    head = classes // 2  # the rarer half has the odd class
    tail = max(1, int(largest / factor))
    return np.array([largest] * head + [tail] * (classes - head), np.int64)


PROFILES = {"exponential": exponential_counts, "step": step_counts}


def draw(labels: npt.ArrayLike, counts: npt.ArrayLike, seed: int = 0) -> IntArray:
    """Indices of `counts[c]` images of each class c (at least 1, at most all), class by class.

    NumPy's legacy generator and the order of its calls are part of the definition: with seed 0 the indices are
    those of the CIFAR-LT sets that published figures are about.
    """
    y, wanted = np.asarray(labels), np.asarray(counts)
    generator = np.random.RandomState(seed)
    kept = []
    for c, n in enumerate(wanted):
        members = np.where(y == c)[0]
        generator.shuffle(members)
        kept.append(members[: max(1, n)])
    return np.concatenate(kept).astype(np.int64)


def validation_split(labels: npt.ArrayLike, fraction: float, seed: int = 0) -> tuple[IntArray, IntArray]:
    """Indices (train, validation), both rising; a class gives `fraction` of its images, at most a fifth.

    A fifth, rounded down, also spares a class's last two images: of 5 it gives 1, of fewer none.
    """
    y = np.asarray(labels)
    sizes = np.bincount(y)
    given = [min(round(fraction * n), n // 5) for n in sizes.tolist()]
    generator = np.random.RandomState(seed)
    held = np.zeros(len(y), bool)
    for c, n in enumerate(given):
        held[generator.permutation(np.where(y == c)[0])[:n]] = True
    return np.where(~held)[0].astype(np.int64), np.where(held)[0].astype(np.int64)


def checksum(indices: npt.ArrayLike) -> str:
    """Sixteen hex digits that tell two draws apart: the head of the SHA-256 of the indices, in order, as int64."""
    return hashlib.sha256(np.asarray(indices).astype("<i8").tobytes()).hexdigest()[:16]
