"""Image operations batched on the device, with separate parameters for each sample, as defined by PIL and torchvision.

Every parameter is a tensor over the samples. There is no synchronization with the host and no shape depends on the data: each
operation is computed for all samples and then selected, so that a whole view can be captured in a CUDA graph.
"""

import math
from collections.abc import Mapping
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.views.color import (
    all_levels,
    apply_lut,
    autocontrast_lut,
    blend,
    brightness_lut,
    contrast_lut,
    equalize_lut,
    gray_levels,
    invert_lut,
    per_sample,
    posterize_lut,
    smooth,
    solarize_add_lut,
    solarize_lut,
    where_samples,
)

# N samples, C channels (red, green, blue), H x W pixels; x is N,C,H,W: uint8, unless a function takes floats.


class Op(IntEnum):
    """The operations of `apply_op`, with the meaning of their values. The codes are shared with kernels/views.cu."""

    IDENTITY = 0
    SHEAR_X = auto()  # source pixels to the right per pixel down
    SHEAR_Y = auto()
    TRANSLATE_X = auto()  # pixels by which the image moves to the right
    TRANSLATE_Y = auto()  # pixels by which the image moves down
    ROTATE = auto()  # degrees, counter-clockwise
    BRIGHTNESS = auto()  # blending factor: 1 is the identity, 0 is black
    COLOR = auto()  # blending factor: 0 is the gray image
    CONTRAST = auto()  # blending factor: 0 is the mean of the gray image
    SHARPNESS = auto()  # blending factor: 0 is the smoothed image
    POSTERIZE = auto()  # number of bits that are kept, 0 to 8
    SOLARIZE = auto()  # gray levels at or above this one are inverted
    SOLARIZE_ADD = auto()  # added to the gray levels below 128
    AUTOCONTRAST = auto()  # the last three operations have no value
    EQUALIZE = auto()
    INVERT = auto()


def _select(op_N: Tensor, default: Tensor, results: Mapping[Op, Tensor]) -> Tensor:
    """Return for each sample the result of its operation, or the default if its operation has no result."""
    is_default_N = torch.ones_like(op_N, dtype=torch.bool)
    total = torch.zeros_like(default)
    for op, result in results.items():  # masked sums are several times as fast as torch.where on the CPU
        total = total + result * per_sample(op_N == op, result)
        is_default_N = is_default_N & (op_N != op)
    return total + default * per_sample(is_default_N, default)


def to_uint8(x: Tensor) -> Tensor:
    """Round float gray levels."""
    return x.round().clamp(0, 255).to(torch.uint8)


def to_float(x: Tensor) -> Tensor:
    """Convert gray levels to floats in [0, 1]. Floats are returned as they are."""
    return x if x.is_floating_point() else x.float() / 255


# Crops and blurs: products with one matrix per sample and direction


def resized_crop(
    x: Tensor, top_N: Tensor, left_N: Tensor, height_N: Tensor, width_N: Tensor, size: int, flip_N: Tensor
) -> Tensor:
    """Crop a box and resize it to size x size with antialiased bilinear interpolation, as PIL. The result is float.

    Args:
        x: Images.
        top_N: First row of each box.
        left_N: First column of each box.
        height_N: Height of each box.
        width_N: Width of each box.
        size: Height and width of the result.
        flip_N: Which results to flip horizontally.
    """
    rows = _resize_weights(top_N, height_N, x.shape[2], size)
    columns = _resize_weights(left_N, width_N, x.shape[3], size)
    return _apply_separable(x, rows, where_samples(flip_N, columns.flip(1), columns))


def _resize_weights(start_N: Tensor, length_N: Tensor, side: int, size: int) -> Tensor:
    """Return the weights (N, size, side) of the input pixels of a line for each output pixel.

    Args:
        start_N: First pixel of the box; pixels outside of the box have weight 0.
        length_N: Length of the box.
        side: Length of the input line.
        size: Length of the output line.
    """
    pixel = (torch.arange(side, device=start_N.device) - start_N[:, None])[:, None]
    length = length_N[:, None, None]
    scale = length / size
    center = (torch.arange(size, device=start_N.device)[:, None] + 0.5) * scale
    # The radius of the triangle filter is one input pixel when enlarging, and one output pixel when shrinking.
    weight = (1 - (pixel + 0.5 - center).abs() / scale.clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel >= 0) & (pixel < length))
    return weight / weight.sum(2, keepdim=True)


def _apply_separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply each image with its matrix over the rows and its matrix over the columns."""
    return rows[:, None] @ x.float() @ columns[:, None].mT


BLUR_RADIUS = 6  # pixels; three standard deviations of the strongest blur in use


def gaussian_blur(x: Tensor, sigma_N: Tensor) -> Tensor:
    """Blur float images with a Gaussian of sigma pixels, with reflection at the border. Sigma 0 is the identity."""
    blurred = _apply_separable(x, _blur_weights(sigma_N, x.shape[2]), _blur_weights(sigma_N, x.shape[3]))
    return where_samples(sigma_N > 0, blurred, x)


def _blur_weights(sigma_N: Tensor, side: int) -> Tensor:
    """Return the matrices (N, side, side) that blur a line, computed by blurring the identity matrix."""
    radius = min(BLUR_RADIUS, side - 1)  # a reflection is not possible beyond the other border
    offset = torch.arange(-radius, radius + 1, device=sigma_N.device)
    tap_NK = (-0.5 * (offset / sigma_N[:, None].clamp(min=1e-3)) ** 2).softmax(1)
    line = F.pad(torch.eye(side, device=sigma_N.device)[None], (radius, radius), mode="reflect")[0]
    return torch.einsum("iok,nk->noi", line.unfold(1, 2 * radius + 1, 1), tap_NK)


# Geometry: every output pixel is read from a source position


def flip(x: Tensor, flip_N: Tensor) -> Tensor:
    """Flip the samples horizontally where flip_N is true."""
    return where_samples(flip_N, x.flip(3), x)


def padded_crop(x: Tensor, top_N: Tensor, left_N: Tensor, pad: int) -> Tensor:
    """Pad the images with `pad` zeros on every side and crop a window of the original size.

    Args:
        x: Images.
        top_N: First row of each window in the padded image, 0 to 2 pad.
        left_N: First column of each window, 0 to 2 pad.
        pad: Number of pixels.
    """
    return affine(x, translation_matrix(pad - left_N.float(), pad - top_N.float()), fill=0)


def affine(x: Tensor, matrix_N23: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """Apply an affine transform to each image, as PIL.

    Args:
        x: Images.
        matrix_N23: Matrices that map output positions to input positions; pixel centers are at 0.5, 1.5, ….
        fill: Value of output pixels whose position is outside of the input.
        bilinear: Interpolate bilinearly instead of taking the nearest pixel.
    """
    height, width = x.shape[2:]
    to_x, to_y = matrix_N23[..., None, None].unbind(1)
    row = torch.arange(height, device=x.device)[:, None] + 0.5
    column = torch.arange(width, device=x.device) + 0.5
    # Not a matrix product, because rounding to TF32 would shift pixels.
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


def shear_x_matrix(factor_N: Tensor) -> Tensor:
    """Return the matrices of horizontal shears about the top left corner."""
    matrix = _identity_matrix(factor_N)
    matrix[:, 0, 1] = factor_N
    return matrix


def shear_y_matrix(factor_N: Tensor) -> Tensor:
    """Return the matrices of vertical shears about the top left corner."""
    matrix = _identity_matrix(factor_N)
    matrix[:, 1, 0] = factor_N
    return matrix


def translation_matrix(right_N: Tensor, down_N: Tensor) -> Tensor:
    """Return the matrices that move images by so many pixels."""
    matrix = _identity_matrix(right_N)
    matrix[:, 0, 2], matrix[:, 1, 2] = -right_N, -down_N
    return matrix


def rotation_matrix(degrees_N: Tensor, height: int, width: int) -> Tensor:
    """Return the matrices of counter-clockwise rotations about the center of height x width pixels."""
    angle = degrees_N * (math.pi / 180)
    cos, sin, x, y = angle.cos(), angle.sin(), width / 2, height / 2
    entries = (cos, -sin, x - x * cos + y * sin, sin, cos, y - x * sin - y * cos)
    return torch.stack(entries, 1).view(-1, 2, 3)


def _identity_matrix(like_N: Tensor) -> Tensor:
    return torch.eye(2, 3, device=like_N.device).repeat(len(like_N), 1, 1)


def apply_op(x: Tensor, op_N: Tensor, value_N: Tensor, fill: int, bilinear: bool = False) -> Tensor:
    """Apply to each sample its own operation, with one affine transform, one lookup table and one blend for the whole batch.

    Args:
        x: Images.
        op_N: Codes of `Op`.
        value_N: Values of the operations.
        fill: Gray level of uncovered pixels.
        bilinear: Interpolate bilinearly instead of taking the nearest pixel.
    """
    x = affine(x, _op_matrix(x, op_N, value_N), fill, bilinear)
    x = apply_lut(x, _op_lut(x, op_N, value_N))
    degenerate = where_samples(op_N == Op.SHARPNESS, smooth(x), gray_levels(x))
    blends = (op_N == Op.SHARPNESS) | (op_N == Op.COLOR)
    return blend(degenerate, x, torch.where(blends, value_N, 1.0))


def _op_matrix(x: Tensor, op_N: Tensor, value_N: Tensor) -> Tensor:
    zero = torch.zeros_like(value_N)
    matrices = {
        Op.SHEAR_X: shear_x_matrix(value_N),
        Op.SHEAR_Y: shear_y_matrix(value_N),
        Op.TRANSLATE_X: translation_matrix(value_N, zero),
        Op.TRANSLATE_Y: translation_matrix(zero, value_N),
        Op.ROTATE: rotation_matrix(value_N, x.shape[2], x.shape[3]),
    }
    return _select(op_N, _identity_matrix(value_N), matrices)


def _op_lut(x: Tensor, op_N: Tensor, value_N: Tensor) -> Tensor:
    tables = {
        Op.BRIGHTNESS: brightness_lut(x, value_N),
        Op.CONTRAST: contrast_lut(x, value_N),
        Op.POSTERIZE: posterize_lut(
            x, value_N.clamp(0, 8)
        ),  # values of other operations must stay in the range of shifts
        Op.SOLARIZE: solarize_lut(x, value_N),
        Op.SOLARIZE_ADD: solarize_add_lut(x, value_N),
        Op.AUTOCONTRAST: autocontrast_lut(x),
        Op.EQUALIZE: equalize_lut(x),
        Op.INVERT: invert_lut(x),
    }
    return _select(op_N, all_levels(x), tables)


# Cutout and normalization


def cutout(x: Tensor, center_y_N: Tensor, center_x_N: Tensor, side: int) -> Tensor:
    """Set a square around each center to 0, which is black before normalization.

    Args:
        x: Images.
        center_y_N: Row of the centers.
        center_x_N: Column of the centers.
        side: Height and width of the square, which is clipped at the border.
    """
    rows, columns = _interval_mask(center_y_N, side, x.shape[2]), _interval_mask(center_x_N, side, x.shape[3])
    return x.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0)


def _interval_mask(center_N: Tensor, side: int, length: int) -> Tensor:
    """Return which of `length` pixels are in the interval of `side` pixels around each center."""
    offset = torch.arange(length, device=center_N.device) - center_N[:, None] + side // 2
    return (offset >= 0) & (offset < side)


def normalize(x: Tensor, mean_C11: Tensor, std_C11: Tensor) -> Tensor:
    """Normalize float images by the mean and standard deviation of each channel."""
    return (x - mean_C11) / std_C11


# Random parameters


def uniform(shape: tuple[int, ...], low: float, high: float, rng: torch.Generator) -> Tensor:
    """Draw floats from the uniform distribution on [low, high)."""
    return low + (high - low) * torch.rand(shape, generator=rng, device=rng.device)


def bernoulli(shape: tuple[int, ...], probability: float | Tensor, rng: torch.Generator) -> Tensor:
    """Draw booleans that are true with this probability."""
    return torch.rand(shape, generator=rng, device=rng.device) < probability


def randint(shape: tuple[int, ...], end: int, rng: torch.Generator) -> Tensor:
    """Draw integers from 0 to `end` - 1."""
    return torch.randint(end, shape, generator=rng, device=rng.device)


def random_sign(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw 1 or -1 with equal probability."""
    return 1.0 - 2.0 * bernoulli(shape, 0.5, rng)
