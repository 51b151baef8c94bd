"""What the remarks say about a data set: a table to choose alpha from, and the alpha that `auto` chooses.

**`alpha="auto"`.** The paper works its theory out once, for balanced ImageNet: alpha·K* = 0.41, so that at the optimum the
centers have P_sup = 1 / (1 + alpha·K*) = 0.71 of an anchor's softmax and the samples the rest. With other classes, queues or
batches the same alpha means another optimum, which stays put only where alpha·K does. On a long tail K_y differs from class to
class, and the loss is a mean over anchors; so `auto` is the alpha at which

    sum_y q(y) / (1 + alpha·K_y) = 0.71,        K_y the true expectation,

the optimal P_sup of the mean anchor, which P_sup in the log of a run would come to. On balanced data alpha·K* is 0.41 again;
and as K_y is at least 1, alpha is never above it. The range from head to tail is no part of the rule: a smaller alpha narrows
it, at the cost of contrast among samples. No theory says that 0.71 is best: it is the paper's one worked example, and a place
to search from.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail import files, recipes
from longtail.config import DataConfig, PaCo, TrainConfig
from longtail.config.section import require
from longtail.data.long_tail import PROFILES
from longtail.errors import Kind, UserError
from longtail.theory import remarks

OPTIMUM = 0.71  # P_sup in the paper's example, Fig. 4
GIVEN = "given counts"
MOST_CLASSES = 2**20  # of a file with counts
ALPHAS = (0.005, 0.01, 0.02, 0.05, 0.1)


def auto_alpha(counts: npt.ArrayLike, queue: int, batch: int, P_sup: float = OPTIMUM) -> float:
    """The alpha at which the optimal P_sup of the mean anchor is this, to three figures."""
    q_C, K_C = remarks.frequencies(counts), remarks.positives(counts, queue, batch)
    low, high = 0.0, 1 / P_sup - 1  # K = 1 would need the latter
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if q_C @ remarks.center(middle, K_C) > P_sup else (low, middle)
    return float(f"{high:.3g}")


@dataclass(frozen=True)
class Optimum:
    """Where the loss is least, at one alpha."""

    alpha: float
    P_sup: list[float]
    """By class: of its anchors' softmax, the share of the centers."""
    pair: list[float]
    """By class: that of each positive sample."""
    mean_P_sup: float
    """Of the mean anchor, as the log of a run has it."""
    range: float
    """Largest over smallest pair probability."""


@dataclass(frozen=True)
class Table:
    """What can be said before training; lists are by class."""

    name: str
    counts: list[int]
    queue: int
    batch: int
    positives: dict[remarks.Count, list[float]]
    """K_y, counted in three ways."""
    absent: list[float]
    """The share of the steps at which the queue has nothing of the class."""
    supcon_pair: list[float]
    supcon_range: float
    auto: float
    """What `alpha="auto"` is here."""
    given: float | None
    """The recipe's own alpha."""
    optima: list[Optimum]
    """In the order of alpha."""

    def head_to_tail(self, most: int = 5) -> list[int]:
        """Some classes, evenly from the most frequent to the rarest; one of those that are alike."""
        order = np.argsort(-np.array(self.counts), kind="stable")
        places = np.linspace(0, len(order) - 1, min(most, len(order)))
        return list({self.counts[c]: int(c) for c in order[np.rint(places).astype(int)][::-1]}.values())[::-1]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def table(
    recipe: str | Path | None = None,
    counts: Sequence[int] | Path | None = None,
    queue: int | None = None,
    batch: int | None = None,
    alpha: Sequence[float] = ALPHAS,
    imbalance: float | None = None,
    setting: str | None = None,
    data_root: Path | None = None,
) -> Table:
    """Optima of SupCon and PaCo for a recipe, a folder of images, or any class counts. The twin of `longtail theory`.

    `counts` may be a file: of numbers, or JSON that has them, such as what `longtail data inspect --json` writes.
    """
    method, train, name, given = PaCo(), TrainConfig(), GIVEN, None
    if recipe is not None:
        config = recipes.make(recipe, method="paco", imbalance=imbalance, setting=setting)
        assert isinstance(config.method, PaCo)
        method, train = config.method, config.train
        name = config.recipe if counts is None else f"{GIVEN}, the rest as in {config.recipe}"
        given = method.alpha if isinstance(method.alpha, float) else None
        counts = counts_of(replace(config.data, root=data_root or config.data.root)) if counts is None else counts
    if counts is None:
        raise UserError("name a recipe or the classes: --recipe cifar100-lt, or --counts 500 100 5")
    queue, batch = method.queue if queue is None else queue, train.batch_size if batch is None else batch
    n_C = read_counts(counts) if isinstance(counts, Path) else list(counts)
    check(n_C, queue, batch, alpha)
    auto, K_C = auto_alpha(n_C, queue, batch), remarks.positives(n_C, queue, batch)
    return Table(
        name=name,
        counts=n_C,
        queue=queue,
        batch=batch,
        positives={count: remarks.positives(n_C, queue, batch, count).tolist() for count in remarks.COUNTS},
        absent=remarks.absent(n_C, queue).tolist(),
        supcon_pair=remarks.supcon_pair(K_C).tolist(),
        supcon_range=float(K_C.max() / K_C.min()),
        auto=auto,
        given=given,
        optima=[optimum(a, n_C, K_C) for a in sorted({*alpha, auto, given or auto})],
    )


def check(n_C: Sequence[int], queue: int, batch: int, alpha: Sequence[float]) -> None:
    rule = "two classes or more of at least one image: try --counts 500 100 5"
    good = len(n_C) > 1 and all(isinstance(n, int | np.integer) and 1 <= n < 2**31 for n in n_C)
    require(good, "counts", " ".join(map(str, n_C[:10])), rule)
    require(0 <= queue < 2**31, "queue", queue, "0 or more")
    require(1 <= batch < 2**31, "batch", batch, "at least 1")
    for a in alpha:
        require(0 < a < 1, "alpha", a, "in (0, 1): try 0.01 to 0.05")


def optimum(alpha: float, n_C: Sequence[int], K_C: remarks.Floats) -> Optimum:
    P_sup_C, pair_C = remarks.center(alpha, K_C), remarks.pair(alpha, K_C)
    mean = float(remarks.frequencies(n_C) @ P_sup_C)
    return Optimum(alpha, P_sup_C.tolist(), pair_C.tolist(), mean, float(remarks.range_of(alpha, K_C)))


def counts_of(data: DataConfig) -> list[int]:
    """Those of the CIFAR draws follow from their rule; those of other data are counted."""
    if data.name in recipes.CIFAR_SIZES:
        classes, largest = recipes.CIFAR_SIZES[data.name]
        return [int(n) for n in PROFILES[data.profile](largest, classes, data.imbalance)]

    from longtail.data.inspection import inspect

    return inspect(data, quick=True).counts


def read_counts(path: Path) -> list[int]:
    try:
        text = files.read_text(path)
        found = files.parse_json(text) if text.lstrip().startswith(("{", "[")) else text.replace(",", " ").split()
        if isinstance(found, dict):
            found = found["counts"] if "counts" in found else found["data"]["counts"]
        if len(found) > MOST_CLASSES:
            raise ValueError(f"more than {MOST_CLASSES:,} classes")
        return [int(n) for n in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        kind: Kind = "missing-file" if isinstance(error, FileNotFoundError) else "bad-list"
        advice = "give a file of numbers, or what `longtail data inspect DATA --json FILE` writes"
        raise UserError(f"--counts {path}: no class counts found there ({error!r}): {advice}", kind=kind) from error
