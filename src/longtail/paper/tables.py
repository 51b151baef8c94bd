"""The tables that `longtail reproduce` can train, those of the paper and further ones, and their cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longtail import recipes
from longtail.config import Config
from longtail.errors import UserError, unknown_name
from longtail.paper.results_page import factor_name
from longtail.recipes import METHODS

CHECKPOINT_EVERY = 50
"""Epochs between checkpoints: runs take minutes, and checkpoints cost time."""


@dataclass(frozen=True)
class MethodVariant:
    """A row of a table that is a method with changed settings, with a name and a label of its own."""

    method: str
    label: str
    change: Callable[[Config], Config]
    paper: float | None = None
    """The number of the paper, on other data. It is displayed, but neither plotted nor subtracted."""


@dataclass(frozen=True)
class PaperTable:
    """A table. The first two methods are trained first, and they are compared if `pairs` is empty."""

    title: str
    recipe: str
    setting: str
    methods: tuple[str, ...]
    imbalance: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    variants: dict[str, MethodVariant] = field(default_factory=dict)
    """Variants by name; `methods` may contain these names."""
    note: str = ""
    """The explanation of the numbers in brackets."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Methods that are compared seed by seed."""
    shares: tuple[str, ...] = ()
    """Tables whose runs are also used here if they have the same configuration."""

    @property
    def mixed(self) -> bool:
        """True if the methods of the table have different numbers of epochs."""
        return self.setting == "released"

    def cells(self) -> list[tuple[str, float]]:
        """Return the cells in the order of training: the first two methods by factor, then the others by method."""
        pair, rest = self.methods[:2], self.methods[2:]
        first = [(method, factor) for factor in self.imbalance for method in pair if factor in self.factors(method)]
        return first + [(method, factor) for method in rest for factor in self.factors(method)]

    def factors(self, method: str) -> tuple[float, ...]:
        """Return the imbalance factors of a method. With authors' settings, only published ones."""
        known = [f for f in self.imbalance if (method, f) in recipes.RECIPES[self.recipe].published]
        return tuple(known) if self.mixed and known else self.imbalance

    def config(self, method: str, imbalance: float, epochs: int | None = None) -> Config:
        """Return the configuration of a cell.

        Args:
            method: The name of the method.
            imbalance: The imbalance factor.
            epochs: Another number of epochs; the stages keep their proportions, and the warm-up its length.
        """
        variant = self.variants.get(method)
        config = recipes.RECIPES[self.recipe].build(variant.method if variant else method, imbalance, self.setting)
        config = variant.change(config) if variant else config
        config = recipes.with_epochs(config, epochs or config.train.epochs)
        return replace(config, train=replace(config.train, checkpoint_every=CHECKPOINT_EVERY))

    def label(self, method: str) -> str:
        """Return the label of a method."""
        variant = self.variants.get(method)
        return variant.label if variant else self.config(method, self.imbalance[0]).method.label

    def to_dict(self) -> dict[str, Any]:
        """Return the content of "table" in the results file."""
        paper: dict[str, dict[str, float]] = {}
        for (method, factor), published in recipes.RECIPES[self.recipe].published.items():
            paper.setdefault(method, {})[f"{factor:g}"] = published
        for name, variant in self.variants.items():
            paper |= {name: {f"{f:g}": variant.paper for f in self.imbalance}} if variant.paper is not None else {}
        labels = {method: self.label(method) for method in self.methods}
        plain = {"imbalance": list(self.imbalance), "seeds": list(self.seeds), "published": paper}
        factors = {method: list(self.factors(method)) for method in self.methods}
        words = {"factors": factors, "mixed": self.mixed, "note": self.note, "elsewhere": list(self.variants)}
        words |= {"pairs": [list(pair) for pair in self.pairs or (self.methods[:2],)]}
        return {"recipe": self.recipe, "setting": self.setting, "methods": labels} | plain | words


def with_changes(section: str, **values: Any) -> Callable[[Config], Config]:
    """Return a function that changes values in a section of a configuration."""
    return lambda config: replace(config, **{section: replace(getattr(config, section), **values)})


def with_augmentation_strategy(number: int, scale: float | None = None) -> Callable[[Config], Config]:
    """Return a function that sets an augmentation strategy of the paper, and the smallest area of crops if `scale` is given."""

    def change(config: Config) -> Config:
        config = recipes.with_strategy(config, number)
        if scale is None:
            return config
        crops = {name: replace(getattr(config.views, name), crop_scale=(scale, 1.0)) for name in ("query", "key")}
        return replace(config, views=replace(config.views, **crops))

    return change


# The paper's ablations are on ImageNet-LT: strategies, crops and alpha with ResNet-50, multi-task with ResNeXt-50.
ABLATIONS = {
    **{
        f"strategy-{n}": MethodVariant("paco", f"strategy ({n}): {q}, {k}", with_augmentation_strategy(n), figure)
        for (n, (q, k)), figure in zip(recipes.STRATEGIES.items(), (55.0, 56.5, 57.0), strict=True)
    },
    **{
        f"crop-{s:g}": MethodVariant("paco", f"strategy (3), crops from {s:g}", with_augmentation_strategy(3, s))
        for s in (0.08, 0.2)
    },
    **{
        f"alpha-{a:g}": MethodVariant("paco", f"alpha {a:g}", with_changes("method", alpha=a))
        for a in (0.005, 0.02, 0.05, 0.1, 0.2)
    },
    **{
        f"multi-task-{w:g}": MethodVariant(
            "balanced-softmax-supcon",
            f"Balanced Softmax + {w:g} re-weighted SupCon",
            with_changes("method", weight=w),
            figure,
        )
        for w, figure in {0.05: 57.0, 0.1: 57.1, 0.2: 57.1, 0.3: 57.0, 0.5: 57.2, 0.8: 57.2, 1.0: 56.9}.items()
    },
}

DEEPER_NETWORKS = {
    f"paco-resnet{depth}": MethodVariant(
        "paco", f"PaCo, ResNet-{depth}", with_changes("model", name=f"resnet{depth}_cifar")
    )
    for depth in (56, 74)
}


def with_main_methods(*names: str) -> tuple[str, ...]:
    """Return PaCo, Balanced Softmax and other methods, each once."""
    return tuple(dict.fromkeys(("paco", "balanced-softmax", *names)))


TABLES = {
    "cifar100-lt": PaperTable(
        title="CIFAR-100-LT with ResNet-32 (Table 6 of the PaCo paper)",
        recipe="cifar100-lt",
        setting="equal",
        methods=("paco", "balanced-softmax", "ce", "paco-no-rebalance", "supcon"),
        imbalance=(100, 50, 10),
    ),
    "published": PaperTable(
        title="CIFAR-100-LT, every method with the settings of its authors",
        recipe="cifar100-lt",
        setting="released",
        methods=with_main_methods(*(m for m, e in METHODS.items() if e.published), "ce"),
        imbalance=(100, 50, 10),
        note="Published results are in parentheses. They are from the PaCo paper, except for CB-Focal (a leaderboard; the best "
        "of several class-balanced losses), cRT, LWS and tau-norm (the Bag of Tricks code), RIDE (its README), NCL (its "
        "authors, one of three networks with self-supervision, 400 epochs), BCL and ProCo (their authors, 200 epochs).",
        shares=("cifar100-lt",),
    ),
    "methods": PaperTable(
        title="CIFAR-100-LT at imbalance 100: all methods with the same budget",
        recipe="cifar100-lt",
        setting="equal",
        methods=with_main_methods(*METHODS),
        imbalance=(100,),
        note="Published results, each with its own training length, schedule and augmentation, are in parentheses.",
        shares=("latency", "cifar100-lt"),
    ),
    "latency": PaperTable(
        title="PaCo against RIDE at equal inference latency, as in the PaCo paper's Fig. 1",
        recipe="cifar100-lt",
        setting="equal",
        methods=("paco-resnet56", "ride-2", "paco-resnet74", "ride-3", "paco", "ride-1", "ride-4"),
        imbalance=(100,),
        variants=DEEPER_NETWORKS,
        # RIDE on ResNet-32 runs 51 convolutions one after another with two experts and 71 with three (11 of them are shared);
        # these networks have 55 and 73. Launching the kernels takes most of the time of such small networks.
        pairs=(("paco-resnet56", "ride-2"), ("paco-resnet74", "ride-3")),
        note="The networks of PaCo are about as deep as all experts of RIDE in sequence; RIDE, and PaCo without a network "
        "name, use a ResNet-32. Published results are in parentheses.",
    ),
    "ablations": PaperTable(
        title="The PaCo paper's ablations, on CIFAR-100-LT at imbalance 100",
        recipe="cifar100-lt",
        setting="equal",
        methods=("paco", "paco-no-rebalance", *ABLATIONS),
        imbalance=(100,),
        variants=ABLATIONS,
        note="Results of the paper are in parentheses. That of PaCo is for CIFAR-100-LT; the others are for ImageNet-LT "
        "(ResNet-50; multi-task: ResNeXt-50, where PaCo has 58.2), so compare differences only. Alpha is 0.01 unless stated "
        "otherwise. The strategies use the crops of the recipe: at least 0.08 of the area for the query, 0.2 for the key.",
        shares=("cifar100-lt", "methods"),
    ),
    "tiny-imagenet-lt": PaperTable(
        title="Tiny-ImageNet-LT with ResNet-18, with the settings for image folders",
        recipe="tiny-imagenet-lt",
        setting="equal",
        methods=("paco", "balanced-softmax", "ce"),
        imbalance=(1,),
    ),
    "cifar100": PaperTable(
        title="Full CIFAR-100 with ResNet-50 (Table 8 of the PaCo paper)",
        recipe="cifar100",
        setting="paper",
        methods=("paco-no-rebalance", "ce", "supcon", "ce-supcon"),
        imbalance=(1,),
        seeds=(0,),
    ),
}


@dataclass(frozen=True)
class Cell:
    """A method at one imbalance factor, and the folder of its runs."""

    method: str
    imbalance: float
    config: Config
    folder: Path
    label: str

    def __str__(self) -> str:
        return f"{self.label}, {factor_name(self.imbalance)}"

    def run_folder(self, seed: int) -> Path:
        """Return the run folder of a seed."""
        return self.folder / f"seed{seed}"

    def with_seeds(self, seeds: Sequence[int]) -> Config:
        """Return the configuration with these seeds."""
        return replace(self.config, train=replace(self.config.train, seeds=tuple(seeds)))


def find_table(name: str) -> PaperTable:
    """Return a table by its name. An unknown name is a UserError."""
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    return TABLES[name]


def choose_cells(
    table: PaperTable, methods: Sequence[str] | None, imbalance: Sequence[float] | None
) -> list[tuple[str, float]]:
    """Return the chosen cells of a table, in its order.

    Args:
        table: The table.
        methods: The chosen methods; None for all. An empty choice is an error.
        imbalance: The chosen imbalance factors; None for all.
    """
    for method in methods or ():
        if method not in table.methods:
            raise unknown_name("method", method, table.methods)
    factors = " ".join(f"{factor:g}" for factor in table.imbalance)
    for factor in imbalance or ():
        if factor not in table.imbalance:
            raise UserError(f"--imbalance {factor:g}: choose from {factors}")
    if methods is not None and not methods:
        raise UserError(f"--methods without a value: choose from {' '.join(table.methods)}")
    if imbalance is not None and not imbalance:
        raise UserError(f"--imbalance without a value: choose from {factors}")
    cells = [(m, f) for m, f in table.cells() if methods is None or m in methods]
    return [(m, f) for m, f in cells if imbalance is None or f in imbalance]


def make_cell(
    table: PaperTable, method: str, factor: float, epochs: int | None, out: Path, data_root: Path | str | None
) -> Cell:
    """Return a cell, whose run folders are OUT/METHOD-FACTOR/seedN; another number of epochs has folders of its own.

    Args:
        table: The table.
        method: The name of the method.
        factor: The imbalance factor.
        epochs: Another number of epochs.
        out: The folder above the run folders.
        data_root: The folder of the images.
    """
    config, default = table.config(method, factor, epochs), table.config(method, factor)
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=Path(data_root)))
    elif config.data.name == "folder":
        raise UserError(f"--data_root DIR is required: {table.recipe} is trained on a folder of images")
    length = config.train.epochs
    suffix = f"-{length}-epochs" if length != default.train.epochs else ""
    return Cell(method, factor, config, out / f"{method}-{factor:g}{suffix}", table.label(method))
