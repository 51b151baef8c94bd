"""Images of their own sizes on square canvases, so that a batch is one tensor."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from longtail.kernels import nvrtc

BLOCKS = 16  # that share an image


@functools.cache
def source() -> nvrtc.CudaSource:
    return nvrtc.read(Path(__file__).with_name("canvas.cu"))


def prepare(device: torch.device) -> None:
    """Compile what `lay_out` will launch there, before another thread asks for it."""
    if nvrtc.available(device):
        source().kernel("lay_out")


def lay_out(found: dict[int, Tensor], canvases: Tensor) -> None:
    """Image i, uint8 (3, height, width), in the upper left corner of canvas i of (N, 3, side, side).

    On a GPU in one launch: a hundred slices and copies keep the host busy longer than the device, and the device longer than
    they would have to.
    """
    if not nvrtc.available(canvases.device):
        onto = [canvases[i, :, : image.shape[1], : image.shape[2]] for i, image in found.items()]
        torch._foreach_copy_(onto, list(found.values()))
        return
    images = {i: image.to(canvases.device).contiguous() for i, image in found.items()}  # alive until the launch
    rows = [(images[i].data_ptr(), *images[i].shape[1:]) if i in images else (0, 0, 0) for i in range(len(canvases))]
    table = torch.tensor(rows)
    table = table.pin_memory().to(canvases.device, non_blocking=True) if canvases.is_cuda else table
    source().kernel("lay_out")((len(canvases), BLOCKS), 256, table, canvases, canvases.shape[3])
