"""Preprocessing of images for a network, identical to that of evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import torch
from torch import Tensor

from longtail.data import decode
from longtail.data.in_memory import to_pil_image
from longtail.data.lazy_images import ImageArray
from longtail.views import Views
from longtail.views.view import STATISTICS

if TYPE_CHECKING:
    from PIL import Image

Picture: TypeAlias = Union[str, Path, "Image.Image", np.ndarray, Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of a network: decoding, resizing and cropping."""

    views: Views
    side: int = 0
    """Length in pixels to which the longer side is reduced; images are then cropped on the device. 0: the central square is
    resized to the input size of the network. A run uses one or the other, depending on --data.load."""

    def pixels(self, picture: Picture) -> ImageArray:
        """Return the pixels of an image with shape (3, height, width); raise a BadImage if it cannot be read."""
        if isinstance(picture, str | Path):
            return self.decoded(decode.read_file(Path(picture)))
        image = to_pil_image(picture)
        if self.side:
            return decode.shrink_to_fit(image, self.side)
        return decode.crop_center_square(image, self.views.size).transpose(2, 0, 1)

    def decoded(self, encoded: bytes) -> ImageArray:
        """Return the pixels of an encoded image file."""
        if self.side:
            return decode.decode_to_fit(encoded, self.side)
        return decode.decode_square(encoded, self.views.size).transpose(2, 0, 1)

    def squares(self, images: Sequence[ImageArray], device: torch.device) -> Tensor:
        """Return the input of the network before normalization, with type uint8 and shape (N, 3, size, size)."""
        if not self.side:
            return self.views.crop_for_test(torch.from_numpy(np.stack(images)).to(device))
        canvas = np.zeros((len(images), 3, self.side, self.side), np.uint8)
        for target, image in zip(canvas, images, strict=True):
            target[:, : image.shape[1], : image.shape[2]] = image
        size_N2 = torch.tensor([image.shape[1:] for image in images], device=device)
        return self.views.crop_for_test(torch.from_numpy(canvas).to(device), size_N2)

    def describe(self) -> dict[str, Any]:
        """Return a description of the preprocessing, for implementing it in another program."""
        size, share = self.views.size, self.views.config.test_crop
        mean, std = STATISTICS[self.views.config.normalize]
        first = (
            f"reduce the longer side to at most {self.side} pixels"
            if self.side
            else f"resize it to {size}x{size} pixels"
        )
        square = f"crop the central square with {share:g} of the shorter side"
        cut = [first, f"{square}, and resize it to {size}x{size} pixels"]
        if not self.side:
            cut = ["crop the central square", first, *([cut[1]] if share < 1 else [])]
        steps = ["rotate it according to its EXIF orientation", "convert it to RGB with 8 bits per channel", *cut]
        resampling = "bilinear, antialiased" + ("; the last step is rounded once" if self.side or share < 1 else "")
        return {"image_size": size, "steps": steps, "resampling": resampling, "mean": mean, "std": std}
