"""Training of CIFAR ResNets with fused CUDA kernels (resnet.cu): one launch per convolution instead of one per operation.

`models.backbones.CifarResNet` defines the network. This module computes the same function with 33 launches forward and 62
backward for a ResNet-32, where PyTorch needs several hundred. Activations are bf16. Weight gradients are computed on side
streams, in parallel to the chain of activation gradients. Sums over pixels are accumulated in no fixed order, so repeated runs
differ by rounding.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longtail.kernels.nvrtc import CudaSource, KernelArgument, read_source, template_instance
from longtail.models.side_stream import SideStream

IMAGE_SIZE = 32  # height and width of the images in pixels

# Shapes of the convolutions in resnet.cu: input channels, output channels, height of the output, stride.
SUPPORTED_CONVS = {
    (3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 16, 2), (32, 32, 16, 1), (32, 64, 8, 2), (64, 64, 8, 1),
}  # fmt: skip

# Maximum number of thread blocks of `weight_grad`, by output channels. Each block adds its sums to all weights, so few blocks
# are faster. Tuned on an H200.
WEIGHT_GRAD_BLOCKS = {16: 128, 32: 64, 64: 32}
STEM_GRAD_BLOCKS = 256  # the last launch, which does not share the GPU with others

ROWS_PER_BLOCK = 8  # image rows per thread block; ROWS in resnet.cu
PACK_BLOCKS = 9 * 64 * 64 // 4 // 256  # thread blocks of `pack_weights`, enough for the largest layer

FINISHED, RAW, JOINT = range(3)  # values of FORM in resnet.cu, see `ConvInput.form`


class CifarResNetLike(Protocol):
    """The attributes of `CifarResNet` that this module reads."""

    conv1: nn.Conv2d
    bn1: nn.BatchNorm2d
    stages: nn.ModuleList  # of sequences of blocks, each with conv1, bn1, conv2, bn2 and stride
    training: bool


@functools.cache
def cuda_source() -> CudaSource:
    """Return the source resnet.cu; it is read once."""
    return read_source(Path(__file__).with_name("resnet.cu"))


def supports(net: CifarResNetLike) -> bool:
    """Return whether the kernels are written for the depth and widths of this network (16, 32 and 64 channels).

    The network may end early, for example after the first stage.
    """
    size, shapes = IMAGE_SIZE, []
    for conv, _ in conv_layers(net):
        size //= int(conv.stride[0])
        shapes.append((conv.in_channels, conv.out_channels, size, int(conv.stride[0])))
    return len(shapes) > 1 and SUPPORTED_CONVS.issuperset(shapes)


# The network


def conv_layers(net: CifarResNetLike) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Yield each convolution with the batch norm after it, from the input to the output."""
    yield net.conv1, net.bn1
    for block in residual_blocks(net):
        yield block.conv1, block.bn1
        yield block.conv2, block.bn2


def residual_blocks(net: CifarResNetLike) -> Iterator[Any]:
    """Yield the residual blocks from the input to the output."""
    for stage in net.stages:
        yield from stage  # type: ignore[misc]


def trainable_params(net: CifarResNetLike) -> list[Tensor]:
    """Return the parameters in the order in which `run_backward` returns their gradients."""
    return [p for conv, norm in conv_layers(net) for p in (conv.weight, norm.weight, norm.bias)]


def running_stats(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """Return running mean, running variance and the number of batches."""
    return norm.running_mean, norm.running_var, norm.num_batches_tracked  # type: ignore[return-value]


class NetworkTables(NamedTuple):
    """Tables of addresses for kernels that handle all layers in one launch, and buffers for the packed bf16 weights."""

    pack_jobs: Tensor  # for `pack_weights`: the layers forward, then the layers backward
    forward_weights: tuple[Tensor, ...]  # packed weights of each layer
    backward_weights: tuple[Tensor, ...]
    running_stats: Tensor  # for `pool`


_tables: "WeakKeyDictionary[CifarResNetLike, tuple[tuple[int, ...], NetworkTables]]" = WeakKeyDictionary()


def get_tables(net: CifarResNetLike) -> NetworkTables:
    """Return the tables of a network. They are made again only if its tensors have moved.

    Making them copies from the host, which is not possible while a CUDA graph is captured.
    """
    addresses = tuple(t.data_ptr() for conv, norm in conv_layers(net) for t in (conv.weight, *running_stats(norm)))
    if net not in _tables or _tables[net][0] != addresses:
        _tables[net] = addresses, make_tables(net)
    return _tables[net][1]


def make_tables(net: CifarResNetLike) -> NetworkTables:
    """Make the tables of a network; the rows are the structs Job and Average of resnet.cu."""
    forward_jobs: list[list[int]] = []
    backward_jobs: list[list[int]] = []
    stats_rows: list[list[int]] = []
    forward_weights, backward_weights, first_channel, size = [], [], 0, IMAGE_SIZE
    for conv, norm in conv_layers(net):
        inputs, outputs = conv.in_channels, conv.out_channels
        if not conv.weight.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("the fused kernels need weights in the memory format torch.channels_last")
        size //= int(conv.stride[0])
        packed = [conv.weight.new_empty(9 * max(inputs, 16) * outputs, dtype=torch.bfloat16) for _ in range(2)]
        forward_jobs.append([conv.weight.data_ptr(), packed[0].data_ptr(), max(inputs, 16), outputs, inputs, 0])
        if inputs != 3:  # the gradient of the images is not needed
            backward_jobs.append([conv.weight.data_ptr(), packed[1].data_ptr(), outputs, inputs, inputs, 1])
        stats_rows.append([*(t.data_ptr() for t in running_stats(norm)), first_channel, outputs, size])
        first_channel += outputs
        forward_weights.append(packed[0])
        backward_weights.append(packed[1])
    device = net.conv1.weight.device
    jobs, stats = (
        torch.tensor(rows, dtype=torch.int64).to(device) for rows in (forward_jobs + backward_jobs, stats_rows)
    )
    return NetworkTables(jobs, tuple(forward_weights), tuple(backward_weights), stats)


# Forward


def features(net: CifarResNetLike, images: Tensor, as_map: bool = False) -> Tensor:
    """Compute the features of N,3,32,32 images: float32 of shape N,C, or the last feature map in bf16, N,C,H,W.

    A network in evaluation mode is normalized with its running statistics. Gradients are computed only in training mode and
    only if a parameter requires them.

    Args:
        net: A network for which `supports` is true, with weights in the memory format channels_last.
        images: The normalized images.
        as_map: Return the last feature map instead of its mean over pixels.
    """
    images = images.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
    params = trainable_params(net)
    if torch.is_grad_enabled() and net.training and any(p.requires_grad for p in params):
        return _FusedResNet.apply(images, net, as_map, *params)
    with torch.no_grad():
        tape, means = run_forward(net, images, needs_grad=False)
        return last_map(tape) if as_map else means


class _FusedResNet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, net: CifarResNetLike, as_map: bool, *params: Tensor) -> Tensor:
        ctx.tape, means = run_forward(net, images, needs_grad=True)
        return last_map(ctx.tape) if as_map else means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.tape is None:
            raise RuntimeError("backward was called a second time, but the saved activations have been freed")
        if grad.dim() == 4:  # the kernels read feature maps with channels last
            grad = grad.to(torch.bfloat16).permute(0, 2, 3, 1)
        grads = run_backward(ctx.tape, grad.contiguous())
        ctx.tape = None
        return None, None, None, *grads


class Layer(NamedTuple):
    """A convolution with its batch norm, and the tensors of the forward pass that the backward pass needs."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    x: Tensor  # input of the convolution; if `previous` is given, its raw result, still to be normalized
    previous: "Layer | None"
    y: Tensor  # raw result of the convolution
    sums: Tensor  # sums of y over `population` pixels; the sums of y² follow after `total_channels` floats
    population: int
    total_channels: int  # channels of all layers; T in resnet.cu
    size: int  # height and width of y
    backward_weights: Tensor  # packed

    @property
    def pixels(self) -> int:
        return self.y.numel() // self.conv.out_channels


class ConvInput(NamedTuple):
    """The input of a convolution: `y`, either finished or a raw result that is normalized as `layer` says.

    If `out` is given, the input is the output of a residual block, relu(bn(y) + shortcut). The kernel computes it while reading
    its input and also writes it to `out`.
    """

    y: Tensor
    layer: Layer | None = None
    out: Tensor | None = None
    shortcut: Tensor | None = None  # None after the stem

    @property
    def form(self) -> tuple[int, int]:
        """The template arguments FORM and X_C of resnet.cu."""
        form = FINISHED if self.layer is None else RAW if self.out is None else JOINT
        return form, 0 if self.shortcut is None else self.shortcut.shape[-1]


class Tape(NamedTuple):
    """The result of a forward pass that the backward pass needs."""

    layers: list[Layer]  # the stem and two of each block
    outs: list[Tensor]  # outputs of the stem and of each block, N,H,W,C
    grads: Tensor  # zeros, for the gradients of all parameters


class LayerSums(NamedTuple):
    """Sums of a layer's result over pixels, from which its mean and variance follow."""

    written: Tensor  # where the kernel accumulates the sums of this batch
    used: Tensor  # the sums with which the result is normalized
    population: int | None  # number of pixels of `used`; None: all pixels of this batch


def last_map(tape: Tape) -> Tensor:
    """Return the output of the last block, N,C,H,W."""
    return tape.outs[-1].permute(0, 3, 1, 2)


def run_forward(net: CifarResNetLike, images: Tensor, needs_grad: bool) -> tuple[Tape, Tensor]:
    """Run the forward pass; return the tape and the features.

    Args:
        net: The network.
        images: bf16 images N,3,32,32 in the memory format channels_last.
        needs_grad: Keep all activations for a backward pass. If false, the tape has the last layer only.
    """
    tables = get_tables(net)
    packed_weights = zip(tables.forward_weights, tables.backward_weights, strict=True)
    widths = [conv.out_channels for conv, _ in conv_layers(net)]
    total, n_grads = sum(widths), sum(p.numel() for p in trainable_params(net)) if needs_grad else 0
    zeros = torch.empty(2 * total + n_grads, device=images.device)  # cleared by the next launch
    n_jobs = len(tables.pack_jobs) if needs_grad else len(widths)  # the jobs of the backward pass come last
    launch("pack_weights", PACK_BLOCKS, 256, tables.pack_jobs, zeros, len(zeros), rows=n_jobs)
    sums = layer_sums(net, zeros[:total].split(widths), widths)
    stem_input = ConvInput(images.permute(0, 2, 3, 1))
    layers = [convolve(net.conv1, net.bn1, stem_input, next(sums), total, images.shape[-1], next(packed_weights))]
    outs = [torch.empty_like(layers[0].y)]
    block_input = ConvInput(layers[0].y, layers[0], outs[0])
    for block in residual_blocks(net):
        size = layers[-1].size // block.stride
        first = convolve(block.conv1, block.bn1, block_input, next(sums), total, size, next(packed_weights))
        between = ConvInput(first.y, first)
        second = convolve(block.conv2, block.bn2, between, next(sums), total, size, next(packed_weights))
        layers += [first, second]
        outs.append(torch.empty_like(second.y))
        block_input = ConvInput(second.y, second, outs[-1], outs[-2])
        if not needs_grad:
            del layers[:-1], outs[:-2]
    tape = Tape(layers, outs, zeros[2 * total :])
    return tape, pool(tape, tables.running_stats if net.training else tables.running_stats[:0])


def layer_sums(net: CifarResNetLike, zeros: Sequence[Tensor], widths: list[int]) -> Iterator[LayerSums]:
    """Return the sums of each layer.

    In evaluation mode the running statistics are used, written as the sums of a single pixel with this mean and variance.

    Args:
        net: The network.
        zeros: Where the kernels accumulate the sums of each layer.
        widths: Output channels of each layer.
    """
    if net.training:
        return (LayerSums(part, part, None) for part in zeros)
    means, variances, _ = zip(*(running_stats(norm) for _, norm in conv_layers(net)), strict=True)
    mean = torch.cat(means)
    known = torch.cat([mean, torch.cat(variances) + mean**2])
    parts = known[: len(mean)].split(widths)
    return (LayerSums(written, used, 1) for written, used in zip(zeros, parts, strict=True))


def convolve(
    conv: nn.Conv2d,
    norm: nn.BatchNorm2d,
    given: ConvInput,
    sums: LayerSums,
    total_channels: int,
    size: int,
    packed_weights: tuple[Tensor, Tensor],
) -> Layer:
    """Launch a convolution.

    Args:
        conv: The convolution.
        norm: The batch norm after it, which the next kernel applies.
        given: The input.
        sums: Where to add the sums of the result.
        total_channels: Number of output channels of all layers.
        size: Height and width of the result.
        packed_weights: The weights for this kernel and for the backward pass.
    """
    inputs, outputs, stride = conv.in_channels, conv.out_channels, int(conv.stride[0])
    y = torch.empty(len(given.y), size, size, outputs, dtype=given.y.dtype, device=given.y.device)
    x, previous = (given.y, given.layer) if given.out is None else (given.out, None)
    population = sums.population or y.numel() // outputs
    layer = Layer(conv, norm, x, previous, y, sums.used, population, total_channels, size, packed_weights[1])
    launch(
        template_instance("convolve", inputs, outputs, size, stride, *given.form),
        count_tiles(layer), count_threads(outputs),
        given.y, packed_weights[0], y, sums.written, *norm_arguments(given.layer), given.shortcut, given.out,
        given.layer.population if given.layer else 1, total_channels,
        early=given.layer is not None, shared=packed_weights[0].nbytes,
    )  # fmt: skip
    return layer


def pool(tape: Tape, stats: Tensor) -> Tensor:
    """Finish the last block and return its mean over pixels. Update the running statistics of all layers in `stats`."""
    last, shortcut, out = tape.layers[-1], tape.outs[-2], tape.outs[-1]
    width = last.conv.out_channels
    means = torch.empty(len(out), width, device=out.device)
    launch(
        template_instance("pool", width, shortcut.shape[-1], last.size), len(out), 256,
        last.y, *norm_arguments(last), shortcut, out, means, stats, len(stats), last.population, last.total_channels,
        early=True,
    )  # fmt: skip
    return means


def count_tiles(layer: Layer, rows: int = ROWS_PER_BLOCK) -> int:
    """Return the number of tiles of `rows` image rows in the result of a layer."""
    return layer.pixels // (rows * layer.size)


def count_threads(channels: int) -> int:
    """Return the threads per block for a result with so many channels; `warps_for` in resnet.cu."""
    return 256 if channels == 64 else 128


def norm_arguments(layer: Layer | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the kernel arguments for a layer's batch norm: sums, weight and bias."""
    return (layer.sums, layer.norm.weight, layer.norm.bias) if layer else (None, None, None)


# Backward


def run_backward(tape: Tape, grad: Tensor) -> list[Tensor]:
    """Return the gradients of `trainable_params`, given that of the features (N, C) or of the feature map (N, H, W, C)."""
    layers, outs, grads = tape
    sizes, widths = [n.conv.weight.numel() for n in layers], [n.conv.out_channels for n in layers]
    parts = grads.split((sum(sizes), sum(widths), sum(widths)))
    dw, beta, gamma = (part.split(each) for part, each in zip(parts, (sizes, widths, widths), strict=True))
    last, g = layers[-1], torch.empty_like(layers[-1].y)  # g: gradient of a batch norm's result
    name = template_instance("last_grad", widths[-1], last.size, grad.dim() == 4)
    launch(name, len(g), 256, grad, outs[-1], last.y, last.sums, g, beta[-1], last.pixels, last.total_channels)
    streams = [SideStream(grad.device, line) for line in range(2)]
    for second in range(len(layers) - 1, 0, -2):
        first, previous = second - 1, second - 2
        streams[0].run(weight_grad, layers[second], g, beta[second], dw[second])
        g_first = input_grad(layers[second], g, beta[second], layers[first], beta[first])
        streams[1].run(weight_grad, layers[first], g_first, beta[first], dw[first])
        block_out = outs[previous // 2]
        g = input_grad(layers[first], g_first, beta[first], layers[previous], beta[previous], block_out, g)
    streams[0].run(weight_grad, layers[0], g, beta[0], dw[0])
    for stream in streams:
        stream.join()
    # The memory order of the weights is channels_last.
    shaped = [d.view(n.conv.out_channels, 3, 3, -1).permute(0, 3, 1, 2) for d, n in zip(dw, layers, strict=True)]
    return [t for triple in zip(shaped, gamma, beta, strict=True) for t in triple]


def input_grad(
    layer: Layer,
    g: Tensor,
    sums: Tensor,
    previous: Layer,
    previous_sums: Tensor,
    block_out: Tensor | None = None,
    skip_grad: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the result of the previous layer's batch norm.

    Args:
        layer: The convolution through which the gradient flows.
        g: Gradient of the result of its batch norm.
        sums: Sums of g, which are the gradients of beta and gamma.
        previous: The layer before.
        previous_sums: Where to add the sums of the returned gradient.
        block_out: Output of the previous block, if `layer` is the first of its block.
        skip_grad: In this case, the gradient of the block's shortcut.
    """
    x_grad, conv = torch.empty_like(previous.y), layer.conv
    inputs, stride = conv.in_channels, int(conv.stride[0])
    name = template_instance("input_grad", inputs, conv.out_channels, layer.size, stride, block_out is not None)
    launch(
        name, count_tiles(layer), count_threads(inputs),
        g, layer.y, layer.sums, sums, layer.norm.weight, layer.backward_weights,
        previous.y, *norm_arguments(previous), block_out, skip_grad, x_grad, previous_sums,
        layer.pixels, previous.pixels, layer.total_channels,
        early=True, shared=layer.backward_weights.nbytes,
    )  # fmt: skip
    return x_grad


def weight_grad(layer: Layer, g: Tensor, sums: Tensor, dw: Tensor) -> None:
    """Compute the gradient of a convolution's weights.

    Args:
        layer: The convolution.
        g: Gradient of the result of its batch norm.
        sums: Sums of g.
        dw: Where to add the gradient.
    """
    inputs, outputs, stride = layer.conv.in_channels, layer.conv.out_channels, int(layer.conv.stride[0])
    form = FINISHED if layer.previous is None else RAW
    name = template_instance("weight_grad", inputs, outputs, layer.size, stride, form)
    max_blocks = WEIGHT_GRAD_BLOCKS[outputs] if inputs != 3 else STEM_GRAD_BLOCKS
    rows = 16 if layer.size == 16 and stride == 1 else ROWS_PER_BLOCK  # R in resnet.cu
    threads = 32 * (12 if outputs == 16 else 9)  # `weight_warps` in resnet.cu
    launch(
        name, min(count_tiles(layer, rows), max_blocks), threads,
        g, layer.y, layer.sums, sums, layer.norm.weight, layer.x, *norm_arguments(layer.previous), dw,
        layer.pixels, layer.x.numel() // inputs, layer.total_channels, rows=-(-outputs // 32),
    )  # fmt: skip


# Launches

_recorded_names: list[str] | None = (
    None  # while `compile_kernels` records the names of kernels instead of launching them
)


def launch(
    name: str, blocks: int, threads: int, *args: KernelArgument, rows: int = 1, shared: int = 0, early: bool = False
) -> None:
    """Launch a kernel of resnet.cu.

    Args:
        name: The kernel with its template arguments.
        blocks: Number of columns of the grid.
        threads: Threads per block.
        *args: The arguments of the kernel.
        rows: Number of rows of the grid.
        shared: Bytes of dynamic shared memory.
        early: Let the kernel start while the previous launch, which must be a kernel of resnet.cu, finishes.
    """
    if _recorded_names is None:
        cuda_source().kernel(name)((blocks, rows), threads, *args, shared=shared, early=early)
    else:
        _recorded_names.append(name)


def compile_kernels(net: CifarResNetLike, images: Tensor, as_map: bool = False) -> None:
    """Compile all kernels that training needs.

    Args:
        net: The network.
        images: Images as for `features`; the size of the batch does not matter.
        as_map: Whether `features` will be called with `as_map`.
    """
    global _recorded_names
    _recorded_names = []
    try:
        twin = copy.deepcopy(net)  # so that `net` and its tables stay as they are
        images = images.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
        tape, means = run_forward(twin, images, needs_grad=True)
        run_backward(tape, tape.outs[-1] if as_map else means)
        cuda_source().compile_all(_recorded_names)
    finally:
        _recorded_names = None
