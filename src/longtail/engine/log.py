"""What a run says: a line of log.jsonl per epoch, and on the screen a bar (terminal) or plain lines (pipe)."""

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
    """Keep the first `epochs` whole lines: what a killed run wrote after its last checkpoint will be written again."""
    if not os.path.lexists(path):
        return
    lines = files.read_text(path, errors="replace", folder=path.parent).splitlines()[:epochs]
    files.write_text(path, "".join(migrate_log_line(line) + "\n" for line in lines))


class Log:
    """Writes `log.jsonl` (unless `path` is None) and shows progress; `steps` is the length of the whole run. `then` is called
    after each line."""

    def __init__(
        self, path: Path | None, steps: int, progress: str, title: str, then: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.steps, self.title, self.then = path, steps, title, then
        terminal = (sys.stderr is not None and sys.stderr.isatty()) if progress == "auto" else progress == "bar"
        self.plain = progress != "none" and not terminal
        console = Console(stderr=True)
        self.narrow = console.width < 130
        now, bar = TextColumn("{task.fields[now]}"), BarColumn(6 if self.narrow else 20)
        columns = (TextColumn("{task.description}"), bar, now, TimeRemainingColumn(compact=True))
        self.bar = Progress(*columns, console=console, transient=True) if terminal else None
        self.task = self.bar.add_task(title, total=steps, now="") if self.bar else None
        self._spoke = self._told = time.monotonic()  # when the screen last had news, and when of an epoch's end
        self._said = 0  # the step of that end

    def __enter__(self) -> "Log":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.bar.stop()

    def wants_news(self) -> bool:
        """Reading the loss off the device makes it wait: a bar asks twice a second at most, a pipe within long epochs."""
        silence = BAR_SECONDS if self.bar else PIPE_SECONDS if self.plain else math.inf
        return time.monotonic() - self._spoke > silence

    def news(self, step: int, row: dict[str, Any], left: float) -> None:
        """Move the bar, or say where the run is; `left` is the time it still needs, in seconds."""
        self._spoke = time.monotonic()
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step, now=summary(row, self.narrow))
        if self.plain:
            try:
                print(f"{self.title}  {summary(row)}  {format_duration(left)} left", file=sys.stderr, flush=True)
            except OSError:  # whoever listened has gone; the run goes on
                self.plain = False

    def epoch(self, step: int, row: dict[str, Any], left: float) -> None:
        """Write the epoch's line.

        Piped output hears of an epoch's end every five seconds at most, forty times a run at most, and of the last one always.
        """
        if self.path is not None:
            with files.open_append(self.path) as file:
                file.write(json.dumps(row) + "\n")
        self.then()
        due = step - self._said >= self.steps / 40 and time.monotonic() - self._told > 5
        if self.bar or due or row["epoch"] + 1 == row["epochs"]:
            self.news(step, row, left)
            self._said, self._told = step, self._spoke


def summary(row: dict[str, Any], narrow: bool = False) -> str:
    """Stage, epoch, loss, accuracies and speed in one short line; the least of it where there is no room."""
    if narrow:
        accuracy = f"acc {row['accuracy']:.0f}% " if "accuracy" in row else ""
        return f"{row['epoch'] + 1}/{row['epochs']} loss {row['loss']:.2f} {accuracy}{row['images_per_second']:,.0f}/s"
    parts = [f"{row['stage']} {row['epoch'] + 1}/{row['epochs']}", f"loss {row['loss']:.3f}"]
    parts += [f"{name} {row[key]:.1f} %" for key, name in (("accuracy", "acc"), ("val_accuracy", "val")) if key in row]
    parts += [f"P_sup {row['P_sup']:.2f}"] if "P_sup" in row else []
    return "  ".join([*parts, f"lr {row['lr']:.2g}", f"{row['images_per_second']:,.0f} images/s"])
