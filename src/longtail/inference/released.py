"""Checkpoints of the released PaCo code: the query trunk (`encoder_q`) and the classifier (`linear`) of its MoCo wrapper.

Beside them a file has the projection (`encoder_q.fc`), the key network, a key classifier that is never used, the queue and the
optimizer; none of that deploys.
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
from longtail.config import Config, DataConfig, ModelConfig, PaCo, ViewsConfig
from longtail.engine.checkpoint import describe
from longtail.engine.device import to_device
from longtail.errors import UserError, file_error_kind
from longtail.inference.model import Model
from longtail.inference.preprocessing import Preprocessing
from longtail.torch_pickle import check_checkpoint
from longtail.views import Views

TRUNK, HEAD = "encoder_q.", "linear."
NETWORKS = {f"resnet{depth}": f"resnet{depth}_cifar" for depth in (20, 32, 44, 56)}


class Layout(NamedTuple):
    """How its authors tested on a data set, known by its number of classes."""

    data: str
    normalize: str


LAYOUTS = {365: Layout("places-lt", "imagenet"), 8142: Layout("inat2018", "inaturalist")}


def load(path: Path, device: torch.device, class_names: Sequence[str] | None, model: str | None) -> Model:
    """Nothing but tensors and plain values is read from the file."""
    tree = read(path)
    state = {
        str(name).removeprefix("module."): tensor
        for name, tensor in tree.get("state_dict", tree).items()
        if isinstance(tensor, Tensor) and not tensor.is_complex()
    }
    weights = network_weights(state, path)
    classes, bias = len(weights["head.weight"]), "head.bias" in weights
    config = configured(network_name(tree, model, path), classes, bias)
    check_width(weights["head.weight"], config, path)
    names = tuple(class_names or map(str, range(classes)))
    if len(names) != classes:
        raise UserError(f"{path} has {classes} classes, and {len(names)} class_names were given", kind="mismatch")
    method = methods.make(config, np.ones(classes, np.int64), stored=True).only_deployed()
    try:
        method.net.load_state_dict(weights)
    except RuntimeError as error:
        reason = next(line.strip() for line in [*str(error).splitlines()[1:], str(error)] if line.strip())
        raise UserError(
            f"{path} does not fit {config.model.name} ({reason}): name its network, model=…", kind="mismatch"
        ) from error
    views = Views(config.views, config.data.image_size)
    side = 0 if config.data.name == "cifar100" else round(config.data.image_size * 16 / 7)
    return Model(
        to_device(method, config, device).eval(), config, Preprocessing(views, side), names, None, device, origin=path
    )


def read(path: Path) -> dict[str, Any]:
    try:
        with files.open_regular(path, folder=path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            check_checkpoint(path, file, size)
            tree = torch.load(file, map_location="cpu", weights_only=True)
        check_tensors(tree)
    except Exception as error:  # a damaged or hostile file fails in many ways
        reason = describe(error)
        advice = "only tensors and plain values are read, save its state_dict alone"
        raise UserError(
            f"cannot read the checkpoint {path} ({reason}): {advice}", kind=file_error_kind(error)
        ) from error
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict", tree), dict):
        raise UserError(
            f"{path} holds no state_dict: is it a checkpoint of the released PaCo code?", kind="damaged-file"
        )
    return tree


def check_tensors(tree: Any) -> None:
    """Raise ValueError if a tensor of a checkpoint has more elements than are stored: it was expanded from a few."""
    tensors = tree.get("state_dict", tree) if isinstance(tree, dict) else {}
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which its file is too small for")


def network_weights(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """By our names: those of timm's ResNets are torchvision's, and the CIFAR networks number their stages."""
    trunk = {k.removeprefix(TRUNK): v for k, v in state.items() if k.startswith(TRUNK) and ".fc." not in k}
    head = {k.removeprefix(HEAD): v for k, v in state.items() if k.startswith(HEAD)}
    if not trunk or "weight" not in head or head["weight"].dim() != 2 or not head["weight"].numel():
        raise UserError(
            f"{path} has no {TRUNK}* and {HEAD}weight: is it a checkpoint of the released PaCo code?",
            kind="damaged-file",
        )
    if not any(k.startswith("layer4.") for k in trunk):
        trunk = {re.sub(r"^layer(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.", k): v for k, v in trunk.items()}
    return {f"trunk.body.{k}": v for k, v in trunk.items()} | {f"head.{k}": v for k, v in head.items()}


def check_width(weight: Tensor, config: Config, path: Path) -> None:
    """Raise a UserError unless the classifier has the width of the network: before one for so many classes is made."""
    width = methods.make(config, np.ones(2, np.int64), stored=True).net.get_parameter("head.weight").shape[1]
    if weight.shape[1] != width:
        have = f"{path} does not fit {config.model.name} (linear.weight is for {weight.shape[1]} features, not {width})"
        raise UserError(f"{have}: name its network, model=…", kind="mismatch")


def network_name(tree: dict[str, Any], model: str | None, path: Path) -> str:
    name = model or tree.get("arch")
    if not isinstance(name, str):
        raise UserError(f"{path} does not say which network it holds: name it, as in load(path, model='resnet50')")
    return NETWORKS.get(name, name)


def configured(name: str, classes: int, bias: bool) -> Config:
    """As its authors tested: CIFAR as it is; other images by the central 224 of 256 pixels."""
    cifar = name.endswith("_cifar")
    data, normalize = LAYOUTS.get(classes, Layout("imagenet-lt", "imagenet"))
    if cifar:
        data, normalize = "cifar100", "cifar10"
    return Config(
        recipe="released checkpoint",
        data=DataConfig(name=data, image_size=32 if cifar else 224),  # type: ignore[arg-type]
        views=ViewsConfig(normalize=normalize, test_crop=1.0 if cifar else 0.875),  # type: ignore[arg-type]
        model=ModelConfig(name=name, bias=bias),
        method=PaCo(queue=0, projection_dim=1, projection_hidden=1),
    )
