"""`longtail recipes`: what can be run, and what was published for it."""

import inspect

from rich.console import Console
from rich.table import Table

from longtail import recipes
from longtail.errors import unknown_name
from longtail.recipes.published_rows import PublishedAccuracy

WORDS = "top-1 percentages, most from the PaCo paper. Ours stand in results/; docs/methods.md says what each does."


def show_all(screen: Console) -> None:
    screen.print(data_table())
    screen.print(methods_table(wide=screen.width >= 120))
    print(
        "longtail train RECIPE --method METHOD [--imbalance 100] [--setting released] [--network resnet50] [--augment rand]"
    )
    print("longtail train FOLDER --method METHOD       a folder of images: train/CLASS/*.jpg, val/CLASS/*.jpg")
    print("longtail compare RECIPE|FOLDER              several methods under one budget")
    print("longtail recipes imagenet-lt                a recipe, and the lines that the paper prints for it")


def show_one(name: str, screen: Console) -> None:
    if name not in recipes.RECIPES:
        raise unknown_name("recipe", name, recipes.RECIPES)
    recipe = recipes.RECIPES[name]
    print(inspect.getdoc(recipe.build), end="\n\n")
    if recipe.networks:
        print(f"--network {' '.join(recipe.networks)}", f"--augment {' '.join(recipe.augments)}", sep="\n", end="\n\n")
        screen.print(rows_table(name))
        print(
            f"longtail train {name} --method METHOD --network NETWORK --augment AUGMENT --setting SETTING --data.root DIR"
        )
    for (method, factor), figure in recipe.published.items():
        print(f"--method {method} --imbalance {factor:g}: {figure:.1f}")


def data_table() -> Table:
    table = Table(title="Data", title_justify="left")
    for heading in ("recipe", "settings", "what"):
        table.add_column(heading)
    for name, recipe in recipes.RECIPES.items():
        what = (recipe.build.__doc__ or "").split(":")[0]
        table.add_row(name, " ".join(recipe.settings), " ".join(what.split()))
    return table


def methods_table(wide: bool) -> Table:
    """Names, and what was published for them, by recipe and imbalance."""
    shown = {"cifar100-lt": (100, 50, 10)} | ({"cifar100": (1,)} if wide else {})
    table = Table(title="Methods", title_justify="left", caption=f"Published {WORDS}", caption_justify="left")
    table.add_column("method", no_wrap=True)
    if wide:
        table.add_column("in tables")
    for name, factors in shown.items():
        for factor in factors:
            table.add_column(f"{name}, {factor}" if factor > 1 else name, justify="right")
    for method in recipes.METHODS:
        figures = [recipes.RECIPES[name].published.get((method, f)) for name, factors in shown.items() for f in factors]
        label = [recipes.digits_lt(method).method.label] if wide else []
        table.add_row(method, *label, *map(cell, figures))
    return table


def rows_table(name: str) -> Table:
    """The paper's lines, with what the recipe makes of them."""
    caption = (
        "Published top-1 percentages. Without a setting: quoted by the paper, the method's own settings are not here."
    )
    table = Table(title="Lines of the paper", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("method", "network", "augment", "setting"):
        table.add_column(heading, no_wrap=True)
    for heading in ("epochs", "batch", *PublishedAccuracy._fields):
        table.add_column(heading, justify="right")
    for row, printed in recipes.RECIPES[name].rows.items():
        config = recipes.make(name, **{choice: value or None for choice, value in row._asdict().items()})
        length = (str(config.train.epochs), str(config.train.batch_size)) if row.setting else ("–", "–")
        table.add_row(*(value or "–" for value in row), *length, *map(cell, printed))
    return table


def cell(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.1f}"
