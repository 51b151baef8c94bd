"""`longtail reproduce`: a table of the paper, trained cell by cell; a results file that grows, and a page made of it.

A cell is a method at one imbalance factor. What the results file has is not trained again, nor is what the run folders have.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longtail import recipes, runs
from longtail.config import Config, from_dict
from longtail.data.sources import DataSet, load
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError, unknown
from longtail.report import results as files
from longtail.report.page import factor_name

CHECKPOINT_EVERY = 50  # epochs; the runs are minutes long, and a checkpoint costs some of their speed
MARGIN = 1.1  # a run's seconds leave out loading and evaluation


@dataclass(frozen=True)
class PaperTable:
    """A table as it is run here. The claim is about the first two methods: they are trained first, and compared."""

    title: str
    recipe: str
    setting: str
    methods: tuple[str, ...]
    imbalance: tuple[float, ...]
    seeds: tuple[int, ...]

    def cells(self) -> list[tuple[str, float]]:
        """In the order of work: the two by factor, then the rest by method."""
        pair, rest = self.methods[:2], self.methods[2:]
        first = [(method, factor) for factor in self.imbalance for method in pair]
        return first + [(method, factor) for method in rest for factor in self.imbalance]

    def config(self, method: str, imbalance: float, epochs: int | None = None) -> Config:
        """The recipe's, or a longer or shorter one: its stages keep their proportion, and its warm-up stays as it is."""
        config = recipes.RECIPES[self.recipe].build(method, imbalance, self.setting)
        usual, linear = config.train.epochs, getattr(config.method, "linear_epochs", None)
        epochs = epochs or usual
        if linear is not None:
            stage: Any = {"linear_epochs": max(round(linear * epochs / usual), 1)}
            config = replace(config, method=replace(config.method, **stage))
        return replace(config, train=replace(config.train, epochs=epochs, checkpoint_every=CHECKPOINT_EVERY))

    def to_dict(self) -> dict[str, Any]:
        """What the page needs to know of the table."""
        labels = {method: self.config(method, self.imbalance[0]).method.label for method in self.methods}
        paper: dict[str, dict[str, float]] = {}
        for (method, factor), figure in recipes.RECIPES[self.recipe].published.items():
            paper.setdefault(method, {})[f"{factor:g}"] = figure
        plain = {"imbalance": list(self.imbalance), "seeds": list(self.seeds), "published": paper}
        return {"recipe": self.recipe, "setting": self.setting, "methods": labels} | plain


TABLES = {
    "cifar100-lt": PaperTable(
        title="CIFAR-100-LT with ResNet-32 (Table 6 of the PaCo paper)",
        recipe="cifar100-lt",
        setting="equal",
        methods=("paco", "balanced-softmax", "ce", "paco-no-rebalance", "supcon"),
        imbalance=(100, 50, 10),
        seeds=(0, 1, 2),
    ),
    "cifar100": PaperTable(
        title="Full CIFAR-100 with ResNet-50 (Table 8 of the PaCo paper)",
        recipe="cifar100",
        setting="paper",
        methods=("paco-no-rebalance", "ce", "supcon"),
        imbalance=(1,),
        seeds=(0,),
    ),
}


@dataclass(frozen=True)
class Cell:
    """A method at one factor, and where its runs lie."""

    method: str
    imbalance: float
    config: Config
    folder: Path

    def __str__(self) -> str:
        return f"{self.config.method.label}, {factor_name(self.imbalance)}"

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def with_seeds(self, seeds: Sequence[int]) -> Config:
        return replace(self.config, train=replace(self.config.train, seeds=tuple(seeds)))


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
    again: bool = False,
) -> dict[str, Any]:
    """Train what is missing of a table, and write RESULTS/NAME.json, its page and pictures after each cell; the JSON's tree.

    The twin of `longtail reproduce`. `seeds`, `methods` and `imbalance` choose a part of the table; `epochs` another length;
    `minutes` (0: no limit) ends the call before a cell that would likely not fit; `again` trains what is recorded once more.
    """
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table, left = TABLES[name], Budget(minutes)
    wanted = check_seeds(table.seeds if seeds is None else seeds)
    check_epochs(epochs)
    chosen = choose_cells(table, methods, imbalance)
    command = command_line(name, table, wanted, methods, imbalance, epochs)
    book = Book(open_folder(Path(results)) / f"{name.replace('-', '_')}.json", name, table, command)
    cells = [make_cell(table, m, f, epochs, Path(out or f"runs/reproduce-{name}"), data_root) for m, f in chosen]
    work_through(cells, wanted, book, left, again)
    return book.write()


def work_through(cells: Sequence["Cell"], wanted: Sequence[int], book: "Book", left: "Budget", again: bool) -> None:
    """Train and record cell after cell, as far as the time goes."""
    images: dict[float, DataSet] = {}
    for number, cell in enumerate(cells, 1):
        where, todo = f"cell {number} of {len(cells)}: {cell}", book.seeds_left(cell, wanted, again)
        if not todo:
            print(f"{where}: in {book.path} already, skipped", flush=True)
            continue
        data = load_images(cell, images)
        book.check_images(cell, data)
        if too_long := left.too_short_for(book.estimate(cell, data, todo, again)):
            go_on = "name what is left with --methods and --imbalance" if again else "the same command continues"
            print(f"stopped before {where}: {too_long}; {go_on}", flush=True)
            break
        skipped = [s for s in wanted if s not in todo]
        print(
            f"{where}, {runs.seeds_named(todo)}"
            + (f" ({runs.seeds_named(skipped)} recorded already)" if skipped else ""),
            flush=True,
        )
        if again:
            set_aside(cell, {s: r for s, r in book.recorded(cell).items() if s in todo})
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


def choose_cells(
    table: PaperTable, methods: Sequence[str] | None, imbalance: Sequence[float] | None
) -> list[tuple[str, float]]:
    """The cells of the table that are asked for, in its order; naming none is a mistake."""
    for method in methods or ():
        if method not in table.methods:
            raise unknown("method", method, table.methods)
    factors = " ".join(f"{factor:g}" for factor in table.imbalance)
    for factor in imbalance or ():
        if factor not in table.imbalance:
            raise UserError(f"--imbalance {factor:g}: the table has {factors}, choose among them")
    if methods is not None and not methods:
        raise UserError(f"--methods without a value: choose among {' '.join(table.methods)}")
    if imbalance is not None and not imbalance:
        raise UserError(f"--imbalance without a value: choose among {factors}")
    cells = [(m, f) for m, f in table.cells() if methods is None or m in methods]
    return [(m, f) for m, f in cells if imbalance is None or f in imbalance]


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


def make_cell(
    table: PaperTable, method: str, factor: float, epochs: int | None, out: Path, data_root: Path | str | None
) -> Cell:
    """Its run folders are OUT/METHOD-FACTOR/seedN; another length has folders of its own."""
    config, usual = table.config(method, factor, epochs), table.config(method, factor)
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=Path(data_root)))
    length = config.train.epochs
    suffix = f"-{length}-epochs" if length != usual.train.epochs else ""
    return Cell(method, factor, config, out / f"{method}-{factor:g}{suffix}")


def open_folder(results: Path) -> Path:
    """A place that cannot be written is an error before the training, not after it."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        probe = results / ".longtail-probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {results} ({error.strerror}): choose another --results") from error
    return results


# The work


def load_images(cell: Cell, loaded: dict[float, DataSet]) -> DataSet:
    """The methods share a factor's images."""
    if cell.imbalance not in loaded:
        loaded[cell.imbalance] = load(cell.config.data)
        print(*loaded[cell.imbalance].describe(), sep="\n", flush=True)
    return loaded[cell.imbalance]


def train_cell(cell: Cell, seeds: Sequence[int], data: DataSet) -> list[Path]:
    try:
        return train(cell.with_seeds(seeds), cell.folder, resume=True, data=data)
    except Interrupted as stop:  # its message speaks of --resume, which this verb needs not
        where = f"stopped in {cell}, and saved in {cell.folder}"
        raise Interrupted(f"{where}: the same command continues", stop.exit_code - 128) from stop


def set_aside(cell: Cell, recorded: dict[int, dict[str, Any]]) -> None:
    """Rename the folders of recorded runs, so that these can be made once more; one not recorded yet is not in the way."""
    for seed, record in recorded.items():
        folder = cell.run_folder(seed)
        if (folder / runs.METRICS).exists():
            started = str(runs.read(folder).environment["started"])
            if started == record["started"]:
                folder.rename(folder.with_name(f"{folder.name}-{started.replace(':', '')}"))


def make_record(cell: Cell, folder: Path, command: str) -> dict[str, Any]:
    """What the results file keeps of a finished run."""
    run = runs.read(folder)
    where, images = run.environment, run.environment["data"]
    return {
        "method": cell.method,
        "imbalance": cell.imbalance,
        "seed": run.seed,
        "epochs": run.config.train.epochs,
        "command": command,
        **{key: where[key] for key in ("started", "commit", "device", "precision", "versions")},
        "resumed": where.get("resumed", []),
        "data": {key: images[key] for key in ("checksum", "images", "notes")},
        "metrics": {name: run.metrics[name] for name in files.METRICS if name in run.metrics},
        "per_class": run.metrics["per_class"],
        "counts": run.metrics["counts"],
        "identity": run.config.identity(),
    }


def all_epochs(config: Config) -> int:
    """Of both stages, where there are two."""
    return config.train.epochs + getattr(config.method, "linear_epochs", 0)


def epochs_left(config: Config, folder: Path) -> int:
    """Of a run that may have begun, by its log; what it logged after its last checkpoint counts as done."""
    if (folder / runs.METRICS).exists():
        return 0
    log = folder / runs.LOG
    done = len(log.read_bytes().splitlines()) if log.exists() else 0
    return max(all_epochs(config) - done, 0)


class Budget:
    """The minutes of a call, from now on; 0: no limit."""

    def __init__(self, minutes: float) -> None:
        if not (math.isfinite(minutes) and minutes >= 0):
            raise UserError(f"--minutes {minutes:g}: it must be 0 (no limit) or more")
        self.end = time.monotonic() + 60 * minutes if minutes else math.inf

    def too_short_for(self, seconds: float | None) -> str | None:
        """Why a cell of so many seconds is not begun; one of which nothing is known is, as long as there is time."""
        left = self.end - time.monotonic()
        if left > (seconds or 0):
            return None
        about = f"it takes about {seconds / 60:.1f} minutes and " if seconds else ""
        return about + f"{max(left, 0) / 60:.1f} are left"


class Book:
    """The results file of one table while it grows."""

    def __init__(self, path: Path, name: str, table: PaperTable, command: str) -> None:
        self.path, self.table, self.command = path, table.to_dict(), command
        self.head = {"name": name, "title": table.title, "table": self.table}
        self.tree = files.read(path, self.table)
        self.device: str | None = None  # of the runs added in this call

    def recorded(self, cell: Cell) -> dict[int, dict[str, Any]]:
        return files.find(self.tree, cell.method, cell.imbalance, cell.config)

    def seeds_left(self, cell: Cell, wanted: Sequence[int], again: bool) -> list[int]:
        return [s for s in wanted if again or s not in self.recorded(cell)]

    def check_images(self, cell: Cell, data: DataSet) -> None:
        """Figures on other images belong in another file."""
        for record in self.tree["runs"]:
            stored = record["data"]["checksum"]
            if record["imbalance"] == cell.imbalance and stored != data.checksum:
                other = f"at imbalance {cell.imbalance:g} {self.path} has runs on other images (checksum {stored})"
                raise UserError(f"{other}: name them with --data_root, or choose another --results")

    def estimate(self, cell: Cell, data: DataSet, seeds: Sequence[int], again: bool) -> float | None:
        """Seconds that a cell will likely take, by the runs done on this machine, of this method where there are some."""
        left = [all_epochs(cell.config) if again else epochs_left(cell.config, cell.run_folder(s)) for s in seeds]
        if not any(left):
            return 0.0
        done = [r for r in self.tree["runs"] if self.device in (None, r["device"])]
        done = [r for r in done if r["method"] == cell.method] or done
        images, running = max(left) * len(data.train.labels), sum(n > 0 for n in left)
        return max((MARGIN * images * seconds_per_image(r, running) for r in done), default=None)

    def add(self, records: list[dict[str, Any]]) -> None:
        """Record a cell; the file is read once more, since another process may have added to it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.tree = files.add(files.read(self.path, self.table), records)
        self.tree |= {"command": self.command, "updated": now}
        self.device = records[-1]["device"]
        self.write()

    def write(self) -> dict[str, Any]:
        """A call that found nothing to do leaves the file as it is, but for what follows from the runs."""
        if not self.tree["runs"]:
            raise UserError("no cell was begun: give more --minutes")
        self.tree = files.write(self.path, self.tree | self.head)
        return self.tree


def seconds_per_image(record: dict[str, Any], seeds: int) -> float:
    """Of a run like this one with so many seeds: as many as trained side by side cost the same, more cost more.

    Per image seen, which steps are proportional to: batches are alike within a table.
    """
    metrics, epochs = record["metrics"], all_epochs(from_dict(Config, record["identity"]))
    seconds = metrics["seconds"] + (metrics.get("setup_seconds") or 0)
    return seconds * max(1, seeds / (metrics.get("together") or 1)) / (epochs * record["data"]["images"])
