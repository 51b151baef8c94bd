"""Loading of networks from run folders, exported files, and checkpoints of the released PaCo code."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from longtail import files, run_folder
from longtail.config import Config, from_dict
from longtail.data.lazy_images import fits_in_memory
from longtail.data.sources import MAX_RESIDENT_SIDE, max_stream_side
from longtail.engine.device import choose_device
from longtail.engine.evaluate import load_stored_network
from longtail.errors import UserError, error_text, file_error_kind
from longtail.inference import released
from longtail.inference.model import Augmentation, Model
from longtail.inference.preprocessing import Preprocessing
from longtail.inference.priors import Prior
from longtail.models.backbones import use_network
from longtail.progress import log_warning
from longtail.schema import anything, count, find_error, number, optional, share, text
from longtail.text import escape_nonprintable
from longtail.views import Views

METADATA_KEY = "longtail"
"""Key of the description of the network in the metadata of an exported file."""
TIMM_CLASSIFIER = "timm_classifier"
"""Key of the name of the classifier, in the description of a file whose weights have the names of timm."""
METADATA_SCHEMA: dict[str, Any] = {
    "config": anything,
    "class_names": [text],
    "counts": optional([count]),
    "preprocessing": {"side": count},
    "temperature": optional(lambda value: is_temperature(value)),
    "prior": optional({"name": text, "shares": [share]}),
    TIMM_CLASSIFIER: optional(text),
}
CHECKPOINT_SUFFIXES = (".pth", ".pt", ".tar")


def load(
    path: Path | str,
    device: str = "auto",
    prior: str | Path | Mapping[str, float] | None = None,
    class_names: Sequence[str] | None = None,
    model: str | nn.Module | None = None,
    tta: Augmentation = "none",
    ensemble: bool = False,
) -> Model:
    """Load a network. The training data are not needed.

    Args:
        path: A run folder, a folder that contains runs with the same settings, an exported .safetensors file or folder, or a
            checkpoint of the released PaCo code (.pth.tar).
        device: "auto", "cpu" or "cuda".
        prior: Expected class frequencies: "uniform", "train" (as in the training data), a CSV or JSON file, or a mapping of
            class names to weights.
        class_names: Names of the classes of a checkpoint of the released code, which does not contain them.
        model: The network of a run that was trained with an nn.Module; or the timm name of the network of a checkpoint of the
            released code, if the file does not contain it.
        tta: Test-time augmentation. "flip" averages the probabilities of each image and of its mirror image.
        ensemble: Whether the probabilities of all seeds in a folder are averaged; otherwise the first seed is used.
    """
    if model is not None and not isinstance(model, str):
        with use_network(model):
            return load(path, device, prior, class_names, None, tta, ensemble)
    path, torch_device = Path(path), choose_device(device, "device")
    if not ensemble and is_exported_folder(path):
        path = path / run_folder.MODEL
    is_file = os.path.isfile(path)
    if is_file and ensemble:
        raise UserError(f"{path} has a single network: name a folder with several seeds for an ensemble")
    if is_file and (path.suffix == ".safetensors" or path.name == run_folder.CONFIG):
        exported = path.suffix == ".safetensors" and METADATA_KEY in _read_header(path)
        found = load_exported(path, torch_device) if exported else load_run(path.parent, torch_device)
    elif is_file and path.suffix in CHECKPOINT_SUFFIXES:
        found = released.load(path, torch_device, class_names, model)
    elif is_file:
        raise UserError(
            f"{path}: name a run folder, a .safetensors file, or a released checkpoint (.pth.tar)", kind="missing-file"
        )
    else:
        found = load_ensemble(path, torch_device) if ensemble else load_run(path, torch_device)
    found = replace(found, tta=tta)
    return found if prior is None else found.expecting(prior)


def is_exported_folder(path: Path) -> bool:
    """Return whether `longtail export --to hub` wrote a folder, or its copy."""
    model = path / run_folder.MODEL
    is_run = os.path.lexists(path / run_folder.METRICS)
    return not is_run and os.path.isfile(model) and METADATA_KEY in _read_header(model)


def load_run(path: Path, device: torch.device) -> Model:
    """Load the network of a run folder, or of the first run in a folder."""
    return load_record(find_run(path), device)


def load_ensemble(path: Path, device: torch.device) -> Model:
    """Load the networks of all seeds in a folder as one model."""
    records = find_seeds(path)
    if len(records) < 2:
        raise UserError(f"{path} contains one run: name a folder with several seeds for an ensemble")
    first, *others = (load_record(record, device) for record in records)
    if any(
        (other.class_names, other.preprocessing.side) != (first.class_names, first.preprocessing.side)
        for other in others
    ):
        raise UserError(f"{path} contains runs on different classes or images: name one of them", kind="mismatch")
    return replace(first, others=tuple(others))


def load_record(record: run_folder.FinishedRun, device: torch.device) -> Model:
    """Load the network of a run."""
    config, data = record.config, record.environment["data"]
    names = record.metrics.get("class_names") or []
    counts = data.get("counts") or record.metrics.get("counts") or []
    if not names or len(counts) != len(names) or not all(counts):
        raise UserError(
            f"{record.folder}: {len(counts)} class counts for {len(names)} class names: train it again",
            kind="damaged-file",
        )
    side = data.get("resolution")
    side = guess_resolution(config, data.get("images") or sum(counts)) if side is None else side
    check_resolution(side, config, record.folder)
    return Model(
        load_stored_network(record.folder / run_folder.MODEL, config, counts, device).drop_training_modules().eval(),
        config,
        Preprocessing(Views(config.views, config.data.image_size), side),
        tuple(map(str, names)),
        np.asarray(counts),
        device,
        _temperature(record.folder),
        origin=record.folder,
    )


def find_run(path: Path) -> run_folder.FinishedRun:
    """Return the finished run at or below a path; the first one, with a message, if there are several seeds."""
    first, *others = find_seeds(path)
    if others:
        log_warning(escape_nonprintable(f"{path} contains {1 + len(others)} seeds: using {first.folder}"))
    return first


def find_seeds(path: Path) -> list[run_folder.FinishedRun]:
    """Return the finished runs at or below a path; raise a UserError if they have different settings."""
    found = run_folder.read_finished(path)
    first = found[0]
    if any(run.config.identity() != first.config.identity() for run in found):
        which = ", ".join(str(run.folder) for run in found[:3])
        raise UserError(
            f"{path} contains {len(found)} runs with different settings ({which}{', …' * (len(found) > 3)}): name one of them",
            kind="mismatch",
        )
    return found


def guess_resolution(config: Config, images: int) -> int:
    """Return the resolution of a run that did not store it, as `longtail train` chooses it."""
    c = config.data
    files = c.name not in ("digits", "cifar10", "cifar100")
    large = c.image_size > MAX_RESIDENT_SIDE or not fits_in_memory(images, c.image_size)
    return max_stream_side(c) if c.load == "stream" or (c.load == "auto" and files and large) else 0


def check_resolution(side: int, config: Config, where: Path) -> None:
    """Raise a UserError unless a stored resolution is that of the configuration, or 0.

    Args:
        side: The stored resolution; 0 if images are reduced to their center squares.
        config: The configuration.
        where: The file or folder, for the message.
    """
    if side not in (0, max_stream_side(config.data)):
        raise UserError(
            f"{where}: a resolution of {side} pixels does not agree with the configuration: train it again",
            kind="damaged-file",
        )


def _temperature(folder: Path) -> float | None:
    path = folder / run_folder.CALIBRATION
    if not os.path.lexists(path):
        return None
    tree = run_folder.read_json(path, limit=files.SMALL_LIMIT)
    value: Any = tree.get("temperature") if isinstance(tree, dict) else None
    if not is_temperature(value):
        raise UserError(
            f"{path}: its temperature is {escape_nonprintable(value)}: evaluate the run again with `longtail eval`",
            kind="damaged-file",
        )
    return float(value)


def is_temperature(value: Any) -> bool:
    """Return whether a value is a possible temperature; calibration finds values between 1/20 and 20."""
    return number(value) and 1e-6 <= value <= 1e6


def load_exported(path: Path, device: torch.device) -> Model:
    """Load a file that `longtail export` wrote, with the description of the network in its metadata."""
    facts = read_metadata(path)
    try:
        config = from_dict(Config, facts["config"])
    except UserError as error:
        raise UserError(f"{path}: {error}", kind=error.kind) from error
    names, known, shares = tuple(facts["class_names"]), facts.get("counts"), facts.get("prior")
    counts = np.ones(len(names), np.int64) if known is None else np.asarray(known, np.int64)
    prior = Prior(shares["name"], np.asarray(shares["shares"], np.float64)) if shares else None
    side = facts["preprocessing"]["side"]
    check_resolution(side, config, path)
    classifier = facts.get(TIMM_CLASSIFIER)
    stored_name = functools.partial(rename_to_timm, classifier=classifier) if classifier else str
    method = load_stored_network(path, config, counts, device, stored_name).drop_training_modules().eval()
    preprocessing = Preprocessing(Views(config.views, config.data.image_size), side)
    temperature = facts.get("temperature")
    return Model(
        method, config, preprocessing, names, None if known is None else counts, device, temperature, prior, path
    )


def rename_to_timm(name: str, classifier: str) -> str:
    """Return the name in timm of a weight of a network with a linear head.

    Args:
        name: The name in this package.
        classifier: The name of the classifier in timm, for example "fc".
    """
    return (
        name.removeprefix("trunk.body.") if name.startswith("trunk.") else f"{classifier}.{name.removeprefix('head.')}"
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the description in an exported file, after a check of its types, lengths and ranges."""
    fix = "export it again"
    try:
        facts = files.parse_json(_read_header(path)[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its description is not JSON ({error}): {fix}", kind="damaged-file") from error
    if wrong := find_error(facts, METADATA_SCHEMA):
        raise UserError(f"{path}: {wrong}: {fix}", kind="damaged-file")
    classes, prior = len(facts["class_names"]), facts.get("prior")
    if not classes:
        raise UserError(f"{path}: it has no class names: {fix}", kind="damaged-file")
    if facts.get("counts") is not None and not all(facts["counts"]):
        raise UserError(f"{path}: a class has no training images: {fix}", kind="damaged-file")
    for name, values in {"counts": facts.get("counts"), "shares of the prior": prior and prior["shares"]}.items():
        if values is not None and (len(values) != classes or not sum(values)):
            raise UserError(f"{path}: {len(values)} {name} for {classes} classes: {fix}", kind="damaged-file")
    if prior and abs(sum(prior["shares"]) - 1) > 1e-3:
        raise UserError(f"{path}: the shares of its prior sum to {sum(prior['shares']):g}: {fix}", kind="damaged-file")
    return facts


def _read_header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    try:
        with files.open_regular(path, folder=path.parent):
            pass
        with safe_open(os.fspath(path), framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot read {path} ({error_text(error).splitlines()[0]}): is it a safetensors file?",
            kind=file_error_kind(error),
        ) from error
