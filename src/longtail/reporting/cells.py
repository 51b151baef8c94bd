"""Rows and verdicts of a reproduced table, from the runs in its results file.

A row is a method at one imbalance factor, with the runs that differ only in the seed, so that lengths of training, precisions
and settings are never mixed.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from longtail.metrics import TABLE_METRICS, mean_std
from longtail.reporting.class_accuracy import Curve
from longtail.reporting.result_rows import describe_differences
from longtail.reporting.significance import compare_seeds, rank_labels
from longtail.reporting.table import MethodPoint

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
