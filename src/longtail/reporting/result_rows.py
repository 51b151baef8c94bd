"""Rows of result tables: the runs of one configuration, with mean and standard deviation over seeds."""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail import run_folder
from longtail.config import differences
from longtail.errors import unknown_name
from longtail.metrics import METRICS, TABLE_METRICS, FloatArray, mean_std


@dataclass(frozen=True)
class ResultRow:
    """The runs of one configuration, one per seed."""

    data: str
    """Name of the data set."""
    label: str
    """Name of the method, with the settings that tell it from other rows."""
    runs: tuple[run_folder.FinishedRun, ...]

    def values(self, metric: str) -> list[float]:
        """Return the values of the runs that have the metric; the number of parameters is part of their environment."""
        found = [r.metrics.get(metric, r.environment.get(metric)) for r in self.runs]
        return [value for value in found if value is not None]

    def mean(self, metric: str) -> float:
        """Return the mean over seeds."""
        return mean_std(self.values(metric))[0]

    def by_seed(self, metric: str = "top1") -> dict[int, float]:
        """Return the values of a metric by seed."""
        return {r.seed: value for r in self.runs if (value := r.metrics.get(metric)) is not None}

    def per_class(self) -> FloatArray:
        """Return the accuracy of each class (C,), averaged over seeds; NaN for a class without test images."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean of an empty slice is NaN, as intended
            return np.asarray(
                np.nanmean(np.array([run.metrics["per_class"] for run in self.runs], dtype=float), axis=0)
            )

    @property
    def held_out(self) -> float:
        """Fraction of the training images that was held out for validation."""
        return self.runs[0].config.data.val_fraction

    def cell(self, metric: str) -> str:
        """Format a metric as tables show it.

        Args:
            metric: Name in metrics.json, or column heading.
        """
        key = {METRICS[name].heading: name for name in TABLE_METRICS}.get(metric, metric)
        if key not in TABLE_METRICS:
            raise unknown_name("metric", metric, TABLE_METRICS)
        return format_metric(key, self.values(key))

    def to_dict(self) -> dict[str, Any]:
        """Return the row as table.json stores it."""
        stats = {m: mean_std(self.values(m)) if self.values(m) else (None, None) for m in TABLE_METRICS}
        return {
            "data": self.data,
            "method": self.label,
            "config": self.runs[0].config.identity(),
            "seeds": [r.seed for r in self.runs],
            "commits": sorted({str(r.environment.get("commit")) for r in self.runs}),
            "devices": sorted({str(r.environment.get("device")) for r in self.runs}),
            "folders": [str(r.folder) for r in self.runs],
            "metrics": {m: {"mean": mean, "std": std, "values": self.values(m)} for m, (mean, std) in stats.items()},
        }


def format_metric(metric: str, values: Sequence[float]) -> str:
    """Format the values of a metric over seeds; the number of parameters is the same for all seeds."""
    return format_mean_std(values[:1] if metric == "parameters" else values, METRICS[metric].digits)


def format_mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Format mean ± standard deviation; an en dash if there are no values."""
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:,.{digits}f}" + (f" ± {std:,.{digits}f}" if std is not None else "")


def make_rows(runs: Sequence[run_folder.FinishedRun]) -> list[ResultRow]:
    """Group runs that differ only in the seed into rows, sorted by data set and then by accuracy, best last.

    If a seed was run twice, the later run is used.
    """
    groups: dict[str, dict[int, run_folder.FinishedRun]] = {}
    for run in sorted(runs, key=lambda r: r.environment["started"]):
        groups.setdefault(_row_key(run), {})[run.seed] = run
    seeds = [tuple(by_seed[s] for s in sorted(by_seed)) for by_seed in groups.values()]
    rows = [ResultRow(dataset_name(g[0]), g[0].config.method.label, g) for g in seeds]
    same_name: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        same_name.setdefault((row.data, row.label), []).append(row)
    held_out = {row.data: {other.held_out for other in rows if other.data == row.data} for row in rows}
    named = [
        ResultRow(
            row.data,
            row.label + _held_out_note(row, held_out[row.data]) + _settings_note(row, same_name[row.data, row.label]),
            row.runs,
        )
        for row in rows
    ]
    return sorted(named, key=lambda row: (row.data, sum(row.values("top1")) / len(row.runs)))


def _row_key(run: run_folder.FinishedRun) -> str:
    """Return a key that is equal for runs that differ only in the seed."""
    return json.dumps(_identity(run) | {"classes": len(run.metrics["per_class"])}, sort_keys=True)


def _identity(run: run_folder.FinishedRun) -> dict[str, Any]:
    """Return the configuration with the checksum of the images and the precision that was used."""
    used = {"images": run.environment["data"]["checksum"], "precision": run.environment["precision"]}
    return run.config.identity() | used


def _held_out_note(row: ResultRow, fractions: set[float]) -> str:
    """Return a note for methods that were trained on fewer images than others."""
    return f", {100 * row.held_out:g} % held out" if row.held_out and len(fractions) > 1 else ""


def _settings_note(row: ResultRow, same_name: list[ResultRow]) -> str:
    """Return the settings in which a row differs from others of the same name; `_held_out_note` covers val_fraction."""
    every = [_identity(other.runs[0]) for other in (row, *same_name)]
    own, *others = ({**one, "data": {**one["data"], "val_fraction": 0}} for one in every)
    return describe_differences(own, others)


def describe_differences(own: dict[str, Any], others: Iterable[dict[str, Any]]) -> str:
    """Return the fields in which `own` differs from any of the others, as " (alpha=0.02, lr=0.1)"; empty if there are none."""
    fields = {f: pair[0] for other in others for f, pair in differences(own, other).items()}
    return " (" + ", ".join(f"{f}={v}" for f, v in sorted(fields.items())) + ")" if fields else ""


def dataset_name(run: run_folder.StartedRun) -> str:
    """Return the name of the data set of a run, as tables show it."""
    data = run.config.data
    path = data.train_list.with_suffix("") if data.train_list else data.root
    name = path.resolve().name if data.name in ("folder", "list", "shards") and path else data.name
    return f"{name}-lt, imbalance {data.imbalance:g}" if data.imbalance > 1 else name
