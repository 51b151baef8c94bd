"""`longtail reproduce`: train a table of the paper cell by cell, and write a results file and its page after each cell.

A cell is a method at one imbalance factor. Runs that are in the results file or in the run folders are not trained again.
"""

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail import files, run_folder
from longtail.config import Config, DataConfig, from_dict
from longtail.data.sources import DataSet, load_cached
from longtail.engine.run_lock import check_links
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError, disk_full_as_user_error
from longtail.paper.results import ResultsFile, file_name, make_record
from longtail.paper.tables import Cell, PaperTable, choose_cells, find_table, make_cell
from longtail.progress import log_info


def reproduce(
    name: str,
    out: Path | str | None = None,
    results: Path | str = "results",
    seeds: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    imbalance: Sequence[float] | None = None,
    epochs: int | None = None,
    data_root: Path | str | None = None,
    minutes: float = 0,
    rerun: bool = False,
) -> dict[str, Any]:
    """Train the missing runs of a table, as `longtail reproduce` does; return the content of the results file.

    RESULTS/NAME.json, its page and its plots are written after each cell.

    Args:
        name: The name of the table.
        out: The folder of the run folders; by default runs/reproduce-NAME.
        results: The folder of the results file.
        seeds: The seeds; None for those of the table.
        methods: The methods to train; None for all.
        imbalance: The imbalance factors to train; None for all.
        epochs: Another number of epochs.
        data_root: The folder of the images.
        minutes: Stop before a cell that would likely exceed this time; 0 for no limit.
        rerun: Train runs again that are recorded already.
    """
    table, budget = find_table(name), TimeBudget(minutes)
    wanted = check_seeds(table.seeds if seeds is None else seeds)
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        raise UserError(f"--epochs {epochs}: it must be a positive integer")
    if epochs is not None and table.mixed:
        raise UserError(
            f"--epochs {epochs}: {name} uses the settings of each method's authors, with their number of epochs: omit --epochs",
            kind="unsupported",
        )
    chosen = choose_cells(table, methods, imbalance)
    command = format_command(name, table, wanted, methods, imbalance, epochs)
    results_file = ResultsFile(make_output_folder(Path(results)) / file_name(name), name, table, command)
    cells = [make_cell(table, m, f, epochs, Path(out or f"runs/reproduce-{name}"), data_root) for m, f in chosen]
    for cell in cells:
        for seed in wanted:
            check_links(cell.run_folder(seed), Path(out or f"runs/reproduce-{name}"))
    train_cells(cells, wanted, results_file, budget, rerun)
    return results_file.write()


def train_cells(
    cells: Sequence[Cell], wanted: Sequence[int], results_file: ResultsFile, budget: "TimeBudget", rerun: bool
) -> None:
    """Train and record the cells one after the other, as far as the time permits.

    Args:
        cells: The cells.
        wanted: The seeds.
        results_file: Where runs are recorded.
        budget: The time.
        rerun: Whether to train runs again that are recorded already.
    """
    images: dict[DataConfig, DataSet] = {}
    if not rerun:
        results_file.copy_shared_runs(cells, wanted)
    for number, cell in enumerate(cells, 1):
        where, todo = f"cell {number} of {len(cells)}: {cell}", results_file.missing_seeds(cell, wanted, rerun)
        if not todo:
            log_info(f"{where}: already in {results_file.path}, skipped")
            continue
        data = load_cached(cell.config.data, images)
        results_file.check_same_images(cell, data)
        if too_long := budget.why_too_short(estimate_seconds(results_file, cell, data, todo, rerun)):
            advice = (
                "choose the remaining cells with --methods and --imbalance"
                if rerun
                else "run the same command to continue"
            )
            log_info(f"stopped before {where}: {too_long}; {advice}")
            break
        skipped = [s for s in wanted if s not in todo]
        log_info(
            f"{where}, {run_folder.format_seeds(todo)}"
            + (f" ({run_folder.format_seeds(skipped)} recorded already)" if skipped else "")
        )
        if rerun:
            rename_recorded_runs(cell, {s: r for s, r in results_file.find_records(cell).items() if s in todo})
        results_file.add([make_record(cell, folder, results_file.command) for folder in train_cell(cell, todo, data)])


# Arguments


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds; raise a UserError unless they are distinct integers from 0."""
    is_valid = all(type(s) is int and 0 <= s < 2**31 for s in seeds) and len(set(seeds)) == len(seeds) > 0
    if not is_valid:
        given = " ".join(map(str, seeds)) or "without a value"
        raise UserError(f"--seeds {given}: give distinct integers from 0, for example --seeds 0 1 2")
    return tuple(seeds)


def format_command(
    name: str,
    table: PaperTable,
    seeds: tuple[int, ...],
    methods: Sequence[str] | None,
    imbalance: Sequence[float] | None,
    epochs: int | None,
) -> str:
    """Return the command for the results file: the arguments that results depend on, without folders and time limits.

    Args:
        name: The name of the table.
        table: The table.
        seeds: The seeds.
        methods: The chosen methods.
        imbalance: The chosen imbalance factors.
        epochs: Another number of epochs.
    """
    flags: dict[str, Sequence[Any]] = {
        "--seeds": seeds if seeds != table.seeds else (),
        "--methods": methods or (),
        "--imbalance": [f"{factor:g}" for factor in imbalance or ()],
        "--epochs": [epochs] if epochs else (),
    }
    given = [" ".join([flag, *map(str, values)]) for flag, values in flags.items() if values]
    return " ".join(["longtail reproduce", name, *given])


def make_output_folder(results: Path) -> Path:
    """Create the folder of the results file; raise a UserError if it is not writable."""
    try:
        with disk_full_as_user_error(results):
            results.mkdir(parents=True, exist_ok=True)
            files.check_writable(results)
    except OSError as error:
        raise UserError(
            f"cannot write to {results} ({error.strerror}): choose another --results", kind="not-writable"
        ) from error
    return results


# Training


def train_cell(cell: Cell, seeds: Sequence[int], data: DataSet) -> list[Path]:
    """Train seeds of a cell and return their run folders."""
    try:
        return train(cell.with_seeds(seeds), cell.folder, resume=True, data=data)
    except Interrupted as stop:
        raise stop.with_resume_hint(f"{cell}, and saved in {cell.folder}") from stop


def rename_recorded_runs(cell: Cell, recorded: dict[int, dict[str, Any]]) -> None:
    """Rename the folders of recorded runs, so that they can be trained again. Other runs are continued."""
    for seed, record in recorded.items():
        folder = cell.run_folder(seed)
        if (folder / run_folder.METRICS).exists():
            started = str(run_folder.read(folder).environment["started"])
            if started == record["started"]:
                folder.rename(folder.with_name(f"{folder.name}-{re.sub(r'[^0-9A-Za-z-]', '', started)[:40]}"))


# Time


MARGIN = 1.1
"""The factor for loading and evaluation, which the seconds of a run do not include."""


def estimate_seconds(
    results_file: ResultsFile, cell: Cell, data: DataSet, seeds: Sequence[int], rerun: bool
) -> float | None:
    """Return the likely time of a cell in seconds, from runs on this device, of this method if there are any.

    Args:
        results_file: The recorded runs.
        cell: The cell.
        data: The images.
        seeds: The seeds to train.
        rerun: Whether runs are trained again from the start.
    """
    left = [total_epochs(cell.config) if rerun else remaining_epochs(cell.config, cell.run_folder(s)) for s in seeds]
    if not any(left):
        return 0.0
    done = [r for r in results_file.tree["runs"] if results_file.device in (None, r["device"])]
    done = [r for r in done if r["method"] == cell.method] or done
    images, running = max(left) * len(data.train.labels), sum(n > 0 for n in left)
    return max((MARGIN * images * seconds_per_image(r, running) for r in done), default=None)


def seconds_per_image(record: dict[str, Any], seeds: int) -> float:
    """Return the time per image of training that a recorded run implies for a number of seeds in parallel.

    The number of seeds of the recorded run takes the same time, and more seeds take longer in proportion.
    """
    metrics, epochs = record["metrics"], total_epochs(from_dict(Config, record["identity"]))
    seconds = metrics["seconds"] + (metrics.get("setup_seconds") or 0)
    return seconds * max(1, seeds / (metrics.get("together") or 1)) / (epochs * record["data"]["images"])


def total_epochs(config: Config) -> int:
    """Return the number of epochs of all stages."""
    return config.train.epochs + config.method.second_epochs


def remaining_epochs(config: Config, folder: Path) -> int:
    """Return the number of epochs that a run still needs, by its log. Epochs after its last checkpoint count as done."""
    if (folder / run_folder.METRICS).exists():
        return 0
    log = folder / run_folder.LOG
    done = len(files.read_bytes(log, folder=folder).splitlines()) if log.exists() else 0
    return max(total_epochs(config) - done, 0)


class TimeBudget:
    """The time limit of a call in minutes from now; 0 for no limit."""

    def __init__(self, minutes: float) -> None:
        if not (math.isfinite(minutes) and minutes >= 0):
            raise UserError(f"--minutes {minutes:g}: it must be 0 (no limit) or more")
        self.end = time.monotonic() + 60 * minutes if minutes else math.inf

    def why_too_short(self, seconds: float | None) -> str | None:
        """Return why a cell is not started, or None. A cell of unknown duration is started if any time is left."""
        left = self.end - time.monotonic()
        if left > (seconds or 0):
            return None
        about = f"it takes about {seconds / 60:.1f} minutes and " if seconds else ""
        return about + f"{max(left, 0) / 60:.1f} are left"
