"""Long-tailed subsets of balanced data sets, drawn as in LDAM (Cao et al. 2019), and validation splits. NumPy only."""

import hashlib

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def exponential_counts(largest: int, classes: int, factor: float) -> IntArray:
    """Return the number of images per class for an exponential profile, from `largest` down to `largest / factor`.

    Args:
        largest: The number of images of the first class.
        classes: The number of classes.
        factor: The imbalance factor.
    """
    # Truncated by int() in double precision, as in the released code: rounding would give other sets.
    last = max(classes - 1, 1)
    return np.array([max(1, int(largest * (1 / factor) ** (c / last))) for c in range(classes)], np.int64)


def step_counts(largest: int, classes: int, factor: float) -> IntArray:
    """Return the number of images per class for a step profile: `largest` in the first half, `largest / factor` in the second.

    Args:
        largest: The number of images of each class of the first half.
        classes: The number of classes; if it is odd, the second half has one class more.
        factor: The imbalance factor.
    """
    head = classes // 2
    tail = max(1, int(largest / factor))
    return np.array([largest] * head + [tail] * (classes - head), np.int64)


PROFILES = {"exponential": exponential_counts, "step": step_counts}


def draw_subset(labels: npt.ArrayLike, counts: npt.ArrayLike, seed: int = 0) -> IntArray:
    """Return the indices of `counts[c]` random images of each class c, class by class.

    NumPy's legacy generator and the order of its calls are part of the definition: with seed 0 the indices are those of the
    CIFAR-LT sets for which results are published.

    Args:
        labels: The label of each image.
        counts: The number of images to draw from each class: at least 1, and at most all images of the class.
        seed: The seed of the generator.
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
    """Return sorted indices (train, validation) of a stratified split.

    Each class gives `fraction` of its images to the validation split, but at most a fifth, rounded down. A class of five images
    gives at most one, a smaller class none.

    Args:
        labels: The label of each image.
        fraction: The share of the images of each class.
        seed: The seed of the generator.
    """
    y = np.asarray(labels)
    class_sizes = np.bincount(y)
    held_counts = [min(round(fraction * n), n // 5) for n in class_sizes.tolist()]
    generator = np.random.RandomState(seed)
    held = np.zeros(len(y), bool)
    for c, n in enumerate(held_counts):
        held[generator.permutation(np.where(y == c)[0])[:n]] = True
    return np.where(~held)[0].astype(np.int64), np.where(held)[0].astype(np.int64)


def checksum(indices: npt.ArrayLike) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the indices, in order, as little-endian int64."""
    return hashlib.sha256(np.asarray(indices).astype("<i8").tobytes()).hexdigest()[:16]
