"""What the kernels of resnet.cu know of a network as a whole, in tables of addresses on the device."""

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longtail.models.backbones import FUSED_SIDE, Block, CifarResNet


class Tables(NamedTuple):
    """What the kernels know of a network as a whole, and room for its weights in bf16, packed anew before each pass."""

    jobs: Tensor  # for `pack_weights`
    forward: tuple[Tensor, ...]  # packed, by layer
    back: tuple[Tensor, ...]
    averages: Tensor  # for `pool`


def convolutions(body: CifarResNet) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """In the order of the data's way."""
    yield body.conv1, body.bn1
    for block in residual_blocks(body):
        yield block.conv1, block.bn1
        yield block.conv2, block.bn2


def residual_blocks(body: CifarResNet) -> Iterator[Block]:
    for stage in body.stages:
        yield from stage  # type: ignore[misc]


def parameters(body: CifarResNet) -> list[Tensor]:
    return [p for conv, norm in convolutions(body) for p in (conv.weight, norm.weight, norm.bias)]


PACK_BLOCKS = 9 * 64 * 64 // 4 // 256  # enough threads for the largest layer
_tables: "WeakKeyDictionary[CifarResNet, tuple[tuple[int, ...], Tables]]" = WeakKeyDictionary()


def tables(body: CifarResNet) -> Tables:
    """Made once for a network, and again only if its tensors have moved: a step being recorded cannot ask the host."""
    where = tuple(t.data_ptr() for conv, norm in convolutions(body) for t in (conv.weight, *averages_of(norm)))
    if body not in _tables or _tables[body][0] != where:
        _tables[body] = where, make_tables(body)
    return _tables[body][1]


def averages_of(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked  # type: ignore[return-value]


def make_tables(body: CifarResNet) -> Tables:
    jobs: list[list[int]] = []
    back_jobs: list[list[int]] = []
    averages: list[list[int]] = []
    forward, back, first, side = [], [], 0, FUSED_SIDE
    for conv, norm in convolutions(body):
        into, out = conv.in_channels, conv.out_channels
        if not conv.weight.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("the kernels read weights whose channels lie innermost (torch.channels_last)")
        side //= int(conv.stride[0])
        room = [conv.weight.new_empty(9 * max(into, 16) * out, dtype=torch.bfloat16) for _ in range(2)]
        jobs.append([conv.weight.data_ptr(), room[0].data_ptr(), max(into, 16), out, into, 0])
        if into != 3:  # nobody asks for the images' gradient
            back_jobs.append([conv.weight.data_ptr(), room[1].data_ptr(), out, into, into, 1])
        averages.append([*(t.data_ptr() for t in averages_of(norm)), first, out, side])
        first += out
        forward.append(room[0])
        back.append(room[1])
    device = body.conv1.weight.device
    made = (torch.tensor(rows, dtype=torch.int64).to(device) for rows in (jobs + back_jobs, averages))
    return Tables(next(made), tuple(forward), tuple(back), next(made))
