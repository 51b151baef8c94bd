"""Run folders as they lie on the disk: who reads them needs neither torch nor the code that wrote them.

config.json  environment.json     written when the run starts; with skipped.jsonl, where images could not be read
log.jsonl                         a line an epoch; with gradients.npz, where asked for
checkpoint/state.pt               all state, for --resume
model.safetensors  predictions.npz  features.npz  examples/  calibration.json  and last metrics.json: the run has finished
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from longtail import files
from longtail.config import Config, from_dict
from longtail.errors import UserError, error_text, file_error_kind
from longtail.schema import amount, anything, count, maybe, named, percent, text, validate

CONFIG, ENVIRONMENT, LOG, METRICS = "config.json", "environment.json", "log.jsonl", "metrics.json"
CHECKPOINT, MODEL = "checkpoint/state.pt", "model.safetensors"
GRADIENTS = "gradients.npz"  # norms (epochs, classes) and stages (epochs,), where --log.gradients asked for it
TENSORBOARD, WANDB = "tensorboard", "wandb.json"  # of --log.loggers: event files; id and epochs of the run there
CALIBRATION = "calibration.json"  # the temperature, where there were validation images
ASK = "is it a run folder of longtail?"
LOCK = "lock"  # held by the process that trains there
SKIPPED = "skipped.jsonl"  # images that were left out as they could not be read: id, reason

R = TypeVar("R")

DATA = {"checksum": text, "images": maybe(count), "counts": maybe([count]), "resolution": maybe(count)}
ENVIRONMENT_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("started", "precision"), text),
    **dict.fromkeys(("device", "commit"), maybe(text)),
    "seed": count,
    "parameters": maybe(count),
    "chosen": maybe(named(amount)),
    "epochs": maybe(count),
    "threads": maybe(count),
    "versions": maybe(named(text)),
    "resumed": maybe([named(anything)]),
    "data": DATA | {"notes": maybe([text])},
}
SCORES = ("many", "medium", "few", "macro_f1", "ece", "knn_top1")
COSTS = ("seconds", "setup_seconds", "together", "peak_memory", "latency_b64", "experts_asked")
BIN = {"low": percent, "high": percent, "count": count, "confidence": maybe(percent), "accuracy": maybe(percent)}
METRICS_SHAPE: dict[str, Any] = {
    "top1": percent,
    **dict.fromkeys(SCORES, maybe(percent)),
    **dict.fromkeys(COSTS, maybe(amount)),
    "per_class": [maybe(percent)],
    "counts": maybe([count]),
    "class_names": maybe([text]),
    "confusion": maybe([[count]]),
    "calibration": maybe([BIN]),
    "shifted": {"forward": named(percent), "uniform": maybe(percent), "backward": named(percent)},
}


@dataclass(frozen=True)
class StartedRun:
    """A run that has begun: what was asked, where it runs."""

    folder: Path
    config: Config
    environment: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.environment["seed"])


@dataclass(frozen=True)
class FinishedRun(StartedRun):
    """A finished run: also what came out."""

    metrics: dict[str, Any]


def short_name(data: str | Path) -> str:
    """Of a recipe or of somebody's images, as folders of runs are called by it: without spaces, which want quoting."""
    return "-".join(Path(data).resolve().name.split())


def seeds_named(seeds: Sequence[int]) -> str:
    """As in "seed 0" and "seeds 0 1 2"."""
    return f"seed{'s' * (len(seeds) > 1)} {' '.join(map(str, seeds))}"


def find(paths: Iterable[Path | str] | Path | str) -> list[Path]:
    """All run folders at or below the given path or paths, finished or not, in the order of their names."""
    found: set[Path] = set()
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not os.path.exists(path):
            raise UserError(
                f"{path} does not exist: name a run folder or a folder that holds runs", kind="missing-file"
            )
        try:
            found |= {Path(top) for top, _, names in files.walk(path) if _is_run({*names})}
        except files.RefusedFile as error:
            raise UserError(
                f"cannot search {path} ({error_text(error)}): name a folder closer to the runs", kind="unsafe-file"
            ) from error
    return sorted(found)


def _is_run(files: set[str]) -> bool:
    """Also a finished one that has lost one of the two that say what it is: who reads it is told so."""
    return {CONFIG, ENVIRONMENT} <= files or ({METRICS, MODEL} <= files and bool({CONFIG, ENVIRONMENT} & files))


def split_finished(paths: Iterable[Path | str] | Path | str) -> tuple[list[Path], list[Path]]:
    """The folders of finished runs at or below the given path or paths, and those of the others."""
    done: list[Path] = []
    others: list[Path] = []
    for folder in find(paths):
        (done if os.path.lexists(folder / METRICS) else others).append(folder)
    return done, others


def read(folder: Path) -> FinishedRun:
    """A finished run."""
    begun, path = read_begun(folder), folder / METRICS
    metrics = _tree(path, METRICS_SHAPE)
    _check_classes(path, metrics)
    return FinishedRun(folder, begun.config, begun.environment, metrics)


def _check_classes(path: Path, metrics: dict[str, Any]) -> None:
    """All that is told by class is told of the same classes, and something is."""
    classes = len(metrics["per_class"])
    rows = {key: metrics.get(key) or [] for key in ("counts", "class_names", "confusion")}
    lengths = {key: {len(found)} for key, found in rows.items() if found}
    lengths |= {"a row of confusion": {len(row) for row in rows["confusion"]}}
    for key, found in lengths.items():
        if found - {classes}:
            raise UserError(f"{path}: {key} is not of the {classes} classes of per_class: {ASK}", kind="damaged-file")
    bins = metrics.get("calibration") or []
    if any(b["count"] and (b.get("confidence") is None or b.get("accuracy") is None) for b in bins):
        raise UserError(f"{path}: calibration has images without confidence or accuracy: {ASK}", kind="damaged-file")
    if all(accuracy is None for accuracy in metrics["per_class"]):
        raise UserError(f"{path}: per_class has no figure: {ASK}", kind="damaged-file")


def read_begun(folder: Path) -> StartedRun:
    """A run, whether it has finished or not."""
    return StartedRun(folder, load_config(folder), _tree(folder / ENVIRONMENT, ENVIRONMENT_SHAPE))


def _tree(path: Path, shape: dict[str, Any]) -> dict[str, Any]:
    tree = read_json(path)
    if wrong := validate(tree, shape):
        raise UserError(f"{path}: {wrong}: {ASK}", kind="damaged-file")
    return tree


def readable(read: Callable[[Path], R], folders: Iterable[Path]) -> tuple[list[R], list[str]]:
    """What `read` makes of the folders, and why others cannot be read: they may be just being written, or damaged."""
    found, bad = list[R](), list[str]()
    for folder in folders:
        try:
            found.append(read(folder))
        except UserError as error:
            bad.append(str(error))
    return found, bad


def finished(paths: Iterable[Path | str] | Path | str) -> list[FinishedRun]:
    """The finished runs at or below the given path or paths; an error where there is none."""
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    done, others = split_finished(paths)
    if not done:
        where = ", ".join(map(str, paths))
        begin = "name a run folder, or train first, e.g. `longtail demo`"
        advice = f"{len(others)} unfinished, continue with --resume" if others else begin
        raise UserError(
            f"no finished run below {where or 'nothing'}: {advice}", kind="unfinished-run" if others else "missing-file"
        )
    return [read(folder) for folder in done]


def load_config(path: Path) -> Config:
    """Of a run folder, or of the file itself."""
    file = path if os.path.isfile(path) else path / CONFIG
    tree = read_json(file, limit=files.SMALL_LIMIT)
    try:
        return from_dict(Config, tree)
    except UserError as error:
        raise UserError(f"{file}: {error}", kind=error.kind) from error


def stored_config(path: Path) -> Config:
    """Of a run, of several below a folder that differ in their seeds alone, or of a file: to be trained anew, by however many
    processes."""
    below = [path] if path.is_file() else find(path)
    if not below:
        raise UserError(
            f"no run below {path}: name a run folder, one that holds runs, or a {CONFIG}", kind="missing-file"
        )
    config = load_config(below[0])
    differing = [folder for folder in below[1:] if load_config(folder).identity() != config.identity()]
    if differing:
        some = ", ".join(map(str, [below[0], *differing][:3]))
        raise UserError(f"{path} holds {len(below)} runs that differ ({some}, …): name one of them", kind="mismatch")
    return replace(config, train=replace(config.train, processes=1))


def read_json(path: Path, folder: Path | None = None, limit: int = files.TEXT_LIMIT) -> Any:
    """Return the content of a JSON file that belongs to `folder` (its own directory if not given); a UserError if it has none.

    The file must be a regular file of at most `limit` bytes, and no symbolic link that leaves the folder.
    """
    try:
        return files.parse_json(files.read_text(path, limit=limit, folder=folder or path.parent))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error_text(error)}): {ASK}", kind=file_error_kind(error)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({error}): {ASK}", kind="damaged-file") from error
