"""Loggers in addition to log.jsonl: TensorBoard and Weights & Biases (`--log.loggers`).

A logger gets the rows of log.jsonl that it has not yet, then every new row, and the final metrics. Therefore a resumed run
sends nothing twice, and a logger that is added by a resume also gets the earlier epochs. If a logger fails, the error is
printed once, and training continues without it.
"""

import contextlib
import importlib.util
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

from longtail import files, run_folder
from longtail.config import Config, LogConfig, to_dict
from longtail.distributed import is_main_process
from longtail.errors import UserError
from longtail.schema import count, find_error

Row = dict[str, Any]
WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_loggers(log: LogConfig) -> None:
    """Raise a UserError if the package of a logger is not installed."""
    for name in log.loggers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # or a folder of that name lies here, as both leave one
            raise UserError(
                f"--log.loggers {name}: it is not installed, try `pip install longtail[log]`", kind="missing-package"
            )


def scalars(row: Row, group: str) -> dict[str, float]:
    """Return the numbers of a row with the group in their names: losses of different stages are different curves."""
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
    """Event files in the run folder. They are rewritten at each start, because epochs may be trained again."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / run_folder.TENSORBOARD
        files.remove(path)  # a link is removed, not followed
        self.writer = SummaryWriter(str(path), purge_step=0)  # an open TensorBoard drops what it read of the old files
        self.writer.add_text("config", f"```json\n{json.dumps(describe_config(config, seed), indent=1)}\n```", 0)

    def epoch(self, number: int, row: Row) -> None:
        """Write line `number` of log.jsonl, from 0."""
        for name, value in scalars(row, row["stage"]).items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    def finished(self, epochs: int, metrics: Row) -> None:
        for name, value in scalars(metrics, "test").items():
            self.writer.add_scalar(name, value, epochs)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A W&B run for each seed, grouped by the output folder.

    Its id and the number of epochs that were sent are stored in the run folder, because they cannot be sent again.
    """

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        import wandb

        self.path = folder / run_folder.WANDB
        known: Row = {"id": uuid.uuid4().hex[:12], "epochs": 0}
        if os.path.lexists(self.path):
            known = run_folder.read_json(self.path, limit=files.SMALL_LIMIT)
            if wrong := find_error(known, {"id": lambda value: bool(WANDB_ID.fullmatch(str(value))), "epochs": count}):
                raise UserError(f"{self.path}: {wrong}: remove it to start another run there", kind="damaged-file")
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
        if number < self.seen:
            return
        # commit: otherwise wandb keeps a row back until the next one, and may lose the last one
        self.run.log(scalars(row, row["stage"]) | {"epoch": number}, step=number, commit=True)
        self.seen = number + 1
        files.write_json(self.path, {"id": self.id, "epochs": self.seen})

    def finished(self, epochs: int, metrics: Row) -> None:
        self.run.summary.update(scalars(metrics, "test"))

    def close(self) -> None:
        self.run.finish()


def describe_config(config: Config, seed: int) -> Row:
    return to_dict(config) | {"seed": seed}


KINDS: dict[str, Callable[[Path, Config, int], Any]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Loggers:
    """All loggers of a run. One that fails is reported and dropped. Only the main process has loggers."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        self.log, self.rows_sent = folder / run_folder.LOG, 0
        self.loggers: dict[str, Any] = {}
        for name in config.log.loggers if is_main_process() else ():
            with self.survive(name):
                self.loggers[name] = KINDS[name](folder, config, seed)
        self.send_rows()

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.call_each(methodcaller("close"))

    def send_rows(self) -> None:
        """Send the rows of log.jsonl that were not sent yet."""
        if not self.loggers or not os.path.lexists(self.log):
            return
        lines = files.read_text(self.log, errors="replace", folder=self.log.parent).splitlines()
        for line in lines[self.rows_sent :]:
            row = parse_row(line)
            if row is not None:
                self.call_each(methodcaller("epoch", self.rows_sent, row))
            self.rows_sent += 1

    def finished(self, metrics: Row) -> None:
        """Send the final metrics."""
        self.call_each(methodcaller("finished", self.rows_sent, metrics))

    def call_each(self, work: Callable[[Any], None]) -> None:
        for name, logger in list(self.loggers.items()):
            with self.survive(name):
                work(logger)

    @contextlib.contextmanager
    def survive(self, name: str) -> Iterator[None]:
        """Catch whatever a logger raises, and drop that logger."""
        try:
            yield
        except Exception as error:
            self.loggers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(OSError):  # stderr may be closed
                print(f"longtail: {name} failed ({reason}): the run goes on without it", file=sys.stderr, flush=True)
