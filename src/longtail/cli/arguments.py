"""What each verb can be told, as a dataclass that tyro reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from longtail.config import (
    DataConfig,
    LogConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe, or a folder of images: one run per seed, each in OUT/seedN, evaluated when it ends."""

    recipe: Positional[str]
    """A recipe (`longtail recipes` lists them), whose defaults those below are; or your images, for which all else is chosen,
    with reasons: a folder of images or of shards, or a list of files (.txt .csv .tsv .json)."""
    again: Annotated[Path | None, arg(name="from", metavar="RUN")] = None
    """Instead of a recipe, and first: train anew what a run folder or its config.json describes; flags change it."""
    method_name: Annotated[str | None, arg(name="method", metavar="NAME")] = None
    """A method (`longtail recipes` lists them)."""
    imbalance: float | None = None
    """Largest over smallest class."""
    setting: str | None = None
    """released, paper or equal."""
    network: str | None = None
    """Of large data sets, one of the paper's networks (`longtail recipes RECIPE` lists them)."""
    augment: str | None = None
    """Of large data sets, plain, sim, rand, rand-rand or stacked (`longtail recipes RECIPE` says which the paper has where)."""
    strategy: int | None = None
    """The paper's augmentation: 1 sim/sim, 2 rand/rand, 3 rand for the query and sim for the key."""
    out: Path | None = None
    """Where the runs go (default: runs/RECIPE-METHOD-IMBALANCE, then setting, network and augmentation where given)."""
    resume: bool = False
    """Continue what OUT holds."""
    data: DataConfig
    views: ViewsConfig
    model: ModelConfig
    method: MethodConfig
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure the stored network of each finished run again."""

    run: Positional[Path]
    """A run folder, or a folder that holds runs."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Where the data are now, if they moved."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class TableArgs:
    """One table of finished runs: mean and standard deviation over seeds."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that hold runs."""
    out: Path | None = None
    """Where table.md and table.json go (default: the first of RUNS)."""


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """One HTML page of runs that needs nothing else: what was learned, which method is best, whether to believe it."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that hold runs."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""


@dataclass(frozen=True, kw_only=True)
class FigureArgs:
    """Draw a figure of the paper from your runs: latency, gradient, framework, extra."""

    name: Positional[str | None] = None
    """latency (Fig. 1: accuracy against the time of a batch of 64), gradient (Fig. 2: gradients of the classifier by class, of
    runs trained with --log.gradients), framework (Fig. 3) or extra (Fig. 4: L_extra); the last two need no runs."""
    runs: Positional[tuple[Path, ...]] = ()
    """Run folders, or folders that hold runs; for latency also the JSON of a reproduced table, such as results/latency.json."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """The file to write: .svg, .png or .pdf (default: NAME.svg)."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The page of `longtail report`, live: in a browser on this machine it follows runs as they are trained."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders that hold runs or will."""
    port: int = 8700
    """Where to listen on 127.0.0.1; 0: any free one."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Cross-entropy, Balanced Softmax, SupCon and PaCo on the embedded digits: minutes, no download."""

    out: Path = Path("runs/demo")
    """Where the runs go."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each method per seed."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train several methods on the same images under one budget, and say which to trust: a table with ties marked."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A data set (`longtail recipes` lists them), a folder of images or of shards, or a list of files (.txt .csv .tsv .json);
    the defaults below are its own."""
    methods: tuple[str, ...] = ("ce", "balanced-softmax", "paco")
    """Names (`longtail recipes` lists them), or all."""
    seeds: tuple[int, ...] | None = None
    """One run of each method per seed; ties need three (default: 0 1 2, or --train.seeds)."""
    imbalance: float | None = None
    """Largest over smallest class."""
    epochs: int | None = None
    """Of every method (default: the recipe's, or --train.epochs); second stages keep their proportion."""
    out: Path | None = None
    """Where the runs go (default: runs/compare-DATA-IMBALANCE); what has finished there is not trained again."""
    data: DataConfig
    views: ViewsConfig
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Train a table, what is missing of it, and write our figures beside the published ones."""

    table: Positional[str]
    """cifar100-lt (Table 6: five methods, three imbalance factors), published (every method as its authors ran it), methods
    (every method under one budget), latency (PaCo and RIDE at equal inference time), ablations (the paper's), cifar100
    (Table 8: balanced, ResNet-50), tiny-imagenet-lt (an image folder, named by --data_root)."""
    out: Path | None = None
    """Where the runs go (default: runs/reproduce-TABLE); what has finished there is not trained again."""
    results: Path = Path("results")
    """Folder of the JSON and its page; what the JSON has is not trained again, even where the runs are gone."""
    seeds: tuple[int, ...] | None = None
    """One run of each cell per seed (default: the table's)."""
    methods: tuple[str, ...] | None = None
    """Some of its methods."""
    imbalance: tuple[float, ...] | None = None
    """Some of its imbalance factors."""
    epochs: int | None = None
    """Another length than the recipe's; lengths never share a row."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Where the archives lie (else $LONGTAIL_DATA, else ./data)."""
    minutes: float = 0
    """End before a cell that would likely not fit into so many minutes; 0: no limit."""
    rerun: bool = False
    """Train once more what is recorded; the older run folders are renamed."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Look at a data set before training, or pack it: data inspect, data shard."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a data set holds, and every file that is unreadable, doubled, or in training and evaluation at once."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A data set (`longtail recipes` lists them), a folder of images or of shards, or a list of files."""
    quick: bool = False
    """Count labels only, and read no image."""
    json: Path | None = None
    """Write all that was found there."""
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Write a data set as parquet shards (image bytes and label), which `longtail train` takes like a folder."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A data set (`longtail recipes` lists them), a folder of images or of shards, or a list of files."""
    out: Path | None = None
    """The folder to write."""
    megabytes: int = 256
    """About the size of a file."""
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class Theory:
    """What the paper's theory says of class counts, queue, batch and alpha: a table to choose alpha from."""

    recipe: str | None = None
    """A recipe (`longtail recipes` lists them), whose counts, queue and batch are taken; or a folder or list of images, with
    the queue and batch that `longtail train` would choose for them."""
    counts: tuple[str, ...] = ()
    """Images of each class, or a file that has them: numbers, or what `longtail data inspect --json` writes."""
    queue: int | None = None
    """Length of the queue (default: the recipe's, or 8192)."""
    batch: int | None = None
    """Images a step (default: the recipe's, or 128)."""
    alpha: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05, 0.1)
    """Columns of the table; the recipe's own and that of `auto` come with them."""
    imbalance: float | None = None
    """Of the recipe: largest over smallest class."""
    setting: str | None = None
    """Of the recipe: released, paper or equal."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Where the images lie, of recipes whose counts are not known without them."""
    json: Path | None = None
    """Write all of it there, every class."""
    figure: Path | None = None
    """Draw it there (.png, .svg or .pdf): L_extra (the paper's Fig. 4), and the pairs of every class by alpha."""


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes, with the figures published for them."""

    recipe: Positional[str | None] = None
    """One of them: what it is, and the lines that the paper prints for it."""
