"""The log of a run: log.jsonl and the progress display, TensorBoard, and Weights & Biases (`--log.loggers`).

`Log` writes a line of log.jsonl for each epoch, and shows progress as a bar or in plain lines.

`Loggers` sends these lines to TensorBoard or Weights & Biases. A logger gets the lines of log.jsonl that it does not have yet,
then every new line, and the final metrics. Therefore a resumed run sends nothing twice, and a logger that is added later also
gets the earlier epochs. If a logger fails, the error is printed once, and training continues without it.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from longtail import files, run_folder
from longtail.config import Config, LogConfig, to_dict
from longtail.config.migrate import migrate_log_line
from longtail.distributed import is_main_process
from longtail.errors import UserError
from longtail.progress import bar_width, format_duration, format_time_left, log_warning
from longtail.schema import count, find_error

Row = dict[str, Any]
"""A line of log.jsonl, or metrics.json."""
BAR_SECONDS, PIPE_SECONDS = 0.5, 60.0
"""The interval of updates within an epoch, in a progress bar and in plain lines."""
WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def truncate_log(path: Path, epochs: int) -> None:
    """Keep the first `epochs` lines of log.jsonl; later ones are newer than the checkpoint and will be written again."""
    if not os.path.lexists(path):
        return
    lines = files.read_text(path, errors="replace", folder=path.parent).splitlines()[:epochs]
    files.write_text(path, "".join(migrate_log_line(line) + "\n" for line in lines))


class Log:
    """Writes log.jsonl and shows progress: a bar in a terminal, or plain lines."""

    def __init__(
        self, path: Path | None, steps: int, progress: str, title: str, then: Callable[[], None] = lambda: None
    ) -> None:
        """Create a log, which is used as a context.

        Args:
            path: The file; None to write none.
            steps: The number of steps of the whole run.
            progress: "bar", "plain", "none", or "auto" for a bar in a terminal and plain lines elsewhere.
            title: The text before the progress.
            then: Called after each line of the file is written.
        """
        self.path, self.steps, self.title, self.then = path, steps, title, then
        terminal = (sys.stderr is not None and sys.stderr.isatty()) if progress == "auto" else progress == "bar"
        self.plain = progress != "none" and not terminal
        console = Console(stderr=True)
        self.narrow = console.width < 170
        name = title.rpartition(", ")[2] if self.narrow else title  # the seed without the method
        left, now = TextColumn("{task.fields[left]}"), TextColumn("{task.fields[now]}")
        columns = (TextColumn("{task.description}"), BarColumn(bar_width(console.width)), left, now)
        self.bar = Progress(*columns, console=console, transient=True) if terminal else None
        waiting = format_time_left(0, steps, 0.0)
        self.task = self.bar.add_task(name, total=steps, now="", left=waiting) if self.bar else None
        # The last time that progress was shown, that the end of an epoch was shown, and the step of that end.
        self._shown = self._epoch_shown = time.monotonic()
        self._epoch_step = 0

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

        Reading the loss makes the device wait, so this should be rare.
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
            time_left = f"{format_duration(left)} left"
            self.bar.update(self.task, completed=step, now=summary(row, self.narrow), left=time_left)
        if self.plain:
            try:
                print(f"{self.title}  {summary(row)}  {format_duration(left)} left", file=sys.stderr, flush=True)
            except OSError:  # the reader of the pipe has closed it; the run continues
                self.plain = False

    def epoch(self, step: int, row: dict[str, Any], left: float) -> None:
        """Write the line of an epoch.

        Plain lines are printed at most every five seconds and at most forty times in a stage, and always for its last epoch.

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
    """Return stage, epoch, loss, accuracies and speed as one line of text; epoch, loss and accuracy if `narrow`."""
    if narrow:
        accuracy = f"acc {row['accuracy']:.0f}% " if "accuracy" in row else ""
        return f"epoch {row['epoch'] + 1}/{row['epochs']} loss {row['loss']:.2f} {accuracy}".rstrip()
    parts = [f"{row['stage']}: epoch {row['epoch'] + 1}/{row['epochs']}", f"loss {row['loss']:.3f}"]
    parts += [f"{name} {row[key]:.1f} %" for key, name in (("accuracy", "acc"), ("val_accuracy", "val")) if key in row]
    parts += [f"P_sup {row['P_sup']:.2f}"] if "P_sup" in row else []
    return "  ".join([*parts, f"lr {row['lr']:.2g}", f"{row['images_per_second']:,.0f} images/s"])


# Loggers in addition to log.jsonl


def check_loggers(log: LogConfig) -> None:
    """Raise a UserError if the package of a logger is not installed."""
    for name in log.loggers:
        found = importlib.util.find_spec(name)
        if (
            found is None or found.origin is None
        ):  # a folder of that name, such as the event files of a logger, is also found
            raise UserError(
                f"--log.loggers {name}: it is not installed; run `pip install {name}`", kind="missing-package"
            )


def scalars(row: Row, group: str) -> dict[str, float]:
    """Return the numbers of a row under names with the group, so that losses of different stages are different curves."""
    kept = {key: value for key, value in row.items() if key not in ("epoch", "epochs")}
    return {f"{group}/{key}": float(value) for key, value in kept.items() if type(value) in (int, float)}


def parse_row(line: str) -> Row | None:
    """Return a row of log.jsonl; None if the line is damaged."""
    try:
        row = files.parse_json(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("stage"), str) else None


class TensorBoard:
    """Writes event files in the run folder. They are rewritten at each start, because epochs may be trained again."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / run_folder.TENSORBOARD
        files.remove(path)  # a link is removed, not followed
        self.writer = SummaryWriter(str(path), purge_step=0)  # an open TensorBoard drops what it read of the old files
        self.writer.add_text("config", f"```json\n{json.dumps(describe_config(config, seed), indent=1)}\n```", 0)

    def epoch(self, number: int, row: Row) -> None:
        """Write line `number` of log.jsonl, counted from 0."""
        for name, value in scalars(row, row["stage"]).items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    def send_metrics(self, epochs: int, metrics: Row) -> None:
        """Write the final metrics after the given number of epochs."""
        for name, value in scalars(metrics, "test").items():
            self.writer.add_scalar(name, value, epochs)

    def close(self) -> None:
        """Flush and close the files."""
        self.writer.close()


class WandB:
    """Sends each seed to a W&B run of its own, grouped by the output folder.

    The run's id and the number of epochs that were sent are stored in the run folder, because epochs cannot be sent again.
    """

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        import wandb

        self.path = folder / run_folder.WANDB
        known: Row = {"id": uuid.uuid4().hex[:12], "epochs": 0}
        if os.path.lexists(self.path):
            known = run_folder.read_json(self.path, limit=files.SMALL_LIMIT)
            if wrong := find_error(known, {"id": lambda value: bool(WANDB_ID.fullmatch(str(value))), "epochs": count}):
                raise UserError(f"{self.path}: {wrong}: remove it to start a new W&B run", kind="damaged-file")
        self.id, self.seen = known["id"], known["epochs"]
        files.check_inside(folder / "wandb", folder)
        out = folder.absolute().parent.name
        self.run = wandb.init(
            project=config.log.project,
            name=f"{out}/{folder.name}",
            group=out,
            config=describe_config(config, seed),
            id=self.id,
            resume="allow",
            reinit="create_new",  # seeds that train in parallel have a run each
            dir=str(folder),
            settings=wandb.Settings(console="off", silent=config.log.progress == "none"),
        )
        self.run.define_metric("*", step_metric="epoch")

    def epoch(self, number: int, row: Row) -> None:
        """Send line `number` of log.jsonl, counted from 0, unless it was sent already."""
        if number < self.seen:
            return
        # commit: otherwise wandb keeps a row back until the next one, and may lose the last one
        self.run.log(scalars(row, row["stage"]) | {"epoch": number}, step=number, commit=True)
        self.seen = number + 1
        files.write_json(self.path, {"id": self.id, "epochs": self.seen})

    def send_metrics(self, epochs: int, metrics: Row) -> None:
        """Send the final metrics."""
        self.run.summary.update(scalars(metrics, "test"))

    def close(self) -> None:
        """Wait until everything was sent."""
        self.run.finish()


def describe_config(config: Config, seed: int) -> Row:
    """Return the configuration of a run as a tree, with its seed."""
    return to_dict(config) | {"seed": seed}


LOGGERS: dict[str, Callable[[Path, Config, int], Any]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Loggers:
    """The loggers of a run. One that fails is reported and dropped. Only the main process has loggers."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        self.log, self.rows_sent = folder / run_folder.LOG, 0
        self.loggers: dict[str, Any] = {}
        for name in config.log.loggers if is_main_process() else ():
            with self.drop_on_error(name):
                self.loggers[name] = LOGGERS[name](folder, config, seed)
        self.send_rows()

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.call_each(methodcaller("close"))

    def send_rows(self) -> None:
        """Send the lines of log.jsonl that were not sent yet."""
        if not self.loggers or not os.path.lexists(self.log):
            return
        lines = files.read_text(self.log, errors="replace", folder=self.log.parent).splitlines()
        for line in lines[self.rows_sent :]:
            row = parse_row(line)
            if row is not None:
                self.call_each(methodcaller("epoch", self.rows_sent, row))
            self.rows_sent += 1

    def send_metrics(self, metrics: Row) -> None:
        """Send the final metrics."""
        self.call_each(methodcaller("send_metrics", self.rows_sent, metrics))

    def call_each(self, work: Callable[[Any], None]) -> None:
        """Call a function with each logger."""
        for name, logger in list(self.loggers.items()):
            with self.drop_on_error(name):
                work(logger)

    @contextlib.contextmanager
    def drop_on_error(self, name: str) -> Iterator[None]:
        """Catch any exception of a logger, report it, and drop the logger."""
        try:
            yield
        except Exception as error:
            self.loggers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(OSError):  # standard error may be closed
                log_warning(f"longtail: {name} failed ({reason}): training continues without it")
