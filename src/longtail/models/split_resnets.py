"""ResNets that are split and recombined: twin last blocks, light branches, experts on shared stages, attention on the last map.

These modules are bodies of a `Trunk`: they map images to features. Some compute a part of their features if its name is given.
The shared part remains a network that ends early, so that the fused kernels support it if they support the original network.
"""

import copy

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn

from longtail.errors import UserError
from longtail.models.backbones import CifarResNet, FeatureMaps, kaiming_normal, make_backbone


def get_stages(body: nn.Module, name: str) -> list[nn.Sequential]:
    """Return the stages of a ResNet, each a sequence of blocks.

    Args:
        body: The network.
        name: Its name for error messages.

    Raises:
        UserError: If the network is not a ResNet.
    """
    if isinstance(body, CifarResNet):
        return list(body.stages)  # type: ignore[arg-type]
    if isinstance(body, ResNet):
        return [body.get_submodule(f"layer{i}") for i in range(1, 5)]  # type: ignore[misc]
    raise UserError(
        f"this method needs a ResNet, and {name!r} is not one: try --model.name resnet32_cifar or resnet50",
        kind="unsupported",
    )


def pop_blocks(body: nn.Module, stage: int, keep: int, name: str) -> list[nn.Module]:
    """Remove the last blocks of a stage from a ResNet and return them.

    Args:
        body: The network, which is changed in place.
        stage: Index of the stage.
        keep: Number of blocks that stay.
        name: Name of the network for error messages.
    """
    blocks = list(get_stages(body, name)[stage])
    kept = nn.Sequential(*blocks[:keep])
    if isinstance(body, CifarResNet):
        body.stages[stage] = kept
    else:
        setattr(body, f"layer{stage + 1}", kept)
    return blocks[keep:]


def weights_before_last_block(body: nn.Module, name: str) -> list[Tensor]:
    """Return the weights of all convolutions before the last block of a ResNet."""
    last = set(get_stages(body, name)[-1][-1].modules())
    return [m.weight for m in body.modules() if isinstance(m, nn.Conv2d) and m not in last]


def output_channels(stage: nn.Sequential) -> int:
    """Return the number of output channels of a stage."""
    convolutions = [m for m in stage[-1].modules() if isinstance(m, nn.Conv2d)]
    return convolutions[-1].out_channels


def global_average_pool(x: Tensor) -> Tensor:
    """Return the mean over pixels, in float32 or higher precision."""
    return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


class TwinBlock(nn.Module):
    """A ResNet with two copies of its last block (BBN); the features of both are concatenated.

    Args:
        body: The network, which is changed in place.
        name: Its name for error messages.
        pretrained: Initialize the second block as a copy of the first. Otherwise it has its own random weights.
    """

    def __init__(self, body: nn.Module, name: str, pretrained: bool = False) -> None:
        super().__init__()
        last = len(get_stages(body, name)) - 1
        (self.left,) = pop_blocks(body, last, len(get_stages(body, name)[last]) - 1, name)
        self.right = copy.deepcopy(self.left)
        if not pretrained:
            self.right.apply(kaiming_normal)
        self.shared = FeatureMaps(body)

    def forward(self, x: Tensor, part: str = "") -> Tensor:
        """Compute the features of both blocks, or only those of the block `part` ("left" or "right")."""
        x = self.shared(x)
        if part:
            return global_average_pool(self.get_submodule(part)(x))
        return torch.cat([global_average_pool(self.left(x)), global_average_pool(self.right(x))], 1)


class LightBranches(nn.Module):
    """A ResNet with parallel branches on its last feature map (ResLT); their pooled outputs are concatenated.

    A branch is a 1x1 convolution, or only a batch norm on the small CIFAR networks, as in the two code releases of the authors.

    Args:
        body: The network.
        name: Its name for error messages.
        branches: Number of branches.
    """

    def __init__(self, body: nn.Module, name: str, branches: int) -> None:
        super().__init__()
        width = output_channels(get_stages(body, name)[-1])
        self.shared = FeatureMaps(body)
        # All branches are one layer with `branches` times as many output channels; a batch norm needs a copy of the map for
        # each.
        self.copies = branches if isinstance(body, CifarResNet) else 1
        self.branches: nn.Module = nn.Conv2d(width, branches * width, 1, bias=False)
        if isinstance(body, CifarResNet):
            self.branches = nn.BatchNorm2d(branches * width)
        self.branches.apply(kaiming_normal)

    def forward(self, x: Tensor) -> Tensor:
        return global_average_pool(self.branches(self.shared(x).repeat(1, self.copies, 1, 1)))


class Experts(nn.Module):
    """A ResNet with several narrower copies of its last two stages (RIDE); the features of these experts are concatenated.

    Args:
        body: The network, which is changed in place.
        name: Its timm name.
        experts: Number of experts.
        width: Width of the experts as a fraction of the original width.
    """

    def __init__(self, body: nn.Module, name: str, experts: int, width: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*make_expert_stages(name, width)) for _ in range(experts))
        stages = len(get_stages(body, name))
        for stage in (stages - 1, stages - 2):
            pop_blocks(body, stage, 0, name)
        self.shared = FeatureMaps(body)

    def forward(self, x: Tensor, part: str | int = "") -> Tensor:
        """Compute the features of all experts, or a part.

        Args:
            x: Images; if `part` is a number, the feature map that the experts share.
            part: "shared" for the shared feature map, or the number of an expert for its features.
        """
        if isinstance(part, int):
            return global_average_pool(self.experts[part](x))
        x = self.shared(x)
        return x if part == "shared" else torch.cat([global_average_pool(expert(x)) for expert in self.experts], 1)


def make_expert_stages(name: str, width: float) -> list[nn.Sequential]:
    """Return new copies of the last two stages of a network, with `width` times as many channels."""
    stages = get_stages(make_backbone(name), name)
    planes = [output_channels(stage) // getattr(stage[-1], "expansion", 1) for stage in stages]
    narrow = tuple(p if i < len(planes) - 2 else max(round(p * width), 1) for i, p in enumerate(planes))
    return get_stages(make_backbone(name, channels=narrow), name)[-2:]


class ModulatedAttention(nn.Module):
    """Modulated attention (OLTR): a non-local block whose output is multiplied by a spatial attention mask.

    It is the identity at initialization. The layers `look`, `met` and `told` compute query, key and value; they keep these
    names because they are keys of checkpoints.

    Args:
        width: Number of channels.
        places: Number of pixels of the feature map.
    """

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        inner = max(width // 2, 1)
        self.look, self.met, self.told = (nn.Conv2d(width, inner, 1) for _ in range(3))
        self.out = nn.Conv2d(inner, width, 1)
        self.places = nn.Linear(width * places, places)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape
        query, key, value = (layer(x).flatten(2) for layer in (self.look, self.met, self.told))
        attended = (query.transpose(1, 2) @ key).softmax(2) @ value.transpose(1, 2)  # B, pixels, inner
        mask = self.places(x.flatten(1)).softmax(1).view(B, 1, H, W)
        return x + mask * self.out(attended.transpose(1, 2).reshape(B, -1, H, W))


class AttentionResNet(nn.Module):
    """A ResNet with modulated attention on its last feature map, which is applied while `uses_attention` is true.

    Args:
        body: The network.
        name: Its name for error messages.
        image_size: Height and width of the images in pixels, on which the size of the last feature map depends.
    """

    def __init__(self, body: nn.Module, name: str, image_size: int) -> None:
        super().__init__()
        width = output_channels(get_stages(body, name)[-1])
        self.shared = FeatureMaps(body)
        with torch.no_grad():
            places = self.shared.eval()(torch.zeros(1, 3, image_size, image_size)).shape[2:].numel()
        self.attention = ModulatedAttention(width, places)
        self.uses_attention = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return global_average_pool(self.attention(x) if self.uses_attention else x)
