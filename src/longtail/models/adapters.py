"""The trained part of a pretrained network: its last block, low-rank updates of its layers (LoRA), or AdaptFormer modules.

Adapters are inserted into a network of timm in place. Its own weights and batch-norm statistics are frozen. At initialization
the network computes what it computed before. Shapes: B images, N tokens, F features.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import group_parameters
from timm.models.resnet import ResNet
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from longtail.errors import UserError
from longtail.models.backbones import CifarResNet, Trunk
from longtail.models.heads import Classifier
from longtail.models.split_resnets import weights_before_last_block

LORA_RANK = 8
"""The automatic rank of low-rank updates, which is the default of peft."""
TRANSFORMERS = "vit, deit, beit, eva, dinov2, dinov3, clip, siglip, swin, swinv2"


# The last block


def freeze_before_last_block(net: nn.Module, name: str) -> tuple[list[Tensor], list[nn.Module]]:
    """Return the parameters before the last block of a network, and the batch norms whose statistics are frozen with them.

    Of a ResNet these are the weights of its convolutions, and no batch norms, as in released PaCo. Other networks are divided
    into blocks by timm's order of layers.

    Args:
        net: The network.
        name: Its name for error messages.

    Raises:
        UserError: If the network has no order of layers.
    """
    if isinstance(net, CifarResNet | ResNet):
        return weights_before_last_block(net, name), []
    if not hasattr(net, "group_matcher"):
        raise UserError(
            f"--model.trainable last-block: the layers of {name!r} have no known order: use a network of timm, or "
            "--model.trainable head",
            kind="conflict",
        )
    groups: dict[int, list[str]] = group_parameters(net, net.group_matcher(coarse=False))  # type: ignore[operator]
    parameters = dict(net.named_parameters())
    blocks = [i for i, names in groups.items() if any(is_in_block(n, parameters[n]) for n in names)]
    last = max(blocks or groups)
    frozen: list[Tensor] = [parameters[n] for i, names in groups.items() if i < last for n in names]
    ids = {id(p) for p in frozen}
    norms: list[nn.Module] = [m for m in net.modules() if isinstance(m, _BatchNorm) and id(m.weight) in ids]
    return frozen, norms


def is_in_block(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a weight in a numbered module, such as `blocks.11.mlp.fc1.weight`; not a norm or bias."""
    return parameter.ndim > 1 and any(re.search(r"\d$", part) for part in name.split(".")[:-2])


# Adapters


def insert_adapters(trunk: Trunk, kind: str, rank: int, image_size: int, classes: int) -> None:
    """Insert adapters into the body of a backbone, and freeze all other parameters and batch-norm statistics.

    Args:
        trunk: The backbone, whose body is a network of timm.
        kind: "lora" or "adapter".
        rank: The rank of low-rank updates, or the width of adapters; 0 for an automatic value.
        image_size: Height and width of the images in pixels.
        classes: The number of classes.

    Raises:
        UserError: If the network has no layers of this kind, or a package is missing.
    """
    base = list(trunk.body.parameters())
    if kind == "lora":
        insert_lora(trunk.body, rank or LORA_RANK, image_size)
    else:
        insert_adaptformers(trunk.body, rank, classes)
    trunk.freeze_params(base)
    trunk.frozen_modules = [trunk.body]


def insert_lora(net: nn.Module, rank: int, image_size: int) -> None:
    """Add a low-rank update to all linear layers and 1x1 convolutions of a network, with the package peft.

    Args:
        net: The network, which is changed in place.
        rank: The rank of the updates.
        image_size: Height and width of the images in pixels.

    Raises:
        UserError: If there are no such layers, or peft is not installed.
    """
    names = find_lora_layers(net, image_size)
    if not names:
        raise UserError(
            f"--model.trainable lora: {type(net).__name__} has no linear layers or 1x1 convolutions: use a transformer "
            f"({TRANSFORMERS}), convnext, efficientnet, mobilenet, regnet or resnet50, or --model.trainable last-block",
            kind="conflict",
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"--model.trainable lora needs the package peft ({error}): pip install peft", kind="missing-package"
        ) from error
    options: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": names, "lora_dropout": 0.0}
    inject_adapter_in_model(LoraConfig(**options), net)


def find_lora_layers(net: nn.Module, image_size: int) -> list[str]:
    """Return the names of the linear layers and 1x1 convolutions of a network that a forward pass calls.

    Some networks only use the weight of a layer without calling it; such a layer cannot be updated.
    """
    called: set[nn.Module] = set()
    layers = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear) or is_pointwise(m)}
    hooks = [m.register_forward_hook(lambda module, *_: called.add(module)) for m in layers.values()]
    mode = net.training
    with torch.no_grad():
        net.eval()(torch.zeros(1, 3, image_size, image_size))
    net.train(mode)
    for hook in hooks:
        hook.remove()
    return [name for name, m in layers.items() if m in called]


def is_pointwise(module: nn.Module) -> bool:
    """Return whether a module is a 1x1 convolution of all channels."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1


def merge_lora(network: nn.Module) -> None:
    """Add all low-rank updates to the weights of their layers, in place. Then the network has the layers of timm again."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if hasattr(layer, "lora_A"):
                updated: Any = layer
                updated.merge()
                setattr(parent, name, updated.get_base_layer())


class AdaptFormer(nn.Module):
    """The MLP of a transformer block with a small module beside it (Chen et al., 2022): mlp(x) + s · up(relu(down(x))).

    The scale s is trained. `up` is zero at initialization.

    Args:
        mlp: The MLP.
        width: Width of its input and output.
        hidden: Width between `down` and `up`.
    """

    def __init__(self, mlp: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp, self.down, self.up = mlp, nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(()))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x_BNF: Tensor, *others: Any) -> Tensor:
        return self.mlp(x_BNF, *others) + self.scale * self.up(F.relu(self.down(x_BNF)))


def insert_adaptformers(net: nn.Module, hidden: int, classes: int) -> None:
    """Replace the MLP of each transformer block by an `AdaptFormer`.

    Args:
        net: The network, which is changed in place.
        hidden: The width between `down` and `up`; 0 for an automatic value.
        classes: The number of classes.

    Raises:
        UserError: If the network has no transformer blocks.
    """
    found = list(find_mlps(net))
    if not found:
        raise UserError(
            f"--model.trainable adapter: {type(net).__name__} has no transformer blocks: use one of {TRANSFORMERS}, or "
            "--model.trainable lora",
            kind="conflict",
        )
    for block, width in found:
        block.mlp = AdaptFormer(block.mlp, width, hidden or automatic_width(classes, len(found)))  # type: ignore[arg-type]


def find_mlps(net: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each transformer block, which has the modules `attn` and `mlp`, with the width of its MLP."""
    for block in net.modules():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, nn.Module) and isinstance(getattr(block, "attn", None), nn.Module):
            first = next((m for m in mlp.modules() if isinstance(m, nn.Linear)), None)
            if first is not None:
                yield block, first.in_features


def automatic_width(classes: int, blocks: int) -> int:
    """Return the width of adapters by the rule of LIFT (Shi et al., 2024), 2^floor(log2(classes / (2 · blocks))), at least 1.

    All adapters together then have at most as many weights as a linear classifier.
    """
    return 2 ** max(0, math.floor(math.log2(classes / (2 * blocks))))


# Small files


def trainable_tensors(net: Classifier) -> dict[str, Tensor]:
    """Return the tensors of a network that training can change: all but frozen parameters and statistics."""
    frozen = find_frozen(net)
    return {name: tensor for name, tensor in net.state_dict().items() if name not in frozen}


def frozen_checksum(net: Classifier) -> str:
    """Return a SHA-256 checksum of the frozen tensors of a network, with their names."""
    tensors, found = net.state_dict(), hashlib.sha256()
    for name in sorted(find_frozen(net)):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def find_frozen(net: Classifier) -> set[str]:
    """Return the names of the frozen tensors in the `state_dict` of a network."""
    statistics = {id(b) for module in net.trunk.frozen_modules for b in module.buffers()}
    buffers = {name for name, b in net.named_buffers() if id(b) in statistics}
    return net.state_dict().keys() & ({f"trunk.{name}" for name in net.trunk.frozen_params} | buffers)
