"""The results file while it grows: what it has of a cell, what a cell will take, and whether there is time for it."""

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail import files, run_folder
from longtail.config import Config, from_dict
from longtail.data.sources import DataSet
from longtail.errors import UserError
from longtail.paper import results
from longtail.paper.tables import TABLES, Cell, PaperTable


def file_name(table: str) -> str:
    return f"{table.replace('-', '_')}.json"


MARGIN = 1.1  # a run's seconds leave out loading and evaluation


class ResultsFile:
    """The results file of one table while it grows."""

    def __init__(self, path: Path, name: str, table: PaperTable, command: str) -> None:
        self.path, self.table, self.command = path, table.to_dict(), command
        self.head = {"name": name, "title": table.title, "table": self.table}
        self.tree = results.read(path, self.table)
        self.shared = [
            results.read(path.with_name(file_name(other)), TABLES[other].to_dict()) for other in table.shares
        ]
        self.device: str | None = None  # of the runs added in this call

    def find_records(self, cell: Cell) -> dict[int, dict[str, Any]]:
        return results.find_runs(self.tree, cell.method, cell.imbalance, cell.config)

    def copy_shared_runs(self, cells: Sequence[Cell], wanted: Sequence[int]) -> None:
        """Take over what other tables have of these very configurations: before any training, so that every page has it."""
        for cell, tree in itertools.product(cells, self.shared):
            found = [r for r in tree["runs"] if r["identity"] == cell.config.identity() and r["seed"] in wanted]
            missing = [r | {"method": cell.method} for r in found if r["seed"] not in self.find_records(cell)]
            if missing:
                self.add(missing, trained_here=False)

    def missing_seeds(self, cell: Cell, wanted: Sequence[int], again: bool) -> list[int]:
        return [s for s in wanted if again or s not in self.find_records(cell)]

    def check_images(self, cell: Cell, data: DataSet) -> None:
        """Figures on other images belong in another file."""
        for record in self.tree["runs"]:
            stored = record["data"]["checksum"]
            if record["imbalance"] == cell.imbalance and stored != data.checksum:
                other = f"at imbalance {cell.imbalance:g} {self.path} has runs on other images (checksum {stored})"
                raise UserError(f"{other}: name them with --data_root, or choose another --results", kind="mismatch")

    def estimate(self, cell: Cell, data: DataSet, seeds: Sequence[int], again: bool) -> float | None:
        """Seconds that a cell will likely take, by the runs done on this machine, of this method where there are some."""
        left = [
            total_epochs(cell.config) if again else remaining_epochs(cell.config, cell.run_folder(s)) for s in seeds
        ]
        if not any(left):
            return 0.0
        done = [r for r in self.tree["runs"] if self.device in (None, r["device"])]
        done = [r for r in done if r["method"] == cell.method] or done
        images, running = max(left) * len(data.train.labels), sum(n > 0 for n in left)
        return max((MARGIN * images * seconds_per_image(r, running) for r in done), default=None)

    def add(self, records: list[dict[str, Any]], trained_here: bool = True) -> None:
        """Record a cell; the file is read once more, since another process may have added to it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.tree = results.add_records(results.read(self.path, self.table), records)
        self.tree |= {"command": self.command, "updated": now}
        self.device = records[-1]["device"] if trained_here else self.device
        self.write()

    def write(self) -> dict[str, Any]:
        """A call that found nothing to do leaves the file as it is, but for what follows from the runs."""
        if not self.tree["runs"]:
            raise UserError("no cell was begun: give more --minutes", kind="unfinished-run")
        self.tree = results.write(self.path, self.tree | self.head)
        return self.tree


def seconds_per_image(record: dict[str, Any], seeds: int) -> float:
    """Of a run like this one with so many seeds: as many as trained side by side cost the same, more cost more.

    Per image seen, which steps are proportional to where batches are alike.
    """
    metrics, epochs = record["metrics"], total_epochs(from_dict(Config, record["identity"]))
    seconds = metrics["seconds"] + (metrics.get("setup_seconds") or 0)
    return seconds * max(1, seeds / (metrics.get("together") or 1)) / (epochs * record["data"]["images"])


def make_record(cell: Cell, folder: Path, command: str) -> dict[str, Any]:
    """Return what the results file keeps of a finished run; what run folders may lack is empty."""
    run = run_folder.read(folder)
    where, images = run.environment, run.environment["data"]
    counts = run.metrics.get("counts") or images.get("counts")
    trained_on = images.get("images") or sum(counts or [])
    if not trained_on:
        raise UserError(
            f"{folder / run_folder.ENVIRONMENT}: it does not say how many images there are", kind="damaged-file"
        )
    found = run.metrics | {"parameters": where.get("parameters")}
    return {
        "method": cell.method,
        "imbalance": cell.imbalance,
        "seed": run.seed,
        "epochs": run.config.train.epochs,
        "command": command,
        **{key: where[key] for key in ("started", "precision")},
        "commit": where.get("commit"),
        "device": where.get("device") or "",
        "versions": where.get("versions") or {},
        "resumed": where.get("resumed") or [],
        "data": {"checksum": images["checksum"], "images": trained_on, "notes": images.get("notes") or []},
        "metrics": {name: found[name] for name in results.STORED_METRICS if name in found},
        "per_class": run.metrics["per_class"],
        "counts": counts,
        "identity": run.config.identity(),
    }


def total_epochs(config: Config) -> int:
    """Of both stages, where there are two."""
    return config.train.epochs + config.method.second_epochs


def remaining_epochs(config: Config, folder: Path) -> int:
    """Of a run that may have begun, by its log; what it logged after its last checkpoint counts as done."""
    if (folder / run_folder.METRICS).exists():
        return 0
    log = folder / run_folder.LOG
    done = len(files.read_bytes(log, folder=folder).splitlines()) if log.exists() else 0
    return max(total_epochs(config) - done, 0)


class TimeBudget:
    """The minutes of a call, from now on; 0: no limit."""

    def __init__(self, minutes: float) -> None:
        if not (math.isfinite(minutes) and minutes >= 0):
            raise UserError(f"--minutes {minutes:g}: it must be 0 (no limit) or more")
        self.end = time.monotonic() + 60 * minutes if minutes else math.inf

    def why_too_short(self, seconds: float | None) -> str | None:
        """Why a cell of so many seconds is not begun; one of which nothing is known is, as long as there is time."""
        left = self.end - time.monotonic()
        if left > (seconds or 0):
            return None
        about = f"it takes about {seconds / 60:.1f} minutes and " if seconds else ""
        return about + f"{max(left, 0) / 60:.1f} are left"
