"""The tables of the paper that can be run here, and their cells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longtail import recipes
from longtail.config import Config
from longtail.errors import UserError, unknown
from longtail.report.cells import factor_name

CHECKPOINT_EVERY = 50  # epochs; the runs are minutes long, and a checkpoint costs some of their speed


@dataclass(frozen=True)
class PaperTable:
    """A table as it is run here. The claim is about the first two methods: they are trained first, and compared."""

    title: str
    recipe: str
    setting: str
    methods: tuple[str, ...]
    imbalance: tuple[float, ...]
    seeds: tuple[int, ...]

    def cells(self) -> list[tuple[str, float]]:
        """In the order of work: the two by factor, then the rest by method."""
        pair, rest = self.methods[:2], self.methods[2:]
        first = [(method, factor) for factor in self.imbalance for method in pair]
        return first + [(method, factor) for method in rest for factor in self.imbalance]

    def config(self, method: str, imbalance: float, epochs: int | None = None) -> Config:
        """The recipe's, or a longer or shorter one: its stages keep their proportion, and its warm-up stays as it is."""
        config = recipes.RECIPES[self.recipe].build(method, imbalance, self.setting)
        config = recipes.with_epochs(config, epochs or config.train.epochs)
        return replace(config, train=replace(config.train, checkpoint_every=CHECKPOINT_EVERY))

    def to_dict(self) -> dict[str, Any]:
        """What the page needs to know of the table."""
        labels = {method: self.config(method, self.imbalance[0]).method.label for method in self.methods}
        paper: dict[str, dict[str, float]] = {}
        for (method, factor), figure in recipes.RECIPES[self.recipe].published.items():
            paper.setdefault(method, {})[f"{factor:g}"] = figure
        plain = {"imbalance": list(self.imbalance), "seeds": list(self.seeds), "published": paper}
        return {"recipe": self.recipe, "setting": self.setting, "methods": labels} | plain


TABLES = {
    "cifar100-lt": PaperTable(
        title="CIFAR-100-LT with ResNet-32 (Table 6 of the PaCo paper)",
        recipe="cifar100-lt",
        setting="equal",
        methods=("paco", "balanced-softmax", "ce", "paco-no-rebalance", "supcon"),
        imbalance=(100, 50, 10),
        seeds=(0, 1, 2),
    ),
    "cifar100": PaperTable(
        title="Full CIFAR-100 with ResNet-50 (Table 8 of the PaCo paper)",
        recipe="cifar100",
        setting="paper",
        methods=("paco-no-rebalance", "ce", "supcon"),
        imbalance=(1,),
        seeds=(0,),
    ),
}


@dataclass(frozen=True)
class Cell:
    """A method at one factor, and where its runs lie."""

    method: str
    imbalance: float
    config: Config
    folder: Path

    def __str__(self) -> str:
        return f"{self.config.method.label}, {factor_name(self.imbalance)}"

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def with_seeds(self, seeds: Sequence[int]) -> Config:
        return replace(self.config, train=replace(self.config.train, seeds=tuple(seeds)))


def choose_cells(
    table: PaperTable, methods: Sequence[str] | None, imbalance: Sequence[float] | None
) -> list[tuple[str, float]]:
    """The cells of the table that are asked for, in its order; naming none is a mistake."""
    for method in methods or ():
        if method not in table.methods:
            raise unknown("method", method, table.methods)
    factors = " ".join(f"{factor:g}" for factor in table.imbalance)
    for factor in imbalance or ():
        if factor not in table.imbalance:
            raise UserError(f"--imbalance {factor:g}: the table has {factors}, choose among them")
    if methods is not None and not methods:
        raise UserError(f"--methods without a value: choose among {' '.join(table.methods)}")
    if imbalance is not None and not imbalance:
        raise UserError(f"--imbalance without a value: choose among {factors}")
    cells = [(m, f) for m, f in table.cells() if methods is None or m in methods]
    return [(m, f) for m, f in cells if imbalance is None or f in imbalance]


def make_cell(
    table: PaperTable, method: str, factor: float, epochs: int | None, out: Path, data_root: Path | str | None
) -> Cell:
    """Its run folders are OUT/METHOD-FACTOR/seedN; another length has folders of its own."""
    config, usual = table.config(method, factor, epochs), table.config(method, factor)
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=Path(data_root)))
    length = config.train.epochs
    suffix = f"-{length}-epochs" if length != usual.train.epochs else ""
    return Cell(method, factor, config, out / f"{method}-{factor:g}{suffix}")
