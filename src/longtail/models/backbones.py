"""Trunks by timm name. The CIFAR ResNets are registered with timm, so that one call makes any trunk.

"ResNet-32" on CIFAR is the 16/32/64-wide network of He et al. (2016) with parameter-free shortcuts: 470,004 parameters with
a 100-way classifier. The 3x3-stem ResNet-18/50 are the wide ones of the contrastive literature, under their own names.
"""

from collections.abc import Iterable
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import register_model
from timm.models.resnet import BasicBlock as WideBasicBlock
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from longtail.errors import UserError, unknown_name
from longtail.models import weights


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut that subsamples and pads channels with zeros ("option A": no parameters)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.extra = stride, width - width_in

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra or self.stride > 1:
            half = self.extra // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.extra - half))
        return F.relu(out + x)


WIDTHS = (16, 32, 64)  # of the stages


class CifarResNet(nn.Module):
    """The ResNet of depth 6n+2 for small images, with timm's manners: num_features, forward_features, forward_head."""

    def __init__(
        self, depth: int, num_classes: int = 100, in_chans: int = 3, channels: tuple[int, ...] = WIDTHS, **_: Any
    ) -> None:
        super().__init__()
        n, widths = (depth - 2) // 6, channels
        self.num_features = self.head_hidden_size = widths[-1]
        self.conv1 = nn.Conv2d(in_chans, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            ins, strides = [widths[max(i - 1, 0)]] + [width] * (n - 1), [min(i + 1, 2)] + [1] * (n - 1)
            self.stages.append(nn.Sequential(*(Block(w, width, s) for w, s in zip(ins, strides, strict=True))))
        self.reset_classifier(num_classes)
        self.apply(kaiming_normal)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """The order of its layers, as timm asks for it: the stem, then block by block."""
        return {"stem": r"^conv1|^bn1", "blocks": r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def kaiming_normal(layer: nn.Module) -> None:
    """He initialization of convolutions and linear layers, as the CIFAR ResNets of this field have it."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight)


def _small_images(block: Any, layers: tuple[int, ...], **kwargs: Any) -> ResNet:
    """timm's ResNet with a 3x3 stem of stride 1 and no pooling: 32x32 images keep their resolution."""
    net: Any = ResNet(block, layers, **kwargs)
    net.conv1 = nn.Conv2d(kwargs.get("in_chans", 3), 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def _untrained(kwargs: dict[str, Any]) -> dict[str, Any]:
    """timm passes its own book-keeping along; the constructors want none of it."""
    return {k: v for k, v in kwargs.items() if not k.startswith("pretrained") and k != "cache_dir"}


@register_model
def resnet8_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(8, **_untrained(kwargs))


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(20, **_untrained(kwargs))


@register_model
def resnet32_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(32, **_untrained(kwargs))


@register_model
def resnet44_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(44, **_untrained(kwargs))


@register_model
def resnet56_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(56, **_untrained(kwargs))


@register_model
def resnet74_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    return CifarResNet(74, **_untrained(kwargs))


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    return _small_images(WideBasicBlock, (2, 2, 2, 2), **_untrained(kwargs))


@register_model
def resnet50_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    return _small_images(Bottleneck, (3, 4, 6, 3), **_untrained(kwargs))


FUSED_SIDE = 32  # pixels: the images that our kernels know


class Trunk(nn.Module):
    """Any headless network as a map from images to float32 features: only its inside may run in low precision."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.width = body, width
        self.precision = torch.float32
        self.fused = False  # train a CIFAR ResNet by our own kernels
        self.fixed: list[str] = []  # parameters that never learn, by name
        self.still: list[nn.Module] = []  # parts of the inside that are as in test mode, always

    def fix(self, parameters: Iterable[Tensor]) -> None:
        """From now on these never learn."""
        chosen = {id(p) for p in parameters}
        self.fixed = [name for name, p in self.named_parameters() if id(p) in chosen]

    def hold(self, part: nn.Module) -> None:
        """From now on this part of the inside stays as it is: no parameter learns, and batch norm keeps its averages."""
        self.fix(part.parameters())
        self.still = [part]

    def train(self, mode: bool = True) -> "Trunk":
        super().train(mode)
        for part in self.still:
            part.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "Trunk":
        super().requires_grad_(requires_grad)
        for name in self.fixed:
            self.get_parameter(name).requires_grad_(False)
        return self

    def forward(self, x: Tensor, *part: Any) -> Tensor:
        """Of the whole inside, or of the `part` that the inside knows by that name."""
        if self.fused and can_use_kernels(self.body, x):
            from longtail.models import fused  # cuda.bindings come with torch where there is CUDA

            return fused.features(self.body, x)  # type: ignore[arg-type]
        low = self.precision != torch.float32
        with torch.autocast(x.device.type, self.precision if low else torch.bfloat16, enabled=low):
            features = self.body(x, *part)
            return features.to(torch.promote_types(features.dtype, torch.float32))


class FeatureMaps(nn.Module):
    """The convolutions of a network, from images to the last map; inside a trunk that goes on from there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.fused = False  # train them by our own kernels

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and can_use_kernels(self.net, x):
            from longtail.models import fused

            return fused.features(self.net, x, as_map=True)  # type: ignore[arg-type]
        return self.net.forward_features(x)  # type: ignore[operator]


def can_use_kernels(net: nn.Module, x: Tensor) -> bool:
    """Images of their size, for a network that learns or from which something learns; the plain one is what is measured."""
    frozen = torch.is_grad_enabled() and not any(p.requires_grad for p in net.parameters())
    return x.shape[-2:] == (FUSED_SIDE, FUSED_SIDE) and (net.training or frozen)


def make_trunk(name: str, pretrained: bool = False, image_size: int = 32) -> Trunk:
    """The trunk of a timm model."""
    return wrap(make_body(name, pretrained, **sized(name, image_size)), name, image_size)


def sized(name: str, image_size: int) -> dict[str, int]:
    """What timm wants to be told of the images by networks that are made for one size (a ViT's positions); of others nothing.

    Pretrained positions are resampled.
    """
    known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return {"img_size": image_size} if known and known.fixed_input_size else {}


def make_body(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    """A headless network by its timm name."""
    if not timm.is_model(name):
        raise unknown_name("model", name, timm.list_models())
    try:
        return weights.pretrained(name, **options) if pretrained else timm.create_model(name, num_classes=0, **options)
    except (OSError, RuntimeError, AssertionError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"cannot make {name!r} (pretrained={pretrained}): {str(error).splitlines()[0]}",
            kind="download-failed" if isinstance(error, OSError) else "conflict",
        ) from error


def wrap(body: nn.Module, name: str, image_size: int) -> Trunk:
    """A network as a trunk, tried on one blank image: what timm declares as its width is not always what comes out."""
    try:
        with torch.no_grad():
            width = body.eval()(torch.zeros(1, 3, image_size, image_size)).shape[-1]
    except (RuntimeError, AssertionError, ValueError, ArithmeticError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{name!r} takes no images of {image_size} pixels ({reason}): set --data.image_size", kind="conflict"
        ) from error
    return Trunk(body.train(), width)
