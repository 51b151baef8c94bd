"""A network from its run folder, from an exported file, or from a checkpoint of the released PaCo code."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from longtail import runs
from longtail.config import Config, from_dict
from longtail.data.pool import fit_in_memory
from longtail.data.sources import RESIDENT_SIDE, streamed_side
from longtail.engine.device import choose_device
from longtail.engine.evaluate import stored_network
from longtail.errors import UserError, visible
from longtail.inference import released
from longtail.inference.model import Model
from longtail.inference.preprocessing import Preprocessing
from longtail.inference.priors import Prior
from longtail.views import Views

METADATA = "longtail"  # the key of an exported file's description
CHECKPOINTS = (".pth", ".pt", ".tar")


def load(
    path: Path | str,
    device: str = "auto",
    prior: str | Path | Mapping[str, float] | None = None,
    class_names: Sequence[str] | None = None,
    model: str | None = None,
) -> Model:
    """The network of a run folder (or of one that holds a single run), or of a file: model.safetensors, or .pth.tar.

    `prior`: class frequencies expected in use, `uniform`, `train`, a file or a mapping. `class_names` and `model` (a timm name)
    are for checkpoints of the released PaCo code, which need not say them. The training data are not needed.
    """
    path, place = Path(path), choose_device(device, "device")
    is_file = os.path.isfile(path)
    if is_file and (path.suffix == ".safetensors" or path.name == runs.CONFIG):
        exported = path.suffix == ".safetensors" and METADATA in _metadata(path)
        found = load_exported(path, place) if exported else load_run(path.parent, place)
    elif is_file and path.suffix in CHECKPOINTS:
        found = released.load(path, place, class_names, model)
    elif is_file:
        raise UserError(f"{path}: name a run folder, a .safetensors file, or a released checkpoint (.pth.tar)")
    else:
        found = load_run(path, place)
    return found if prior is None else found.expecting(prior)


def load_run(path: Path, device: torch.device) -> Model:
    record = one_run(path)
    config, data = record.config, record.environment["data"]
    names, counts = record.metrics.get("class_names", []), data.get("counts", record.metrics.get("counts", []))
    if not names or len(counts) != len(names):
        raise UserError(f"{record.folder}: {len(counts)} class counts for {len(names)} class names: train it again")
    side = data["resolution"] if "resolution" in data else likely_side(config, data["images"])
    return Model(
        stored_network(record.folder / runs.MODEL, config, counts, device).only_deployed().eval(),
        config,
        Preprocessing(Views(config.views, config.data.image_size), side),
        tuple(map(str, names)),
        np.asarray(counts),
        device,
        _temperature(record.folder),
        origin=record.folder,
    )


def one_run(path: Path) -> runs.Run:
    """The finished run at or below a path; of seeds of one configuration the first, which is said."""
    found = runs.finished(path)
    first = found[0]
    if any(run.config.identity() != first.config.identity() for run in found):
        which = ", ".join(str(run.folder) for run in found[:3])
        raise UserError(
            f"{path} holds {len(found)} runs that differ ({which}{', …' * (len(found) > 3)}): name one of them"
        )
    if len(found) > 1:
        print(visible(f"{path} holds {len(found)} seeds: {first.folder} is taken"), file=sys.stderr)
    return first


def likely_side(config: Config, images: int) -> int:
    """Of runs that did not store it: as `longtail train` chooses."""
    c = config.data
    files = c.name not in ("digits", "cifar10", "cifar100")
    large = c.image_size > RESIDENT_SIDE or not fit_in_memory(images, c.image_size)
    return streamed_side(c) if c.load == "stream" or (c.load == "auto" and files and large) else 0


def _temperature(folder: Path) -> float | None:
    path = folder / runs.CALIBRATION
    return temperature_of(runs.read_json(path), path) if path.exists() else None


def temperature_of(tree: Any, where: Path) -> float:
    value = tree.get("temperature") if isinstance(tree, dict) else None
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{where}: its temperature is {value!r}, measure the run again with `longtail eval`")
    return float(value)


def load_exported(path: Path, device: torch.device) -> Model:
    """What `longtail export --to safetensors` wrote: the description travels with the weights."""
    try:
        facts = json.loads(_metadata(path)[METADATA])
        config = from_dict(Config, facts["config"])
        names, known = tuple(map(str, facts["class_names"])), facts["counts"]
        counts = np.ones(len(names), np.int64) if known is None else np.asarray(known, np.int64)
        side, calibration = int(facts["preprocessing"]["side"]), facts["temperature"]
        prior = Prior(facts["prior"]["name"], np.asarray(facts["prior"]["shares"])) if facts["prior"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: its description cannot be understood ({error}): export it again") from error
    method = stored_network(path, config, counts, device).only_deployed().eval()
    preprocessing = Preprocessing(Views(config.views, config.data.image_size), side)
    temperature = None if calibration is None else temperature_of(facts, path)
    return Model(
        method, config, preprocessing, names, None if known is None else counts, device, temperature, prior, path
    )


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path} ({str(error).splitlines()[0]}): is it a safetensors file?") from error
