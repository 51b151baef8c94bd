"""Rows and verdicts of a reproduced table, from the runs of its results file.

A row is a method at one factor: runs that differ in nothing but the seed. So lengths, precisions and settings never mix.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.metrics import mean_std
from longtail.reporting.table import COLUMNS, Dot, apart
from longtail.reporting.ties import compare_seeds, rank_labels

Tree = dict[str, Any]


class Curve(NamedTuple):
    """A method on one draw: images of each class, and for every run the accuracy of each class (None: no test images)."""

    label: str
    counts: Sequence[int]
    per_class: Sequence[Sequence[float | None]]


BINS = 10  # of the classes, from frequent to rare


def binned(curve: Curve) -> tuple[list[float], list[float]]:
    """Images and accuracy of classes of like frequency, over runs; ten bins where there are more classes."""
    counts, per_class = np.array(curve.counts), np.array(curve.per_class, dtype=float)
    order = np.argsort(-counts, kind="stable")
    order = order[~np.isnan(per_class).all(0)[order]]
    bins = np.array_split(order, min(BINS, len(order)))
    return [float(counts[b].mean()) for b in bins], [float(np.nanmean(per_class[:, b])) for b in bins]


def make_dots(tree: Tree, epochs: int) -> dict[str, list[Dot]]:
    """By factor, the rows of one length, best last."""
    panels: dict[str, list[Dot]] = {}
    for factor in tree["table"]["imbalance"]:
        rows = [row for row in of_length(tree["rows"], epochs) if row["imbalance"] == factor]
        rows.sort(key=lambda row: row["metrics"]["top1"]["mean"])
        words = rank_labels([top1_by_seed(row) for row in rows])
        dots = [_dot(row, word) for row, word in zip(rows, words, strict=True)]
        panels |= {factor_name(factor): dots} if dots else {}
    return panels


def _dot(row: Tree, word: str) -> Dot:
    values = {name: metric["values"] for name, metric in row["metrics"].items()}
    return Dot(row["label"], word, values, None if row["difference"] is None else row["paper"])


class Picture(NamedTuple):
    """A file beside the page, and what it shows."""

    name: str
    shows: str


FEW = 7  # curves that a reader can tell apart


def pictures(tree: Tree, epochs: int) -> dict[str, Picture]:
    """Of one length: accuracy by class frequency, or by method where these are many; accuracy against latency."""
    stem = tree["name"].replace("-", "_") + (f"_{epochs}_epochs" if epochs != MIXED else "")
    curves, dots = make_panels(tree, epochs), make_dots(tree, epochs)
    found = {}
    if max(map(len, dots.values()), default=0) > FEW:
        found["compared"] = Picture(f"{stem}.png", "Accuracy of each method: all images, and classes by their size")
    elif curves:
        found["by frequency"] = Picture(f"{stem}.png", "Accuracy of each class against its training images")
    if any(len(sizes(each)) > 2 for each in dots.values()):
        found["latency"] = Picture(f"{stem}_latency.png", "Accuracy against the time for a batch of 64")
    return found


def sizes(dots: Sequence[Dot]) -> set[float]:
    """The numbers of parameters of those whose latency is known: that of like networks is the same."""
    return {dot.values["parameters"][0] for dot in dots if dot.values["latency_b64"] and dot.values["parameters"]}


def make_rows(tree: Tree) -> list[Tree]:
    """One per method, factor and configuration."""
    return [_row(label, runs, tree["table"]) for label, runs in labeled(tree)]


def make_panels(tree: Tree, epochs: int) -> dict[str, list[Curve]]:
    """By factor, the curves of the rows of one length; balanced draws have nothing to draw, older records no counts."""
    panels: dict[float, list[Curve]] = {factor: [] for factor in tree["table"]["imbalance"]}
    for label, runs in labeled(tree):
        counts = next((r["counts"] for r in runs if r.get("counts")), [0])
        scored = any(share is not None for r in runs for share in r["per_class"])
        if of_length(runs[:1], epochs) and min(counts) < max(counts) and scored:
            panels[runs[0]["imbalance"]].append(Curve(label, counts, [r["per_class"] for r in runs]))
    return {factor_name(factor): curves for factor, curves in panels.items() if curves}


def labeled(tree: Tree) -> list[tuple[str, list[Tree]]]:
    """The runs of each row, with its label, in the order of the table, longest training first."""
    groups: dict[str, dict[int, Tree]] = {}
    for record in tree["runs"]:
        key = [record["method"], record["identity"], record["precision"], record["data"]["checksum"]]
        groups.setdefault(json.dumps(key, sort_keys=True), {})[record["seed"]] = record
    cells = [[by_seed[s] for s in sorted(by_seed)] for by_seed in groups.values()]
    alike: dict[tuple[Any, ...], list[Tree]] = {}
    for first, *_ in cells:
        alike.setdefault(_place(first), []).append(_traits(first))
    methods, factors = list(tree["table"]["methods"]), tree["table"]["imbalance"]

    def order(named: tuple[str, list[Tree]]) -> tuple[int, int, int, str]:
        label, (first, *_) = named
        length = 0 if tree["table"].get("mixed") else -first["epochs"]
        return length, methods.index(first["method"]), factors.index(first["imbalance"]), label

    return sorted(((_label(cell[0], alike, tree["table"]), cell) for cell in cells), key=order)


def _label(first: Tree, alike: dict[tuple[Any, ...], list[Tree]], table: Tree) -> str:
    return label_of(first, table) + apart(_traits(first), alike[_place(first)])


def _place(record: Tree) -> tuple[Any, ...]:
    """Where it stands in the table: rows of one place must be told apart. Some methods have settings by factor."""
    return record["method"], record["epochs"], record["imbalance"]


def _traits(record: Tree) -> Tree:
    """What rows of one method and length may differ in, the factor apart."""
    identity = record["identity"]
    data = {k: v for k, v in identity["data"].items() if k != "imbalance"}
    return identity | {"data": data, "precision": record["precision"]}


def _row(label: str, runs: list[Tree], table: Tree) -> Tree:
    first, metrics = runs[0], dict[str, Tree]()
    for name in COLUMNS:
        values = [r["metrics"][name] for r in runs if r["metrics"].get(name) is not None]
        mean, std = mean_std(values) if values else (None, None)
        metrics[name] = {"mean": mean, "std": std, "values": values}
    paper = published(table, first["method"], first["imbalance"])
    elsewhere = first["method"] in table.get("elsewhere", [])  # the paper's figure is for other data
    return {
        "method": first["method"],
        "label": label,
        "imbalance": first["imbalance"],
        "epochs": first["epochs"],
        "precision": first["precision"],
        "checksum": first["data"]["checksum"],
        "seeds": [r["seed"] for r in runs],
        "paper": paper,
        "difference": None if paper is None or elsewhere else metrics["top1"]["mean"] - paper,
        "metrics": metrics,
    }


def factor_name(factor: float) -> str:
    return f"imbalance {factor:g}" if factor > 1 else "all images"


def label_of(record: Tree, table: Tree) -> str:
    return str(table["methods"][record["method"]])


MIXED = 0  # the "length" of a table whose methods have each their own


def lengths(tree: Tree) -> list[int]:
    """The lengths of training that were run, longest first: each has a part of the page."""
    if tree["table"].get("mixed"):
        return [MIXED]
    return sorted({record["epochs"] for record in tree["runs"]}, reverse=True)


def of_length(records: Sequence[Tree], epochs: int) -> list[Tree]:
    """Runs, rows or verdicts of one part of the page."""
    return [record for record in records if epochs in (MIXED, record["epochs"])]


def published(table: Tree, method: str, imbalance: float) -> float | None:
    return table["published"].get(method, {}).get(f"{imbalance:g}")


def make_verdicts(rows: Sequence[Tree], table: Tree) -> list[Tree]:
    """The table's pairs, wherever both ran on the same images, at one length and precision."""
    same = ("imbalance", "precision", "checksum", *([] if table.get("mixed") else ["epochs"]))
    found = []
    for pair in pairs(table):
        ours, theirs = ([row for row in rows if row["method"] == m] for m in pair)
        found += [compare(a, b) for a in ours for b in theirs if all(a[k] == b[k] for k in same)]
    return found


def pairs(table: Tree) -> list[list[str]]:
    """Which methods are compared: the first two, where the table does not say."""
    return table.get("pairs") or [list(table["methods"])[:2]]


def compare(a: Tree, b: Tree) -> Tree:
    """The seed-paired difference a - b in top-1 with its 95 % t interval; tied where the interval contains zero."""
    names = {"pair": [a["method"], b["method"]], "first": a["label"], "second": b["label"]}
    names |= {"epochs": a["epochs"], "imbalance": a["imbalance"]}
    return names | compare_seeds(top1_by_seed(a), top1_by_seed(b))._asdict()


def top1_by_seed(row: Tree) -> dict[int, float]:
    return dict(zip(row["seeds"], row["metrics"]["top1"]["values"], strict=True))
