"""Backbones by their timm names. The CIFAR ResNets are registered with timm, so that one function makes any backbone.

"ResNet-32" on CIFAR is the network of He et al. (2016) with 16, 32 and 64 channels and shortcuts without parameters: 470,004
parameters with a classifier of 100 classes. `resnet8x4_cifar` and `resnet32x4_cifar` have four times as many channels, for
example as teachers. ResNet-18 and ResNet-50 with a 3x3 stem are the wide networks of the contrastive learning literature; they
are registered as `resnet18_cifar` and `resnet50_cifar`.
"""

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import register_model
from timm.models.resnet import BasicBlock as WideBasicBlock
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from longtail.errors import UserError, first_line, unknown_name
from longtail.kernels import resnet
from longtail.models import weights


class CifarBlock(nn.Module):
    """Two 3x3 convolutions, and a shortcut that subsamples and pads channels with zeros ("option A": no parameters)."""

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


STAGE_WIDTHS = (16, 32, 64)  # channels of each stage
WIDE_STAGE_WIDTHS = (64, 128, 256)


class CifarResNet(nn.Module):
    """ResNet of depth 6n+2 for small images, with the interface of timm models: num_features, forward_features, forward_head.

    Args:
        depth: Number of layers with weights: 8, 14, 20, …
        num_classes: Number of classes; 0 for no classifier.
        in_chans: Number of channels of the images.
        channels: Number of channels of each stage.
    """

    def __init__(
        self, depth: int, num_classes: int = 100, in_chans: int = 3, channels: tuple[int, ...] = STAGE_WIDTHS, **_: Any
    ) -> None:
        super().__init__()
        n, widths = (depth - 2) // 6, channels
        self.num_features = self.head_hidden_size = widths[-1]
        self.conv1 = nn.Conv2d(in_chans, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = nn.ModuleList()
        for i, width in enumerate(widths):
            ins, strides = [widths[max(i - 1, 0)]] + [width] * (n - 1), [min(i + 1, 2)] + [1] * (n - 1)
            self.stages.append(nn.Sequential(*(CifarBlock(w, width, s) for w, s in zip(ins, strides, strict=True))))
        self.reset_classifier(num_classes)
        self.apply(kaiming_normal)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the order of the layers for layer-wise learning rate decay in timm: the stem, then each block."""
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
    """Initialize a convolution or linear layer as in He et al. (2015), which is usual for CIFAR ResNets."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight)


def _resnet_for_small_images(block: Any, layers: tuple[int, ...], **kwargs: Any) -> ResNet:
    """Return a timm ResNet with a 3x3 stem of stride 1 and no max pooling, so that 32x32 images keep their resolution."""
    net: Any = ResNet(block, layers, **kwargs)
    net.conv1 = nn.Conv2d(kwargs.get("in_chans", 3), 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def _drop_pretrained_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that timm adds for pretrained weights; the constructors do not accept them."""
    return {k: v for k, v in kwargs.items() if not k.startswith("pretrained") and k != "cache_dir"}


@register_model
def resnet8_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-8 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(8, **_drop_pretrained_options(kwargs))


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-20 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(20, **_drop_pretrained_options(kwargs))


@register_model
def resnet32_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-32 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(32, **_drop_pretrained_options(kwargs))


@register_model
def resnet44_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-44 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(44, **_drop_pretrained_options(kwargs))


@register_model
def resnet56_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-56 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(56, **_drop_pretrained_options(kwargs))


@register_model
def resnet74_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-74 for CIFAR with 16, 32 and 64 channels; there are no pretrained weights."""
    return CifarResNet(74, **_drop_pretrained_options(kwargs))


@register_model
def resnet8x4_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-8 for CIFAR, four times as wide: 64, 128 and 256 channels; there are no pretrained weights."""
    return CifarResNet(8, channels=WIDE_STAGE_WIDTHS, **_drop_pretrained_options(kwargs))


@register_model
def resnet32x4_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """ResNet-32 for CIFAR, four times as wide: 64, 128 and 256 channels; there are no pretrained weights."""
    return CifarResNet(32, channels=WIDE_STAGE_WIDTHS, **_drop_pretrained_options(kwargs))


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """Wide ResNet-18 with a 3x3 stem for CIFAR; there are no pretrained weights."""
    return _resnet_for_small_images(WideBasicBlock, (2, 2, 2, 2), **_drop_pretrained_options(kwargs))


@register_model
def resnet50_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """Wide ResNet-50 with a 3x3 stem for CIFAR; there are no pretrained weights."""
    return _resnet_for_small_images(Bottleneck, (3, 4, 6, 3), **_drop_pretrained_options(kwargs))


class Trunk(nn.Module):
    """The backbone with its pooling: maps images to float32 features of `width` channels.

    "Backbone" means this module throughout the documentation. The class and the attribute `trunk` of other modules keep their
    names because they are part of the keys of checkpoints.

    Attributes:
        body: Any headless network. It runs in `precision`; everything outside of it runs in float32.
        width: Number of features.
        precision: torch.float32, or the dtype for autocast.
        fused: Use the kernels of `kernels.resnet` where they support the network and the images.
        frozen_params: Names of parameters that stay frozen when `requires_grad_(True)` is called.
        frozen_modules: Modules that stay in evaluation mode when `train()` is called.
        is_pretrained: Whether training starts from pretrained weights, which can be loaded again.
    """

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.width = body, width
        self.precision = torch.float32
        self.fused = False
        self.frozen_params: list[str] = []
        self.frozen_modules: list[nn.Module] = []
        self.is_pretrained = False

    def freeze_params(self, parameters: Iterable[Tensor]) -> None:
        """Exclude these parameters from training. The next call of `requires_grad_` takes this into account."""
        ids = {id(p) for p in parameters}
        self.frozen_params = [name for name, p in self.named_parameters() if id(p) in ids]

    def freeze_module(self, module: nn.Module) -> None:
        """Freeze the parameters of a module inside `body`, and keep it in evaluation mode (fixed batch-norm statistics)."""
        self.freeze_params(module.parameters())
        self.frozen_modules = [module]

    def train(self, mode: bool = True) -> "Trunk":
        super().train(mode)
        for module in self.frozen_modules:
            module.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "Trunk":
        super().requires_grad_(requires_grad)
        for name in self.frozen_params:
            self.get_parameter(name).requires_grad_(False)
        return self

    def forward(self, x: Tensor, *part: Any) -> Tensor:
        """Compute the features of images.

        Args:
            x: The normalized images.
            *part: Further arguments of `body`, for example the name of the branch to compute.
        """
        if self.fused and can_use_kernels(self.body, x):
            return resnet.features(self.body, x)  # type: ignore[arg-type]
        low = self.precision != torch.float32
        with torch.autocast(x.device.type, self.precision if low else torch.bfloat16, enabled=low):
            features = self.body(x, *part)
            return features.to(torch.promote_types(features.dtype, torch.float32))


class FeatureMaps(nn.Module):
    """The convolutions of a network, from images to the last feature map; for trunks whose body continues from there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.fused = False  # as in `Trunk`

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and can_use_kernels(self.net, x):
            return resnet.features(self.net, x, as_map=True)  # type: ignore[arg-type]
        return self.net.forward_features(x)  # type: ignore[operator]


def has_kernels(net: nn.Module) -> bool:
    """Return whether `kernels.resnet` can train this network: a CIFAR ResNet of the standard widths."""
    return isinstance(net, CifarResNet) and resnet.supports(net)


def can_use_kernels(net: nn.Module, x: Tensor) -> bool:
    """Return whether `kernels.resnet` can process these images with this network in its present mode.

    The kernels are for training: of a network in training mode, or of the head on a frozen network. Evaluation always uses the
    plain network.
    """
    frozen = torch.is_grad_enabled() and not any(p.requires_grad for p in net.parameters())
    return x.shape[-2:] == (resnet.IMAGE_SIZE, resnet.IMAGE_SIZE) and (net.training or frozen) and has_kernels(net)


def make_trunk(name: str, pretrained: bool = False, image_size: int = 32) -> Trunk:
    """Return a timm model without its classifier, as a `Trunk`.

    Args:
        name: Name of a timm model.
        pretrained: Load pretrained weights.
        image_size: Height and width of the images in pixels.
    """
    return wrap_backbone(make_backbone(name, pretrained, **image_size_options(name, image_size)), name, image_size)


def image_size_options(name: str, image_size: int) -> dict[str, int]:
    """Return the option `img_size` for models with a fixed input size (such as a ViT), otherwise no options.

    timm resamples pretrained position embeddings to this size.
    """
    known = weights.find_timm_config(name)
    return {"img_size": image_size} if known and known.fixed_input_size else {}


CUSTOM = "custom"
"""The name of a network that is passed from Python."""
_custom_network: ContextVar[nn.Module | None] = ContextVar("custom network", default=None)


@contextlib.contextmanager
def use_network(network: nn.Module | None) -> Iterator[None]:
    """Let the backbone with the name `CUSTOM` be a copy of this module within the context. None changes nothing.

    Args:
        network: A module that maps images to features (N, F), or to logits if it has `reset_classifier`, as timm models.
    """
    if not isinstance(network, nn.Module | None):
        raise UserError(f"model has the type {type(network).__name__}: give the name of a timm model, or an nn.Module")
    token = _custom_network.set(_custom_network.get() if network is None else network)
    try:
        yield
    finally:
        _custom_network.reset(token)


def copy_custom_network() -> nn.Module:
    """Return a copy of the network of the present context, without its classifier; raise UserError if there is none."""
    given = _custom_network.get()
    if given is None:
        raise UserError(
            "the network of this run was passed from Python: pass it again, as in longtail.load(run, model=network)",
            kind="unknown-name",
        )
    network: Any = copy.deepcopy(given)
    if hasattr(network, "reset_classifier"):
        network.reset_classifier(0)
    return network


def make_backbone(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
    """Return a timm model without its classifier.

    Args:
        name: Name of a timm model.
        pretrained: Load pretrained weights.
        **options: Further arguments of `timm.create_model`.

    Raises:
        UserError: If the name is unknown or timm cannot make the model.
    """
    if name == CUSTOM:
        return copy_custom_network()
    if not timm.is_model(name):
        raise unknown_name("model", name, timm.list_models())
    try:
        if pretrained:
            return weights.load_pretrained(name, **options)
        return timm.create_model(name, num_classes=0, **options)
    except (OSError, RuntimeError, AssertionError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"cannot create the model {name!r} (pretrained={pretrained}): {first_line(error)}",
            kind="download-failed" if isinstance(error, OSError) else "conflict",
        ) from error


def wrap_backbone(body: nn.Module, name: str, image_size: int) -> Trunk:
    """Return a network as a `Trunk`. Its width is measured with one blank image, because timm's `num_features` can differ.

    Args:
        body: The network, without a classifier.
        name: Its name for error messages.
        image_size: Height and width of the images in pixels.

    Raises:
        UserError: If the network cannot process images of this size.
    """
    try:
        with torch.no_grad():
            x_1F = body.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, AssertionError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"the model {name!r} does not accept images of {image_size}x{image_size} pixels ({first_line(error)}): "
            "set --data.image_size",
            kind="conflict",
        ) from error
    if name == CUSTOM and (not isinstance(x_1F, Tensor) or x_1F.dim() != 2):
        found = tuple(x_1F.shape) if isinstance(x_1F, Tensor) else type(x_1F).__name__
        raise UserError(
            f"the network returns {found} for one image: it must return a tensor of shape (images, features)",
            kind="conflict",
        )
    return Trunk(body.train(), x_1F.shape[-1])


# Fast inference of a frozen backbone in float32: ONNX Runtime on the CPU if it is installed, otherwise PyTorch


Forward = Callable[[Tensor], Tensor]
"""Maps normalized images (N,3,H,W) to float32 features (N,F), without gradients."""
MIN_COSINE = 0.9999
"""Smallest cosine similarity between the features of ONNX Runtime and PyTorch; otherwise PyTorch is used."""
INPUT = "images"


def make_plain_forward(body: nn.Module, device: torch.device) -> Forward:
    """Return a function that runs a copy of a network in evaluation mode, with the channels-last memory format."""
    net = copy.deepcopy(body).eval().requires_grad_(False).float()
    net = net.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return net(x.to(memory_format=torch.channels_last)).float()

    return forward


def make_onnx_forward(body: nn.Module, image_size: int) -> Forward:
    """Return a function that runs a network in ONNX Runtime on the CPU.

    The TorchScript-based exporter takes a second; the one based on torch.export takes several times as long.
    """
    import onnxruntime

    net, example = (
        copy.deepcopy(body).cpu().eval().requires_grad_(False).float(),
        torch.zeros(2, 3, image_size, image_size),
    )
    content = io.BytesIO()
    with silence_exporters():
        options: dict[str, Any] = {"input_names": [INPUT], "dynamic_axes": {INPUT: {0: "batch"}}}
        torch.onnx.export(net, (example,), content, dynamo=False, **options)  # type: ignore[arg-type]
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content.getvalue(), settings, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {INPUT: x.numpy(force=True)})[0])


def make_fast_forward(body: nn.Module, image_size: int, device: torch.device) -> Forward:
    """Return the fastest function that computes the same features as a network.

    Args:
        body: The network. It is copied, and may be changed afterward.
        image_size: Height and width of the images in pixels.
        device: The device of the images.
    """
    plain = make_plain_forward(body, device)
    if (
        device.type != "cpu"
        or importlib.util.find_spec("onnxruntime") is None
        or importlib.util.find_spec("onnx") is None
    ):
        return plain
    x = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    try:
        fast = make_onnx_forward(body, image_size)
        is_exact = F.cosine_similarity(plain(x), fast(x)).amin() >= MIN_COSINE  # False for NaN
    except Exception as error:  # exporters raise many types for operations that they do not support
        logging.getLogger(__name__).debug("ONNX Runtime is not used: %s", error)
        return plain
    return fast if is_exact else plain


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Suppress messages and warnings of exporters, which are not addressed to users. Errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
