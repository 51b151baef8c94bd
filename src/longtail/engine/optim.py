"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

import bisect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longtail.config import OptimConfig
from longtail.errors import UserError
from longtail.kernels import sgd
from longtail.models.backbones import Trunk

Group = dict[str, Any]


def make_optimizer(
    optim: OptimConfig, groups: list[Group], trunk: Trunk, device: torch.device, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer of a stage.

    Args:
        optim: Its settings.
        groups: The parameter groups of the method, which `split_param_groups` refines.
        trunk: The backbone, whose layers have an order.
        device: On CUDA the learning rates are tensors on the device, where a captured step reads them.
        fused: On CUDA, whether our own kernels train the network; then one of them also does the SGD step. On the CPU, whether
            torch's fused step is used, which needs about a third of the time.
    """
    groups = split_param_groups(groups, trunk, optim)
    kind: Any = torch.optim.SGD
    options: dict[str, Any] = {
        "momentum": optim.momentum,
        "nesterov": optim.nesterov,
        "weight_decay": optim.weight_decay,
    }
    if optim.name == "adamw":
        kind, options = torch.optim.AdamW, {"betas": optim.betas, "weight_decay": optim.weight_decay}
    if device.type != "cuda":
        return kind(groups, lr=optim.lr, fused=fused or None, **options)
    groups = [{"lr": torch.tensor(optim.lr, device=device), **group} for group in groups]
    if optim.name == "adamw":
        options["capturable"] = True
    elif fused:
        return sgd.SGD(groups, **options)
    return kind(groups, fused=True, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups, each multiplied by its `lr_scale`; a rate on the device is changed in place."""
    for group in optimizer.param_groups:
        scaled = rate * group.get("lr_scale", 1)
        group["lr"] = group["lr"].fill_(scaled) if isinstance(group["lr"], Tensor) else scaled


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless every stored average has the shape of its parameter and every `step` is a single number."""
    for parameter, averages in optimizer.state.items():
        for name, value in averages.items():
            if name == "step":
                fits = type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
            else:
                fits = value is None or (isinstance(value, Tensor) and value.shape == parameter.shape)
            if not fits:
                raise ValueError(f"{name} of the optimizer does not fit its parameter")


# Learning rate


def learning_rate(optim: OptimConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of a step. It depends on the step alone, so that a resumed run needs no scheduler state.

    Args:
        optim: The settings of the stage.
        step: The number of the optimizer step in the stage, from 0.
        steps_per_epoch: The optimizer steps of an epoch.
        epochs: The epochs of the stage.
    """
    return optim.lr * warmup(optim, step, steps_per_epoch) * decay(optim, step, steps_per_epoch, epochs)


def warmup(optim: OptimConfig, step: int, steps_per_epoch: int) -> float:
    """Return the fraction of the peak rate in the warm-up.

    With "epoch-overshoot", epoch n after a warm-up of n epochs has the factor (n+1)/n, as in the released code of PaCo.
    """
    n = optim.warmup_epochs
    if n == 0:
        return 1.0
    if optim.warmup_by == "step":
        done = min(step / (n * steps_per_epoch), 1.0)
    else:
        epoch = step // steps_per_epoch
        is_rising = epoch < n or (optim.warmup_by == "epoch-overshoot" and epoch == n)
        done = (epoch + 1) / n if is_rising else 1.0
    return optim.warmup_start + (1 - optim.warmup_start) * done


def decay(optim: OptimConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Return the factor of the schedule.

    The factor of "step" is gamma to the power of the number of milestones passed. "cosine" is half a period from the end of the
    warm-up to the last step.
    """
    if optim.schedule == "step":
        # a milestone below 1 is a fraction of the stage, and otherwise an epoch
        at = [round(m * steps_per_epoch * (epochs if m < 1 else 1)) for m in optim.milestones]
        return optim.gamma ** bisect.bisect_right(at, step)
    if optim.schedule == "cosine":
        start, end = optim.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
        done = min(max(step - start, 0) / max(end - start, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0


# Parameter groups


def split_param_groups(groups: list[Group], trunk: Trunk, optim: OptimConfig) -> list[Group]:
    """Split the groups of a method where parameters differ in learning rate or weight decay.

    Args:
        groups: The groups of the method.
        trunk: The backbone, whose layers may have different rates.
        optim: The settings. With the default ones the groups are returned unchanged.
    """
    if optim.decay_norms and optim.head_lr == optim.layer_decay == 1:
        return groups
    scales = dict(layer_scales(trunk.body, optim.layer_decay))
    exempt = set() if optim.decay_norms else set(find_undecayed(trunk.body))
    return [part for group in groups for part in _split(group, scales, exempt, optim)]


def _split(group: Group, scales: dict[Tensor, float], exempt: set[Tensor], optim: OptimConfig) -> Iterator[Group]:
    """Yield a group for each combination of rate and decay; the order of its parameters does not change."""
    parts: dict[tuple[float, bool], list[Tensor]] = {}
    for p in group["params"]:
        is_exempt = not optim.decay_norms and (p.ndim <= 1 or p in exempt)
        parts.setdefault((scales.get(p, optim.head_lr), is_exempt), []).append(p)
    for (scale, is_exempt), params in parts.items():
        no_decay = {"weight_decay": 0.0} if is_exempt else {}
        yield group | {"params": params, "lr_scale": scale * group.get("lr_scale", 1.0)} | no_decay


def layer_scales(body: nn.Module, decay: float) -> Iterator[tuple[Tensor, float]]:
    """Yield each parameter of a network with the factor of its rate, by timm's order of layers; the last layer has 1."""
    from timm.optim import param_groups_layer_decay  # importing timm.optim raises a limit of torch.compile to a million

    if decay < 1 and not hasattr(body, "group_matcher"):
        advice = "use a network of timm, and a method that does not split it"
        raise UserError(
            f"--optim.layer_decay {decay}: the layers of this network have no known order: {advice}", kind="unsupported"
        )
    for group in param_groups_layer_decay(body, layer_decay=decay):
        yield from ((p, group["lr_scale"]) for p in group["params"])


def find_undecayed(body: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that a network exempts from weight decay, such as the position embeddings of a transformer."""
    names = getattr(body, "no_weight_decay", lambda: ())()
    yield from (p for name, p in body.named_parameters() if name in names)
