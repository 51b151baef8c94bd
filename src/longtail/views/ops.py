"""Image operations batched on the device, one parameter set per sample, as PIL and torchvision define them.

Every parameter is a tensor over the samples. Nothing waits for the host and no shape depends on the data: each
operation is computed for all samples and selected, so that a whole view can be captured in a CUDA graph.
"""

# N samples, C channels (red, green, blue), H x W pixels; x is N,C,H,W: uint8, or floats where a function says so.

import math
from collections.abc import Mapping
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.views.lut import (
    along,
    apply_lut,
    autocontrast_lut,
    blend,
    brightness_lut,
    choose,
    contrast_lut,
    equalize_lut,
    every_level,
    gray_levels,
    invert_lut,
    posterize_lut,
    smooth,
    solarize_add_lut,
    solarize_lut,
)


class Op(IntEnum):
    """The operations of `apply_op`, each with the meaning of its value."""

    IDENTITY = 0
    SHEAR_X = auto()  # pixels to the right per pixel down, at the source
    SHEAR_Y = auto()
    TRANSLATE_X = auto()  # pixels that the image moves to the right
    TRANSLATE_Y = auto()  # ... and down
    ROTATE = auto()  # degrees, counter-clockwise
    BRIGHTNESS = auto()  # enhancement factors: 1 changes nothing, 0 gives black,
    COLOR = auto()  # ... the gray image,
    CONTRAST = auto()  # ... its mean gray,
    SHARPNESS = auto()  # ... and the smoothed image
    POSTERIZE = auto()  # bits kept, 0 to 8
    SOLARIZE = auto()  # gray level from which the image is inverted
    SOLARIZE_ADD = auto()  # gray levels added to the darker half
    AUTOCONTRAST = auto()  # the last three have no value
    EQUALIZE = auto()
    INVERT = auto()


def _select(op_N: Tensor, default: Tensor, results: Mapping[Op, Tensor]) -> Tensor:
    """Per sample the result of the operation that it chose, else the default."""
    unchosen_N = torch.ones_like(op_N, dtype=torch.bool)
    total = torch.zeros_like(default)
    for op, result in results.items():  # masked sums: on the CPU several times as fast as a `where` each
        total = total + result * along(op_N == op, result)
        unchosen_N = unchosen_N & (op_N != op)
    return total + default * along(unchosen_N, default)


def to_uint8(x: Tensor) -> Tensor:
    """Float gray levels, rounded."""
    return x.round().clamp(0, 255).to(torch.uint8)


def to_float(x: Tensor) -> Tensor:
    """Gray levels to [0, 1], where floats are already."""
    return x if x.is_floating_point() else x.float() / 255


# Crops and blurs: products with one matrix per sample and direction.


def resized_crop(
    x: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, size: int, flip_N: Tensor
) -> Tensor:
    """PIL's crop, then its antialiased bilinear resize to size x size, mirrored where flip_N; floats in x's range."""
    rows = _triangle(top_N, height_N, x.shape[2], size)
    columns = _triangle(left_N, width_N, x.shape[3], size)
    return _separable(x, rows, choose(flip_N, columns.flip(1), columns))


def _triangle(start_N: Tensor, length_N: Tensor, side: int, size: int) -> Tensor:
    """(N, size, side): each output pixel's weights over an input line, none outside [start, start + length)."""
    pixel = (torch.arange(side, device=start_N.device) - start_N[:, None])[:, None]
    length = length_N[:, None, None]
    scale = length / size
    center = (torch.arange(size, device=start_N.device)[:, None] + 0.5) * scale
    # The filter reaches one pixel, of the input when it enlarges and of the output when it shrinks.
    weight = (1 - (pixel + 0.5 - center).abs() / scale.clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel >= 0) & (pixel < length))
    return weight / weight.sum(2, keepdim=True)


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return rows[:, None] @ x.float() @ columns[:, None].mT


BLUR_RADIUS = 6  # pixels: three standard deviations of the strongest blur in use


def gaussian_blur(x: Tensor, sigma_N: Tensor) -> Tensor:
    """Gaussian blur of float images, sigma in pixels, reflected at the border; sigma 0 leaves a sample as it is."""
    blurred = _separable(x, _gaussian(sigma_N, x.shape[2]), _gaussian(sigma_N, x.shape[3]))
    return choose(sigma_N > 0, blurred, x)


def _gaussian(sigma_N: Tensor, side: int) -> Tensor:
    """(N, side, side): what blurring a line does, found by blurring the identity."""
    radius = min(BLUR_RADIUS, side - 1)  # a reflection needs that many pixels
    offset = torch.arange(-radius, radius + 1, device=sigma_N.device)
    tap_NK = (-0.5 * (offset / sigma_N[:, None].clamp(min=1e-3)) ** 2).softmax(1)
    line = F.pad(torch.eye(side, device=sigma_N.device)[None], (radius, radius), mode="reflect")[0]
    return torch.einsum("iok,nk->noi", line.unfold(1, 2 * radius + 1, 1), tap_NK)


# Geometry: every output pixel fetches its source.


def flip(x: Tensor, flip_N: Tensor) -> Tensor:
    """Mirrored left to right where flip_N."""
    return choose(flip_N, x.flip(3), x)


def padded_crop(x: Tensor, top_N: Tensor, left_N: Tensor, pad: int) -> Tensor:
    """The H x W window at (top, left), each in [0, 2 pad], of the image padded with `pad` zeros on every side."""
    return affine(x, translate(pad - left_N.float(), pad - top_N.float()), fill=0)


def affine(x: Tensor, matrix_N23: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """PIL's affine transform: the matrix takes output to input positions, pixel centers at halves; `fill` outside."""
    height, width = x.shape[2:]
    to_x, to_y = matrix_N23[..., None, None].unbind(1)
    row = torch.arange(height, device=x.device)[:, None] + 0.5
    column = torch.arange(width, device=x.device) + 0.5
    # Not a matrix product: TF32 would shift pixels.
    at_x, at_y = (to[:, 0] * column + (to[:, 1] * row + to[:, 2]) for to in (to_x, to_y))
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    fetched = (_bilinear if bilinear else _nearest)(x, at_x, at_y)
    return fetched.masked_fill(~inside[:, None], fill)


def _nearest(x: Tensor, at_x: Tensor, at_y: Tensor) -> Tensor:
    height, width = x.shape[2:]
    row, column = at_y.long().clamp(0, height - 1), at_x.long().clamp(0, width - 1)
    index = (row * width + column).flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, index).view_as(x)


def _bilinear(x: Tensor, at_x: Tensor, at_y: Tensor) -> Tensor:
    height, width = x.shape[2:]
    grid = torch.stack((2 * at_x / width - 1, 2 * at_y / height - 1), 3)
    return to_uint8(F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False))


def shear_x(factor_N: Tensor) -> Tensor:
    """The matrix of a horizontal shear about the top left corner."""
    matrix = _identity(factor_N)
    matrix[:, 0, 1] = factor_N
    return matrix


def shear_y(factor_N: Tensor) -> Tensor:
    """The matrix of a vertical shear about the top left corner."""
    matrix = _identity(factor_N)
    matrix[:, 1, 0] = factor_N
    return matrix


def translate(right_N: Tensor, down_N: Tensor) -> Tensor:
    """The matrix that moves the image by so many pixels."""
    matrix = _identity(right_N)
    matrix[:, 0, 2], matrix[:, 1, 2] = -right_N, -down_N
    return matrix


def rotate(degrees_N: Tensor, height: int, width: int) -> Tensor:
    """The matrix of a counter-clockwise rotation about the center."""
    angle = degrees_N * (math.pi / 180)
    cos, sin, x, y = angle.cos(), angle.sin(), width / 2, height / 2
    entries = (cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos)
    return torch.stack(entries, 1).view(-1, 2, 3)


def _identity(like_N: Tensor) -> Tensor:
    return torch.eye(2, 3, device=like_N.device).repeat(len(like_N), 1, 1)


def apply_op(x: Tensor, op_N: Tensor, value_N: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """The operation that each sample chose, with its value: one fetch, one table and one blend for the whole batch."""
    x = affine(x, _op_matrix(x, op_N, value_N), fill, bilinear)
    x = apply_lut(x, _op_lut(x, op_N, value_N))
    degenerate = choose(op_N == Op.SHARPNESS, smooth(x), gray_levels(x))
    blends = (op_N == Op.SHARPNESS) | (op_N == Op.COLOR)
    return blend(degenerate, x, torch.where(blends, value_N, 1.0))


def _op_matrix(x: Tensor, op_N: Tensor, value_N: Tensor) -> Tensor:
    zero = torch.zeros_like(value_N)
    matrices = {
        Op.SHEAR_X: shear_x(value_N),
        Op.SHEAR_Y: shear_y(value_N),
        Op.TRANSLATE_X: translate(value_N, zero),
        Op.TRANSLATE_Y: translate(zero, value_N),
        Op.ROTATE: rotate(value_N, x.shape[2], x.shape[3]),
    }
    return _select(op_N, _identity(value_N), matrices)


def _op_lut(x: Tensor, op_N: Tensor, value_N: Tensor) -> Tensor:
    tables = {
        Op.BRIGHTNESS: brightness_lut(x, value_N),
        Op.CONTRAST: contrast_lut(x, value_N),
        Op.POSTERIZE: posterize_lut(x, value_N.clamp(0, 8)),  # values meant for others must not shift by more
        Op.SOLARIZE: solarize_lut(x, value_N),
        Op.SOLARIZE_ADD: solarize_add_lut(x, value_N),
        Op.AUTOCONTRAST: autocontrast_lut(x),
        Op.EQUALIZE: equalize_lut(x),
        Op.INVERT: invert_lut(x),
    }
    return _select(op_N, every_level(x), tables)


# Squares and statistics.


def cutout(x: Tensor, center_y_N: Tensor, center_x_N: Tensor, side: int) -> Tensor:
    """A square of `side` pixels around the center, clipped at the border, set to 0 (black: cut before normalizing)."""
    rows, columns = _span(center_y_N, side, x.shape[2]), _span(center_x_N, side, x.shape[3])
    return x.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0)


def _span(center_N: Tensor, side: int, length: int) -> Tensor:
    offset = torch.arange(length, device=center_N.device) - center_N[:, None] + side // 2
    return (offset >= 0) & (offset < side)


def normalize(x: Tensor, mean_C11: Tensor, std_C11: Tensor) -> Tensor:
    return (x - mean_C11) / std_C11
