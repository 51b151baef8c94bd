"""The commands about the paper: `reproduce`, `recipes` and `theory`."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from longtail import files, recipes
from longtail.cli.console import check_output_files, make_screen, write_error_as_user_error
from longtail.cli.parse import check_path, parse_arguments
from longtail.config import PaCoSettings
from longtail.errors import UserError, unknown_name
from longtail.recipes.imagenet_scale import PublishedAccuracy
from longtail.text import escape_nonprintable, format_percent

if TYPE_CHECKING:
    from longtail import theory

WIDE_SCREEN = 120  # columns from which the table of methods has all of its columns


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Train the missing runs of a table of the paper, and compare our results with the published ones."""

    table: Positional[str]
    """cifar100-lt (Table 6: five methods, three imbalance factors), published (each method with its authors' settings), methods
    (all methods with the same budget), latency (PaCo and RIDE at equal inference time), ablations (of the paper), cifar100
    (Table 8: balanced, ResNet-50), tiny-imagenet-lt (an image folder, set by --data_root)."""
    out: Path | None = None
    """Output folder of the runs (default: runs/reproduce-TABLE). Runs that are finished there are not trained again."""
    results: Path = Path("results")
    """Output folder of the JSON file and its page. Runs that are recorded in the JSON file are not trained again, even if their
    folders no longer exist."""
    seeds: tuple[int, ...] | None = None
    """Each cell is trained once per seed (default: the seeds of the table)."""
    methods: tuple[str, ...] | None = None
    """Train only these methods of the table."""
    imbalance: tuple[float, ...] | None = None
    """Train only these imbalance factors of the table."""
    epochs: int | None = None
    """Number of epochs of each run (default: that of the recipe). The page has a section for each number of epochs."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Folder of the data archives (default: $LONGTAIL_DATA, or ./data)."""
    minutes: float = 0
    """Time limit in minutes: a cell that would probably exceed it is not started; 0: no limit."""
    rerun: bool = False
    """Train recorded runs again. Existing run folders are renamed."""


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List recipes and methods with their published results."""

    recipe: Positional[str | None] = None
    """Describe this recipe, and list its results in the paper."""


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Compute the optima of the PaCo loss for several values of alpha, from the class counts, the queue and the batch size."""

    recipe: str | None = None
    """A recipe (`longtail recipes` lists them), which sets class counts, queue and batch size; or a folder or list of images,
    with the queue and batch size that `longtail train` would choose for it."""
    counts: tuple[str, ...] = ()
    """Numbers of images per class: integers, or a file with them, such as the output of `longtail data inspect --json`."""
    queue: int | None = None
    """Length of the queue (default: that of the recipe, or 8192)."""
    batch: int | None = None
    """Batch size (default: that of the recipe, or 128)."""
    alpha: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05, 0.1)
    """Values of alpha in the table, in addition to that of the recipe and that of `auto`."""
    imbalance: float | None = None
    """Imbalance factor of the recipe: size of the largest class divided by that of the smallest class."""
    setting: str | None = None
    """Hyperparameters of the recipe: released (released code), paper (text of the paper) or equal (same for all methods)."""
    data_root: Annotated[Path | None, arg(aliases=["--data.root"])] = None
    """Location of the data, for recipes whose class counts are not built in."""
    json: Path | None = None
    """Write the complete results, with every class, to this file."""
    figure: Path | None = None
    """Draw L_extra (Fig. 4 of the paper) and the pair probabilities of all classes to this file (.png, .svg or .pdf)."""


# reproduce


def run_reproduce(args: list[str]) -> None:
    """Run `longtail reproduce`."""
    given = dict(vars(parse_arguments(Reproduce, "reproduce", args)))

    from longtail.paper.tables import choose_cells, find_table

    choose_cells(find_table(given["table"]), given["methods"], given["imbalance"])  # reports unknown names

    from longtail.paper.reproduce import reproduce
    from longtail.paper.results_page import plot_files, to_rich, training_lengths

    tree = reproduce(given.pop("table"), **given)
    screen, path = make_screen(), given["results"] / tree["name"].replace("-", "_")
    for table in to_rich(tree, screen.width):
        screen.print(table)
    images = [given["results"] / p.name for epochs in training_lengths(tree) for p in plot_files(tree, epochs).values()]
    print("written to", " and ".join(map(escape_nonprintable, [f"{path}.json", f"{path}.md", *images])))


# recipes


def run_recipes(args: list[str]) -> None:
    """Run `longtail recipes`."""
    given = parse_arguments(Recipes, "recipes", args)
    if given.recipe is None:
        print_recipes(make_screen())
    else:
        print_recipe(given.recipe, make_screen())


def print_recipes(screen: Console) -> None:
    """Print tables of all recipes and methods."""
    screen.print(make_recipe_table())
    screen.print(make_method_table(is_wide=screen.width >= WIDE_SCREEN))
    print(
        "longtail train RECIPE --method METHOD [--imbalance 100] [--setting released] [--network resnet50] [--augment rand]"
    )
    print("longtail train FOLDER --method METHOD       train on a folder of images: train/CLASS/*.jpg, val/CLASS/*.jpg")
    print("longtail compare RECIPE|FOLDER              compare several methods with the same budget")
    print("longtail recipes imagenet-lt                describe a recipe, and list its results in the paper")


def print_recipe(name: str, screen: Console) -> None:
    """Print the description of a recipe and its published results."""
    if name not in recipes.RECIPES:
        raise unknown_name("recipe", name, recipes.RECIPES)
    recipe = recipes.RECIPES[name]
    print(inspect.getdoc(recipe.build), end="\n\n")
    if recipe.networks:
        print(f"--network {' '.join(recipe.networks)}", f"--augment {' '.join(recipe.augments)}", sep="\n", end="\n\n")
        screen.print(make_published_table(name))
        print(
            f"longtail train {name} --method METHOD --network NETWORK --augment AUGMENT --setting SETTING --data.root DIR"
        )
    for (method, factor), top1 in recipe.published.items():
        print(f"--method {method} --imbalance {factor:g}: {top1:.1f}")


def make_recipe_table() -> Table:
    """Return a table of recipes with their settings and a short description."""
    table = Table(title="Recipes", title_justify="left")
    for heading in ("recipe", "settings", "description"):
        table.add_column(heading)
    for name, recipe in recipes.RECIPES.items():
        description = (recipe.build.__doc__ or "").split(":")[0]
        table.add_row(name, " ".join(recipe.settings), " ".join(description.split()))
    return table


def make_method_table(is_wide: bool) -> Table:
    """Return a table of methods with their published results by recipe and imbalance factor."""
    columns = {"cifar100-lt": (100, 50, 10)} | ({"cifar100": (1,)} if is_wide else {})
    caption = (
        "Published top-1 accuracy in percent, mostly from the PaCo paper. Our results are in results/; docs/methods.md "
        "describes the methods."
    )
    table = Table(title="Methods", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("method", no_wrap=True)
    if is_wide:
        table.add_column("label in tables")
    for name, factors in columns.items():
        for factor in factors:
            table.add_column(f"{name}, {factor}" if factor > 1 else name, justify="right")
    for method in recipes.METHODS:
        results = [
            recipes.RECIPES[name].published.get((method, f)) for name, factors in columns.items() for f in factors
        ]
        label = [recipes.digits_lt(method).method.label] if is_wide else []
        table.add_row(method, *label, *map(format_percent, results))
    return table


def make_published_table(name: str) -> Table:
    """Return a table of the results that the paper prints for a recipe, with the epochs and batch size of the recipe."""
    caption = (
        "Published top-1 accuracy in percent. Rows without a setting are quoted in the paper from other papers, "
        "whose settings this package does not have."
    )
    table = Table(title="Results in the paper", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("method", "network", "augment", "setting"):
        table.add_column(heading, no_wrap=True)
    for heading in ("epochs", "batch", *PublishedAccuracy._fields):
        table.add_column(heading, justify="right")
    for row, printed in recipes.RECIPES[name].rows.items():
        config = recipes.make(name, **{choice: value or None for choice, value in row._asdict().items()})
        length = (str(config.train.epochs), str(config.train.batch_size)) if row.setting else ("–", "–")
        table.add_row(*(value or "–" for value in row), *length, *map(format_percent, printed))
    return table


# theory

POSITIVES_TITLE = """\
Number of positives of an anchor, K_y, for a class of frequency q
  text: q·queue, in the main text of the paper; supplement: q·(queue + 2·batch − 1)
  expected: 1 + q·(queue + 2·batch − 2), because the anchor's own key is always a positive"""
CENTERS_TITLE = "Optimal probability of the class center, P_sup = 1 / (1 + alpha·K_y)"
PAIRS_TITLE = "Optimal probability of a positive pair, in percent: SupCon 1 / K_y, PaCo alpha / (1 + alpha·K_y)"
ADVICE = """\
A smaller alpha reduces the difference between the pairs of frequent and rare classes; a larger alpha increases the weight of
the contrast among samples. --method.alpha auto is {auto:g} here: the mean of P_sup over all anchors is {optimum}, as in the
paper's Fig. 4."""


def run_theory(args: list[str]) -> None:
    """Run `longtail theory`."""
    given = dict(vars(parse_arguments(Theory, "theory", args)))
    json, figure, counts = (given.pop(name) for name in ("json", "figure", "counts"))
    check_output_files(json=json, figure=figure)
    check_path(given["recipe"] or "")

    from longtail.paper.figures import check_figure_path
    from longtail.theory import table

    if figure:
        check_figure_path("theory", figure, "--figure")
    name = given["recipe"]
    if name and recipes.is_user_data(name) and given["setting"] is None:
        given |= {key: value for key, value in choose_queue_and_batch(name).items() if given[key] is None}
    results = table(counts=parse_counts(counts), **given)
    print_theory(results, make_screen())
    if json:
        with write_error_as_user_error(json):
            files.write_output_json(json, results.to_dict())
    if figure:
        from longtail.reporting import plots

        alphas = [optimum.alpha for optimum in results.optima]
        with write_error_as_user_error(figure):
            plots.draw_theory(results.counts, results.positives["expected"], alphas, figure)
    for file in filter(None, (json, figure)):
        print(f"written to {escape_nonprintable(file)}")


def choose_queue_and_batch(name: str) -> dict[str, int]:
    """Return the queue length and the batch size of PaCo that `longtail train` would choose for the user's images."""
    from longtail.autoconfig import choose, inspect_data

    config = choose(name, inspect_data(recipes.make(name).data), "paco").config
    assert isinstance(config.method, PaCoSettings)
    return {"queue": config.method.queue, "batch": config.train.batch_size}


def parse_counts(words: tuple[str, ...]) -> tuple[int, ...] | Path | None:
    """Return the class counts of --counts, or the path of the file that contains them; None if the flag is not given."""
    if len(words) == 1 and not words[0].isdigit():
        return Path(words[0])
    try:
        return tuple(map(int, words)) or None
    except ValueError as error:
        raise UserError(f"--counts {' '.join(words)}: give integers, or one file") from error


def print_theory(results: "theory.Table", screen: Console) -> None:
    """Print the number of positives, the optimal center probabilities and the optimal pair probabilities."""
    from longtail.theory import OPTIMUM

    images, classes = sum(results.counts), len(results.counts)
    data = f"{images:,} images of {classes:,} classes"
    print(f"{results.name}: {data}; queue {results.queue:,}, batch {results.batch:,}")
    examples = results.head_to_tail()
    tables = {
        POSITIVES_TITLE: make_positives_table(results, examples),
        CENTERS_TITLE: make_centers_table(results, examples),
        PAIRS_TITLE: make_pairs_table(results, examples),
    }
    for title, table in tables.items():
        print(f"\n{title}")
        screen.print(table)
    print("\n" + ADVICE.format(auto=results.auto, optimum=OPTIMUM))


def make_positives_table(results: "theory.Table", classes: Sequence[int]) -> Table:
    """Return a table of the number of positives, with a row for each class."""
    table = start_table([*results.positives, "absent from queue"])
    for c in classes:
        numbers = (f"{numbers[c]:.2f}" for numbers in results.positives.values())
        table.add_row(f"{results.counts[c]:,}", *numbers, f"{100 * results.absent[c]:.0f} %")
    return table


def make_centers_table(results: "theory.Table", classes: Sequence[int]) -> Table:
    """Return a table of P_sup at the optimum, with a row for each class and a column for each alpha."""
    table = start_table(format_alphas(results))
    for c in classes:
        table.add_row(f"{results.counts[c]:,}", *(f"{optimum.P_sup[c]:.2f}" for optimum in results.optima))
    table.add_section()
    table.add_row("all anchors", *(f"{optimum.mean_P_sup:.2f}" for optimum in results.optima))
    return table


def make_pairs_table(results: "theory.Table", classes: Sequence[int]) -> Table:
    """Return a table of the probability of a positive pair at the optimum, for SupCon and for PaCo with each alpha."""
    table = start_table(["SupCon", *format_alphas(results)])
    for c in classes:
        probabilities = (results.supcon_pair[c], *(optimum.pair[c] for optimum in results.optima))
        table.add_row(f"{results.counts[c]:,}", *(f"{100 * p:.3g}" for p in probabilities))
    table.add_section()
    ratios = (results.supcon_range, *(optimum.range for optimum in results.optima))
    table.add_row("tail / head", *(f"{ratio:.3g}" for ratio in ratios))
    return table


def start_table(headings: Sequence[str]) -> Table:
    """Return an empty table whose first column is the number of images of a class."""
    table = Table()
    table.add_column("images", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def format_alphas(results: "theory.Table") -> list[str]:
    """Return column headings; the alpha of the recipe and that of `auto` are marked."""
    names = {results.given: "recipe", results.auto: "auto"}
    return [f"{names.get(optimum.alpha, 'alpha')} {optimum.alpha:g}" for optimum in results.optima]
