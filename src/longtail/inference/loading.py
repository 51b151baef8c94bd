"""Loading of networks from run folders, exported files, and checkpoints of the released PaCo code."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longtail import files, methods, run_folder
from longtail.config import Config, DataConfig, ModelConfig, PaCoSettings, ViewsConfig, from_dict
from longtail.data.lazy_images import fits_in_memory
from longtail.data.sources import MAX_RESIDENT_SIDE, max_stream_side
from longtail.engine.checkpoint import describe
from longtail.engine.device import choose_device, to_device
from longtail.engine.evaluate import load_stored_network
from longtail.errors import UserError, check_is_path, error_text, file_error_kind
from longtail.inference.model import Augmentation, Model, Preprocessing
from longtail.inference.priors import Prior
from longtail.models.backbones import use_network
from longtail.progress import log_warning
from longtail.schema import anything, count, find_error, number, optional, share, text
from longtail.text import escape_nonprintable
from longtail.torch_pickle import check_checkpoint
from longtail.views import Views

METADATA_KEY = "longtail"
"""Key of the description of the network in the metadata of an exported file."""
TIMM_CLASSIFIER = "timm_classifier"
"""Key of the name of the classifier, in the description of a file whose weights have the names of timm."""
MAX_PRIOR_NAME = 255
"""The largest length of the name of class frequencies: it is the name of a file, or a word."""
METADATA_SCHEMA: dict[str, Any] = {
    "config": anything,
    "class_names": [text],
    "counts": optional([count]),
    "preprocessing": {"side": count},
    "temperature": optional(lambda value: is_temperature(value)),
    "prior": optional({"name": lambda value: text(value) and len(value) <= MAX_PRIOR_NAME, "shares": [share]}),
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
    check_is_path(path, "path")
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
        found = load_released(path, torch_device, class_names, model)
    elif is_file:
        raise UserError(
            f"{path}: name a run folder, a .safetensors file, or a released checkpoint (.pth.tar)", kind="missing-file"
        )
    else:
        found = load_ensemble(path, torch_device) if ensemble else load_run(path, torch_device)
    found = replace(found, tta=tta)
    return found if prior is None else found.with_prior(prior)


def is_exported_folder(path: Path) -> bool:
    """Return whether a folder, or the original of a copied folder, was written by `longtail export --to hub`."""
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


# Checkpoints of the released PaCo code


BACKBONE_PREFIX, HEAD_PREFIX = "encoder_q.", "linear."
RELEASED_NETWORKS = {f"resnet{depth}": f"resnet{depth}_cifar" for depth in (20, 32, 44, 56)}


class Protocol(NamedTuple):
    """The evaluation protocol of the authors for a dataset, which is identified by its number of classes."""

    data: str
    normalize: str


PROTOCOLS = {365: Protocol("places-lt", "imagenet"), 8142: Protocol("inat2018", "inaturalist")}


def load_released(path: Path, device: torch.device, class_names: Sequence[str] | None, model: str | None) -> Model:
    """Load a checkpoint of the released code. Only tensors and plain values are read from the file.

    Only the query backbone (`encoder_q`) and the classifier (`linear`) are loaded. A checkpoint also contains the projection
    head (`encoder_q.fc`), the key network, an unused key classifier, the queue and the optimizer, which are not needed for
    predictions.

    Args:
        path: The file.
        device: The device of the network.
        class_names: Names of the classes; by default their indices.
        model: timm name of the network; by default the one stored in the file.
    """
    tree = read_checkpoint(path)
    state = {
        str(name).removeprefix("module."): tensor
        for name, tensor in tree.get("state_dict", tree).items()
        if isinstance(tensor, Tensor) and not tensor.is_complex()
    }
    weights = network_weights(state, path)
    classes, bias = len(weights["head.weight"]), "head.bias" in weights
    config = make_released_config(network_name(tree, model, path), classes, bias)
    check_width(weights["head.weight"], config, path)
    names = tuple(class_names or map(str, range(classes)))
    if len(names) != classes:
        raise UserError(f"{path} has {classes} classes, but {len(names)} class_names were given", kind="mismatch")
    method = methods.make(config, np.ones(classes, np.int64), stored=True).drop_training_modules()
    try:
        method.net.load_state_dict(weights)
    except RuntimeError as error:
        reason = next(line.strip() for line in [*str(error).splitlines()[1:], str(error)] if line.strip())
        raise UserError(
            f"{path} does not fit {config.model.name} ({reason}): give its network as model=…", kind="mismatch"
        ) from error
    views = Views(config.views, config.data.image_size)
    side = 0 if config.data.name == "cifar100" else round(config.data.image_size * 16 / 7)
    return Model(
        to_device(method, config, device).eval(), config, Preprocessing(views, side), names, None, device, origin=path
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint; raise a UserError if it is damaged or contains more than tensors and plain values."""
    try:
        with files.open_regular(path, folder=path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            check_checkpoint(path, file, size)
            tree = torch.load(file, map_location="cpu", weights_only=True)
        check_tensors(tree)
    except Exception as error:  # a damaged or hostile file fails in many ways
        reason = describe(error)
        advice = "save its state_dict, because only tensors and plain values are read"
        raise UserError(
            f"cannot read the checkpoint {path} ({reason}): {advice}", kind=file_error_kind(error)
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict", tree), dict):
        raise UserError(f"{path} has no state_dict: is it a checkpoint of the released PaCo code?", kind="damaged-file")
    return tree


def check_tensors(tree: Any) -> None:
    """Raise a ValueError if a tensor of a checkpoint has more elements than are stored, because it was expanded."""
    tensors = tree.get("state_dict", tree) if isinstance(tree, dict) else {}
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but fewer values are stored")


def network_weights(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the weights of a network under the names of this package.

    timm's ResNets use the names of the released code. The CIFAR networks have numbered stages instead.
    """
    backbone = {
        k.removeprefix(BACKBONE_PREFIX): v
        for k, v in state.items()
        if k.startswith(BACKBONE_PREFIX) and ".fc." not in k
    }
    head = {k.removeprefix(HEAD_PREFIX): v for k, v in state.items() if k.startswith(HEAD_PREFIX)}
    if not backbone or "weight" not in head or head["weight"].dim() != 2 or not head["weight"].numel():
        raise UserError(
            f"{path} has no {BACKBONE_PREFIX}* and {HEAD_PREFIX}weight: is it a checkpoint of the released PaCo code?",
            kind="damaged-file",
        )
    if not any(k.startswith("layer4.") for k in backbone):
        backbone = {re.sub(r"^layer(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.", k): v for k, v in backbone.items()}
    return {f"trunk.body.{k}": v for k, v in backbone.items()} | {f"head.{k}": v for k, v in head.items()}


def check_width(weight: Tensor, config: Config, path: Path) -> None:
    """Raise a UserError unless the classifier has the feature width of the network.

    This is checked before a classifier with the stored number of classes is allocated.
    """
    width = methods.make(config, np.ones(2, np.int64), stored=True).net.get_parameter("head.weight").shape[1]
    if weight.shape[1] != width:
        problem = f"{path} does not fit {config.model.name} (linear.weight has {weight.shape[1]} features, not {width})"
        raise UserError(f"{problem}: give its network as model=…", kind="mismatch")


def network_name(tree: dict[str, Any], model: str | None, path: Path) -> str:
    """Return the name of the network: the given one, or the one stored in a checkpoint."""
    name = model or tree.get("arch")
    if not isinstance(name, str):
        raise UserError(
            f"{path} does not contain the name of its network: give it, for example load(path, model='resnet50')"
        )
    return RELEASED_NETWORKS.get(name, name)


def make_released_config(name: str, classes: int, bias: bool) -> Config:
    """Return a configuration with the evaluation protocol of the authors.

    CIFAR images are not cropped; of other images the central 224 of 256 pixels are used.
    """
    cifar = name.endswith("_cifar")
    data, normalize = PROTOCOLS.get(classes, Protocol("imagenet-lt", "imagenet"))
    if cifar:
        data, normalize = "cifar100", "cifar10"
    return Config(
        recipe="released checkpoint",
        data=DataConfig(name=data, image_size=32 if cifar else 224),  # type: ignore[arg-type]
        views=ViewsConfig(normalize=normalize, test_crop=1.0 if cifar else 0.875),  # type: ignore[arg-type]
        model=ModelConfig(name=name, bias=bias),
        method=PaCoSettings(queue=0, projection_dim=1, projection_hidden=1),
    )
