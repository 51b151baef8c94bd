"""A table of the theory for one dataset, and the value of `alpha="auto"`.

The paper evaluates its theory once, for balanced ImageNet: alpha·K* = 0.41, so that at the optimum the centers have the
share P_sup = 1 / (1 + alpha·K*) = 0.71 of an anchor's softmax, and the samples have the rest. With other classes, queues or
batch sizes, the same alpha has another optimum; the optimum stays the same only if alpha·K does. On a long-tailed dataset,
K_y differs between classes, and the loss is a mean over anchors. Therefore `auto` is the alpha for which

    sum_y q(y) / (1 + alpha·K_y) = 0.71,        with K_y the true expectation.

This is the optimal P_sup of the mean anchor, toward which P_sup in the log of a run converges. On balanced data, alpha·K*
is 0.41 again. Because K_y is at least 1, alpha is never larger than 0.41. The ratio of pair probabilities between head and
tail is not part of the rule: a smaller alpha makes it smaller, but also weakens the contrast between samples. The theory
does not say that 0.71 is the best value. It is the only example in the paper, and a starting point for a search.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail import files, recipes
from longtail.config import DataConfig, PaCoSettings, TrainConfig
from longtail.config.section import require
from longtail.data.long_tail import PROFILES
from longtail.errors import Kind, UserError, file_error_kind
from longtail.theory import closed_forms

OPTIMUM = 0.71
"""P_sup in the example of the paper (Fig. 4)."""
ALPHAS = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Values of alpha in the table by default."""
MAX_CLASSES = 2**20
"""Largest number of class counts in a file."""
GIVEN_COUNTS = "given counts"


def auto_alpha(counts: npt.ArrayLike, queue: int, batch: int, P_sup: float = OPTIMUM) -> float:
    """Return the alpha for which the optimal P_sup of the mean anchor has a given value, rounded to three significant digits.

    Args:
        counts: Number of training images of each class.
        queue: Queue length.
        batch: Batch size.
        P_sup: The desired P_sup.
    """
    q_C, K_C = closed_forms.frequencies(counts), closed_forms.positives(counts, queue, batch)
    low, high = 0.0, 1 / P_sup - 1  # the upper limit is the solution for K = 1
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if q_C @ closed_forms.center(middle, K_C) > P_sup else (low, middle)
    return float(f"{high:.3g}")


@dataclass(frozen=True)
class Optimum:
    """The minimum of the PaCo loss for one alpha."""

    alpha: float
    P_sup: list[float]
    """Share of the centers in the softmax of an anchor, by class."""
    pair: list[float]
    """Share of each positive sample, by class."""
    mean_P_sup: float
    """P_sup of the mean anchor, as in the log of a run."""
    range: float
    """Ratio of the largest to the smallest pair probability."""


@dataclass(frozen=True)
class Table:
    """The predictions of the theory for a dataset. Lists contain one value per class."""

    name: str
    counts: list[int]
    queue: int
    batch: int
    positives: dict[closed_forms.Count, list[float]]
    """K_y for each way of counting, see `positives`."""
    absent: list[float]
    """Fraction of the steps at which the queue has no sample of the class."""
    supcon_pair: list[float]
    """Optimal probability of a positive pair for SupCon."""
    supcon_range: float
    """Ratio of the largest to the smallest of these."""
    auto: float
    """The value of `alpha="auto"`."""
    given: float | None
    """The alpha of the recipe, if it has one."""
    optima: list[Optimum]
    """Sorted by alpha."""

    def head_to_tail(self, most: int = 5) -> list[int]:
        """Return up to `most` classes, evenly spaced from the most frequent to the rarest, without duplicate counts."""
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
    """Return the optima of SupCon and PaCo for a recipe, for the user's images, or for given class counts.

    This function is the equivalent of `longtail theory`.

    Args:
        recipe: A recipe, or a path of images. Its class counts, queue length and batch size are used unless given.
        counts: Number of training images of each class, or a file that contains them: numbers, or JSON such as
            `longtail data inspect --json` writes.
        queue: Queue length.
        batch: Batch size.
        alpha: Values of alpha in the table, in addition to that of the recipe and to `auto`.
        imbalance: Imbalance factor of the recipe.
        setting: Setting of the recipe.
        data_root: Folder of the data.
    """
    method, train, name, given = PaCoSettings(), TrainConfig(), GIVEN_COUNTS, None
    if recipe is not None:
        config = recipes.make(recipe, method="paco", imbalance=imbalance, setting=setting)
        assert isinstance(config.method, PaCoSettings)
        method, train = config.method, config.train
        name = config.recipe if counts is None else f"{GIVEN_COUNTS}, otherwise as in {config.recipe}"
        given = method.alpha if isinstance(method.alpha, float) else None
        counts = _find_counts(replace(config.data, root=data_root or config.data.root)) if counts is None else counts
    if counts is None:
        raise UserError("give a recipe or class counts: --recipe cifar100-lt, or --counts 500 100 5")
    queue, batch = method.queue if queue is None else queue, train.batch_size if batch is None else batch
    n_C = _read_counts(counts) if isinstance(counts, Path) else list(counts)
    _check(n_C, queue, batch, alpha)
    auto, K_C = auto_alpha(n_C, queue, batch), closed_forms.positives(n_C, queue, batch)
    return Table(
        name=name,
        counts=n_C,
        queue=queue,
        batch=batch,
        positives={count: closed_forms.positives(n_C, queue, batch, count).tolist() for count in closed_forms.COUNTS},
        absent=closed_forms.absent(n_C, queue).tolist(),
        supcon_pair=closed_forms.supcon_pair(K_C).tolist(),
        supcon_range=float(K_C.max() / K_C.min()),
        auto=auto,
        given=given,
        optima=[_optimum(a, n_C, K_C) for a in sorted({*alpha, auto, given or auto})],
    )


def _check(n_C: Sequence[int], queue: int, batch: int, alpha: Sequence[float]) -> None:
    rule = "two or more classes with at least one image, for example --counts 500 100 5"
    are_counts = len(n_C) > 1 and all(isinstance(n, int | np.integer) and 1 <= n < 2**31 for n in n_C)
    require(are_counts, "counts", " ".join(map(str, n_C[:10])), rule)
    require(0 <= queue < 2**31, "queue", queue, "at least 0")
    require(1 <= batch < 2**31, "batch", batch, "at least 1")
    for a in alpha:
        require(0 < a < 1, "alpha", a, "in (0, 1), for example 0.01 to 0.05")


def _optimum(alpha: float, n_C: Sequence[int], K_C: closed_forms.Floats) -> Optimum:
    P_sup_C, pair_C = closed_forms.center(alpha, K_C), closed_forms.pair(alpha, K_C)
    mean = float(closed_forms.frequencies(n_C) @ P_sup_C)
    return Optimum(alpha, P_sup_C.tolist(), pair_C.tolist(), mean, float(closed_forms.range_of(alpha, K_C)))


def _find_counts(data: DataConfig) -> list[int]:
    """Return the class counts of a dataset: computed for the long-tailed subsets of CIFAR, counted for other data."""
    if data.name in recipes.CIFAR_SIZES:
        classes, largest = recipes.CIFAR_SIZES[data.name]
        return [int(n) for n in PROFILES[data.profile](largest, classes, data.imbalance)]

    from longtail.data.inspection import inspect

    return inspect(data, quick=True).counts


def _read_counts(path: Path) -> list[int]:
    """Return the class counts in a file of numbers or a JSON file."""
    try:
        text = files.read_text(path)
        found = files.parse_json(text) if text.lstrip().startswith(("{", "[")) else text.replace(",", " ").split()
        if isinstance(found, dict):
            found = found["counts"] if "counts" in found else found["data"]["counts"]
        if len(found) > MAX_CLASSES:
            raise ValueError(f"more than {MAX_CLASSES:,} classes")
        return [int(n) for n in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        kind: Kind = file_error_kind(error) if isinstance(error, OSError) else "bad-list"
        advice = "give a file of numbers, or the output of `longtail data inspect DATA --json FILE`"
        raise UserError(f"--counts {path}: cannot read class counts ({error!r}): {advice}", kind=kind) from error
