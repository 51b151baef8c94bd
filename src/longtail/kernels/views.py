"""Augmentation on CUDA with one launch per step (views.cu), where the operations of `longtail.views.ops` need hundreds.

`longtail.views` defines what is computed. Kernels are compiled for each image size. Small images are processed in shared
memory, larger ones in a scratch buffer. canvas.cu copies images of different sizes onto square canvases, so that a batch is one
tensor.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from longtail.kernels import nvrtc

SHARED_BYTES = 40_000  # of shared memory for images; SHARED in views.cu
MAX_IMAGE_SIZE = 1024  # pixels
PIXELS_PER_BLOCK = 2048  # of `crop` and `normalize_into`


@functools.cache
def cuda_source() -> nvrtc.CudaSource:
    """Return the source views.cu; it is read once."""
    return nvrtc.read_source(Path(__file__).with_name("views.cu"), "--fmad=false")


def supports(x: Tensor) -> bool:
    """Return whether the kernels can process these images on their device: square uint8 RGB images."""
    square = x.shape[2] == x.shape[3] <= MAX_IMAGE_SIZE
    return x.dtype == torch.uint8 and x.shape[1] == 3 and square and nvrtc.is_available(x.device)


def can_normalize_into(x: Tensor, out: Tensor) -> bool:
    """Return whether `normalize_into` supports this pair of tensors on their device."""
    is_input = x.dtype in (torch.uint8, torch.float32) and x.is_contiguous() and x.shape[1] == 3
    is_output = out.dtype == torch.bfloat16 and out.is_contiguous(memory_format=torch.channels_last)
    return is_input and is_output and nvrtc.is_available(x.device)


def _count_threads(side: int) -> int:
    """Return the threads per block; THREADS in views.cu."""
    return 256 if side <= 64 else 1024


def _make_scratch(x: Tensor, images: int, dtype: torch.dtype) -> Tensor | None:
    """Return room for `images` images per sample, or None if two images fit into shared memory."""
    elements = 3 * x.shape[3] ** 2
    if 2 * elements * dtype.itemsize <= SHARED_BYTES:
        return None
    return torch.empty(len(x) * images * elements, dtype=dtype, device=x.device)


def apply_draw(x: Tensor, op_NS: Tensor, value_NS: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """Compute `views.policies.apply_draw`.

    Args:
        x: uint8 images.
        op_NS: Codes of `views.ops.Op`, S operations per sample.
        value_NS: Their values.
        fill: Gray level of uncovered pixels.
        bilinear: Interpolate bilinearly instead of taking the nearest pixel.
    """
    x, side, steps = x.contiguous(), x.shape[3], op_NS.shape[1]
    out, scratch = torch.empty_like(x), _make_scratch(x, 2, torch.uint8)
    kernel = cuda_source().kernel(nvrtc.template_instance("apply_draw", side, bilinear))
    kernel((len(x), 1), _count_threads(side), x, op_NS.contiguous(), value_NS.contiguous(), out, scratch, steps, fill)
    return out


def apply_sim(
    x: Tensor, jittered_N: Tensor, factor_N3: Tensor, hue_N: Tensor, order_N4: Tensor, gray_N: Tensor, sigma_N: Tensor
) -> Tensor:
    """Compute `views.policies.apply_sim` of uint8 images; the other arguments are the fields of `SimDraw`."""
    x, side = x.contiguous(), x.shape[3]
    out, scratch = torch.empty(x.shape, device=x.device), _make_scratch(x, 1, torch.float32)
    kernel = cuda_source().kernel(nvrtc.template_instance("apply_sim", side))
    draw = (t.contiguous() for t in (jittered_N, factor_N3, hue_N, order_N4, gray_N, sigma_N))
    kernel((len(x), 1), _count_threads(side), x, *draw, out, scratch)
    return out


def apply_tone(x: Tensor, factor_N3: Tensor, order_N3: Tensor) -> Tensor:
    """Compute `views.color.tone_jitter` of uint8 images, rounded to uint8.

    Args:
        x: uint8 images.
        factor_N3: Factors of brightness, contrast and saturation.
        order_N3: The order in which they are applied.
    """
    x, side = x.contiguous(), x.shape[3]
    out = torch.empty_like(x)
    kernel = cuda_source().kernel(nvrtc.template_instance("apply_tone", side))
    kernel((len(x), 1), _count_threads(side), x, factor_N3.contiguous(), order_N3.contiguous(), out)
    return out


def crop(
    x: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, size: int, flip_N: Tensor
) -> Tensor:
    """Compute `views.ops.resized_crop` of uint8 images, rounded to uint8; the arguments are the same."""
    x = x.contiguous()
    out = x.new_empty(len(x), 3, size, size)
    kernel = cuda_source().kernel(nvrtc.template_instance("crop", size))
    box = (t.contiguous() for t in (top_N, left_N, height_N, width_N, flip_N))
    kernel((len(x), -(-(size**2) // PIXELS_PER_BLOCK)), 256, x, *box, out, *x.shape[2:])
    return out


def normalize_into(x: Tensor, mean_C11: Tensor, std_C11: Tensor, out: Tensor) -> Tensor:
    """Compute `views.ops.normalize` and write it to `out`, bf16 in the memory format channels_last.

    Args:
        x: uint8 images, or float images in [0, 1].
        mean_C11: Mean of each channel.
        std_C11: Standard deviation of each channel.
        out: The result, which is also returned.
    """
    pixels = x.shape[2] * x.shape[3]
    kernel = cuda_source().kernel(nvrtc.template_instance("normalize", x.is_floating_point()))
    kernel((len(x), -(-pixels // PIXELS_PER_BLOCK)), 256, x, mean_C11.contiguous(), std_C11.contiguous(), out, pixels)
    return out


# Canvases


CANVAS_BLOCKS_PER_IMAGE = 16


@functools.cache
def canvas_source() -> nvrtc.CudaSource:
    """Return the source canvas.cu; it is read once."""
    return nvrtc.read_source(Path(__file__).with_name("canvas.cu"))


def compile_kernel(device: torch.device) -> None:
    """Compile the kernel of `copy_to_canvases`, before a worker thread needs it."""
    if nvrtc.is_available(device):
        canvas_source().kernel("copy_to_canvases")


def copy_to_canvases(images: dict[int, Tensor], canvases: Tensor) -> None:
    """Copy image i to the upper left corner of canvas i. On CUDA this is one launch, where slicing needs one per image.

    Args:
        images: uint8 images (3, height, width) by the index of their canvas.
        canvases: uint8 (N, 3, side, side). Canvases without an image stay as they are.
    """
    if not nvrtc.is_available(canvases.device):
        targets = [canvases[i, :, : image.shape[1], : image.shape[2]] for i, image in images.items()]
        torch._foreach_copy_(targets, list(images.values()))
        return
    # The contiguous copies must not be freed before the launch.
    on_device = {i: image.to(canvases.device).contiguous() for i, image in images.items()}
    rows = [
        (on_device[i].data_ptr(), *on_device[i].shape[1:]) if i in on_device else (0, 0, 0)
        for i in range(len(canvases))
    ]
    table = torch.tensor(rows)
    table = table.pin_memory().to(canvases.device, non_blocking=True) if canvases.is_cuda else table
    kernel = canvas_source().kernel("copy_to_canvases")
    kernel((len(canvases), CANVAS_BLOCKS_PER_IMAGE), 256, table, canvases, canvases.shape[3])
