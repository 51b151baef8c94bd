"""`longtail reproduce`: a table of the paper, trained cell by cell; a results file that grows, and a page made of it.

A cell is a method at one imbalance factor. What the results file has is not trained rerun, nor is what the run folders have.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail import files, run_folder
from longtail.config import DataConfig
from longtail.data.sources import DataSet, load_cached
from longtail.deprecated import accept_old_arguments
from longtail.engine.run_lock import check_links
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError, disk_full_as_user_error, unknown_name
from longtail.paper.results_book import ResultsFile, TimeBudget, file_name, make_record
from longtail.paper.tables import TABLES, Cell, PaperTable, choose_cells, make_cell


@accept_old_arguments(again="rerun")
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
    """Train what is missing of a table, and write RESULTS/NAME.json, its page and pictures after each cell; the JSON's tree.

    The twin of `longtail reproduce`. `seeds`, `methods` and `imbalance` choose a part of the table; `epochs` another length;
    `minutes` (0: no limit) ends the call before a cell that would likely not fit; `again` trains what is recorded once more.
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    table, left = TABLES[name], TimeBudget(minutes)
    wanted = check_seeds(table.seeds if seeds is None else seeds)
    check_epochs(epochs)
    if epochs is not None and table.mixed:
        raise UserError(
            f"--epochs {epochs}: {name} has each method in its authors' setting, whose length is part of it",
            kind="unsupported",
        )
    chosen = choose_cells(table, methods, imbalance)
    command = command_line(name, table, wanted, methods, imbalance, epochs)
    book = ResultsFile(open_folder(Path(results)) / file_name(name), name, table, command)
    cells = [make_cell(table, m, f, epochs, Path(out or f"runs/reproduce-{name}"), data_root) for m, f in chosen]
    for cell in cells:
        for seed in wanted:
            check_links(cell.run_folder(seed), Path(out or f"runs/reproduce-{name}"))
    train_cells(cells, wanted, book, left, rerun)
    return book.write()


def train_cells(cells: Sequence[Cell], wanted: Sequence[int], book: ResultsFile, left: TimeBudget, rerun: bool) -> None:
    """Train and record cell after cell, as far as the time goes."""
    images: dict[DataConfig, DataSet] = {}
    if not rerun:
        book.copy_shared_runs(cells, wanted)
    for number, cell in enumerate(cells, 1):
        where, todo = f"cell {number} of {len(cells)}: {cell}", book.missing_seeds(cell, wanted, rerun)
        if not todo:
            print(f"{where}: in {book.path} already, skipped", flush=True)
            continue
        data = load_cached(cell.config.data, images)
        book.check_images(cell, data)
        if too_long := left.why_too_short(book.estimate(cell, data, todo, rerun)):
            go_on = "name what is left with --methods and --imbalance" if rerun else "the same command continues"
            print(f"stopped before {where}: {too_long}; {go_on}", flush=True)
            break
        skipped = [s for s in wanted if s not in todo]
        print(
            f"{where}, {run_folder.format_seeds(todo)}"
            + (f" ({run_folder.format_seeds(skipped)} recorded already)" if skipped else ""),
            flush=True,
        )
        if rerun:
            rename_recorded_runs(cell, {s: r for s, r in book.find_records(cell).items() if s in todo})
        book.add([make_record(cell, folder, book.command) for folder in train_cell(cell, todo, data)])


# What is asked for


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    good = all(type(s) is int and 0 <= s < 2**31 for s in seeds) and len(set(seeds)) == len(seeds) > 0
    if not good:
        given = " ".join(map(str, seeds)) or "without a value"
        raise UserError(f"--seeds {given}: name distinct whole numbers from 0, such as --seeds 0 1 2")
    return tuple(seeds)


def check_epochs(epochs: int | None) -> None:
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        raise UserError(f"--epochs {epochs}: it must be a whole number from 1")


def command_line(
    name: str,
    table: PaperTable,
    seeds: tuple[int, ...],
    methods: Sequence[str] | None,
    imbalance: Sequence[float] | None,
    epochs: int | None,
) -> str:
    """The call as the results file remembers it: what decides figures, not where files lie nor how long a call may take."""
    flags: dict[str, Sequence[Any]] = {
        "--seeds": seeds if seeds != table.seeds else (),
        "--methods": methods or (),
        "--imbalance": [f"{factor:g}" for factor in imbalance or ()],
        "--epochs": [epochs] if epochs else (),
    }
    given = [" ".join([flag, *map(str, values)]) for flag, values in flags.items() if values]
    return " ".join(["longtail reproduce", name, *given])


def open_folder(results: Path) -> Path:
    """A place that cannot be written is an error before the training, not after it."""
    try:
        with disk_full_as_user_error(results):
            results.mkdir(parents=True, exist_ok=True)
            files.check_writable(results)
    except OSError as error:
        raise UserError(
            f"cannot write to {results} ({error.strerror}): choose another --results", kind="not-writable"
        ) from error
    return results


# The work


def train_cell(cell: Cell, seeds: Sequence[int], data: DataSet) -> list[Path]:
    try:
        return train(cell.with_seeds(seeds), cell.folder, resume=True, data=data)
    except Interrupted as stop:
        raise stop.in_a_verb_that_resumes(f"{cell}, and saved in {cell.folder}") from stop


def rename_recorded_runs(cell: Cell, recorded: dict[int, dict[str, Any]]) -> None:
    """Rename the folders of recorded runs, so that these can be made once more; one not recorded yet is not in the way."""
    for seed, record in recorded.items():
        folder = cell.run_folder(seed)
        if (folder / run_folder.METRICS).exists():
            started = str(run_folder.read(folder).environment["started"])
            if started == record["started"]:
                folder.rename(folder.with_name(f"{folder.name}-{re.sub(r'[^0-9A-Za-z-]', '', started)[:40]}"))
