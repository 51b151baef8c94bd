"""ResNets taken apart and put together otherwise: a doubled last block, light branches, experts on a shared stem.

A body maps images to features; it can be asked for a part of them by name. What it shares is a network that ends early, so
that our kernels know it where they know the whole.
"""

import copy

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.models.backbones import CifarResNet, FeatureMaps, kaiming_normal, make_body


def stages_of(body: nn.Module, name: str) -> list[nn.Sequential]:
    """The stages of a ResNet, each a chain of blocks."""
    if isinstance(body, CifarResNet):
        return list(body.stages)  # type: ignore[arg-type]
    if isinstance(body, ResNet):
        return [body.get_submodule(f"layer{i}") for i in range(1, 5)]  # type: ignore[misc]
    raise UserError(
        f"this method takes a ResNet apart, which {name} is not: try --model.name resnet32_cifar or resnet50",
        kind="unsupported",
    )


def split_blocks(body: nn.Module, stage: int, blocks: int, name: str) -> list[nn.Module]:
    """Take all but the first `blocks` blocks out of a stage (from 0): these are what it returns."""
    taken = list(stages_of(body, name)[stage])
    rest = nn.Sequential(*taken[:blocks])
    if isinstance(body, CifarResNet):
        body.stages[stage] = rest
    else:
        setattr(body, f"layer{stage + 1}", rest)
    return taken[blocks:]


def early_convolutions(body: nn.Module, name: str) -> list[Tensor]:
    """The weights of all convolutions before the last block."""
    last = set(stages_of(body, name)[-1][-1].modules())
    return [m.weight for m in body.modules() if isinstance(m, nn.Conv2d) and m not in last]


def width_of(stage: nn.Sequential) -> int:
    """Channels that a stage leaves."""
    convolutions = [m for m in stage[-1].modules() if isinstance(m, nn.Conv2d)]
    return convolutions[-1].out_channels


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


class TwinBlock(nn.Module):
    """The last block doubled (BBN): both see what the shared part leaves; "left" and "right" are one's features alone.

    The second begins as a copy of the first where that is `pretrained`, and else with weights of its own.
    """

    def __init__(self, body: nn.Module, name: str, pretrained: bool = False) -> None:
        super().__init__()
        last = len(stages_of(body, name)) - 1
        (self.left,) = split_blocks(body, last, len(stages_of(body, name)[last]) - 1, name)
        self.right = copy.deepcopy(self.left)
        if not pretrained:
            self.right.apply(kaiming_normal)
        self.shared = FeatureMaps(body)

    def forward(self, x: Tensor, part: str = "") -> Tensor:
        x = self.shared(x)
        if part:
            return pooled(self.get_submodule(part)(x))
        return torch.cat([pooled(self.left(x)), pooled(self.right(x))], 1)


class LightBranches(nn.Module):
    """Side by side on the last map (ResLT), their pooled outputs one after the other: 1x1 convolutions, and of the small CIFAR
    networks batch norms alone, as in its authors' two codes."""

    def __init__(self, body: nn.Module, name: str, branches: int) -> None:
        super().__init__()
        width = width_of(stages_of(body, name)[-1])
        self.shared = FeatureMaps(body)
        # side by side: one layer of so many times the channels
        self.copies = branches if isinstance(body, CifarResNet) else 1
        self.branches: nn.Module = nn.Conv2d(width, branches * width, 1, bias=False)
        if isinstance(body, CifarResNet):
            self.branches = nn.BatchNorm2d(branches * width)
        self.branches.apply(kaiming_normal)

    def forward(self, x: Tensor) -> Tensor:
        return pooled(self.branches(self.shared(x).repeat(1, self.copies, 1, 1)))


class Experts(nn.Module):
    """The last two stages several times over and narrower, on a shared rest (RIDE); their features one after the other.

    "shared" is the map that all experts see, and an expert's number what it makes of such a map.
    """

    def __init__(self, body: nn.Module, name: str, experts: int, width: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*last_stages(name, width)) for _ in range(experts))
        stages = len(stages_of(body, name))
        for stage in (stages - 1, stages - 2):
            split_blocks(body, stage, 0, name)
        self.shared = FeatureMaps(body)

    def forward(self, x: Tensor, part: str | int = "") -> Tensor:
        if isinstance(part, int):
            return pooled(self.experts[part](x))
        x = self.shared(x)
        return x if part == "shared" else torch.cat([pooled(expert(x)) for expert in self.experts], 1)


def last_stages(name: str, width: float) -> list[nn.Sequential]:
    """The last two stages of a network, narrower by the factor `width`."""
    planes = [width_of(stage) // getattr(stage[-1], "expansion", 1) for stage in stages_of(make_body(name), name)]
    narrow = tuple(p if i < len(planes) - 2 else max(round(p * width), 1) for i, p in enumerate(planes))
    return stages_of(make_body(name, channels=narrow), name)[-2:]


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
        width = width_of(stages_of(body, name)[-1])
        self.shared = FeatureMaps(body)
        with torch.no_grad():
            places = self.shared.eval()(torch.zeros(1, 3, image_size, image_size)).shape[2:].numel()
        self.attention = Attention(width, places)
        self.attends = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return pooled(self.attention(x) if self.attends else x)
