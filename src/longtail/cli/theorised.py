"""The theory of a data set, as a person reads it."""

from rich.console import Console
from rich.table import Table as Grid

from longtail.theory import OPTIMUM, Table

POSITIVES = """\
Positives of an anchor, K_y: q·queue in the text, q·(queue + 2·batch − 1) in the supplement,
and expected, as its own key is always one: 1 + q·(queue + 2·batch − 2)"""
SHARES = "Optimal share of the centers, P_sup = 1 / (1 + alpha·K_y)"
PAIRS = "Optimal probability of a positive pair, in percent: SupCon 1 / K_y, PaCo alpha / (1 + alpha·K_y)"
ADVICE = """\
A smaller alpha makes the pairs of frequent and rare classes more alike; a larger one gives contrast among samples more weight.
--method.alpha auto is {auto:g} here: P_sup is {optimum} over all anchors, as in the paper's Fig. 4."""


def show(table: Table, screen: Console) -> None:
    images, classes = f"{sum(table.counts):,} images of {len(table.counts):,} classes", table.head_to_tail()
    print(f"{table.name}: {images}; queue {table.queue:,}, batch {table.batch:,}")
    for title, grid in ((POSITIVES, positives), (SHARES, shares), (PAIRS, pairs)):
        print(f"\n{title}")
        screen.print(grid(table, classes))
    print("\n" + ADVICE.format(auto=table.auto, optimum=OPTIMUM))


def positives(table: Table, classes: list[int]) -> Grid:
    grid = started(*table.positives, "not in the queue")
    for c in classes:
        counted = (f"{table.positives[count][c]:.2f}" for count in table.positives)
        grid.add_row(f"{table.counts[c]:,}", *counted, f"{100 * table.absent[c]:.0f} %")
    return grid


def shares(table: Table, classes: list[int]) -> Grid:
    grid = started(*alphas(table))
    for c in classes:
        grid.add_row(f"{table.counts[c]:,}", *(f"{o.P_sup[c]:.2f}" for o in table.optima))
    grid.add_section()
    grid.add_row("all anchors", *(f"{o.mean_P_sup:.2f}" for o in table.optima))
    return grid


def pairs(table: Table, classes: list[int]) -> Grid:
    grid = started("SupCon", *alphas(table))
    for c in classes:
        row = (table.supcon_pair[c], *(o.pair[c] for o in table.optima))
        grid.add_row(f"{table.counts[c]:,}", *(f"{100 * p:.3g}" for p in row))
    grid.add_section()
    grid.add_row("tail / head", *(f"{r:.3g}" for r in (table.supcon_range, *(o.range for o in table.optima))))
    return grid


def started(*headings: str) -> Grid:
    grid = Grid()
    grid.add_column("images", no_wrap=True)
    for heading in headings:
        grid.add_column(heading, justify="right")
    return grid


def alphas(table: Table) -> list[str]:
    """Headings; the recipe's own and what `auto` is are named."""
    names = {table.given: "recipe", table.auto: "auto"}
    return [f"{names.get(o.alpha, 'alpha')} {o.alpha:g}" for o in table.optima]
