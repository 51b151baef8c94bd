"""The verbs. tyro lives here and nowhere else; torch is imported only once a verb has understood its arguments."""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from longtail import __version__, recipes
from longtail.config import (
    Config,
    DataConfig,
    LogConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from longtail.errors import UserError, unknown

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe, or a folder of images: one run per seed, each in OUT/seedN, evaluated when it ends."""

    recipe: Positional[str]
    """A recipe (`longtail recipes` lists them) or a folder of images; the defaults below are its own."""
    method_name: Annotated[str | None, arg(name="method", metavar="NAME")] = None
    """A method (`longtail recipes` lists them)."""
    imbalance: float | None = None
    """Largest over smallest class."""
    setting: str | None = None
    """released, paper or equal."""
    strategy: int | None = None
    """The paper's augmentation: 1 sim/sim, 2 rand/rand, 3 rand for the query and sim for the key."""
    out: Path | None = None
    """Where the runs go (default: runs/RECIPE-METHOD-IMBALANCE, and the setting where it is not the recipe's own)."""
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
    data_root: Path | None = None
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
    """A data set (`longtail recipes` lists them) or a folder of images; the defaults below are its own."""
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
    (every method under one budget), ablations (the paper's), cifar100 (Table 8: balanced, ResNet-50)."""
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
    data_root: Path | None = None
    """Where the archives lie (else $LONGTAIL_DATA, else ./data)."""
    minutes: float = 0
    """End before a cell that would likely not fit into so many minutes; 0: no limit."""
    again: bool = False
    """Train once more what is recorded; the older run folders are renamed."""


@dataclass(frozen=True)
class Recipes:
    """List the recipes, with the figures published for them."""


def main(args: Sequence[str] | None = None) -> int:
    """The command; every error of the user's is one line and an exit code."""
    args = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± shows ?
    try:
        return dispatch(args)
    except UserError as error:
        print("longtail: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("longtail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `longtail recipes | head`
        sys.stderr.close()
        return 141


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"longtail {__version__}")
        return 0
    if args[0] not in VERBS:
        raise unknown("command", args[0], VERBS)
    VERBS[args[0]][1](args[1:])
    return 0


def overview() -> str:
    lines = [f"  {verb:9} {first_line(kind)}" for verb, (kind, _) in VERBS.items()]
    return "\n".join(
        [
            "longtail: image recognition where a few classes have most of the images",
            "",
            *lines,
            "",
            "Start with `longtail demo`; each command explains itself with --help.",
        ]
    )


def first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def run_train(args: list[str]) -> None:
    name = name_first("train", args)
    config = chosen_recipe(name, args[1:])
    sections = sections_of(config, "method", *SHARED)
    given = parse(Train, "train", args, Train(recipe=name, **sections))
    config = replace(config, **{s: getattr(given, s) for s in sections})

    from longtail.engine.train import train
    from longtail.report.table import table

    out = given.out or default_out(name, config, given.setting)
    show_tables(table(train(config, out, given.resume)))
    print(f"written to {out}")


SHARED = ("data", "views", "model", "optim", "train", "log")  # sections that all methods have alike


def sections_of(config: Config, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def name_first(verb: str, args: list[str]) -> str:
    """What is trained comes first, as the other arguments' defaults are its own."""
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        advice = f"as in `longtail {verb} cifar100-lt`; `longtail recipes` lists them"
        raise UserError(f"name a recipe or a folder first, {advice}")
    return args[0] if args[0] not in ("-h", "--help") else "cifar100-lt"


def default_out(name: str, config: Config, setting: str | None) -> Path:
    parts = [
        Path(name).resolve().name,
        config.method.name,
        f"{config.data.imbalance:g}",
        *([setting] if setting else []),
    ]
    return Path("runs") / "-".join(parts)


def chosen_recipe(name: str, args: list[str]) -> Config:
    """The recipe with its own arguments; section flags are applied after it, so that nothing derived from these is stale."""
    choices = scanned(args, method=str, imbalance=float, setting=str, strategy=int)
    strategy = choices.pop("strategy")
    config = recipes.make(name, **choices)
    return config if strategy is None else recipes.with_strategy(config, strategy)


def scanned(args: list[str], **kinds: Callable[[str], Any]) -> dict[str, Any]:
    """The values of some flags, before the rest is understood."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, kind in kinds.items():
        scan.add_argument(f"--{flag}", type=kind)
    try:
        return vars(scan.parse_known_args(args)[0])
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(str(error)) from error


def run_eval(args: list[str]) -> None:
    given = parse(Eval, "eval", args)

    from longtail.engine.evaluate import evaluate
    from longtail.report.table import table

    folders = list(evaluate(given.run, given.data_root, given.device))
    show_tables(table(folders))


def run_table(args: list[str]) -> None:
    given = parse(TableArgs, "table", args)
    if not given.runs:
        raise UserError("name the runs, as in `longtail table runs`")

    from longtail.report.table import table, to_rich

    out = given.out or given.runs[0]
    screen = console()
    screen.print(to_rich(table(given.runs, out), screen.width))
    print(f"written to {out}/table.md and {out}/table.json")


def run_demo(args: list[str]) -> None:
    given = parse(Demo, "demo", args)

    from longtail.quickstart import demo, verdict
    from longtail.report.table import to_rich

    rows = demo(given.out, given.seeds)
    screen = console()
    screen.print(to_rich(rows, screen.width))
    print(*verdict(rows, given.out), sep="\n")


def run_compare(args: list[str]) -> None:
    name = name_first("compare", args)
    config = recipes.one_budget(name, imbalance=scanned(args[1:], imbalance=float)["imbalance"])
    config = replace(config, train=replace(config.train, seeds=(0, 1, 2)))
    given = parse(Compare, "compare", args, Compare(images=name, **sections_of(config, *SHARED)))

    from longtail.comparison import compare
    from longtail.report.table import to_rich

    def change(config: Config) -> Config:
        return replace(config, **{s: getattr(given, s) for s in SHARED})

    rows = compare(name, given.methods, given.out, given.seeds, given.imbalance, given.epochs, change)
    screen, out = console(), rows[0].runs[0].folder.parents[1]
    screen.print(to_rich(rows, screen.width))
    print(f"written to {out}/table.md, {out}/table.json and {out}/comparison.png")


def run_reproduce(args: list[str]) -> None:
    given = dict(vars(parse(Reproduce, "reproduce", args)))

    from longtail.report.cells import lengths, pictures
    from longtail.report.page import to_rich
    from longtail.reproduction import reproduce

    tree = reproduce(given.pop("table"), **given)
    screen, place = console(), given["results"] / tree["name"].replace("-", "_")
    for headline in to_rich(tree, screen.width):
        screen.print(headline)
    drawn = [given["results"] / p.name for epochs in lengths(tree) for p in pictures(tree, epochs).values()]
    print("written to", " and ".join(map(str, [f"{place}.json", f"{place}.md", *drawn])))


def run_recipes(args: list[str]) -> None:
    parse(Recipes, "recipes", args)
    data, methods = Table(title="Data", title_justify="left"), Table(title="Methods", title_justify="left")
    for heading in ("recipe", "settings", "what"):
        data.add_column(heading)
    for name, recipe in recipes.RECIPES.items():
        what = (recipe.build.__doc__ or "").split(":")[0]
        data.add_row(name, " ".join(recipe.settings), " ".join(what.split()))
    methods.caption = "Published: top-1 percentages, most of the PaCo paper. Ours stand in results/."
    methods.caption_justify = "left"
    shown = [name for name, recipe in recipes.RECIPES.items() if recipe.published]
    for heading in ("method", "what", *(f"published, {name}" for name in shown)):
        methods.add_column(heading)
    for method in recipes.METHODS:
        figures = [published_line(recipes.RECIPES[name], method) for name in shown]
        methods.add_row(method, recipes.digits_lt(method).method.label, *figures)
    for table in (data, methods):
        console().print(table)
    print("longtail train RECIPE --method METHOD [--imbalance 100] [--setting released]")
    print("longtail train FOLDER --method METHOD       a folder of images: train/CLASS/*.jpg, val/CLASS/*.jpg")
    print("longtail compare RECIPE|FOLDER              several methods under one budget")


def published_line(recipe: recipes.Recipe, method: str) -> str:
    """The figures of a method, by imbalance where there are several."""
    figures = {imbalance: figure for (name, imbalance), figure in recipe.published.items() if name == method}
    if list(figures) == [1]:
        return f"{figures[1]}"
    return "   ".join(f"{imbalance:g}: {figure}" for imbalance, figure in figures.items()) or "–"


def show_tables(rows: Any) -> None:
    from longtail.report.table import shifted_table, to_rich

    screen = console()
    screen.print(to_rich(rows, screen.width))
    screen.print(shifted_table(rows, screen.width))


def console() -> Console:
    """Tables keep their width where nobody's terminal limits it."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if terminal else 150)


def parse(kind: type[T], verb: str, args: list[str], default: T | None = None) -> T:
    """tyro's reading of the arguments; what it would print in a box becomes one line."""
    errors = io.StringIO()
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, prog=f"longtail {verb}", args=args, use_underscores=True, **given)
    except SystemExit as stop:
        if stop.code in (None, 0):  # --help
            raise
        raise UserError(f"{in_one_line(errors.getvalue())} (longtail {verb} --help lists the flags)") from None


def in_one_line(box: str) -> str:
    """The message of tyro's box, up to its first blank line, with the flag it suggests; the box may be drawn in ASCII."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and not line.strip("-─"):
            parts.append([])
        else:
            parts[-1].append(line)
    message = parts[0] if "╭" in box else parts[1]  # an ASCII box has its title first
    message = message[: message.index("")] if "" in message else message
    meant = [part[1].split()[0] for part in parts if part and part[0].startswith("Perhaps you meant")]
    hint = f": did you mean {meant[0]}?" if meant else ""
    if message[0].endswith((" True", " False")):
        hint = ": a switch takes no value, write --x or --no_x"
    return " ".join(message) + hint


VERBS: dict[str, tuple[type, Callable[[list[str]], None]]] = {
    "demo": (Demo, run_demo),
    "recipes": (Recipes, run_recipes),
    "train": (Train, run_train),
    "eval": (Eval, run_eval),
    "table": (TableArgs, run_table),
    "compare": (Compare, run_compare),
    "reproduce": (Reproduce, run_reproduce),
}


def console_script() -> None:
    sys.exit(main())
