"""The results file of a reproduced table: one JSON that holds every run of it, checked when it is read.

name, title, command, updated     what it is, the last call that added to it, and when
table                             methods and their labels, factors, seeds, and the figures of the paper
rows, verdicts                    what follows from the runs, for readers who want no arithmetic
runs                              a record per method, factor, seed and configuration
"""

import json
from pathlib import Path
from typing import Any

from longtail import files
from longtail.config import Config, from_dict
from longtail.errors import UserError
from longtail.metrics import METRICS
from longtail.paper.results_page import to_markdown
from longtail.reporting.cells import (
    compare_pairs,
    curves_by_factor,
    make_rows,
    plot_files,
    points_by_factor,
    training_lengths,
)
from longtail.schema import amount, count, percent

# Metrics that a record keeps, the required ones first. Others may be missing, or None for an empty group.
STORED_METRICS = sorted(METRICS, key=lambda name: not METRICS[name].is_required)
Types = dict[str, type | tuple[type, ...]]
START_TYPES: Types = {
    "started": str,
    "commit": (str, type(None)),
    "device": str,
}  # of a run, and of each time it was resumed
RECORD_TYPES: Types = START_TYPES | {
    "method": str,
    "imbalance": (int, float),
    "seed": int,
    "epochs": int,
    "command": str,
    "metrics": dict,
    "per_class": list,
    "precision": str,
    "versions": dict,
    "resumed": list,
    "data": dict,
    "identity": dict,
}
DATA_TYPES: Types = {"checksum": str, "images": int, "notes": list}


def read(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The file of `table`; without a run where there is none yet. Identities are brought up to the fields of today's Config."""
    try:
        if not path.exists():
            return {"runs": []}
        tree = files.parse_json(files.read_text(path))
        if not isinstance(tree, dict) or not isinstance(tree.get("runs"), list):
            raise ValueError("no list of runs")
        _check_types(tree, {"command": str, "updated": str})
        return tree | {"runs": [_check_record(record, table) for record in tree["runs"]]}
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise UserError(
            f"cannot use {path} ({error}): restore it, or move it away to start anew", kind="damaged-file"
        ) from error


def _check_record(record: Any, table: dict[str, Any]) -> dict[str, Any]:
    _check_types(record, RECORD_TYPES)
    _check_types(record["data"], DATA_TYPES)
    numbers = {"seed": record["seed"], "epochs": record["epochs"], "images": record["data"]["images"]}
    for name, value in numbers.items():
        if not count(value) or (name != "seed" and not value):
            raise ValueError(f"{name} is {str(value)[:60]}")
    _check_classes(record["per_class"], record.get("counts"))
    for start in record["resumed"]:
        _check_types(start, START_TYPES)
    if record["method"] not in table["methods"] or record["imbalance"] not in table["imbalance"]:
        raise ValueError(f"a run of {record['method']} at {record['imbalance']}, which the table does not have")
    for name in STORED_METRICS:
        value = record["metrics"].get(name)
        fits = percent(value) if METRICS[name].is_percentage else amount(value)
        if not fits and (value is not None or METRICS[name].is_required):
            raise ValueError(f"{name} is {str(value)[:60]}")
    return record | {"identity": from_dict(Config, record["identity"]).identity()}


def _check_types(tree: Any, kinds: Types) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"{tree!r} where a run was expected")
    for key, kind in kinds.items():
        if key not in tree or not isinstance(tree[key], kind):
            raise ValueError(f"{key} is {tree.get(key)!r}")


def _check_classes(per_class: list[Any], counts: Any) -> None:
    """A number a class; None for one without test images, and for the counts of older records."""
    if any(value is not None and not percent(value) for value in per_class):
        raise ValueError("per_class has a value that is no percentage")
    if counts is None:
        return
    if not isinstance(counts, list) or len(counts) != len(per_class) or not all(map(count, counts)):
        raise ValueError(f"counts are not those of {len(per_class)} classes")


def find_runs(tree: dict[str, Any], method: str, imbalance: float, config: Config) -> dict[int, dict[str, Any]]:
    """The recorded runs of one cell in this very configuration, by seed."""
    same = [r for r in tree["runs"] if (r["method"], r["imbalance"]) == (method, imbalance)]
    return {r["seed"]: r for r in same if r["identity"] == config.identity()}


def add_records(tree: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The tree with these records, in the place of older ones of the same method, factor, seed and configuration."""
    fresh = [_key(record) for record in records]
    return tree | {"runs": [r for r in tree["runs"] if _key(r) not in fresh] + records}


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    identity = json.dumps(record["identity"], sort_keys=True)
    return record["method"], record["imbalance"], record["seed"], identity


def write(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """The file, its pictures and its page, each replaced atomically; the tree as it was written, rows and verdicts anew."""
    rows = make_rows(tree)
    head = {k: tree[k] for k in ("name", "title", "command", "updated", "table")}
    tree = head | {"rows": rows, "verdicts": compare_pairs(rows, tree["table"]), "runs": tree["runs"]}
    try:
        files.write_json(path, tree)
        draw_pictures(tree, path.parent)
        files.write_text(path.with_suffix(".md"), to_markdown(tree))
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent} ({error.strerror}): choose another --results", kind="not-writable"
        ) from error
    return tree


def draw_pictures(tree: dict[str, Any], folder: Path) -> None:
    """The pictures that the page shows."""
    from longtail.reporting import plots  # matplotlib, which takes a second to come

    for epochs in training_lengths(tree):
        for kind, picture in plot_files(tree, epochs).items():
            with files.replace_file(folder / picture.name) as path:
                if kind == "by frequency":
                    plots.accuracy_by_frequency(curves_by_factor(tree, epochs), path)
                elif kind == "compared":
                    plots.accuracy_by_method(points_by_factor(tree, epochs), path)
                else:
                    plots.accuracy_by_latency(points_by_factor(tree, epochs), path)
