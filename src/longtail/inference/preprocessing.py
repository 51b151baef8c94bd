"""Whatever a caller has for an image, as the network sees it: exactly what evaluation does with a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import torch
from torch import Tensor

from longtail.data import decode
from longtail.data.decode import BadImage
from longtail.data.lazy_images import ImageArray
from longtail.views import Views
from longtail.views.view import STATISTICS

if TYPE_CHECKING:
    from PIL import Image

Picture: TypeAlias = Union[str, Path, "Image.Image", np.ndarray, Tensor]
CHANNELS = (1, 3, 4)  # gray, colors, colors with alpha


@dataclass(frozen=True)
class Preprocessing:
    views: Views
    side: int = 0
    """Images are kept whole, of at most so many pixels on the longer side, and cut on the device; 0: their central square is
    brought to the network's size first. A run does the one or the other, by --data.load."""

    def pixels(self, picture: Picture) -> ImageArray:
        """(3, height, width); a BadImage where it cannot be read."""
        if isinstance(picture, str | Path):
            return self.decoded(decode.read_file(Path(picture)))
        image = as_image(picture)
        if self.side:
            return decode.shrink_to_fit(image, self.side)
        return decode.crop_center_square(image, self.views.size).transpose(2, 0, 1)

    def decoded(self, encoded: bytes) -> ImageArray:
        """The same of an image file."""
        if self.side:
            return decode.decode_to_fit(encoded, self.side)
        return decode.decode_square(encoded, self.views.size).transpose(2, 0, 1)

    def squares(self, images: Sequence[ImageArray], device: torch.device) -> Tensor:
        """What the network is shown, before it is normalized: uint8 (N, 3, size, size)."""
        if not self.side:
            return self.views.crop_for_test(torch.from_numpy(np.stack(images)).to(device))
        canvas = np.zeros((len(images), 3, self.side, self.side), np.uint8)
        for place, image in zip(canvas, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        size_N2 = torch.tensor([image.shape[1:] for image in images], device=device)
        return self.views.crop_for_test(torch.from_numpy(canvas).to(device), size_N2)

    def describe(self) -> dict[str, Any]:
        """For who has to do it elsewhere."""
        size, share = self.views.size, self.views.config.test_crop
        mean, std = STATISTICS[self.views.config.normalize]
        first = (
            f"make the longer side {self.side} pixels at most" if self.side else f"resize it to {size}x{size} pixels"
        )
        square = f"take the central square, its side {share:g} of the shorter one"
        cut = [first, f"{square}, and resize it to {size}x{size} pixels"]
        if not self.side:
            cut = ["take the central square", first, *([cut[1]] if share < 1 else [])]
        steps = ["turn it upright (EXIF)", "convert it to RGB, 8 bits a channel", *cut]
        resampling = "bilinear, antialiased" + ("; the last time rounded once" if self.side or share < 1 else "")
        return {"image_size": size, "steps": steps, "resampling": resampling, "mean": mean, "std": std}


def as_image(picture: Any) -> "Image.Image":
    """PIL images; arrays (height, width[, channels]); tensors ([channels,] height, width); uint8, or floats from 0 to 1."""
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    if isinstance(picture, Tensor):
        picture = (picture.movedim(0, -1) if picture.dim() == 3 else picture).detach().cpu().numpy()
    if not isinstance(picture, np.ndarray):
        raise BadImage(f"{type(picture).__name__} is no kind of image: give a path, a PIL image, an array or a tensor")
    picture = picture[..., None] if picture.ndim == 2 else picture
    if picture.ndim != 3 or picture.shape[2] not in CHANNELS or not picture.size:
        order = "arrays are (height, width, channels), tensors (channels, height, width)"
        raise BadImage(f"its shape is {tuple(picture.shape)}: {order}")
    gray = picture.shape[2] == 1
    return Image.fromarray(np.ascontiguousarray(eight_bit(picture)[..., 0] if gray else eight_bit(picture)))


def eight_bit(picture: np.ndarray) -> ImageArray:
    if picture.dtype == np.uint8:
        return picture
    if not np.issubdtype(picture.dtype, np.floating):
        raise BadImage(f"its numbers are {picture.dtype}: give uint8, or floats from 0 to 1")
    if not (picture >= 0).all() or not (picture <= 1).all():  # NaN is neither
        raise BadImage("its floats are not all from 0 to 1: give it before it is normalized")
    return np.rint(picture * 255).astype(np.uint8)
