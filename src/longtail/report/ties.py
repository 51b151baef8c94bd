"""Who is ahead of whom, and who is tied: seeds in pairs, a 95 % t interval."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from longtail.metrics import paired_difference

ENOUGH = 3  # common seeds for a verdict
Outcome = Literal["ahead", "tied", "behind"]


class Verdict(NamedTuple):
    """Of one method against another: the mean of their difference, half its interval, and what it says; None: too few seeds."""

    seeds: list[int]
    difference: float | None = None
    half_width: float | None = None
    outcome: Outcome | None = None


def compare_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Verdict:
    """Accuracies by seed; tied where the interval of the difference first - second contains zero."""
    seeds = [s for s in first if s in second]
    if len(seeds) < ENOUGH:
        return Verdict(seeds)
    mean, half = paired_difference([first[s] for s in seeds], [second[s] for s in seeds])
    return Verdict(seeds, mean, half, "tied" if abs(mean) <= half else "ahead" if mean > 0 else "behind")


def standings(accuracies: Sequence[Mapping[int, float]]) -> list[str]:
    """Of each of several methods: "best", "tied" with it, nothing for one behind, or "no verdict" for one of too few seeds.

    The best is sought among those that can be compared; without a second one there are no words at all.
    """
    enough = [i for i, by_seed in enumerate(accuracies) if len(by_seed) >= ENOUGH]
    if len(enough) < 2:
        return [""] * len(accuracies)
    best = max(enough, key=lambda i: sum(accuracies[i].values()) / len(accuracies[i]))
    words = {"ahead": "", "tied": "tied", "behind": "", None: "no verdict"}
    found = [words[compare_seeds(by_seed, accuracies[best]).outcome] for by_seed in accuracies]
    return ["best" if i == best else word for i, word in enumerate(found)]
