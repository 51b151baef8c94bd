"""The part of an image that a view shows, at the size of the network: N samples, uint8 to uint8."""

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
    """Whole pixels, each (N,) int64."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


TRIES = 10
RATIO = (3 / 4, 4 / 3)  # width over height


def draw_box(size_N2: Tensor, scale: tuple[float, float], rng: torch.Generator) -> Box:
    """torchvision's RandomResizedCrop: the first of ten candidates that fits the image, else the central box."""
    n, (height, width) = len(size_N2), size_N2.float().unbind(1)
    area = (height * width)[:, None] * uniform((n, TRIES), *scale, rng)
    ratio = uniform((n, TRIES), math.log(RATIO[0]), math.log(RATIO[1]), rng).exp()
    box_h, box_w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    central_h, central_w = _central(height, width)
    box_h = torch.where(found, box_h.gather(1, first)[:, 0], central_h)
    box_w = torch.where(found, box_w.gather(1, first)[:, 0], central_w)
    # A uniform place for a candidate, the middle for the fallback.
    place_h, place_w = uniform((n, 2), 0, 1, rng).unbind(1)
    top = torch.where(found, place_h * (height - box_h + 1), (height - box_h) / 2)
    left = torch.where(found, place_w * (width - box_w + 1), (width - box_w) / 2)
    return Box(top.long(), left.long(), box_h.long(), box_w.long())


def _central(height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width of the largest box whose ratio is allowed."""
    low, high = RATIO
    return torch.minimum(height, (width / low).round()), torch.minimum(width, (height * high).round())


def _sizes(x: Tensor) -> Tensor:
    """Height and width of each, where all fill their tensor."""
    sides = [torch.full((len(x),), side, device=x.device) for side in x.shape[2:]]
    return torch.stack(sides, 1)


def resized_crop(x: Tensor, box: Box, size: int, flip_N: Tensor, kernels: bool = False) -> Tensor:
    """A box of each, mirrored where flip_N: uint8 at size x size."""
    if kernels and views.supports(x):
        return views.crop(x, *box, size, flip_N)
    return ops.to_uint8(ops.resized_crop(x, *box, size, flip_N))


def resize(x: Tensor, size: int, size_N2: Tensor | None = None, share: float = 1.0, kernels: bool = False) -> Tensor:
    """The central square, its side a share of the shorter one: uint8 at size x size, untouched where that is all there is."""
    if size_N2 is None:
        if x.shape[2:] == (size, size) and share == 1:
            return x
        size_N2 = _sizes(x)
    side_N = (size_N2.amin(1) * share).round().long().clamp(min=1)
    top_N, left_N = ((size_N2 - side_N[:, None]) // 2).unbind(1)
    return resized_crop(x, Box(top_N, left_N, side_N, side_N), size, torch.zeros_like(side_N).bool(), kernels)


def crop(x: Tensor, size_N2: Tensor | None, view: ViewConfig, size: int, rng: torch.Generator, kernels: bool) -> Tensor:
    """Cropped and mirrored: uint8 at size x size."""
    flip_N = bernoulli((len(x),), 0.5 if view.flip else 0.0, rng)
    if view.crop == "resized":
        box = draw_box(_sizes(x) if size_N2 is None else size_N2, view.crop_scale, rng)
        return resized_crop(x, box, size, flip_N, kernels)
    if size_N2 is not None or view.crop == "none":
        x = resize(x, size, size_N2, kernels=kernels)
    return ops.flip(_pad_crop(x, size, rng) if view.crop == "pad" else x, flip_N)


def _pad_crop(x: Tensor, size: int, rng: torch.Generator) -> Tensor:
    if x.shape[2:] != (size, size):
        given, wanted = f"{x.shape[2]}x{x.shape[3]}", f"{size}x{size}"
        raise UserError(
            f"crop 'pad' keeps the size, got {given} for {wanted}: try --views.query.crop resized, key too",
            kind="conflict",
        )
    pad = size // 8
    top_N, left_N = randint((2, len(x)), 2 * pad + 1, rng)
    return ops.padded_crop(x, top_N, left_N, pad)
