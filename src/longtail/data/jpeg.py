"""JPEG files: parsing their headers, and decoding them on a GPU.

`is_plain` finds the files that fast decoders read exactly as Pillow does. On a GPU they are decoded by torchvision's nvJPEG,
which is six times as fast as sixteen CPU cores (results/stream.json). Its pixels differ slightly from those of the CPU decoder,
because rounding and chroma upsampling differ; evaluation and prediction therefore always decode on the CPU.

torch is imported when a GPU decoder is asked for, so that commands that only read files start quickly.
"""

import functools
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from longtail.config import Decoding
from longtail.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

START, END = b"\xff\xd8\xff", b"\xff\xd9"
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # frame headers; the three excluded ones are tables
APPLICATION = 0xE1  # the marker of EXIF and XMP segments
ORIENTATION, SHORT = 0x0112, 3  # the EXIF tag, and the type that its value should have

Decoder = Callable[["list[Tensor]"], "list[Tensor]"]
"""A function that decodes JPEG files (bytes as uint8 tensors) to images (3, height, width) on its device.

It raises RuntimeError if it cannot decode them."""


class Header(NamedTuple):
    """The properties of a JPEG that its header segments contain."""

    height: int
    width: int
    channels: int
    bits: int
    orientation: int
    """EXIF orientation: 1 is upright, 0 is one that could not be parsed."""


def read_header(encoded: bytes) -> Header | None:
    """Return the header of a JPEG, or None for other formats and for files that are damaged before their pixel data."""
    if not encoded.startswith(START):
        return None
    position, orientation = 2, 1
    try:
        while True:
            prefix, marker, length = struct.unpack_from(">BBH", encoded, position)
            if prefix != 0xFF:
                return None
            if marker == 0xFF:  # padding
                position += 1
            elif marker in FRAME_MARKERS:
                bits, height, width, channels = struct.unpack_from(">BHHB", encoded, position + 4)
                return Header(height, width, channels, bits, orientation)
            else:
                if marker == APPLICATION and orientation == 1:
                    orientation = _read_orientation(encoded[position + 4 : position + 2 + length])
                position += 2 + length
    except struct.error:
        return None


def is_plain(encoded: bytes, side: int) -> bool:
    """Return whether a file is a JPEG that any decoder can read: upright, gray or three colors, 8 bits, not truncated.

    Its size must not exceed a square of `side` pixels, so that it does not have to be resized.
    """
    header = read_header(encoded)
    return (
        header is not None
        and header.orientation == 1
        and header.channels in (1, 3)
        and header.bits == 8
        and max(header.height, header.width) <= side
        and encoded.endswith(END)
    )


def _read_orientation(segment: bytes) -> int:
    if segment.startswith(b"Exif\0\0"):
        return _read_exif_orientation(segment[6:])
    return 0 if b"tiff:Orientation" in segment else 1  # XMP, which Pillow uses if EXIF has no orientation


def _read_exif_orientation(tiff: bytes) -> int:
    """Return the orientation from the first directory of the TIFF structure that EXIF contains."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 0
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(entries):
            tag, kind, value = struct.unpack_from(f"{order}HH4xH", tiff, directory + 2 + 12 * entry)
            if tag == ORIENTATION:
                return (value or 1) if kind == SHORT else 0
    except struct.error:
        return 0
    return 1


# Decoding on a GPU


def make_decoder(device: "torch.device", setting: Decoding) -> Decoder | None:
    """Return the decoder for `--data.decode`, or None if images are decoded on the CPU."""
    if setting == "cpu" or (setting == "auto" and device.type != "cuda"):
        return None
    if device.type == "cuda" and _is_decoder_available(device):
        return functools.partial(_decode_on_gpu, device=device)
    if setting == "gpu":
        raise UserError(
            "--data.decode gpu needs a CUDA device and a torchvision with nvJPEG: use --data.decode auto",
            kind="conflict",
        )
    return None


@functools.cache
def _is_decoder_available(device: "torch.device") -> bool:
    """Decode a small image to find out whether torchvision was built with nvJPEG and still has its decoders."""
    import torch

    try:
        from torchvision.io import encode_jpeg

        gray = torch.full((3, 16, 16), 128, dtype=torch.uint8)
        return (_decode_on_gpu([encode_jpeg(gray)], device)[0].int() - 128).abs().max().item() <= 1
    except (ImportError, AttributeError, RuntimeError):
        return False


def _decode_on_gpu(encoded: "list[Tensor]", device: "torch.device") -> "list[Tensor]":
    """Decode on the current stream, after waiting for it.

    nvJPEG writes on a stream of its own and does not check whether the memory that it gets is still being read on the current
    one (https://github.com/pytorch/vision/pull/9606).
    """
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.cuda.current_stream(device).synchronize()
    return decode_jpeg(encoded, ImageReadMode.RGB, device=device)
