"""ResNets taken apart and put together otherwise: a doubled last block, light branches, experts on a shared stem.

A body maps images to features; it can be asked for a part of them by name.
"""

import copy
from typing import NamedTuple

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.models.backbones import CifarResNet, kaiming_normal, make_body


class Parts(NamedTuple):
    """A ResNet as a chain: what comes before its stages, and the stages, each a chain of blocks."""

    stem: nn.Sequential
    stages: list[nn.Sequential]

    @property
    def widths(self) -> list[int]:
        """Channels that each stage leaves."""
        return [width_of(stage) for stage in self.stages]


def take_apart(body: nn.Module, name: str) -> Parts:
    if isinstance(body, CifarResNet):
        return Parts(nn.Sequential(body.conv1, body.bn1, nn.ReLU()), list(body.stages))  # type: ignore[arg-type]
    if isinstance(body, ResNet):
        stem = nn.Sequential(body.conv1, body.bn1, body.act1, body.maxpool)
        return Parts(stem, [body.get_submodule(f"layer{i}") for i in range(1, 5)])  # type: ignore[misc]
    raise UserError(
        f"this method takes a ResNet apart, which {name} is not: try --model.name resnet32_cifar or resnet50"
    )


def width_of(stage: nn.Sequential) -> int:
    convolutions = [m for m in stage[-1].modules() if isinstance(m, nn.Conv2d)]
    return convolutions[-1].out_channels


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


class TwinBlock(nn.Module):
    """The last block doubled (BBN): both see what the shared part leaves; "left" and "right" are one's features alone."""

    def __init__(self, body: nn.Module, name: str) -> None:
        super().__init__()
        parts = take_apart(body, name)
        *blocks, last = parts.stages[-1]
        self.shared = nn.Sequential(parts.stem, *parts.stages[:-1], *blocks)
        self.left, self.right = last, copy.deepcopy(last).apply(kaiming_normal)

    def forward(self, x: Tensor, part: str = "") -> Tensor:
        x = self.shared(x)
        if part:
            return pooled(self.get_submodule(part)(x))
        return torch.cat([pooled(self.left(x)), pooled(self.right(x))], 1)


class LightBranches(nn.Module):
    """1x1 convolutions with batch norm, side by side on the last map (ResLT); their pooled outputs one after the other."""

    def __init__(self, body: nn.Module, name: str, branches: int) -> None:
        super().__init__()
        parts = take_apart(body, name)
        width = parts.widths[-1]
        self.shared = nn.Sequential(parts.stem, *parts.stages)
        # side by side: one convolution of so many times the channels
        self.branches = nn.Sequential(
            nn.Conv2d(width, branches * width, 1, bias=False), nn.BatchNorm2d(branches * width)
        )
        self.branches.apply(kaiming_normal)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.branches(self.shared(x)))


class Experts(nn.Module):
    """The last two stages several times over and narrower, on a shared rest (RIDE); their features one after the other.

    "shared" is the map that all experts see, and an expert's number what it makes of such a map.
    """

    def __init__(self, body: nn.Module, name: str, experts: int, width: float) -> None:
        super().__init__()
        parts = take_apart(body, name)
        self.shared = nn.Sequential(parts.stem, *parts.stages[:-2])
        self.experts = nn.ModuleList(nn.Sequential(*last_stages(name, width)) for _ in range(experts))

    def forward(self, x: Tensor, part: str | int = "") -> Tensor:
        if isinstance(part, int):
            return pooled(self.experts[part](x))
        x = self.shared(x)
        return x if part == "shared" else torch.cat([pooled(expert(x)) for expert in self.experts], 1)


def last_stages(name: str, width: float) -> list[nn.Sequential]:
    """The last two stages of a network, narrower by the factor `width`."""
    usual = take_apart(make_body(name), name)
    planes = [conv.out_channels for conv in (first_convolution(stage) for stage in usual.stages)]
    narrow = tuple(p if i < len(planes) - 2 else max(round(p * width), 1) for i, p in enumerate(planes))
    return take_apart(make_body(name, channels=narrow), name).stages[-2:]


def first_convolution(stage: nn.Sequential) -> nn.Conv2d:
    """Of a stage's first block: as wide as the stage is called, also where the block's end is wider (bottlenecks)."""
    return next(m for m in stage.modules() if isinstance(m, nn.Conv2d))


class Attention(nn.Module):
    """Modulated attention (OLTR): a non-local block, each place of whose output counts by its share of a spatial mask."""

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        inner = max(width // 2, 1)
        self.look, self.met, self.told = (nn.Conv2d(width, inner, 1) for _ in range(3))
        self.out = nn.Conv2d(inner, width, 1)
        self.places = nn.Linear(width * places, places)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)  # it begins as if it were not there

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape
        look, met, told = (layer(x).flatten(2) for layer in (self.look, self.met, self.told))
        seen = (look.transpose(1, 2) @ met).softmax(2) @ told.transpose(1, 2)  # B, places, inner
        share = self.places(x.flatten(1)).softmax(1).view(B, 1, H, W)
        return x + share * self.out(seen.transpose(1, 2).reshape(B, -1, H, W))


class Attended(nn.Module):
    """A ResNet whose last map goes through modulated attention, once that is switched on."""

    def __init__(self, body: nn.Module, name: str, image_size: int) -> None:
        super().__init__()
        parts = take_apart(body, name)
        self.shared = nn.Sequential(parts.stem, *parts.stages)
        with torch.no_grad():
            places = self.shared.eval()(torch.zeros(1, 3, image_size, image_size)).shape[2:].numel()
        self.attention = Attention(parts.widths[-1], places)
        self.attends = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return pooled(self.attention(x) if self.attends else x)
