"""The page of a reproduced table, made from its results file: our numbers and those of the paper, details, comparisons.

Each number of epochs has a section of its own.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table

from longtail.config import Config, from_dict
from longtail.metrics import METRICS, PAPER_METRICS
from longtail.reporting.cells import (
    MIXED_LENGTHS,
    Tree,
    factor_name,
    method_label,
    method_pairs,
    plot_files,
    published_accuracy,
    select_length,
    top1_by_seed,
    training_lengths,
)
from longtail.reporting.result_rows import format_mean_std, format_metric
from longtail.reporting.significance import MIN_SEEDS, TIES_LEGEND, rank_labels
from longtail.reporting.table import markdown_table, plain_cell
from longtail.run_folder import format_seeds
from longtail.text import escape_markdown, quote_markdown

HEADLINE = "Top-1 accuracy in percent, last epoch, mean ± standard deviation over seeds; –: no run."
BRACKETS = "Results of the paper are in parentheses."
DETAIL = (
    "Percent, last epoch, test set: accuracy of all images and of classes with many (>100), medium (20-100) and few (<20) "
    "training images; expected calibration error (lower is better); k-NN accuracy of the features; seconds of training; "
    "milliseconds for a batch of 64."
)


def to_markdown(tree: Tree) -> str:
    """Return the page of a results file."""
    name = tree["name"].replace("-", "_")
    made = f"Created by `longtail reproduce {tree['name']}` from [{name}.json]({name}.json), which contains all runs. "
    parts = [f"# {tree['title']}", made + f"Last updated {escape_markdown(tree['updated'])}."]
    for epochs in training_lengths(tree):
        parts += length_section(tree, epochs)
    return "\n\n".join(parts) + "\n"


def length_section(tree: Tree, epochs: int) -> list[str]:
    """Return the paragraphs about the runs with one number of epochs."""
    table, rows = tree["table"], select_length(tree["rows"], epochs)
    head, body = headline_table(table, rows)
    return [
        f"## {length_name(epochs).capitalize()}",
        "\n".join(provenance_list(tree, epochs)),
        markdown_table(head, body),
        caption(table),
        list_missing(table, rows),
        *(f"![{picture.description}]({picture.name})" for picture in plot_files(tree, epochs).values()),
        *(part for pair in method_pairs(table) for part in comparison_section(tree, epochs, pair)),
        *(part for factor in table["imbalance"] for part in detail_section(rows, factor)),
        DETAIL + parallel_note(tree, epochs),
    ]


def caption(table: Tree) -> str:
    """Return the caption of the main table."""
    return f"{HEADLINE} {table.get('note') or BRACKETS}"


def length_name(epochs: int) -> str:
    """Return the title of the section for a number of epochs."""
    return "each method with its own settings" if epochs == MIXED_LENGTHS else _count(epochs, "epoch")


def headline_table(table: Tree, rows: Sequence[Tree]) -> tuple[list[str], list[list[str]]]:
    """Return head and body of the table of methods and factors, with the numbers of the paper in brackets."""
    factors = table["imbalance"]
    body = [
        [label, *(headline_cell(table, m, f, named) for f in factors)] for m, label, named in headline_rows(table, rows)
    ]
    return ["method", *map(factor_name, factors)], body


def headline_rows(table: Tree, rows: Sequence[Tree]) -> Iterator[tuple[str, str, list[Tree]]]:
    """Yield method, label and rows of each line of the main table. A method with two configurations has two lines."""
    for method, title in table["methods"].items():
        mine = [row for row in rows if row["method"] == method]
        for label in _distinct(row["label"] for row in mine) or [title]:
            yield method, label, [row for row in mine if row["label"] == label]


def headline_cell(table: Tree, method: str, factor: float, rows: Iterable[Tree]) -> str:
    """Return our accuracy and that of the paper in a cell."""
    ours = [format_mean_std(row["metrics"]["top1"]["values"]) for row in rows if row["imbalance"] == factor] or ["–"]
    paper = published_accuracy(table, method, factor)
    return "; ".join(ours) + ("" if paper is None else f" ({paper:.1f})")


def list_missing(table: Tree, rows: Sequence[Tree]) -> str:
    """Return a sentence about the runs of the table that are missing in these rows."""
    lacks = []
    for method, label, named in headline_rows(table, rows):
        wanted = table.get("factors", {}).get(method, table["imbalance"])
        cells = [words for factor in wanted if (words := _missing_seeds(table, factor, named))]
        lacks += [f"{escape_markdown(label)} at {', '.join(cells)}"] if cells else []
    return f"Not run yet: {'; '.join(lacks)}." if lacks else "All runs are complete."


def _missing_seeds(table: Tree, factor: float, rows: Iterable[Tree]) -> str | None:
    there = {seed for row in rows if row["imbalance"] == factor for seed in row["seeds"]}
    seeds = [s for s in table["seeds"] if s not in there]
    some = f" ({format_seeds(seeds)})" if there else ""
    return factor_name(factor) + some if seeds else None


def describe_verdict(verdict: Tree) -> str:
    """Return a sentence about the comparison of two methods."""
    seeds = len(verdict["seeds"])
    where = f"{factor_name(verdict['imbalance']).capitalize()}:"
    if verdict["outcome"] is None:
        return f"{where} no conclusion; there are {_count(seeds, 'common seed')}, and at least {MIN_SEEDS} are needed."
    by = f"{verdict['difference']:+.1f} ± {verdict['half_width']:.1f} points, {seeds} seeds".replace("-", "−")
    first, second = escape_markdown(verdict["first"]), escape_markdown(verdict["second"])
    if verdict["outcome"] == "tied":
        return f"{where} {first} and {second} are tied ({by})."
    position = {"ahead": "ahead of", "behind": "behind"}[verdict["outcome"]]
    return f"{where} {first} is {position} {second} ({by})."


def comparison_section(tree: Tree, epochs: int, pair: list[str]) -> list[str]:
    """Return the paragraphs that compare two methods at each factor.

    Args:
        tree: The content of the results file.
        epochs: The number of epochs.
        pair: The names of the methods.
    """
    first, second = (tree["table"]["methods"][method] for method in pair)
    mine = [v for v in select_length(tree["verdicts"], epochs) if v["pair"] == pair]
    said = []
    for factor in tree["table"]["imbalance"]:
        nothing = f"{factor_name(factor).capitalize()}: no conclusion; {first} or {second} has not been run."
        said += [describe_verdict(v) for v in mine if v["imbalance"] == factor] or [nothing]
    how = "Seed-paired difference in top-1 accuracy, with its 95 % t interval."
    return [f"### {first} against {second}", how, "\n".join(f"- {words}" for words in said)]


def detail_section(rows: Sequence[Tree], factor: float) -> list[str]:
    """Return the paragraphs with all metrics at one factor, or nothing if there are no runs."""
    here = [row for row in rows if row["imbalance"] == factor]
    if not here:
        return []
    head = ["method", "", *(METRICS[c].heading for c in PAPER_METRICS), "seeds"]
    words = rank_labels([top1_by_seed(row) for row in here])
    body = [
        [row["label"], word, *(_figure(row, c) for c in PAPER_METRICS), " ".join(map(str, row["seeds"]))]
        for row, word in zip(here, words, strict=True)
    ]
    title = f"### {factor_name(factor).capitalize()}"
    return [title, markdown_table(head, body, 2), *([TIES_LEGEND] if any(words) else [])]


def _figure(row: Tree, column: str) -> str:
    return format_metric(column, row["metrics"][column]["values"])


def provenance_list(tree: Tree, epochs: int) -> list[str]:
    """Return a list of commands, settings, seeds, commits, machines, dates, and notes about the data."""
    runs = select_length(tree["runs"], epochs)
    starts = [start for r in runs for start in (r, *r["resumed"])]  # a resumed run has several
    dates = sorted(start["started"][:10] for start in starts)
    identities = [r["identity"] for r in runs]
    models = _distinct(f"{escape_markdown(i['model']['name'])}, batch {i['train']['batch_size']}" for i in identities)
    commands = _distinct(quote_markdown(r["command"]) for r in runs)
    return [
        *([f"- command {commands[0]}"] if len(commands) == 1 else ["- commands", *(f"  - {c}" for c in commands)]),
        f"- recipe {tree['table']['recipe']}, setting {tree['table']['setting']}: {', '.join(models)}",
        *(f"- {words}" for words in second_stage_notes(runs, tree["table"])),
        f"- {format_seeds(sorted({r['seed'] for r in runs}))}",
        f"- {_one_of('commit', _distinct(str(start['commit'] or 'unknown') for start in starts))}",
        f"- {_one_of('machine', _distinct(start['device'] for start in starts))}",
        f"- {_one_of('precision', _distinct(r['precision'] for r in runs))}",
        f"- trained {escape_markdown(dates[0])}"
        + (f" to {escape_markdown(dates[-1])}" if dates[-1] != dates[0] else ""),
        *(f"- {escape_markdown(note)}" for note in _distinct(str(note) for r in runs for note in r["data"]["notes"])),
    ]


def second_stage_notes(runs: Sequence[Tree], table: Tree) -> list[str]:
    """Return notes about the second stages of methods, which the number of epochs does not include."""
    stages = [(method_label(r, table), from_dict(Config, r["identity"]).method.second_epochs) for r in runs]
    return _distinct(
        f"{escape_markdown(label)}: plus {_count(n, 'epoch')} for the second stage" for label, n in stages if n
    )


def parallel_note(tree: Tree, epochs: int) -> str:
    """Return a note about seeds that were trained in parallel, which share their training time."""
    together = {r["metrics"].get("together") or 1 for r in select_length(tree["runs"], epochs)}
    counts = ", ".join(str(n) for n in sorted(together) if n > 1)
    return f" Seeds that were trained in parallel ({counts} at a time) share these seconds." if counts else ""


def to_rich(tree: Tree, width: int = 150) -> list[Table]:
    """Return the main table for each number of epochs, for a terminal of this width."""
    tables = []
    for epochs in training_lengths(tree):
        head, body = headline_table(tree["table"], select_length(tree["rows"], epochs))
        title = f"{tree['title']}, {length_name(epochs)}"
        words = caption(tree["table"])
        table = Table(title=title, caption=words, title_justify="left", caption_justify="left")
        for i, heading in enumerate(head):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i > 0)
        for row in body:
            table.add_row(plain_cell(row[0]), *(cell if width >= 100 else cell.replace(" ± ", "±") for cell in row[1:]))
        tables.append(table)
    return tables


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _one_of(kind: str, items: Sequence[str]) -> str:
    return f"{kind}{'s' * (len(items) > 1)} {', '.join(map(escape_markdown, items))}"


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
