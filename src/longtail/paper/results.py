"""The results file of a reproduced table: a JSON file with all its runs, which is validated when it is read.

name, title, command, updated     the table, the last command that added runs, and its time
table                             methods and their labels, imbalance factors, seeds, and the numbers of the paper
rows, verdicts                    statistics of the runs, and seed-paired comparisons of methods
runs                              a record for each method, factor, seed and configuration
"""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail import files, run_folder
from longtail.config import Config, from_dict
from longtail.data.sources import DataSet
from longtail.errors import UserError
from longtail.metrics import METRICS
from longtail.paper.results_page import (
    compare_pairs,
    curves_by_factor,
    make_rows,
    plot_files,
    points_by_factor,
    to_markdown,
    training_lengths,
)
from longtail.paper.tables import TABLES, Cell, PaperTable
from longtail.schema import amount, count, percent

# Metrics that a record keeps, the required ones first. Others may be missing, or None for an empty group.
STORED_METRICS = sorted(METRICS, key=lambda name: not METRICS[name].is_required)
Types = dict[str, type | tuple[type, ...]]
START_TYPES: Types = {
    "started": str,
    "commit": (str, type(None)),
    "device": str,
}  # of a run, and each time it was resumed
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


def read_results(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a results file; without runs if there is no file. Identities get the fields of the present Config.

    Args:
        path: The file.
        table: The table, as `PaperTable.to_dict` returns it.
    """
    try:
        if not path.exists():
            return {"runs": []}
        tree = files.parse_json(files.read_text(path))
        if not isinstance(tree, dict) or not isinstance(tree.get("runs"), list):
            raise ValueError("it has no list of runs")
        _check_types(tree, {"command": str, "updated": str})
        return tree | {"runs": [_check_record(record, table) for record in tree["runs"]]}
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise UserError(
            f"cannot use {path} ({error}): restore it, or move it away to start again", kind="damaged-file"
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
        raise ValueError(f"it has a run of {record['method']} at {record['imbalance']}, which is not in the table")
    for name in STORED_METRICS:
        value = record["metrics"].get(name)
        fits = percent(value) if METRICS[name].is_percentage else amount(value)
        if not fits and (value is not None or METRICS[name].is_required):
            raise ValueError(f"{name} is {str(value)[:60]}")
    return record | {"identity": from_dict(Config, record["identity"]).identity()}


def _check_types(tree: Any, kinds: Types) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"it has {tree!r} instead of a run")
    for key, kind in kinds.items():
        if key not in tree or not isinstance(tree[key], kind):
            raise ValueError(f"{key} is {tree.get(key)!r}")


def _check_classes(per_class: list[Any], counts: Any) -> None:
    """Raise ValueError unless there is a percentage for each class; None for classes without test images.

    Older records have no counts.
    """
    if any(value is not None and not percent(value) for value in per_class):
        raise ValueError("per_class has a value that is not a percentage")
    if counts is None:
        return
    if not isinstance(counts, list) or len(counts) != len(per_class) or not all(map(count, counts)):
        raise ValueError(f"counts does not have {len(per_class)} classes")


def add_records(tree: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content with more records, which replace those of the same method, factor, seed and configuration."""
    new = [_key(record) for record in records]
    return tree | {"runs": [r for r in tree["runs"] if _key(r) not in new] + records}


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    identity = json.dumps(record["identity"], sort_keys=True)
    return record["method"], record["imbalance"], record["seed"], identity


def write_results(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Write a results file, its plots and its page, each atomically; return the content with new rows and verdicts."""
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
    """Draw the plots of the page."""
    from longtail.reporting import plots  # imports matplotlib, which takes a second

    for epochs in training_lengths(tree):
        for kind, picture in plot_files(tree, epochs).items():
            with files.replace_file(folder / picture.name) as path:
                if kind == "by frequency":
                    plots.accuracy_by_frequency(curves_by_factor(tree, epochs), path)
                elif kind == "compared":
                    plots.accuracy_by_method(points_by_factor(tree, epochs), path)
                else:
                    plots.accuracy_by_latency(points_by_factor(tree, epochs), path)


def file_name(table: str) -> str:
    """Return the name of the results file of a table."""
    return f"{table.replace('-', '_')}.json"


class ResultsFile:
    """The results file of a table, to which runs are added."""

    def __init__(self, path: Path, name: str, table: PaperTable, command: str) -> None:
        self.path, self.table, self.command = path, table.to_dict(), command
        self.head = {"name": name, "title": table.title, "table": self.table}
        self.tree = read_results(path, self.table)
        self.shared = [
            read_results(path.with_name(file_name(other)), TABLES[other].to_dict()) for other in table.shares
        ]
        self.device: str | None = None  # the device of the runs that this call added

    def find_records(self, cell: Cell) -> dict[int, dict[str, Any]]:
        """Return the recorded runs of a cell, with exactly its configuration, by seed."""
        same = [r for r in self.tree["runs"] if (r["method"], r["imbalance"]) == (cell.method, cell.imbalance)]
        return {r["seed"]: r for r in same if r["identity"] == cell.config.identity()}

    def copy_shared_runs(self, cells: Sequence[Cell], wanted: Sequence[int]) -> None:
        """Copy runs of the same configurations from the results of other tables, before anything is trained."""
        for cell, tree in itertools.product(cells, self.shared):
            found = [r for r in tree["runs"] if r["identity"] == cell.config.identity() and r["seed"] in wanted]
            missing = [r | {"method": cell.method} for r in found if r["seed"] not in self.find_records(cell)]
            if missing:
                self.add(missing, trained_here=False)

    def missing_seeds(self, cell: Cell, wanted: Sequence[int], rerun: bool) -> list[int]:
        """Return the seeds of a cell that are not recorded, or all with `rerun`."""
        return [s for s in wanted if rerun or s not in self.find_records(cell)]

    def check_same_images(self, cell: Cell, data: DataSet) -> None:
        """Raise a UserError if the file has runs on other images at the same imbalance factor."""
        for record in self.tree["runs"]:
            stored = record["data"]["checksum"]
            if record["imbalance"] == cell.imbalance and stored != data.checksum:
                other = f"at imbalance {cell.imbalance:g} {self.path} has runs on other images (checksum {stored})"
                raise UserError(
                    f"{other}: give their folder as --data_root, or choose another --results", kind="mismatch"
                )

    def add(self, records: list[dict[str, Any]], trained_here: bool = True) -> None:
        """Add records and write the file. It is read again before, because another process may have added runs."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.tree = add_records(read_results(self.path, self.table), records)
        self.tree |= {"command": self.command, "updated": now}
        self.device = records[-1]["device"] if trained_here else self.device
        self.write()

    def write(self) -> dict[str, Any]:
        """Write the file, with new rows and verdicts, and return its content."""
        if not self.tree["runs"]:
            raise UserError("no cell was started: increase --minutes", kind="unfinished-run")
        self.tree = write_results(self.path, self.tree | self.head)
        return self.tree


def make_record(cell: Cell, folder: Path, command: str) -> dict[str, Any]:
    """Return the record of a finished run; fields that the run folder does not have are empty.

    Args:
        cell: The cell of the run.
        folder: The run folder.
        command: The command that trained it.
    """
    run = run_folder.read(folder)
    environment, images = run.environment, run.environment["data"]
    counts = run.metrics.get("counts") or images.get("counts")
    trained_on = images.get("images") or sum(counts or [])
    if not trained_on:
        raise UserError(f"{folder / run_folder.ENVIRONMENT} does not contain the number of images", kind="damaged-file")
    found = run.metrics | {"parameters": environment.get("parameters")}
    return {
        "method": cell.method,
        "imbalance": cell.imbalance,
        "seed": run.seed,
        "epochs": run.config.train.epochs,
        "command": command,
        **{key: environment[key] for key in ("started", "precision")},
        "commit": environment.get("commit"),
        "device": environment.get("device") or "",
        "versions": environment.get("versions") or {},
        "resumed": environment.get("resumed") or [],
        "data": {"checksum": images["checksum"], "images": trained_on, "notes": images.get("notes") or []},
        "metrics": {name: found[name] for name in METRICS if name in found},
        "per_class": run.metrics["per_class"],
        "counts": counts,
        "identity": run.config.identity(),
    }
