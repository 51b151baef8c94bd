"""Reading of run folders. This module needs neither torch nor the code that wrote them.

config.json, environment.json     written when the run starts, with skipped.jsonl if images could not be read
log.jsonl                         one line per epoch; gradients.npz with --log.gradients
checkpoint/state.pt               the state of the training, for --resume
model.safetensors, predictions.npz, features.npz, examples/, calibration.json, and last metrics.json: the run is finished
adapter.safetensors               the trained tensors of model.safetensors, if a part of a pretrained network is frozen
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from longtail import files
from longtail.config import Config, from_dict
from longtail.errors import UserError, error_text, file_error_kind, list_paths
from longtail.schema import amount, anything, count, find_error, mapping_of, optional, percent, text
from longtail.text import pluralize

CONFIG, ENVIRONMENT, LOG, METRICS = "config.json", "environment.json", "log.jsonl", "metrics.json"
CHECKPOINT, MODEL = "checkpoint/state.pt", "model.safetensors"
ADAPTER = "adapter.safetensors"
"""Written if a part of a pretrained network is frozen: the tensors of model.safetensors that were trained."""
GRADIENTS = "gradients.npz"
"""Written with --log.gradients: norms (epochs, classes) and stages (epochs,)."""
TENSORBOARD = "tensorboard"
"""Folder of the event files of the TensorBoard logger."""
WANDB = "wandb.json"
"""Id of the run in Weights & Biases, and the number of epochs that were logged there."""
CALIBRATION = "calibration.json"
"""The temperature, for runs with a validation split or cross-validation."""
CROSS_VALIDATION = "cross_validation.json"
"""The results of the cross-validation that selected the settings, for runs on cached features."""
LOCK = "lock"
"""File that is locked by the process that trains in the folder."""
SKIPPED = "skipped.jsonl"
"""Id and reason of each image that could not be read and was skipped."""
HINT = "is it a run folder of longtail?"
HASH_BLOCK = 2**20  # bytes

R = TypeVar("R")

DATA_SCHEMA = {"checksum": text, "images": optional(count), "counts": optional([count]), "resolution": optional(count)}
ENVIRONMENT_SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("started", "precision"), text),
    **dict.fromkeys(("device", "commit"), optional(text)),
    "seed": count,
    "parameters": optional(count),
    "chosen": optional(mapping_of(amount)),
    "epochs": optional(count),
    "threads": optional(count),
    "versions": optional(mapping_of(text)),
    "resumed": optional([mapping_of(anything)]),
    "data": DATA_SCHEMA | {"notes": optional([text])},
}
BIN_SCHEMA = {
    "low": percent,
    "high": percent,
    "count": count,
    "confidence": optional(percent),
    "accuracy": optional(percent),
}


@functools.cache
def metrics_shape() -> dict[str, Any]:
    """Return the shape of metrics.json."""
    from longtail.metrics import METRICS as REGISTRY  # imports NumPy, which `--help` does not need

    stored = [metric for metric in REGISTRY.values() if metric.stored_in == "metrics"]
    return {metric.key: optional(percent if metric.is_percentage else amount) for metric in stored} | {
        "top1": percent,
        "per_class": [optional(percent)],
        "counts": optional([count]),
        "class_names": optional([text]),
        "confusion": optional([[count]]),
        "calibration": optional([BIN_SCHEMA]),
        "shifted": {"forward": mapping_of(percent), "uniform": optional(percent), "backward": mapping_of(percent)},
    }


@dataclass(frozen=True)
class StartedRun:
    """A run that has started: its configuration and environment."""

    folder: Path
    config: Config
    environment: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.environment["seed"])


@dataclass(frozen=True)
class FinishedRun(StartedRun):
    """A finished run, with its metrics."""

    metrics: dict[str, Any]


def short_name(data: str | Path) -> str:
    """Return the name of a recipe, or of a path of images, for the name of a run folder: without directories and spaces."""
    return "-".join(Path(data).resolve().name.split())


def format_seeds(seeds: Sequence[int]) -> str:
    """Return, for example, "seed 0" or "seeds 0 1 2"."""
    return f"seed{'s' * (len(seeds) > 1)} {' '.join(map(str, seeds))}"


# Finding runs


def check_exists(path: Path) -> None:
    """Raise a UserError with the closest existing path if the path of a run does not exist."""
    if not os.path.exists(path):
        similar = files.find_similar_path(path)
        hint = f"did you mean {similar!r}?" if similar else "name a run folder, or a folder that contains runs"
        raise UserError(f"{path} does not exist: {hint}", kind="missing-file")


def find_runs(paths: Iterable[Path | str] | Path | str) -> list[Path]:
    """Return all run folders at or below one or more paths, finished or not, sorted by name."""
    found: set[Path] = set()
    for path in list_paths(paths, "paths"):
        check_exists(path)
        try:
            found |= {Path(folder) for folder, _, names in files.walk(path) if _is_run({*names})}
        except files.RefusedFile as error:
            raise UserError(
                f"cannot search {path} ({error_text(error)}): name a folder closer to the runs", kind="unsafe-file"
            ) from error
    return sorted(found)


def _is_run(names: set[str]) -> bool:
    """Return whether a folder with these files is a run folder.

    A finished run that has lost one of its two descriptions counts too, so that reading it reports the missing file.
    """
    return {CONFIG, ENVIRONMENT} <= names or ({METRICS, MODEL} <= names and bool({CONFIG, ENVIRONMENT} & names))


def split_finished(paths: Iterable[Path | str] | Path | str) -> tuple[list[Path], list[Path]]:
    """Return the folders of finished runs and of unfinished runs at or below one or more paths."""
    finished: list[Path] = []
    unfinished: list[Path] = []
    for folder in find_runs(paths):
        (finished if os.path.lexists(folder / METRICS) else unfinished).append(folder)
    return finished, unfinished


# Reading runs


def read(folder: Path) -> FinishedRun:
    """Read a finished run."""
    started, path = read_started(folder), folder / METRICS
    metrics = _read_object(path, metrics_shape())
    _check_classes(path, metrics)
    return FinishedRun(folder, started.config, started.environment, metrics)


def _check_classes(path: Path, metrics: dict[str, Any]) -> None:
    """Raise a UserError unless all metrics by class have the same classes, and at least one class has an accuracy."""
    classes = len(metrics["per_class"])
    rows = {key: metrics.get(key) or [] for key in ("counts", "class_names", "confusion")}
    lengths = {key: {len(found)} for key, found in rows.items() if found}
    lengths |= {"a row of confusion": {len(row) for row in rows["confusion"]}}
    for key, found in lengths.items():
        if found - {classes}:
            raise UserError(
                f"{path}: {key} does not have the {classes} classes of per_class: {HINT}", kind="damaged-file"
            )
    bins = metrics.get("calibration") or []
    if any(b["count"] and (b.get("confidence") is None or b.get("accuracy") is None) for b in bins):
        raise UserError(f"{path}: calibration has images without confidence or accuracy: {HINT}", kind="damaged-file")
    if rows["counts"] and not any(rows["counts"]):
        raise UserError(f"{path}: counts has no training images: {HINT}", kind="damaged-file")
    if all(accuracy is None for accuracy in metrics["per_class"]):
        raise UserError(f"{path}: per_class has no accuracies: {HINT}", kind="damaged-file")


def read_started(folder: Path) -> StartedRun:
    """Read a run that may not be finished."""
    return StartedRun(folder, load_config(folder), _read_object(folder / ENVIRONMENT, ENVIRONMENT_SCHEMA))


def _read_object(path: Path, schema: dict[str, Any]) -> dict[str, Any]:
    tree = read_json(path)
    if wrong := find_error(tree, schema):
        raise UserError(f"{path}: {wrong}: {HINT}", kind="damaged-file")
    return tree


def read_valid(read: Callable[[Path], R], folders: Iterable[Path]) -> tuple[list[R], list[str]]:
    """Read folders of which some may be damaged, or are just being written.

    Args:
        read: Function that reads a folder.
        folders: The folders.

    Returns:
        The results of `read`, and the errors of the folders for which it failed.
    """
    found, errors = list[R](), list[str]()
    for folder in folders:
        try:
            found.append(read(folder))
        except UserError as error:
            errors.append(str(error))
    return found, errors


def read_finished(paths: Iterable[Path | str] | Path | str) -> list[FinishedRun]:
    """Read all finished runs at or below one or more paths; raise a UserError if there are none."""
    paths = list_paths(paths, "paths")
    finished, unfinished = split_finished(paths)
    if not finished:
        searched = ", ".join(map(str, paths)) or "an empty list of paths"
        if unfinished:
            runs = pluralize(len(unfinished), "unfinished run")
            raise UserError(f"no finished run in {searched}: continue {runs} with --resume", kind="unfinished-run")
        raise UserError(
            f"no finished run in {searched}: name a run folder, or train first, for example with `longtail demo`",
            kind="missing-file",
        )
    return [read(folder) for folder in finished]


def hash_network(run: FinishedRun) -> str:
    """Return a checksum of the network of a finished run: of its settings and of its weights.

    If only the trained tensors of a network with frozen weights were kept, they are hashed.
    """
    path = run.folder / (MODEL if os.path.lexists(run.folder / MODEL) else ADAPTER)
    settings = json.dumps(run.config.identity(), sort_keys=True)
    digest = hashlib.sha256(settings.encode())
    try:
        with files.open_regular(path, folder=run.folder) as file:
            while block := file.read(HASH_BLOCK):
                digest.update(block)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error_text(error)}): {HINT}", kind=file_error_kind(error)) from error
    return digest.hexdigest()[:16]


def load_config(path: Path) -> Config:
    """Read the configuration of a run folder, or a config.json."""
    file = path if os.path.isfile(path) else path / CONFIG
    tree = read_json(file, limit=files.SMALL_LIMIT)
    try:
        return from_dict(Config, tree)
    except UserError as error:
        raise UserError(f"{file}: {error}", kind=error.kind) from error


def load_common_config(path: Path) -> Config:
    """Return the configuration for training a stored run again.

    Args:
        path: A run folder, a folder with several runs that differ only in their seeds, or a config.json.

    Returns:
        The configuration of the first run, for a single process: the number of processes may be another one now.
    """
    below = [path] if path.is_file() else find_runs(path)
    if not below:
        raise UserError(
            f"no run below {path}: name a run folder, a folder that contains runs, or a {CONFIG}", kind="missing-file"
        )
    config = load_config(below[0])
    differing = [folder for folder in below[1:] if load_config(folder).identity() != config.identity()]
    if differing:
        examples = ", ".join(map(str, [below[0], *differing][:3]))
        raise UserError(
            f"{path} contains {len(below)} runs with different settings ({examples}, …): name one of them",
            kind="mismatch",
        )
    return replace(config, train=replace(config.train, processes=1))


def read_json(path: Path, limit: int = files.TEXT_LIMIT) -> Any:
    """Return the content of a JSON file of a run.

    Args:
        path: The file. It must be a regular file, and not a symbolic link that leaves its directory.
        limit: The largest size in bytes.

    Raises:
        UserError: The file cannot be read, or is not valid JSON.
    """
    try:
        return files.parse_json(files.read_text(path, limit=limit, folder=path.parent))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error_text(error)}): {HINT}", kind=file_error_kind(error)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({error}): {HINT}", kind="damaged-file") from error
