"""The log of a run: a line of log.jsonl for each epoch, and on the screen a progress bar (terminal) or plain lines (pipe)."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from longtail import files
from longtail.config.migrate import migrate_log_line
from longtail.progress import format_duration

BAR_SECONDS, PIPE_SECONDS = 0.5, 60.0  # without news, within an epoch


def truncate(path: Path, epochs: int) -> None:
    """Keep the first `epochs` lines; later ones were written after the last checkpoint and will be written again."""
    if not os.path.lexists(path):
        return
    lines = files.read_text(path, errors="replace", folder=path.parent).splitlines()[:epochs]
    files.write_text(path, "".join(migrate_log_line(line) + "\n" for line in lines))


class Log:
    """Writes `log.jsonl` and shows progress."""

    def __init__(
        self, path: Path | None, steps: int, progress: str, title: str, then: Callable[[], None] = lambda: None
    ) -> None:
        """Create a log, which is used as a context.

        Args:
            path: The file; None to write none.
            steps: The number of steps of the whole run.
            progress: "bar", "plain", "none", or "auto" for a bar in a terminal and plain lines elsewhere.
            title: The text before the progress.
            then: Called after each line of the file.
        """
        self.path, self.steps, self.title, self.then = path, steps, title, then
        terminal = (sys.stderr is not None and sys.stderr.isatty()) if progress == "auto" else progress == "bar"
        self.plain = progress != "none" and not terminal
        console = Console(stderr=True)
        self.narrow = console.width < 130
        now, bar = TextColumn("{task.fields[now]}"), BarColumn(6 if self.narrow else 20)
        columns = (TextColumn("{task.description}"), bar, now, TimeRemainingColumn(compact=True))
        self.bar = Progress(*columns, console=console, transient=True) if terminal else None
        self.task = self.bar.add_task(title, total=steps, now="") if self.bar else None
        self._shown = self._epoch_shown = time.monotonic()  # when progress was last shown, and when the end of an epoch
        self._epoch_step = 0  # the step of that end

    def __enter__(self) -> "Log":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.bar.stop()

    def is_due(self) -> bool:
        """Return whether progress should be shown now: twice a second in a bar, once a minute in plain lines.

        Each time the device has to wait for the loss to be read.
        """
        silence = BAR_SECONDS if self.bar else PIPE_SECONDS if self.plain else math.inf
        return time.monotonic() - self._shown > silence

    def show(self, step: int, row: dict[str, Any], left: float) -> None:
        """Show the progress.

        Args:
            step: The number of steps made.
            row: The log line of the epoch so far.
            left: The remaining time in seconds.
        """
        self._shown = time.monotonic()
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step, now=summary(row, self.narrow))
        if self.plain:
            try:
                print(f"{self.title}  {summary(row)}  {format_duration(left)} left", file=sys.stderr, flush=True)
            except OSError:  # the reader of the pipe has closed it; the run continues
                self.plain = False

    def epoch(self, step: int, row: dict[str, Any], left: float) -> None:
        """Write the line of an epoch.

        Plain output shows the end of an epoch every five seconds and forty times in a run at most, and always the last one.

        Args:
            step: The number of steps made.
            row: The line.
            left: The remaining time in seconds.
        """
        if self.path is not None:
            with files.open_append(self.path) as file:
                file.write(json.dumps(row) + "\n")
        self.then()
        due = step - self._epoch_step >= self.steps / 40 and time.monotonic() - self._epoch_shown > 5
        if self.bar or due or row["epoch"] + 1 == row["epochs"]:
            self.show(step, row, left)
            self._epoch_step, self._epoch_shown = step, self._shown


def summary(row: dict[str, Any], narrow: bool = False) -> str:
    """Return stage, epoch, loss, accuracies and speed in one line; `narrow` for a shorter one."""
    if narrow:
        accuracy = f"acc {row['accuracy']:.0f}% " if "accuracy" in row else ""
        return f"{row['epoch'] + 1}/{row['epochs']} loss {row['loss']:.2f} {accuracy}{row['images_per_second']:,.0f}/s"
    parts = [f"{row['stage']} {row['epoch'] + 1}/{row['epochs']}", f"loss {row['loss']:.3f}"]
    parts += [f"{name} {row[key]:.1f} %" for key, name in (("accuracy", "acc"), ("val_accuracy", "val")) if key in row]
    parts += [f"P_sup {row['P_sup']:.2f}"] if "P_sup" in row else []
    return "  ".join([*parts, f"lr {row['lr']:.2g}", f"{row['images_per_second']:,.0f} images/s"])
