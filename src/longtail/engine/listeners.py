"""Who hears of a run beside log.jsonl, the log of record: TensorBoard and Weights & Biases (`--log.loggers`).

A listener is told the rows that the log of record has and it has not, then every new one, and the final metrics: a resumed run
doubles nothing, and one that listens from a resume on has the epochs before it too. Whatever goes wrong with a listener is said
once, and the training goes on.
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
from longtail.engine.distributed import is_first
from longtail.errors import UserError
from longtail.schema import count, find_error

Row = dict[str, Any]
WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check(log: LogConfig) -> None:
    """Before the work is done that they would hear of."""
    for name in log.loggers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # or a folder of that name lies here, as both leave one
            raise UserError(
                f"--log.loggers {name}: it is not installed, try `pip install longtail[log]`", kind="missing-package"
            )


def scalars(row: Row, group: str) -> dict[str, float]:
    """The numbers of a row, named after the stage, as losses of different stages are not one curve."""
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
    """Event files in the run folder, written anew at each start: what is there of epochs that are trained again goes."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / run_folder.TENSORBOARD
        files.remove(place)  # a link too, which is not followed
        self.writer = SummaryWriter(str(place), purge_step=0)  # who watches forgets what it saw of the old files
        self.writer.add_text("config", f"```json\n{json.dumps(described(config, seed), indent=1)}\n```", 0)

    def epoch(self, number: int, row: Row) -> None:
        """Line `number` of the log of record, from 0."""
        for name, value in scalars(row, row["stage"]).items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    def finished(self, epochs: int, metrics: Row) -> None:
        for name, value in scalars(metrics, "test").items():
            self.writer.add_scalar(name, value, epochs)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run there for each seed, grouped by OUT. Its id and the epochs it has are kept in the run folder: unlike TensorBoard's
    files, what was sent cannot be taken back."""

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
            config=described(config, seed),
            id=self.id,
            resume="allow",
            reinit="create_new",  # seeds side by side have a run each
            dir=str(folder),
            settings=wandb.Settings(console="off", silent=config.log.progress == "none"),
        )
        self.run.define_metric("*", step_metric="epoch")

    def epoch(self, number: int, row: Row) -> None:
        if number < self.seen:
            return
        # commit: by itself wandb holds a row back until the next one comes, and may lose the last
        self.run.log(scalars(row, row["stage"]) | {"epoch": number}, step=number, commit=True)
        self.seen = number + 1
        files.write_json(self.path, {"id": self.id, "epochs": self.seen})

    def finished(self, epochs: int, metrics: Row) -> None:
        self.run.summary.update(scalars(metrics, "test"))

    def close(self) -> None:
        self.run.finish()


def described(config: Config, seed: int) -> Row:
    return to_dict(config) | {"seed": seed}


KINDS: dict[str, Callable[[Path, Config, int], Any]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Listeners:
    """All that a run has; one that fails is named and dropped. Of several processes the first alone is heard."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        self.log, self.told = folder / run_folder.LOG, 0  # lines
        self.heard: dict[str, Any] = {}
        for name in config.log.loggers if is_first() else ():
            with self.spared(name):
                self.heard[name] = KINDS[name](folder, config, seed)
        self.hear()

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(methodcaller("close"))

    def hear(self) -> None:
        """What the log of record has that was not told yet."""
        if not self.heard or not os.path.lexists(self.log):
            return
        lines = files.read_text(self.log, errors="replace", folder=self.log.parent).splitlines()
        for line in lines[self.told :]:
            row = parse_row(line)
            if row is not None:
                self.tell(methodcaller("epoch", self.told, row))
            self.told += 1

    def finished(self, metrics: Row) -> None:
        self.tell(methodcaller("finished", self.told, metrics))

    def tell(self, news: Callable[[Any], None]) -> None:
        for name, listener in list(self.heard.items()):
            with self.spared(name):
                news(listener)

    @contextlib.contextmanager
    def spared(self, name: str) -> Iterator[None]:
        """The training, of whatever a listener raises."""
        try:
            yield
        except Exception as error:
            self.heard.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(OSError):  # whoever listened there has gone too
                print(f"longtail: {name} failed ({reason}): the run goes on without it", file=sys.stderr, flush=True)
