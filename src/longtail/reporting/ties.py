"""Who is ahead of whom, and who is tied: seeds in pairs, a 95 % t interval."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from longtail.metrics import paired_difference

ENOUGH = 3  # common seeds for a verdict
Outcome = Literal["ahead", "tied", "behind"]
TIES = (
    "best: the highest mean; tied: the 95 % interval of its seed-paired difference from the best contains zero "
    "(three common seeds at least)."
)
LENGTH, IMAGES = "another length", "other images"


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


def rank_labels(accuracies: Sequence[Mapping[int, float]]) -> list[str]:
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


class ComparisonKey(NamedTuple):
    """Figures of one place can be compared."""

    data: str
    images: str
    epochs: int


def why_not_comparable(places: Sequence[ComparisonKey]) -> list[str]:
    """Of each row why it is not compared; nothing for those at the place of most rows of its data, the longest of several."""
    times, chief = Counter(places), dict[str, ComparisonKey]()
    for place in sorted(times, key=lambda place: (times[place], place.epochs, place.images)):
        chief[place.data] = place
    words = {True: "", False: LENGTH}
    return [words[p == chief[p.data]] if p.images == chief[p.data].images else IMAGES for p in places]


def explained(words: Collection[str]) -> str:
    """What the words beside rows mean, where there are any; to be set after other sentences."""
    apart = ", ".join(word for word in (LENGTH, IMAGES) if word in words)
    return (f" {TIES}" if "best" in words else "") + (f" {apart}: not compared with the others." if apart else "")
