"""Rows, verdicts and page of a reproduced table, made from its results file.

A row is a method at one imbalance factor, with the runs that differ only in the seed, so that lengths of training, precisions
and settings are never mixed. The page has our numbers and those of the paper, details and comparisons. Each number of epochs
has a section of its own.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from longtail.config import Config, from_dict
from longtail.metrics import METRICS, PAPER_METRICS, TABLE_METRICS, mean_std
from longtail.reporting.class_accuracy import Curve
from longtail.reporting.result_rows import describe_differences, format_mean_std, format_metric
from longtail.reporting.significance import MIN_SEEDS, TIES_LEGEND, compare_seeds, rank_labels
from longtail.reporting.table import MethodPoint, plain_cell
from longtail.run_folder import format_seeds
from longtail.text import escape_markdown, markdown_table, pluralize, quote_markdown

Tree = dict[str, Any]
"""A results file, or a part of it, as parsed JSON."""

MAX_CURVES = 7  # that a reader can tell apart
MIXED_LENGTHS = 0  # replaces the length in tables whose methods have different lengths of training

# Selecting runs


def training_lengths(tree: Tree) -> list[int]:
    """Return the numbers of epochs that were run, longest first; each has a section on the page."""
    if tree["table"].get("mixed"):
        return [MIXED_LENGTHS]
    return sorted({record["epochs"] for record in tree["runs"]}, reverse=True)


def select_length(records: Sequence[Tree], epochs: int) -> list[Tree]:
    """Return the runs, rows or verdicts with this number of epochs."""
    return [record for record in records if epochs in (MIXED_LENGTHS, record["epochs"])]


def factor_name(factor: float) -> str:
    """Return the name of an imbalance factor."""
    return f"imbalance {factor:g}" if factor > 1 else "all images"


def method_label(record: Tree, table: Tree) -> str:
    """Return the label of the method of a run or row."""
    return str(table["methods"][record["method"]])


def published_accuracy(table: Tree, method: str, imbalance: float) -> float | None:
    """Return the accuracy in the paper; None if the paper has none."""
    return table["published"].get(method, {}).get(f"{imbalance:g}")


# Rows


def make_rows(tree: Tree) -> list[Tree]:
    """Return one row per method, factor and configuration."""
    return [_make_row(label, runs, tree["table"]) for label, runs in group_runs(tree)]


def group_runs(tree: Tree) -> list[tuple[str, list[Tree]]]:
    """Return the label and runs of each row, in the order of the table, longest training first."""
    groups: dict[str, dict[int, Tree]] = {}
    for record in tree["runs"]:
        key = [record["method"], record["identity"], record["precision"], record["data"]["checksum"]]
        groups.setdefault(json.dumps(key, sort_keys=True), {})[record["seed"]] = record
    rows = [[by_seed[s] for s in sorted(by_seed)] for by_seed in groups.values()]
    same_cell: dict[tuple[Any, ...], list[Tree]] = {}
    for first, *_ in rows:
        same_cell.setdefault(_cell_key(first), []).append(_identity(first))
    methods, factors = list(tree["table"]["methods"]), tree["table"]["imbalance"]

    def sort_key(labeled: tuple[str, list[Tree]]) -> tuple[int, int, int, str]:
        label, (first, *_) = labeled
        length = 0 if tree["table"].get("mixed") else -first["epochs"]
        return length, methods.index(first["method"]), factors.index(first["imbalance"]), label

    labeled_rows = []
    for runs in rows:
        differences = describe_differences(_identity(runs[0]), same_cell[_cell_key(runs[0])])
        labeled_rows.append((method_label(runs[0], tree["table"]) + differences, runs))
    return sorted(labeled_rows, key=sort_key)


def _cell_key(record: Tree) -> tuple[Any, ...]:
    """Return the key of a cell of the table; rows of one cell need different labels."""
    return record["method"], record["epochs"], record["imbalance"]


def _identity(record: Tree) -> Tree:
    """Return the settings, without the imbalance factor, and the precision."""
    identity = record["identity"]
    data = {k: v for k, v in identity["data"].items() if k != "imbalance"}
    return identity | {"data": data, "precision": record["precision"]}


def _make_row(label: str, runs: list[Tree], table: Tree) -> Tree:
    first, metrics = runs[0], dict[str, Tree]()
    for name in TABLE_METRICS:
        values = [r["metrics"][name] for r in runs if r["metrics"].get(name) is not None]
        mean, std = mean_std(values) if values else (None, None)
        metrics[name] = {"mean": mean, "std": std, "values": values}
    paper = published_accuracy(table, first["method"], first["imbalance"])
    is_other_data = first["method"] in table.get("elsewhere", [])  # the paper's accuracy is for other data
    return {
        "method": first["method"],
        "label": label,
        "imbalance": first["imbalance"],
        "epochs": first["epochs"],
        "precision": first["precision"],
        "checksum": first["data"]["checksum"],
        "seeds": [r["seed"] for r in runs],
        "paper": paper,
        "difference": None if paper is None or is_other_data else metrics["top1"]["mean"] - paper,
        "metrics": metrics,
    }


def top1_by_seed(row: Tree) -> dict[int, float]:
    """Return the top-1 accuracies of a row by seed."""
    return dict(zip(row["seeds"], row["metrics"]["top1"]["values"], strict=True))


# Verdicts


def compare_pairs(rows: Sequence[Tree], table: Tree) -> list[Tree]:
    """Compare the method pairs of a table wherever both ran on the same images, with the same length and precision."""
    same = ("imbalance", "precision", "checksum", *([] if table.get("mixed") else ["epochs"]))
    found = []
    for pair in method_pairs(table):
        first, second = ([row for row in rows if row["method"] == m] for m in pair)
        found += [compare_rows(a, b) for a in first for b in second if all(a[k] == b[k] for k in same)]
    return found


def method_pairs(table: Tree) -> list[list[str]]:
    """Return the pairs of methods to compare; by default the first two methods."""
    return table.get("pairs") or [list(table["methods"])[:2]]


def compare_rows(a: Tree, b: Tree) -> Tree:
    """Return the seed-paired difference a - b in top-1 accuracy with its 95 % t interval."""
    names = {"pair": [a["method"], b["method"]], "first": a["label"], "second": b["label"]}
    names |= {"epochs": a["epochs"], "imbalance": a["imbalance"]}
    return names | compare_seeds(top1_by_seed(a), top1_by_seed(b))._asdict()


# Plots


class PlotFile(NamedTuple):
    """A plot next to the page of a table."""

    name: str
    """File name."""
    description: str


def plot_files(tree: Tree, epochs: int) -> dict[str, PlotFile]:
    """Return the plots for one length of training.

    There is a plot of accuracy by class frequency, or by method if there are many methods, and one of accuracy against latency
    if the networks differ in size.
    """
    stem = tree["name"].replace("-", "_") + (f"_{epochs}_epochs" if epochs != MIXED_LENGTHS else "")
    curves, points = curves_by_factor(tree, epochs), points_by_factor(tree, epochs)
    found = {}
    if max(map(len, points.values()), default=0) > MAX_CURVES:
        found["compared"] = PlotFile(f"{stem}.png", "Accuracy of each method: all images, and classes by their size")
    elif curves:
        found["by frequency"] = PlotFile(f"{stem}.png", "Accuracy of each class against its training images")
    if any(len(model_sizes(each)) > 2 for each in points.values()):
        found["latency"] = PlotFile(f"{stem}_latency.png", "Accuracy against the time for a batch of 64")
    return found


def points_by_factor(tree: Tree, epochs: int) -> dict[str, list[MethodPoint]]:
    """Return the rows of one length as points for each factor, best last."""
    panels: dict[str, list[MethodPoint]] = {}
    for factor in tree["table"]["imbalance"]:
        rows = [row for row in select_length(tree["rows"], epochs) if row["imbalance"] == factor]
        rows.sort(key=lambda row: row["metrics"]["top1"]["mean"])
        labels = rank_labels([top1_by_seed(row) for row in rows])
        points = [_make_point(row, label) for row, label in zip(rows, labels, strict=True)]
        panels |= {factor_name(factor): points} if points else {}
    return panels


def _make_point(row: Tree, rank: str) -> MethodPoint:
    values = {name: metric["values"] for name, metric in row["metrics"].items()}
    return MethodPoint(row["label"], rank, values, None if row["difference"] is None else row["paper"])


def curves_by_factor(tree: Tree, epochs: int) -> dict[str, list[Curve]]:
    """Return the curves of the rows of one length for each factor.

    Balanced data have nothing to plot, and records of older versions have no class counts.
    """
    panels: dict[float, list[Curve]] = {factor: [] for factor in tree["table"]["imbalance"]}
    for label, runs in group_runs(tree):
        counts = next((r["counts"] for r in runs if r.get("counts")), [0])
        has_accuracy = any(accuracy is not None for r in runs for accuracy in r["per_class"])
        if select_length(runs[:1], epochs) and min(counts) < max(counts) and has_accuracy:
            panels[runs[0]["imbalance"]].append(Curve(label, counts, [r["per_class"] for r in runs]))
    return {factor_name(factor): curves for factor, curves in panels.items() if curves}


def model_sizes(points: Sequence[MethodPoint]) -> set[float]:
    """Return the numbers of parameters of the methods with a known latency."""
    return {p.values["parameters"][0] for p in points if p.values["latency_b64"] and p.values["parameters"]}


# Page


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
    return "each method with its own settings" if epochs == MIXED_LENGTHS else pluralize(epochs, "epoch")


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
    missing = []
    for method, label, named in headline_rows(table, rows):
        wanted = table.get("factors", {}).get(method, table["imbalance"])
        cells = [words for factor in wanted if (words := _describe_missing_seeds(table, factor, named))]
        missing += [f"{escape_markdown(label)} at {', '.join(cells)}"] if cells else []
    return f"Not run yet: {'; '.join(missing)}." if missing else "All runs are complete."


def _describe_missing_seeds(table: Tree, factor: float, rows: Iterable[Tree]) -> str | None:
    recorded = {seed for row in rows if row["imbalance"] == factor for seed in row["seeds"]}
    seeds = [s for s in table["seeds"] if s not in recorded]
    note = f" ({format_seeds(seeds)})" if recorded else ""
    return factor_name(factor) + note if seeds else None


def describe_verdict(verdict: Tree) -> str:
    """Return a sentence about the comparison of two methods."""
    seeds = len(verdict["seeds"])
    where = f"{factor_name(verdict['imbalance']).capitalize()}:"
    if verdict["outcome"] is None:
        return (
            f"{where} no conclusion; there are {pluralize(seeds, 'common seed')}, and at least {MIN_SEEDS} are needed."
        )
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
        [row["label"], word, *(_format_cell(row, c) for c in PAPER_METRICS), " ".join(map(str, row["seeds"]))]
        for row, word in zip(here, words, strict=True)
    ]
    title = f"### {factor_name(factor).capitalize()}"
    return [title, markdown_table(head, body, 2), *([TIES_LEGEND] if any(words) else [])]


def _format_cell(row: Tree, column: str) -> str:
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
        f"{escape_markdown(label)}: plus {pluralize(n, 'epoch')} for the second stage" for label, n in stages if n
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
