"""A network from its run folder, from an exported file, or from a checkpoint of the released PaCo code."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from longtail import files, run_folder
from longtail.config import Config, from_dict
from longtail.data.lazy_images import fit_in_memory
from longtail.data.sources import RESIDENT_SIDE, streamed_side
from longtail.engine.device import choose_device
from longtail.engine.evaluate import stored_network
from longtail.errors import UserError, error_text
from longtail.inference import released
from longtail.inference.model import Model
from longtail.inference.preprocessing import Preprocessing
from longtail.inference.priors import Prior
from longtail.progress import log_warning
from longtail.schema import anything, count, maybe, number, share, text, validate
from longtail.text import escape_nonprintable
from longtail.views import Views

METADATA = "longtail"  # the key of an exported file's description
FACTS: dict[str, Any] = {
    "config": anything,
    "class_names": [text],
    "counts": maybe([count]),
    "preprocessing": {"side": count},
    "temperature": maybe(lambda value: is_temperature(value)),
    "prior": maybe({"name": text, "shares": [share]}),
}
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
    if is_file and (path.suffix == ".safetensors" or path.name == run_folder.CONFIG):
        exported = path.suffix == ".safetensors" and METADATA in _metadata(path)
        found = load_exported(path, place) if exported else load_run(path.parent, place)
    elif is_file and path.suffix in CHECKPOINTS:
        found = released.load(path, place, class_names, model)
    elif is_file:
        raise UserError(
            f"{path}: name a run folder, a .safetensors file, or a released checkpoint (.pth.tar)", kind="missing-file"
        )
    else:
        found = load_run(path, place)
    return found if prior is None else found.expecting(prior)


def load_run(path: Path, device: torch.device) -> Model:
    record = one_run(path)
    config, data = record.config, record.environment["data"]
    names = record.metrics.get("class_names") or []
    counts = data.get("counts") or record.metrics.get("counts") or []
    if not names or len(counts) != len(names) or not all(counts):
        raise UserError(
            f"{record.folder}: {len(counts)} class counts for {len(names)} class names: train it again",
            kind="damaged-file",
        )
    side = data.get("resolution")
    side = likely_side(config, data.get("images") or sum(counts)) if side is None else side
    check_side(side, config, record.folder)
    return Model(
        stored_network(record.folder / run_folder.MODEL, config, counts, device).drop_training_modules().eval(),
        config,
        Preprocessing(Views(config.views, config.data.image_size), side),
        tuple(map(str, names)),
        np.asarray(counts),
        device,
        _temperature(record.folder),
        origin=record.folder,
    )


def one_run(path: Path) -> run_folder.FinishedRun:
    """The finished run at or below a path; of seeds of one configuration the first, which is said."""
    found = run_folder.finished(path)
    first = found[0]
    if any(run.config.identity() != first.config.identity() for run in found):
        which = ", ".join(str(run.folder) for run in found[:3])
        raise UserError(
            f"{path} holds {len(found)} runs that differ ({which}{', …' * (len(found) > 3)}): name one of them",
            kind="mismatch",
        )
    if len(found) > 1:
        log_warning(escape_nonprintable(f"{path} holds {len(found)} seeds: {first.folder} is taken"))
    return first


def likely_side(config: Config, images: int) -> int:
    """Of runs that did not store it: as `longtail train` chooses."""
    c = config.data
    files = c.name not in ("digits", "cifar10", "cifar100")
    large = c.image_size > RESIDENT_SIDE or not fit_in_memory(images, c.image_size)
    return streamed_side(c) if c.load == "stream" or (c.load == "auto" and files and large) else 0


def check_side(side: int, config: Config, where: Path) -> None:
    """Raise a UserError unless images are kept at the resolution that the configuration asks for, or (0) as squares."""
    if side not in (0, streamed_side(config.data)):
        raise UserError(
            f"{where}: images of {side} pixels do not belong to its configuration: train it again", kind="damaged-file"
        )


def _temperature(folder: Path) -> float | None:
    path = folder / run_folder.CALIBRATION
    if not os.path.lexists(path):
        return None
    tree = run_folder.read_json(path, limit=files.SMALL_LIMIT)
    value: Any = tree.get("temperature") if isinstance(tree, dict) else None
    if not is_temperature(value):
        raise UserError(
            f"{path}: its temperature is {escape_nonprintable(value)}, measure the run again with `longtail eval`",
            kind="damaged-file",
        )
    return float(value)


def is_temperature(value: Any) -> bool:
    """Return whether logits can be divided by the value; calibration itself stays between 1/20 and 20."""
    return number(value) and 1e-6 <= value <= 1e6


def load_exported(path: Path, device: torch.device) -> Model:
    """What `longtail export --to safetensors` wrote: the description travels with the weights."""
    facts = read_facts(path)
    try:
        config = from_dict(Config, facts["config"])
    except UserError as error:
        raise UserError(f"{path}: {error}", kind=error.kind) from error
    names, known, shares = tuple(facts["class_names"]), facts.get("counts"), facts.get("prior")
    counts = np.ones(len(names), np.int64) if known is None else np.asarray(known, np.int64)
    prior = Prior(shares["name"], np.asarray(shares["shares"], np.float64)) if shares else None
    side = facts["preprocessing"]["side"]
    check_side(side, config, path)
    method = stored_network(path, config, counts, device).drop_training_modules().eval()
    preprocessing = Preprocessing(Views(config.views, config.data.image_size), side)
    temperature = facts.get("temperature")
    return Model(
        method, config, preprocessing, names, None if known is None else counts, device, temperature, prior, path
    )


def read_facts(path: Path) -> dict[str, Any]:
    """Return the description of an exported file, with the types, lengths and ranges that `load_exported` relies on."""
    again = "export it again"
    try:
        facts = files.parse_json(_metadata(path)[METADATA])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its description is not JSON ({error}): {again}", kind="damaged-file") from error
    if wrong := validate(facts, FACTS):
        raise UserError(f"{path}: {wrong}: {again}", kind="damaged-file")
    classes, prior = len(facts["class_names"]), facts.get("prior")
    if not classes:
        raise UserError(f"{path}: it names no class: {again}", kind="damaged-file")
    if facts.get("counts") is not None and not all(facts["counts"]):
        raise UserError(f"{path}: a class has no training image: {again}", kind="damaged-file")
    for name, values in {"counts": facts.get("counts"), "shares of the prior": prior and prior["shares"]}.items():
        if values is not None and (len(values) != classes or not sum(values)):
            raise UserError(f"{path}: {len(values)} {name} for {classes} classes: {again}", kind="damaged-file")
    if prior and abs(sum(prior["shares"]) - 1) > 1e-3:
        raise UserError(
            f"{path}: the shares of its prior sum to {sum(prior['shares']):g}: {again}", kind="damaged-file"
        )
    return facts


def _metadata(path: Path) -> dict[str, str]:
    try:
        with files.open_regular(path, folder=path.parent):
            pass
        with safe_open(os.fspath(path), framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot read {path} ({error_text(error).splitlines()[0]}): is it a safetensors file?",
            kind=files.read_error_kind(error),
        ) from error
