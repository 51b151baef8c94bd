"""The views on CUDA, a launch each (views.cu), where `ops` needs hundreds; `ops` says what they compute.

Kernels are compiled for one side of the images. An image that fits is worked on in shared memory, a larger one near by.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from longtail.kernels import nvrtc

SHARED = 40_000  # bytes of shared memory that images may take; as in views.cu
LARGEST = 1024  # pixels of a side
PIXELS = 2048  # of a crop, that a block makes


@functools.cache
def source() -> nvrtc.CudaSource:
    return nvrtc.read(Path(__file__).with_name("views.cu"), "--fmad=false")


def supports(x: Tensor) -> bool:
    """Whether there are kernels for such images here."""
    square = x.shape[2] == x.shape[3] <= LARGEST
    return x.dtype == torch.uint8 and x.shape[1] == 3 and square and nvrtc.available(x.device)


def can_write_into(x: Tensor, out: Tensor) -> bool:
    """Whether there is a kernel that brings such images to such a place."""
    known = x.dtype in (torch.uint8, torch.float32) and x.is_contiguous() and x.shape[1] == 3
    last = out.dtype == torch.bfloat16 and out.is_contiguous(memory_format=torch.channels_last)
    return known and last and nvrtc.available(x.device)


def threads_for(side: int) -> int:
    return 256 if side <= 64 else 1024


def near(x: Tensor, images: int, dtype: torch.dtype) -> Tensor | None:
    """Room for so many images more of each, where they do not fit in shared memory beside one another."""
    each = 3 * x.shape[3] ** 2
    if 2 * each * dtype.itemsize <= SHARED:
        return None
    return torch.empty(len(x) * images * each, dtype=dtype, device=x.device)


def apply_draw(x: Tensor, op_NS: Tensor, value_NS: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """`policies.apply_draw`."""
    x, side, steps = x.contiguous(), x.shape[3], op_NS.shape[1]
    out, beside = torch.empty_like(x), near(x, 2, torch.uint8)
    launch = source().kernel(nvrtc.expression("apply_draw", side, bilinear))
    launch((len(x), 1), threads_for(side), x, op_NS.contiguous(), value_NS.contiguous(), out, beside, steps, fill)
    return out


def apply_sim(
    x: Tensor, jittered_N: Tensor, factor_N3: Tensor, hue_N: Tensor, order_N4: Tensor, gray_N: Tensor, sigma_N: Tensor
) -> Tensor:
    """`policies.apply_sim` of uint8 images."""
    x, side = x.contiguous(), x.shape[3]
    out, beside = torch.empty(x.shape, device=x.device), near(x, 1, torch.float32)
    launch = source().kernel(nvrtc.expression("apply_sim", side))
    draw = (t.contiguous() for t in (jittered_N, factor_N3, hue_N, order_N4, gray_N, sigma_N))
    launch((len(x), 1), threads_for(side), x, *draw, out, beside)
    return out


def apply_tone(x: Tensor, factor_N3: Tensor, order_N3: Tensor) -> Tensor:
    """`tones.tone_jitter` of uint8 images, rounded to uint8."""
    x, side = x.contiguous(), x.shape[3]
    out = torch.empty_like(x)
    launch = source().kernel(nvrtc.expression("apply_tone", side))
    launch((len(x), 1), threads_for(side), x, factor_N3.contiguous(), order_N3.contiguous(), out)
    return out


def crop(
    x: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, size: int, flip_N: Tensor
) -> Tensor:
    """`ops.resized_crop`, rounded to uint8."""
    x = x.contiguous()
    out = x.new_empty(len(x), 3, size, size)
    launch = source().kernel(nvrtc.expression("crop", size))
    box = (t.contiguous() for t in (top_N, left_N, height_N, width_N, flip_N))
    launch((len(x), -(-(size**2) // PIXELS)), 256, x, *box, out, *x.shape[2:])
    return out


def finish(x: Tensor, mean_C11: Tensor, std_C11: Tensor, out: Tensor) -> Tensor:
    """`ops.normalize`, into bf16 with its channels last."""
    launch, pixels = source().kernel(nvrtc.expression("finish", x.is_floating_point())), x.shape[2] * x.shape[3]
    launch((len(x), -(-pixels // PIXELS)), 256, x, mean_C11.contiguous(), std_C11.contiguous(), out, pixels)
    return out
