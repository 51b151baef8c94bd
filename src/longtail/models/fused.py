"""The CIFAR ResNets in training, by the kernels beside this file: a launch per convolution instead of one per operation.

The plain network (`backbones.CifarResNet`) says what is computed; this says it again in 47 launches forward and 62 backward
where torch needs several hundred. The weights' gradients run beside the chain of the activations' gradients, on a stream of
their own. Sums over pixels are added up in no fixed order, so repetitions differ by rounding.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longtail.models import kernels
from longtail.models.backbones import Block, CifarResNet
from longtail.models.beside import Beside


class How(NamedTuple):
    """How a kernel runs: pixels of a tile, warps, stages of its loop. Found by trying, on an H200."""

    block: int
    warps: int = 4
    stages: int = 3


# By the channels of the result.
CONVOLVE = {16: How(128), 32: How(128), 64: How(64)}
JOIN = {16: How(128), 32: How(128), 64: How(64)}
INPUT_GRAD = {16: How(128), 32: How(128), 64: How(64)}
WEIGHT_GRAD = {16: How(64), 32: How(64), 64: How(64)}
CHUNKS = {16: 64, 32: 32, 64: 16}  # into which the pixels are divided for the weights' gradient


class Layer(NamedTuple):
    """A convolution and its batch norm, with what the forward pass leaves of them for the backward pass."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    x: Tensor  # what was convolved: raw and to be normalised by `before`, or finished
    before: "Layer | None"
    y: Tensor  # raw result
    sums: Tensor  # of y over its pixels; those of y² stand `stride` floats behind
    side: int  # of y's images

    @property
    def pixels(self) -> int:
        return self.y.numel() // self.conv.out_channels

    @property
    def stride(self) -> int:
        """Of all layers' sums: how far those of y² are behind those of y."""
        return self.sums.untyped_storage().nbytes() // 8


class Joint(NamedTuple):
    """A block: two layers, and relu(bn(second) + shortcut of x). The stem is one too: a layer and its relu."""

    layers: tuple[Layer, ...]
    x: Tensor | None
    out: Tensor


def convolutions(body: CifarResNet) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """In the order of the data's way."""
    yield body.conv1, body.bn1
    for block in blocks(body):
        yield block.conv1, block.bn1
        yield block.conv2, block.bn2


def blocks(body: CifarResNet) -> Iterator[Block]:
    for stage in body.stages:
        yield from stage  # type: ignore[misc]


def parameters(body: CifarResNet) -> list[Tensor]:
    return [p for conv, norm in convolutions(body) for p in (conv.weight, norm.weight, norm.bias)]


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, body: CifarResNet, *weights: Tensor) -> Tensor:
        ctx.joints, features = run(body, images)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = run_back(ctx.joints, grad.contiguous())
        del ctx.joints
        return None, None, *grads


def features(body: CifarResNet, images: Tensor, dtype: torch.dtype) -> Tensor:
    """What the network makes of N,3,H,W images in training mode, as float32 N,C; its activations are kept in `dtype`."""
    images = images.to(dtype=dtype, memory_format=torch.channels_last)
    if torch.is_grad_enabled():
        return _Features.apply(images, body, *parameters(body))
    return run(body, images)[1]


def run(body: CifarResNet, images: Tensor) -> tuple[list[Joint], Tensor]:
    """Forward."""
    widths = [conv.out_channels for conv, _ in convolutions(body)]
    sums = torch.zeros(2, sum(widths), device=images.device)
    of_layer = iter(sums[0].split(widths))
    stem = convolve(body.conv1, body.bn1, images.permute(0, 2, 3, 1), None, next(of_layer), images.shape[-1])
    joints = [Joint((stem,), None, join(stem, None))]
    for block in blocks(body):
        x = joints[-1].out
        first = convolve(block.conv1, block.bn1, x, None, next(of_layer), joints[-1].layers[-1].side // block.stride)
        second = convolve(block.conv2, block.bn2, first.y, first, next(of_layer), first.side)
        joints.append(Joint((first, second), x, join(second, x, block.stride)))
    update_averages([layer for joint in joints for layer in joint.layers], sums)
    last = joints[-1].out
    return joints, last.view(len(images), -1, last.shape[-1]).mean(1, dtype=torch.float32)


def convolve(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, before: Layer | None, sums: Tensor, side: int) -> Layer:
    n, wide, stride = len(x), conv.out_channels, int(conv.stride[0])
    y = torch.empty(n, side, side, wide, dtype=x.dtype, device=x.device)
    layer = Layer(conv, norm, x, before, y, sums, side)
    how = CONVOLVE[wide]
    launch(
        kernels.convolve, (ceil(layer.pixels, how.block),), how,
        x, conv.weight, y, sums, *normalised_by(before), layer.pixels, x.numel() // conv.in_channels, layer.stride, norm.eps,
        IN=conv.in_channels, OUT=wide, SIDE=side, STRIDE=stride, NORM=before is not None,
        BLOCK_IN=max(conv.in_channels, 16), BLOCK=how.block,
    )  # fmt: skip
    return layer


def normalised_by(layer: Layer | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (layer.sums, layer.norm.weight, layer.norm.bias) if layer else (None, None, None)


def join(layer: Layer, x: Tensor | None, stride: int = 1) -> Tensor:
    out, wide = torch.empty_like(layer.y), layer.conv.out_channels
    how = JOIN[wide]
    launch(
        kernels.join, (ceil(layer.pixels, how.block),), how,
        layer.y, *normalised_by(layer), x, out, layer.pixels, layer.stride, layer.norm.eps,
        C=wide, X_C=x.shape[-1] if x is not None else 0, SIDE=layer.side, STRIDE=stride, BLOCK=how.block,
    )  # fmt: skip
    return out


@torch.no_grad()
def update_averages(layers: list[Layer], sums: Tensor) -> None:
    """Batch norm's running mean and (unbiased) variance, and its counter; `sums` are those of all layers."""
    widths = [layer.conv.out_channels for layer in layers]
    pixels_T = per_channel(tuple(layer.pixels for layer in layers), tuple(widths), sums.device)
    mean_T, square_T = sums / pixels_T
    variance_T = (square_T - mean_T**2) * (pixels_T / (pixels_T - 1))
    norms: list[Any] = [layer.norm for layer in layers]
    torch._foreach_lerp_([n.running_mean for n in norms], list(mean_T.split(widths)), norms[0].momentum)
    torch._foreach_lerp_([n.running_var for n in norms], list(variance_T.split(widths)), norms[0].momentum)
    torch._foreach_add_([n.num_batches_tracked for n in norms], 1)


@functools.cache
def per_channel(values: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> Tensor:
    """A constant, made once: a step that is being recorded cannot fetch it from the host."""
    return torch.cat([torch.full((width,), float(value)) for value, width in zip(values, widths, strict=True)]).to(
        device
    )


def run_back(joints: list[Joint], grad: Tensor) -> list[Tensor]:
    """Backward: the gradients of `parameters`, from that of the features."""
    layers = [layer for joint in joints for layer in joint.layers]
    flat = torch.zeros(sum(layer.conv.weight.numel() for layer in layers), device=grad.device)
    dw = dict(zip(map(id, layers), flat.split([layer.conv.weight.numel() for layer in layers]), strict=True))
    widths = [layer.conv.out_channels for layer in layers]
    beta, gamma = torch.zeros(2, sum(widths), device=grad.device)
    sums = dict(zip(map(id, layers), beta.split(widths), strict=True))
    last = layers[-1]
    g = torch.empty_like(last.y)
    how = JOIN[last.conv.out_channels]
    launch(
        kernels.pooled_grad, (ceil(last.pixels, how.block),), how,
        grad, joints[-1].out, last.y, last.sums, g, sums[id(last)], last.pixels, last.stride, last.norm.eps,
        C=last.conv.out_channels, SIDE=last.side, BLOCK=how.block,
    )  # fmt: skip
    beside, kept = Beside(grad.device), [g]  # what the other stream still reads must not be given away
    for i in range(len(joints) - 1, 0, -1):
        joint, before = joints[i], joints[i - 1]
        first, second = joint.layers
        beside.run(weight_grad, second, g, sums[id(second)], dw[id(second)])
        g_first = input_grad(second, g, sums[id(second)], first, sums[id(first)])
        beside.run(weight_grad, first, g_first, sums[id(first)], dw[id(first)])
        g = input_grad(first, g_first, sums[id(first)], before.layers[-1], sums[id(before.layers[-1])], before.out, g)
        kept += [g_first, g]
    stem = layers[0]
    beside.run(weight_grad, stem, g, sums[id(stem)], dw[id(stem)])
    beside.join()
    weights = [
        dw[id(n)].view(n.conv.out_channels, 3, 3, -1).permute(0, 3, 1, 2) for n in layers
    ]  # in their memory's order
    return [t for triple in zip(weights, gamma.split(widths), beta.split(widths), strict=True) for t in triple]


def input_grad(
    layer: Layer, g: Tensor, sums: Tensor, before: Layer, before_sums: Tensor,
    out: Tensor | None = None, skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """g of the batch norm before `layer`'s convolution, and into `before_sums` its sums."""
    x_g, conv = torch.empty_like(before.y), layer.conv
    how = INPUT_GRAD[conv.in_channels]
    launch(
        kernels.input_grad, (ceil(before.pixels, how.block),), how,
        g, layer.y, layer.sums, sums, layer.norm.weight, conv.weight,
        before.y, *normalised_by(before), out, skip, x_g, before_sums,
        layer.pixels, before.pixels, layer.stride, layer.norm.eps,
        IN=conv.in_channels, OUT=conv.out_channels, SIDE=before.side, STRIDE=int(conv.stride[0]),
        BLOCK_START=out is not None, BLOCK=how.block,
    )  # fmt: skip
    return x_g


def weight_grad(layer: Layer, g: Tensor, sums: Tensor, dw: Tensor) -> None:
    conv, wide = layer.conv, layer.conv.out_channels
    how, x_pixels = WEIGHT_GRAD[wide], layer.x.numel() // layer.conv.in_channels
    pixels = ceil(ceil(layer.pixels, CHUNKS[wide]), how.block) * how.block
    launch(
        kernels.weight_grad, (ceil(layer.pixels, pixels), 3), how,
        g, layer.y, layer.sums, sums, layer.norm.weight, layer.x, *normalised_by(layer.before), dw,
        layer.pixels, x_pixels, layer.stride, layer.norm.eps, pixels,
        IN=conv.in_channels, OUT=wide, SIDE=layer.side, STRIDE=int(conv.stride[0]), NORM=layer.before is not None,
        BLOCK_IN=max(conv.in_channels, 16), BLOCK=how.block,
    )  # fmt: skip


def ceil(a: int, b: int) -> int:
    return -(-a // b)


_wanted: list[Callable[[], Any]] | None = None  # where launches go while `compile_ahead` takes note of them


def launch(kernel: Any, grid: tuple[int, ...], how: How, *args: Any, **constants: Any) -> None:
    options = {"num_warps": how.warps, "num_stages": how.stages}
    if _wanted is None:
        kernel[grid](*args, **constants, **options)
    else:
        _wanted.append(functools.partial(kernel.warmup, *args, grid=grid, **constants, **options))


def compile_ahead(body: CifarResNet, images: Tensor, dtype: torch.dtype) -> None:
    """Compile every kernel that training on such images needs, many at a time; what is on the disk already is only loaded."""
    global _wanted
    _wanted = []
    try:
        twin = copy.deepcopy(body)  # nothing runs, but its averages would be touched
        joints, pooled = run(twin, images.to(dtype=dtype, memory_format=torch.channels_last))
        run_back(joints, pooled)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda compile_one: compile_one(), _wanted))
    finally:
        _wanted = None
