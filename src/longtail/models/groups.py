"""Which parameters learn at which rate, and which decay: what fine-tuning asks for beside one rate for all."""

from collections.abc import Iterator
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from longtail.config import OptimConfig
from longtail.errors import UserError
from longtail.models.backbones import Trunk

Group = dict[str, Any]


def refined(groups: list[Group], trunk: Trunk, optim: OptimConfig) -> list[Group]:
    """Split a method's groups where parameters differ in rate or decay; the same groups, where nothing is asked for."""
    if optim.decay_norms and optim.head_lr == optim.layer_decay == 1:
        return groups
    scales = dict(layer_scales(trunk.body, optim.layer_decay))
    bare = set() if optim.decay_norms else set(undecayed(trunk.body))
    return [part for group in groups for part in _split(group, scales, bare, optim)]


def _split(group: Group, scales: dict[Tensor, float], bare: set[Tensor], optim: OptimConfig) -> Iterator[Group]:
    """Parameters of one rate and one decay stay together, in their order."""
    parts: dict[tuple[float, bool], list[Tensor]] = {}
    for p in group["params"]:
        plain = not optim.decay_norms and (p.ndim <= 1 or p in bare)
        parts.setdefault((scales.get(p, optim.head_lr), plain), []).append(p)
    for (scale, plain), params in parts.items():
        no_decay = {"weight_decay": 0.0} if plain else {}
        yield group | {"params": params, "lr_scale": scale * group.get("lr_scale", 1.0)} | no_decay


def layer_scales(body: nn.Module, decay: float) -> Iterator[tuple[Tensor, float]]:
    """The factor of each parameter's rate, by timm's order of layers; the last one's is 1."""
    if decay < 1 and not hasattr(body, "group_matcher"):
        advice = "it needs a whole network of timm, not one that the method takes apart"
        raise UserError(
            f"--optim.layer_decay {decay}: the layers of this network have no order: {advice}", kind="unsupported"
        )
    for group in param_groups_layer_decay(body, layer_decay=decay):
        yield from ((p, group["lr_scale"]) for p in group["params"])


def undecayed(body: nn.Module) -> Iterator[Tensor]:
    """What a network says of itself beyond norms and biases: a transformer's positions and class token."""
    names = getattr(body, "no_weight_decay", lambda: ())()
    yield from (p for name, p in body.named_parameters() if name in names)
