"""The views of small images on CUDA, a launch each (views.cu), where `ops` needs hundreds; `ops` says what they compute."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from longtail import kernels

SIDE = 32  # the only size, CIFAR's: an image has to fit in a block's shared memory


@functools.cache
def source() -> kernels.Source:
    return kernels.read(Path(__file__).with_name("views.cu"), "--fmad=false")


def knows(x: Tensor) -> bool:
    """Whether there are kernels for such images here."""
    return x.dtype == torch.uint8 and x.shape[1:] == (3, SIDE, SIDE) and kernels.available(x.device)


def apply_draw(x: Tensor, op_NS: Tensor, value_NS: Tensor, fill: int) -> Tensor:
    """`policies.apply_draw` with the nearest pixel."""
    x, out, steps = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format), op_NS.shape[1]
    launch = source().kernel(kernels.expression("apply_draw", SIDE))
    launch((len(x), 1), 256, x, op_NS.contiguous(), value_NS.contiguous(), out, steps, fill)
    return out


def apply_sim(
    x: Tensor, jittered_N: Tensor, factor_N3: Tensor, hue_N: Tensor, order_N4: Tensor, grey_N: Tensor, sigma_N: Tensor
) -> Tensor:
    """`policies.apply_sim` of uint8 images."""
    x = x.contiguous()
    out = torch.empty(x.shape, device=x.device)
    launch = source().kernel(kernels.expression("apply_sim", SIDE))
    draw = (t.contiguous() for t in (jittered_N, factor_N3, hue_N, order_N4, grey_N, sigma_N))
    launch((len(x), 1), 256, x, *draw, out)
    return out
