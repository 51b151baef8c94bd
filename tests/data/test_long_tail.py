"""The long-tailed subset against the usual rule written as loops, and properties of the validation split."""

import numpy as np
import pytest

from longtail import metrics
from longtail.data import long_tail

BALANCED = np.random.RandomState(3).permutation(np.repeat(np.arange(100), 500))  # labels of the size of CIFAR-100


def released_draw(labels, classes, factor):
    """Draw as the released LDAM code does, with NumPy's global generator."""
    state = np.random.get_state()
    np.random.seed(0)
    kept = []
    for c in range(classes):
        n = int((len(labels) / classes) * ((1 / factor) ** (c / (classes - 1.0))))
        members = np.where(np.array(labels) == c)[0]
        np.random.shuffle(members)
        kept.extend(members[:n])
    np.random.set_state(state)
    return kept


@pytest.mark.parametrize(("factor", "total"), [(100, 10_847), (50, 12_608), (10, 19_573)])
def test_draw_is_the_published_one(factor, total):
    counts = long_tail.exponential_counts(500, 100, factor)
    drawn = long_tail.draw_subset(BALANCED, counts)
    assert len(drawn) == counts.sum() == total
    assert drawn.tolist() == released_draw(BALANCED, 100, factor)
    assert np.bincount(BALANCED[drawn]).tolist() == counts.tolist()


def test_draw_leaves_the_global_generator_alone():
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    long_tail.draw_subset(BALANCED, [3] * 100)
    assert np.random.rand() == expected


def test_draw_keeps_at_least_one_and_at_most_all():
    drawn = long_tail.draw_subset([0, 0, 0, 1, 1], [0, 9])
    assert np.bincount(np.array([0, 0, 0, 1, 1])[drawn]).tolist() == [1, 2]


def test_seeds_differ_and_repeat():
    counts = long_tail.exponential_counts(500, 100, 100)
    assert (
        long_tail.draw_subset(BALANCED, counts, seed=1).tolist()
        == long_tail.draw_subset(BALANCED, counts, seed=1).tolist()
    )
    assert long_tail.draw_subset(BALANCED, counts, seed=1).tolist() != long_tail.draw_subset(BALANCED, counts).tolist()


def test_exponential_counts():
    counts = long_tail.exponential_counts(5000, 10, 100)
    assert counts.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]  # CIFAR-10-LT, as published
    assert long_tail.exponential_counts(7, 3, 1000).tolist() == [7, 1, 1]
    assert long_tail.exponential_counts(7, 1, 10).tolist() == [7]
    assert long_tail.exponential_counts(7, 3, 1).tolist() == [7, 7, 7]


def test_step_counts():
    assert long_tail.step_counts(500, 4, 100).tolist() == [500, 500, 5, 5]
    assert long_tail.step_counts(500, 5, 3).tolist() == [500, 500, 166, 166, 166]
    assert long_tail.step_counts(10, 2, 100).tolist() == [10, 1]


def test_shot_groups_at_their_bounds():
    groups = metrics.shot_groups([101, 100, 20, 19, 0])
    assert groups["many"].tolist() == [True, False, False, False, False]
    assert groups["medium"].tolist() == [False, True, True, False, False]
    assert groups["few"].tolist() == [False, False, False, True, True]


def test_checksum_sees_values_and_order_but_not_width():
    assert long_tail.checksum([1, 2]) == long_tail.checksum(np.array([1, 2], np.int32))
    assert len({long_tail.checksum(x) for x in ([1, 2], [2, 1], [1, 3], [1])}) == 4
    assert len(long_tail.checksum([])) == 16


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.1, 0.2, 0.9])
def test_validation_split_promises(fraction):
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(30), np.arange(1, 31)))
    train, val = long_tail.validation_split(labels, fraction)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(len(labels)))
    assert np.array_equal(train, np.sort(train)) and np.array_equal(val, np.sort(val))
    for c, size in enumerate(range(1, 31)):
        given = int((labels[val] == c).sum())
        assert given == min(round(fraction * size), size // 5)
        assert given == 0 or size - given >= 2


def test_validation_split_is_random_and_repeats():
    labels = np.repeat([0, 1], 50)
    first, again, other = (long_tail.validation_split(labels, 0.2, seed)[1].tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert first != list(range(10)) + list(range(50, 60))
