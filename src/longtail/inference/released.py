"""Checkpoints of the released PaCo code. Only the query backbone (`encoder_q`) and the classifier (`linear`) are loaded.

A checkpoint also contains the projection head (`encoder_q.fc`), the key network, an unused key classifier, the queue and the
optimizer, which are not needed for predictions.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail import files, methods
from longtail.config import Config, DataConfig, ModelConfig, PaCoSettings, ViewsConfig
from longtail.engine.checkpoint import describe
from longtail.engine.device import to_device
from longtail.errors import UserError, file_error_kind
from longtail.inference.model import Model
from longtail.inference.preprocessing import Preprocessing
from longtail.torch_pickle import check_checkpoint
from longtail.views import Views

BACKBONE_PREFIX, HEAD_PREFIX = "encoder_q.", "linear."
NETWORKS = {f"resnet{depth}": f"resnet{depth}_cifar" for depth in (20, 32, 44, 56)}


class Protocol(NamedTuple):
    """The evaluation protocol of the authors for a dataset, which is identified by its number of classes."""

    data: str
    normalize: str


PROTOCOLS = {365: Protocol("places-lt", "imagenet"), 8142: Protocol("inat2018", "inaturalist")}


def load(path: Path, device: torch.device, class_names: Sequence[str] | None, model: str | None) -> Model:
    """Load a checkpoint of the released code. Only tensors and plain values are read from the file.

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
    config = make_config(network_name(tree, model, path), classes, bias)
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
    return NETWORKS.get(name, name)


def make_config(name: str, classes: int, bias: bool) -> Config:
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
