"""Figures of the training: curves from log.jsonl, the progress of unfinished runs, and gradient norms from gradients.npz."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail import run_folder
from longtail.metrics import FloatArray, evenly_spaced
from longtail.progress import format_duration
from longtail.reporting import run_artifacts
from longtail.reporting.dataset_results import MAX_CLASSES_SHOWN, DatasetResults
from longtail.reporting.html import (
    Element,
    Plot,
    Point,
    Scale,
    SeriesStyle,
    TableCell,
    el,
    figure,
    grid,
    make_scale,
    missing_note,
    section,
    swatch,
    table,
    user_text,
)
from longtail.reporting.result_rows import ResultRow, dataset_name

Log = Sequence[dict[str, Any]]
"""One row per epoch."""

MAX_POINTS = 400  # per curve
MAX_CURVES = 20  # more colors, dashes and markers cannot be told apart
PROGRESS_HEADINGS = ("epoch", "loss", "training, %", "validation, %", "training time left", "last update")
CURVES = {
    "loss": "training loss",
    "accuracy": "training accuracy, %",
    "val_accuracy": "validation accuracy, %",
    "lr": "learning rate",
    "P_sup": "P_sup, the probability of the centers",
}
"""Keys of log rows that are plotted, with their axis labels."""
P_SUP_EXPLAINED = (
    "PaCo compares an image with the centers of the classes and with other images. P_sup is the share of the probability that "
    "falls on the centers; the rest falls on images. Its level depends on alpha, and it should converge. "
)


def curve_figures(title: str, logs: Mapping[str, Log], optimum: float | None = None) -> Element:
    """Return a figure for each quantity of the logs, with a line for each log.

    Args:
        title: Start of the titles.
        logs: Logs by label; the first has `SeriesStyle(0)`.
        optimum: Value of P_sup at the minimum of the loss, drawn as a reference.
    """
    if not any(logs.values()):
        return missing_note("training curves", "log.jsonl is missing or contains no epoch")
    known = [key for key in CURVES if any(key in row for log in logs.values() for row in log)]
    return grid([_curve_figure(title, key, logs, optimum if key == "P_sup" else None) for key in known])


def _curve_figure(title: str, key: str, logs: Mapping[str, Log], optimum: float | None) -> Element:
    series = {label: _finite_points(log, key) for label, log in logs.items()}
    values = [y for points in series.values() for _, y in points]
    x = Scale(0, max((e for points in series.values() for e, _ in points), default=1), is_integer=True)
    y = make_scale([*values, 0.0] if optimum is None else [*values, 0.0, optimum])
    plot = Plot(f"{title}: {CURVES[key]}", f"{CURVES[key]} by epoch, one line per run.", x, y, "epoch", CURVES[key])
    for i, (label, points) in enumerate(series.items()):
        if len(points) == 1:
            plot.dots(points, SeriesStyle(i), [label])
        elif points:
            plot.marked_line([points[j] for j in evenly_spaced(len(points), MAX_POINTS)], SeriesStyle(i), label)
    if optimum is not None:
        plot.reference([(x.low, optimum), (x.high, optimum)], f"optimum {optimum:.3f}")
    stages = max((list(dict.fromkeys(str(row.get("stage")) for row in log)) for log in logs.values()), key=len)
    caption = f"Stages in order: {', '.join(stages)}. " if len(stages) > 1 else ""
    if key == "P_sup":
        caption += P_SUP_EXPLAINED
    if optimum is not None:
        caption += f"Dashed: value at the optimum of the loss, {optimum:.2f} (mean of 1/(1 + alpha·K) over images). "
    columns: dict[str, Sequence[Any]] = {"epoch": range(1, 1 + max(map(len, logs.values())))}
    columns |= {label: [row.get(key) for row in log] for label, log in logs.items()}
    legend = [(SeriesStyle(i), label) for i, (label, points) in enumerate(series.items()) if points and len(series) > 1]
    return figure(plot, f"training_{key}", columns, caption, legend)


# Unfinished runs


class RunProgress(NamedTuple):
    """The progress of a run that is not finished."""

    run: run_folder.StartedRun
    log: Log
    last_update: float
    """Time of the last write, in seconds since 1970."""
    is_training: bool | None
    """True if a process on this machine trains the run; None if unknown."""

    @property
    def epochs(self) -> int:
        """Epochs of all stages; for runs of older versions, those of the current stage."""
        stored = self.run.environment.get("epochs") or (self.log[-1].get("epochs") if self.log else None)
        return max(int(_finite(stored) or self.run.config.train.epochs), len(self.log))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds of training that are left."""
        seconds = [s for row in self.log if (s := _finite(row.get("seconds"))) is not None]
        return sum(seconds) / len(seconds) * (self.epochs - len(self.log)) if seconds else None

    def latest(self, key: str) -> float | None:
        """Return the latest finite value of a quantity."""
        return next((y for row in reversed(self.log) if (y := _finite(row.get(key))) is not None), None)


def read_progress(run: run_folder.StartedRun) -> RunProgress:
    """Read the progress of a run."""
    training = run_artifacts.is_training(run.folder)
    return RunProgress(run, run_artifacts.read_log(run), run_artifacts.last_update(run), training)


def unfinished_section(started: Sequence[run_folder.StartedRun]) -> Element | None:
    """Return the progress and curves of unfinished runs, the latest first; None if there are none.

    Styles are counted from the earliest run, so that they do not change when another run starts.
    """
    if not started:
        return None
    runs = [
        read_progress(run) for run in sorted(started, key=lambda run: (str(run.environment["started"]), run.folder))
    ]
    labels = _run_labels([progress.run for progress in runs])
    num_older = max(len(runs) - MAX_CURVES, 0)
    styles = [None] * num_older + [SeriesStyle(i) for i in range(len(runs) - num_older)]
    head = ["run", "data", *PROGRESS_HEADINGS, "folder"]
    body = [_progress_cells(*cells) for cells in zip(runs, labels, styles, strict=True)]
    advice = (
        "Stopped: no process on this machine trains the run; continue it with --resume. Runs on other machines have stopped "
        "if their last update is much older than the time of an epoch."
    )
    subset = f" Curves are shown for the {MAX_CURVES} latest runs." if num_older else ""
    logs = {label: progress.log for label, progress in zip(labels[num_older:], runs[num_older:], strict=True)}
    return el(
        "section",
        el("h2", "Unfinished runs"),
        table(head, body[::-1], "Unfinished runs, with their latest values"),
        el("p", advice, subset, class_="small"),
        curve_figures("Unfinished", logs) if any(logs.values()) else None,
    )


def _run_labels(started: Sequence[run_folder.StartedRun]) -> list[str]:
    """Return unique labels: method and seed, and the folder if these are ambiguous."""
    labels = [f"{run.config.method.label}, seed {run.seed}" for run in started]
    parent = os.path.commonpath([run.folder.absolute() for run in started])
    folders = [os.path.relpath(run.folder, parent) for run in started]
    return [
        f"{label} in {folder}" if labels.count(label) > 1 else label
        for label, folder in zip(labels, folders, strict=True)
    ]


def _progress_cells(progress: RunProgress, label: str, style: SeriesStyle | None) -> list[TableCell]:
    done, total, left = len(progress.log), progress.epochs, progress.seconds_left
    bar = el("progress", value=done, max=total, aria_label=f"{label}: {done} of {total} epochs")
    epoch = el("span", f"{done} of {total} ", bar) if done < total else f"{done} of {done}, then evaluation"
    numbers = [
        _number_cell(progress.latest("loss"), 3),
        _number_cell(progress.latest("accuracy")),
        _number_cell(progress.latest("val_accuracy")),
    ]
    time_left = f"about {format_duration(left)}" if left else "–"
    return [
        TableCell(el("span", swatch(style) if style else None, " ", user_text(label))),
        TableCell(user_text(dataset_name(progress.run))),
        TableCell(epoch, done),
        *numbers,
        TableCell("stopped" if progress.is_training is False else time_left, left),
        TableCell(_time_element(progress.last_update), progress.last_update),
        TableCell(user_text(str(progress.run.folder), max_length=300)),
    ]


def _number_cell(value: float | None, digits: int = 1) -> TableCell:
    return TableCell("–" if value is None else f"{value:.{digits}f}", value)


def _time_element(seconds: float) -> Element:
    """Return a time; the script of a live page replaces its text by the time that has passed since."""
    moment = time.gmtime(seconds)
    iso = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)
    return el("time", time.strftime("%Y-%m-%d %H:%M UTC", moment), datetime=iso)


# Values


def _finite_points(log: Log, key: str) -> list[Point]:
    """Return (epoch, value) for the epochs with a finite value."""
    found = [(float(i), _finite(row.get(key))) for i, row in enumerate(log, 1)]
    return [(x, y) for x, y in found if y is not None]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# Gradient norms


CAPTION = (
    "Mean gradient norm of each class's classifier weights, over the last stage that trains the classifier "
    "(as in the paper's Fig. 2). Shaded: range over seeds. Head / tail: the most frequent tenth of the classes divided by the "
    "rarest tenth; 1 is balanced."
)


class ClassGradientNorms(NamedTuple):
    """Gradient norms of a method, one row per seed (S, C), classes from frequent to rare."""

    label: str
    norms_SC: FloatArray

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.norms_SC.shape[1]

    @property
    def head_tail_ratio(self) -> float | None:
        """Mean of the most frequent tenth of the classes divided by that of the rarest tenth; None if the latter is 0."""
        mean_C, tenth = self.norms_SC.mean(0), -(-self.num_classes // 10)
        tail = mean_C[-tenth:].mean()
        return float(mean_C[:tenth].mean() / tail) if tail else None

    @property
    def label_with_ratio(self) -> str:
        """The label for legends."""
        ratio = self.head_tail_ratio
        return self.label if ratio is None else f"{self.label}: head / tail {ratio:.{1 if ratio < 10 else 0}f}"

    def seed_range(self) -> FloatArray:
        """Return minimum, mean and maximum over seeds (3, C)."""
        return np.stack([self.norms_SC.min(0), self.norms_SC.mean(0), self.norms_SC.max(0)])


def class_gradient_norms(row: ResultRow) -> ClassGradientNorms | None:
    """Return the norms of the seeds that have gradients.npz; None if none has."""
    counts = row.runs[0].metrics.get("counts") or []
    found = [norms_C for run in row.runs if (norms_C := run_artifacts.read_gradient_norms(run)) is not None]
    order = np.argsort(-np.asarray(counts), kind="stable")
    known = [norms_C[order] for norms_C in found if len(norms_C) == len(counts)]
    return ClassGradientNorms(row.label, np.stack(known)) if known else None


def gradient_norms_by_dataset(rows: Sequence[ResultRow]) -> dict[str, list[ClassGradientNorms]]:
    """Return the norms for each data set, in the order of the rows."""
    panels: dict[str, list[ClassGradientNorms]] = {}
    for row in rows:
        if (norms := class_gradient_norms(row)) is not None:
            panels.setdefault(row.data, []).append(norms)
    return panels


def gradient_section(dataset: DatasetResults) -> Element | None:
    """Return the section of a page; None if no run has gradients.npz."""
    found = [(row, norms) for row in dataset.rows if (norms := class_gradient_norms(row)) is not None]
    if not found:
        return None
    description = "Gradient norms of the classes, frequent classes on the left; a flat line is balanced."
    num_classes = max(norms.num_classes for _, norms in found)
    x = Scale(1, 1.02 * num_classes)
    y = make_scale(np.concatenate([norms.seed_range().ravel() for _, norms in found]).tolist(), log=True)
    labels = ("classes, from frequent to rare", "mean gradient norm")
    plot = Plot("Gradients of the classifier", description, x, y, *labels)
    columns: dict[str, Sequence[Any]] = {"rank": range(1, num_classes + 1)}
    for row, norms in found:
        shown = evenly_spaced(norms.num_classes, MAX_CLASSES_SHOWN)
        low, mean, high = (
            [(float(c + 1), max(float(norm_C[c]), y.low)) for c in shown] for norm_C in norms.seed_range()
        )
        plot.area(low, high, dataset.style(row))
        plot.marked_line(mean, dataset.style(row), row.label)
        columns |= {row.label: norms.norms_SC.mean(0).tolist()}
    legend = [(dataset.style(row), norms.label_with_ratio) for row, norms in found]
    return section("Gradients of the classifier", figure(plot, "gradients", columns, CAPTION, legend))
