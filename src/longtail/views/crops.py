"""Crops: the part of each image that a view shows, resized to the input size of the network; uint8 to uint8."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.config import ViewConfig
from longtail.errors import UserError
from longtail.kernels import views
from longtail.views import ops
from longtail.views.random import bernoulli, randint, uniform


class Box(NamedTuple):
    """A box of pixels for each sample; the fields are int64 (N,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


MAX_TRIES = 10
ASPECT_RATIO = (3 / 4, 4 / 3)  # minimum and maximum of width / height


def draw_box(size_N2: Tensor, scale: tuple[float, float], rng: torch.Generator) -> Box:
    """Draw boxes as torchvision's RandomResizedCrop: the first of ten candidates that fits the image, or the central box.

    Args:
        size_N2: Height and width of each image.
        scale: Minimum and maximum area of a box as a fraction of the image.
        rng: The random generator.
    """
    n, (height, width) = len(size_N2), size_N2.float().unbind(1)
    area = (height * width)[:, None] * uniform((n, MAX_TRIES), *scale, rng)
    ratio = uniform((n, MAX_TRIES), math.log(ASPECT_RATIO[0]), math.log(ASPECT_RATIO[1]), rng).exp()
    box_h, box_w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    central_h, central_w = _central_box_size(height, width)
    box_h = torch.where(found, box_h.gather(1, first)[:, 0], central_h)
    box_w = torch.where(found, box_w.gather(1, first)[:, 0], central_w)
    # A candidate has a random position, the central box does not.
    position_h, position_w = uniform((n, 2), 0, 1, rng).unbind(1)
    top = torch.where(found, position_h * (height - box_h + 1), (height - box_h) / 2)
    left = torch.where(found, position_w * (width - box_w + 1), (width - box_w) / 2)
    return Box(top.long(), left.long(), box_h.long(), box_w.long())


def _central_box_size(height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return height and width of the largest box with an allowed aspect ratio."""
    low, high = ASPECT_RATIO
    return torch.minimum(height, (width / low).round()), torch.minimum(width, (height * high).round())


def _image_sizes(x: Tensor) -> Tensor:
    """Return height and width of each image, (N, 2), for images that fill the tensor."""
    sides = [torch.full((len(x),), side, device=x.device) for side in x.shape[2:]]
    return torch.stack(sides, 1)


def resized_crop(x: Tensor, box: Box, size: int, flip_N: Tensor, kernels: bool = False) -> Tensor:
    """Crop a box of each image and resize it to uint8 of size x size.

    Args:
        x: uint8 images.
        box: The boxes.
        size: Height and width of the result.
        flip_N: Which results to flip horizontally.
        kernels: Use the CUDA kernels if they support the images.
    """
    if kernels and views.supports(x):
        return views.crop(x, *box, size, flip_N)
    return ops.to_uint8(ops.resized_crop(x, *box, size, flip_N))


def center_crop_resize(
    x: Tensor, size: int, size_N2: Tensor | None = None, fraction: float = 1.0, kernels: bool = False
) -> Tensor:
    """Crop the central square of each image and resize it to uint8 of size x size.

    Args:
        x: uint8 images.
        size: Height and width of the result.
        size_N2: Height and width of each image, if the images do not fill the tensor.
        fraction: Side of the square as a fraction of the shorter side of the image.
        kernels: Use the CUDA kernels if they support the images.

    Returns:
        The crops. Images that have this size already are returned as they are.
    """
    if size_N2 is None:
        if x.shape[2:] == (size, size) and fraction == 1:
            return x
        size_N2 = _image_sizes(x)
    side_N = (size_N2.amin(1) * fraction).round().long().clamp(min=1)
    top_N, left_N = ((size_N2 - side_N[:, None]) // 2).unbind(1)
    return resized_crop(x, Box(top_N, left_N, side_N, side_N), size, torch.zeros_like(side_N).bool(), kernels)


def crop_view(
    x: Tensor, size_N2: Tensor | None, view: ViewConfig, size: int, rng: torch.Generator, kernels: bool
) -> Tensor:
    """Crop and flip each image at random as the settings of a view say; return uint8 of size x size.

    Args:
        x: uint8 images.
        size_N2: Height and width of each image, if the images do not fill the tensor.
        view: The settings.
        size: Height and width of the result.
        rng: The random generator.
        kernels: Use the CUDA kernels if they support the images.
    """
    flip_N = bernoulli((len(x),), 0.5 if view.flip else 0.0, rng)
    if view.crop == "resized":
        box = draw_box(_image_sizes(x) if size_N2 is None else size_N2, view.crop_scale, rng)
        return resized_crop(x, box, size, flip_N, kernels)
    if size_N2 is not None or view.crop == "none":
        x = center_crop_resize(x, size, size_N2, kernels=kernels)
    return ops.flip(_pad_crop(x, size, rng) if view.crop == "pad" else x, flip_N)


def _pad_crop(x: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Pad the images by an eighth of their size and crop them at a random position."""
    if x.shape[2:] != (size, size):
        raise UserError(
            f"the crop 'pad' does not resize, but the images have {x.shape[2]}x{x.shape[3]} pixels and the network needs "
            f"{size}x{size}: set --views.query.crop resized and --views.key.crop resized",
            kind="conflict",
        )
    pad = size // 8
    top_N, left_N = randint((2, len(x)), 2 * pad + 1, rng)
    return ops.padded_crop(x, top_N, left_N, pad)
