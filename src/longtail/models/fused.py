"""The CIFAR ResNets in training, by the kernels beside this file: a launch per convolution instead of one per operation.

The plain network (`backbones.CifarResNet`) says what is computed; this says it again in 33 launches forward and 62 backward
where torch needs several hundred. The weights' gradients run beside the chain of the activations' gradients, on streams of
their own. Sums over pixels are added up in no fixed order, so repetitions differ by rounding.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longtail.kernels.nvrtc import Argument, CudaSource, expression, read
from longtail.models.backbones import CifarResNet
from longtail.models.side_stream import SideStream
from longtail.models.tables import PACK_BLOCKS, averages_of, convolutions, parameters, residual_blocks, tables


@functools.cache
def source() -> CudaSource:
    return read(Path(__file__).with_name("resnet.cu"))


# Blocks of threads at most, by the width of the result: few, as each adds its part to all weights. Found by trying, on an H200.
WEIGHT_GRAD_BLOCKS = {16: 128, 32: 64, 64: 32}
STEM_GRAD_BLOCKS = 256  # the last launch of all, which has the device to itself


class Layer(NamedTuple):
    """A convolution and its batch norm, with what the forward pass leaves of them for the backward pass."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    x: Tensor  # what was convolved: finished, or raw and to be normalized by `before`
    before: "Layer | None"
    y: Tensor  # raw result
    sums: Tensor  # of y over `population` pixels; those of y² stand `total` floats behind
    population: int
    total: int  # channels of all layers: the T of resnet.cu
    side: int  # of y's images
    back: Tensor  # the packed weights for the way back

    @property
    def pixels(self) -> int:
        return self.y.numel() // self.conv.out_channels


class Input(NamedTuple):
    """What a convolution is given: y, finished or raw and to be normalized as `layer` says.

    With `out` it is the end of a block, relu(bn(y) + shortcut): whoever comes next computes it on the way, and leaves it there.
    """

    y: Tensor
    layer: Layer | None = None
    out: Tensor | None = None
    shortcut: Tensor | None = None  # the stem has none

    @property
    def form(self) -> tuple[int, int]:
        """FORM and X_C of resnet.cu."""
        form = FINISHED if self.layer is None else RAW if self.out is None else JOINT
        return form, 0 if self.shortcut is None else self.shortcut.shape[-1]


FINISHED, RAW, JOINT = range(3)


class Tape(NamedTuple):
    """What the way forward leaves for the way back: the stem's layer and two of each block, and the outputs of all of these."""

    layers: list[Layer]
    outs: list[Tensor]
    grads: Tensor  # cleared: room for the gradients of all parameters


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, body: CifarResNet, as_map: bool, *weights: Tensor) -> Tensor:
        ctx.tape, features = run(body, images, learning=True)
        return last_map(ctx.tape) if as_map else features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.tape is None:
            raise RuntimeError("the way back was gone already, and what it needed is freed")
        if grad.dim() == 4:  # of the map; pixel by pixel, as the kernels read it
            grad = grad.to(torch.bfloat16).permute(0, 2, 3, 1)
        grads = run_back(ctx.tape, grad.contiguous())
        ctx.tape = None
        return None, None, None, *grads


def features(body: CifarResNet, images: Tensor, as_map: bool = False) -> Tensor:
    """What the network makes of N,3,H,W images, as float32 N,C; or, before the mean over pixels, as bf16 N,C,H,W.

    Its activations are kept in bf16. In evaluation mode it is normalized by its running averages and gives no gradients; nor
    does one whose weights are frozen.
    """
    images = images.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
    weights = parameters(body)
    if torch.is_grad_enabled() and body.training and any(w.requires_grad for w in weights):
        return _Forward.apply(images, body, as_map, *weights)
    with torch.no_grad():
        tape, means = run(body, images, learning=False)
        return last_map(tape) if as_map else means


def last_map(tape: Tape) -> Tensor:
    """The last block's output, N,C,H,W."""
    return tape.outs[-1].permute(0, 3, 1, 2)


def run(body: CifarResNet, images: Tensor, learning: bool) -> tuple[Tape, Tensor]:
    """Forward: the tape, for a network that is learning, and the features."""
    weights = tables(body)
    packs = zip(weights.forward, weights.back, strict=True)
    widths = [conv.out_channels for conv, _ in convolutions(body)]
    total, n_grads = sum(widths), sum(p.numel() for p in parameters(body)) if learning else 0
    cleared = torch.empty(2 * total + n_grads, device=images.device)
    n_jobs = len(weights.jobs) if learning else len(widths)  # the way back comes last
    launch("pack_weights", PACK_BLOCKS, 256, weights.jobs, cleared, len(cleared), rows=n_jobs)
    of_layer = sums_of(body, cleared[:total].split(widths), widths)
    pixels = Input(images.permute(0, 2, 3, 1))
    layers = [convolve(body.conv1, body.bn1, pixels, next(of_layer), total, images.shape[-1], next(packs))]
    outs = [torch.empty_like(layers[0].y)]
    end = Input(layers[0].y, layers[0], outs[0])
    for block in residual_blocks(body):
        side = layers[-1].side // block.stride
        first = convolve(block.conv1, block.bn1, end, next(of_layer), total, side, next(packs))
        second = convolve(block.conv2, block.bn2, Input(first.y, first), next(of_layer), total, side, next(packs))
        layers += [first, second]
        outs.append(torch.empty_like(second.y))
        end = Input(second.y, second, outs[-1], outs[-2])
        if not learning:  # nobody will look back
            del layers[:-1], outs[:-2]
    tape = Tape(layers, outs, cleared[2 * total :])
    return tape, pool(tape, weights.averages if body.training else weights.averages[:0])


class Sums(NamedTuple):
    """Of a layer's result over its pixels: where they are added up, and what it is normalized by."""

    added: Tensor
    used: Tensor
    population: int | None  # pixels that these are of; all of them, if not said


def sums_of(body: CifarResNet, added: Sequence[Tensor], widths: list[int]) -> Iterator[Sums]:
    """Layer by layer. In evaluation mode the running averages are used: the sums of one pixel that has just these."""
    if body.training:
        return (Sums(one, one, None) for one in added)
    means, variances, _ = zip(*(averages_of(norm) for _, norm in convolutions(body)), strict=True)
    mean = torch.cat(means)
    known = torch.cat([mean, torch.cat(variances) + mean**2])
    return (Sums(one, other, 1) for one, other in zip(added, known[: len(mean)].split(widths), strict=True))


def convolve(
    conv: nn.Conv2d, norm: nn.BatchNorm2d, given: Input, sums: Sums, total: int, side: int,
    weights: tuple[Tensor, Tensor],
) -> Layer:  # fmt: skip
    into, out, stride = conv.in_channels, conv.out_channels, int(conv.stride[0])
    y = torch.empty(len(given.y), side, side, out, dtype=given.y.dtype, device=given.y.device)
    x, before = (given.y, given.layer) if given.out is None else (given.out, None)
    layer = Layer(conv, norm, x, before, y, sums.used, sums.population or y.numel() // out, total, side, weights[1])
    launch(
        expression("convolve", into, out, side, stride, *given.form), tiles(layer), threads_for(out),
        given.y, weights[0], y, sums.added, *normalized_by(given.layer), given.shortcut, given.out,
        given.layer.population if given.layer else 1, layer.total,
        early=given.layer is not None, shared=weights[0].nbytes,
    )  # fmt: skip
    return layer


def pool(tape: Tape, averages: Tensor) -> Tensor:
    """The features: the last block's end, and its mean over each image's pixels. Updates the averages of all layers."""
    last, shortcut, out = tape.layers[-1], tape.outs[-2], tape.outs[-1]
    wide = last.conv.out_channels
    means = torch.empty(len(out), wide, device=out.device)
    launch(
        expression("pool", wide, shortcut.shape[-1], last.side), len(out), 256,
        last.y, *normalized_by(last), shortcut, out, means, averages, len(averages), last.population, last.total, early=True,
    )  # fmt: skip
    return means


ROWS = 8  # of an image, that a block of threads works on; as in resnet.cu


def tiles(layer: Layer, rows: int = ROWS) -> int:
    return layer.pixels // (rows * layer.side)


def threads_for(channels: int) -> int:
    """`warps_for` in resnet.cu."""
    return 256 if channels == 64 else 128


def normalized_by(layer: Layer | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (layer.sums, layer.norm.weight, layer.norm.bias) if layer else (None, None, None)


def run_back(tape: Tape, grad: Tensor) -> list[Tensor]:
    """Backward: the gradients of `parameters`, from that of the features (N, C) or of the map (N, H, W, C)."""
    layers, outs, grads = tape
    sizes, widths = [n.conv.weight.numel() for n in layers], [n.conv.out_channels for n in layers]
    parts = grads.split((sum(sizes), sum(widths), sum(widths)))
    dw, beta, gamma = (part.split(each) for part, each in zip(parts, (sizes, widths, widths), strict=True))
    last, g = layers[-1], torch.empty_like(layers[-1].y)
    name = expression("last_grad", widths[-1], last.side, grad.dim() == 4)
    launch(name, len(g), 256, grad, outs[-1], last.y, last.sums, g, beta[-1], last.pixels, last.total)
    lines = [SideStream(grad.device, line) for line in range(2)]
    for second in range(len(layers) - 1, 0, -2):
        first, before = second - 1, second - 2
        lines[0].run(weight_grad, layers[second], g, beta[second], dw[second])
        g_first = input_grad(layers[second], g, beta[second], layers[first], beta[first])
        lines[1].run(weight_grad, layers[first], g_first, beta[first], dw[first])
        g = input_grad(layers[first], g_first, beta[first], layers[before], beta[before], outs[before // 2], g)
    lines[0].run(weight_grad, layers[0], g, beta[0], dw[0])
    for line in lines:
        line.join()
    # in the memory's order of the weights
    shaped = [d.view(n.conv.out_channels, 3, 3, -1).permute(0, 3, 1, 2) for d, n in zip(dw, layers, strict=True)]
    return [t for triple in zip(shaped, gamma, beta, strict=True) for t in triple]


def input_grad(
    layer: Layer, g: Tensor, sums: Tensor, before: Layer, before_sums: Tensor,
    out: Tensor | None = None, skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """g of the batch norm before `layer`'s convolution, and into `before_sums` its sums."""
    x_g, conv = torch.empty_like(before.y), layer.conv
    into, stride = conv.in_channels, int(conv.stride[0])
    name = expression("input_grad", into, conv.out_channels, layer.side, stride, out is not None)
    launch(
        name, tiles(layer), threads_for(into),
        g, layer.y, layer.sums, sums, layer.norm.weight, layer.back,
        before.y, *normalized_by(before), out, skip, x_g, before_sums, layer.pixels, before.pixels, layer.total,
        early=True, shared=layer.back.nbytes,
    )  # fmt: skip
    return x_g


def weight_grad(layer: Layer, g: Tensor, sums: Tensor, dw: Tensor) -> None:
    into, out, stride = layer.conv.in_channels, layer.conv.out_channels, int(layer.conv.stride[0])
    name = expression("weight_grad", into, out, layer.side, stride, FINISHED if layer.before is None else RAW)
    most = WEIGHT_GRAD_BLOCKS[out] if into != 3 else STEM_GRAD_BLOCKS
    rows = 16 if layer.side == 16 and stride == 1 else ROWS  # R in resnet.cu; and its `weight_warps`:
    threads = 32 * (12 if out == 16 else 9)
    launch(
        name, min(tiles(layer, rows), most), threads,
        g, layer.y, layer.sums, sums, layer.norm.weight, layer.x, *normalized_by(layer.before), dw,
        layer.pixels, layer.x.numel() // into, layer.total, rows=ceil(out, 32),
    )  # fmt: skip


def ceil(a: int, b: int) -> int:
    return -(-a // b)


_wanted: list[str] | None = None  # where names go while `compile_ahead` takes note of them


def launch(
    name: str, blocks: int, threads: int, *args: Argument, rows: int = 1, shared: int = 0, early: bool = False
) -> None:
    """`early`: where the launch before is one of ours, this one may begin while that one ends."""
    if _wanted is None:
        source().kernel(name)((blocks, rows), threads, *args, shared=shared, early=early)
    else:
        _wanted.append(name)


def compile_ahead(body: CifarResNet, images: Tensor, as_map: bool = False) -> None:
    """Compile what training on such images needs."""
    global _wanted
    _wanted = []
    try:
        twin = copy.deepcopy(body)  # nothing runs, but its averages would be touched
        tape, means = run(twin, images.to(dtype=torch.bfloat16, memory_format=torch.channels_last), learning=True)
        run_back(tape, tape.outs[-1] if as_map else means)
        source().compile_all(_wanted)
    finally:
        _wanted = None
