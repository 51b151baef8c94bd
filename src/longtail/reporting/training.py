"""Training as log.jsonl tells of it, a line an epoch: its curves, and how far runs have come that are not finished."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail import run_folder
from longtail.progress import format_duration
from longtail.reporting import reading
from longtail.reporting.html import Element, el
from longtail.reporting.parts import TableCell, absent, figure, grid, name, table
from longtail.reporting.svg import Plot, Point, Scale, SeriesStyle, around, swatch
from longtail.reporting.table import data_name

Log = Sequence[dict[str, Any]]

DRAWN = 400  # points of a curve
HEADINGS = ("epoch", "loss", "training, %", "validation, %", "training time left", "last heard of")
LOOKS = 20  # lines that can be told apart
CURVES = {"loss": "training loss", "accuracy": "training accuracy, %", "val_accuracy": "validation accuracy, %"}
CURVES |= {"lr": "learning rate", "P_sup": "P_sup, the centers' share"}


def curves(title: str, logs: Mapping[str, Log], optimum: float | None = None) -> Element:
    """A figure for each quantity, with a line for each log by its name, the first in `Look(0)`; `optimum` is that of P_sup."""
    if not any(logs.values()):
        return absent("training curves", "log.jsonl is not there, or holds no epoch")
    known = [key for key in CURVES if any(key in line for log in logs.values() for line in log)]
    return grid([_curve_figure(title, key, logs, optimum if key == "P_sup" else None) for key in known])


def _curve_figure(title: str, key: str, logs: Mapping[str, Log], optimum: float | None) -> Element:
    series = {label: _finite_points(log, key) for label, log in logs.items()}
    every = [y for points in series.values() for _, y in points]
    x = Scale(0, max((e for points in series.values() for e, _ in points), default=1), whole=True)
    y = around([*every, 0.0] if optimum is None else [*every, 0.0, optimum])
    shows = f"{CURVES[key]} by epoch, a line for each run."
    plot = Plot(f"{title}: {CURVES[key]}", shows, x, y, "epoch", CURVES[key])
    for i, (label, points) in enumerate(series.items()):
        if len(points) == 1:
            plot.dots(points, SeriesStyle(i), [label])
        elif points:
            plot.marked_line(_thinned(points), SeriesStyle(i), label)
    if optimum is not None:
        plot.reference([(x.low, optimum), (x.high, optimum)], f"optimum {optimum:.3f}")
    stages = max((list(dict.fromkeys(str(line.get("stage")) for line in log)) for log in logs.values()), key=len)
    words = f"Stages one after another: {', '.join(stages)}. " if len(stages) > 1 else ""
    if optimum is not None:
        words += f"Dashed: its value at the optimum of the loss, {optimum:.2f} (mean of 1/(1 + alpha·K) over images). "
    columns: dict[str, Sequence[Any]] = {"epoch": range(1, 1 + max(map(len, logs.values())))}
    columns |= {label: [line.get(key) for line in log] for label, log in logs.items()}
    legend = [(SeriesStyle(i), label) for i, (label, points) in enumerate(series.items()) if points and len(series) > 1]
    return figure(plot, f"training_{key}", columns, words, legend)


# Runs under way


class UnderWay(NamedTuple):
    """How far a run has come that is not finished."""

    run: run_folder.StartedRun
    log: Log
    heard: float
    """When it last wrote, in seconds since 1970."""
    at_work: bool | None
    """Whether a process of this machine trains it; None where that is not known."""

    @property
    def epochs(self) -> int:
        """Of all stages; a run of an older version has not said it, and then it is the stage's."""
        said = self.run.environment.get("epochs") or (self.log[-1].get("epochs") if self.log else None)
        return max(int(_finite(said) or self.run.config.train.epochs), len(self.log))

    @property
    def left(self) -> float | None:
        """Seconds of training, if it goes on as it did."""
        seconds = [s for line in self.log if (s := _finite(line.get("seconds"))) is not None]
        return sum(seconds) / len(seconds) * (self.epochs - len(self.log)) if seconds else None

    def latest(self, key: str) -> float | None:
        return next((y for line in reversed(self.log) if (y := _finite(line.get(key))) is not None), None)


def look_at(run: run_folder.StartedRun) -> UnderWay:
    return UnderWay(run, reading.log(run), reading.heard(run), reading.at_work(run.folder))


def unfinished(begun: Sequence[run_folder.StartedRun]) -> Element | None:
    """The runs that are being trained, or were left in the middle: their progress and curves, the latest first.

    Their colors are counted from the earliest, so that they stay when another begins.
    """
    if not begun:
        return None
    found = [look_at(run) for run in sorted(begun, key=lambda run: (str(run.environment["started"]), run.folder))]
    names = _names([one.run for one in found])
    older = max(len(found) - LOOKS, 0)
    looks = [None] * older + [SeriesStyle(i) for i in range(len(found) - older)]
    head = ["run", "data", *HEADINGS, "folder"]
    body = [_line(*of) for of in zip(found, names, looks, strict=True)]
    advice = (
        "Stopped: no process of this machine trains it, and --resume continues it. On another machine, whatever has been "
        "silent for much longer than an epoch takes was stopped."
    )
    some = f" Curves of the {LOOKS} that began last." if older else ""
    logs = {label: one.log for label, one in zip(names[older:], found[older:], strict=True)}
    return el(
        "section",
        el("h2", "Not finished yet"),
        table(head, body[::-1], "Unfinished runs; of each quantity the latest figure"),
        el("p", advice, some, class_="small"),
        curves("Under way", logs) if any(logs.values()) else None,
    )


def _names(begun: Sequence[run_folder.StartedRun]) -> list[str]:
    """By method and seed; where these are not enough, by folder too."""
    short = [f"{run.config.method.label}, seed {run.seed}" for run in begun]
    above = os.path.commonpath([run.folder.absolute() for run in begun])
    folders = [os.path.relpath(run.folder, above) for run in begun]
    return [f"{s} in {folder}" if short.count(s) > 1 else s for s, folder in zip(short, folders, strict=True)]


def _line(one: UnderWay, label: str, look: SeriesStyle | None) -> list[TableCell]:
    done, left = len(one.log), one.left
    bar = el("progress", value=done, max=one.epochs, aria_label=f"{label}: {done} of {one.epochs} epochs")
    epoch = el("span", f"{done} of {one.epochs} ", bar) if done < one.epochs else f"{done} of {done}, then evaluation"
    numbers = [_number(one.latest("loss"), 3), _number(one.latest("accuracy")), _number(one.latest("val_accuracy"))]
    return [
        TableCell(el("span", swatch(look) if look else None, " ", name(label))),
        TableCell(name(data_name(one.run))),
        TableCell(epoch, done),
        *numbers,
        TableCell("stopped" if one.at_work is False else f"about {format_duration(left)}" if left else "–", left),
        TableCell(_moment(one.heard), one.heard),
        TableCell(name(str(one.run.folder), most=300)),
    ]


def _number(value: float | None, digits: int = 1) -> TableCell:
    return TableCell("–" if value is None else f"{value:.{digits}f}", value)


def _moment(seconds: float) -> Element:
    """A page that is live says how long ago it was."""
    moment = time.gmtime(seconds)
    iso = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)
    return el("time", time.strftime("%Y-%m-%d %H:%M UTC", moment), datetime=iso)


# Numbers


def _finite_points(log: Log, key: str) -> list[Point]:
    found = [(float(i), _finite(line.get(key))) for i, line in enumerate(log, 1)]
    return [(x, y) for x, y in found if y is not None]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _thinned(points: list[Point]) -> list[Point]:
    return [points[i] for i in np.linspace(0, len(points) - 1, min(len(points), DRAWN)).round().astype(int)]
