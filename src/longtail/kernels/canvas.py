"""Copy images of different sizes onto square canvases, so that a batch is one tensor."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from longtail.kernels import nvrtc

BLOCKS_PER_IMAGE = 16


@functools.cache
def cuda_source() -> nvrtc.CudaSource:
    """Return the source canvas.cu; it is read once."""
    return nvrtc.read_source(Path(__file__).with_name("canvas.cu"))


def compile_kernel(device: torch.device) -> None:
    """Compile the kernel of `copy_to_canvases`, before a worker thread needs it."""
    if nvrtc.is_available(device):
        cuda_source().kernel("copy_to_canvases")


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
    kernel = cuda_source().kernel("copy_to_canvases")
    kernel((len(canvases), BLOCKS_PER_IMAGE), 256, table, canvases, canvases.shape[3])
