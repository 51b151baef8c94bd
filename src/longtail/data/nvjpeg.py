"""JPEGs decoded on a GPU, by torchvision's nvJPEG: six times the speed of sixteen cores (results/stream.json).

Its pixels are not quite those of the CPU's decoder, which rounds and makes color finer in its own way; what is measured
(evaluation, prediction) is always read by the CPU.
"""

import functools

import torch
from torch import Tensor

from longtail.config import Decoding
from longtail.data.stream import Decoder
from longtail.errors import UserError


def decoder_for(device: torch.device, asked: Decoding) -> Decoder | None:
    """None where images are decoded on the CPU."""
    if asked == "cpu" or (asked == "auto" and device.type != "cuda"):
        return None
    if device.type == "cuda" and _works(device):
        return functools.partial(_decode, device=device)
    if asked == "gpu":
        raise UserError(
            "--data.decode gpu needs a CUDA device, and a torchvision that decodes JPEGs on it: try auto",
            kind="conflict",
        )
    return None


@functools.cache
def _works(device: torch.device) -> bool:
    """Seen by an image: torchvision may have been built without nvJPEG, and will give up its decoders one day."""
    try:
        from torchvision.io import encode_jpeg

        gray = torch.full((3, 16, 16), 128, dtype=torch.uint8)
        return (_decode([encode_jpeg(gray)], device)[0].int() - 128).abs().max().item() <= 1
    except (ImportError, AttributeError, RuntimeError):
        return False


def _decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """On the current stream, which is emptied first: nvJPEG writes on a stream of its own, without a look at whether the memory
    that it is given is still being read on ours (https://github.com/pytorch/vision/pull/9606)."""
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.cuda.current_stream(device).synchronize()
    return decode_jpeg(files, ImageReadMode.RGB, device=device)
