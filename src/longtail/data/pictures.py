"""Conversion of pictures in memory: PIL images, arrays and tensors become PIL images, or encoded files."""

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.data.decode import BadImage, decoding_error_as_bad_image, to_upright_rgb
from longtail.data.lazy_images import ImageArray

if TYPE_CHECKING:
    from PIL import Image

CHANNEL_COUNTS = (1, 3, 4)
"""Possible numbers of channels: grayscale, RGB, and RGB with alpha."""
GRAYSCALE_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")


class EncodedPicture(NamedTuple):
    """A picture as the content of an uncompressed image file."""

    content: bytes
    digest: str
    """Identifies the pixels and the size; it does not depend on the type of the picture."""


def encode_picture(picture: Any) -> EncodedPicture:
    """Encode a PIL image, an array or a tensor as PPM, or as PGM if it is grayscale, which is fast and lossless."""
    image = to_pil_image(picture)
    is_gray = image.mode in GRAYSCALE_MODES
    with decoding_error_as_bad_image():  # a PIL image of a file is decoded now
        rgb = to_upright_rgb(image)
    pixels = rgb.tobytes()
    digest = hashlib.blake2b(f"{rgb.width}x{rgb.height} ".encode() + pixels, digest_size=8).hexdigest()
    kind, pixels = ("P5", rgb.getchannel(0).tobytes()) if is_gray else ("P6", pixels)
    return EncodedPicture(f"{kind} {rgb.width} {rgb.height} 255\n".encode() + pixels, digest)


def to_pil_image(picture: Any) -> "Image.Image":
    """Convert a PIL image, an array or a tensor to a PIL image; raise a BadImage if that is impossible.

    Arrays have the shape (height, width[, channels]), tensors ([channels,] height, width), with uint8 values or floats from
    0 to 1.
    """
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    if isinstance(picture, Tensor):
        try:
            picture = picture.float() if picture.dtype == torch.bfloat16 else picture  # which NumPy does not have
            picture = (picture.movedim(0, -1) if picture.dim() == 3 else picture).detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise BadImage(f"a tensor of the type {picture.dtype}, {picture.layout} cannot be converted") from error
    if not isinstance(picture, np.ndarray):
        raise BadImage(f"{type(picture).__name__} is not an image: give a path, a PIL image, an array or a tensor")
    picture = picture[..., None] if picture.ndim == 2 else picture
    if picture.ndim != 3 or picture.shape[2] not in CHANNEL_COUNTS or not picture.size:
        order = "arrays are (height, width, channels), tensors (channels, height, width)"
        raise BadImage(f"its shape is {tuple(picture.shape)}: {order}")
    gray = picture.shape[2] == 1
    return Image.fromarray(np.ascontiguousarray(to_uint8(picture)[..., 0] if gray else to_uint8(picture)))


def to_uint8(picture: np.ndarray) -> ImageArray:
    """Convert floats from 0 to 1 to uint8; raise a BadImage for other values."""
    if picture.dtype == np.uint8:
        return picture
    if not np.issubdtype(picture.dtype, np.floating):
        raise BadImage(f"its values have the type {picture.dtype}: give uint8, or floats from 0 to 1")
    if not (picture >= 0).all() or not (picture <= 1).all():  # NaN fails both
        raise BadImage("its floats are not all in the range 0 to 1: give the image without normalization")
    return np.rint(picture * 255).astype(np.uint8)
