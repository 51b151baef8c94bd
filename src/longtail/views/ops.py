"""Image operations batched on the device, with separate parameters for each sample, as defined by PIL and torchvision.

Every parameter is a tensor over the samples. There is no synchronization with the host and no shape depends on the data: each
operation is computed for all samples and then selected, so that a whole view can be captured in a CUDA graph.
"""

# N samples, C channels (red, green, blue), H x W pixels; x is N,C,H,W: uint8, unless a function takes floats.

import math
from collections.abc import Mapping
from enum import IntEnum, auto
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]


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


FEW_PIXELS = 128 * 128
"""On the CPU, images with more pixels are resized one by one, which leaves out the pixels outside of the boxes."""


def resized_crop(
    x: Tensor,
    top_N: Tensor,
    left_N: Tensor,
    height_N: Tensor,
    width_N: Tensor,
    size: int,
    flip_N: Tensor,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Crop a box and resize it to size x size with antialiased interpolation, as PIL. The result is float.

    Args:
        x: Images.
        top_N: First row of each box.
        left_N: First column of each box.
        height_N: Height of each box.
        width_N: Width of each box.
        size: Height and width of the result.
        flip_N: Which results to flip horizontally.
        interpolation: The interpolation.
    """
    if x.device.type == "cpu" and x.shape[2] * x.shape[3] > FEW_PIXELS:
        boxes, zero, results = torch.stack((top_N, left_N, height_N, width_N), 1).tolist(), torch.zeros(1), []
        for image, (top, left, height, width), is_flipped in zip(x, boxes, flip_N.tolist(), strict=True):
            box = image[None, :, top : top + height, left : left + width]
            rows = _resize_weights(zero, zero + height, height, size, interpolation)
            columns = _resize_weights(zero, zero + width, width, size, interpolation)
            results.append(_apply_separable(box, rows, columns.flip(1) if is_flipped else columns))
        return torch.cat(results)
    rows = _resize_weights(top_N, height_N, x.shape[2], size, interpolation)
    columns = _resize_weights(left_N, width_N, x.shape[3], size, interpolation)
    return _apply_separable(x, rows, where_samples(flip_N, columns.flip(1), columns))


def _resize_weights(start_N: Tensor, length_N: Tensor, side: int, size: int, interpolation: Interpolation) -> Tensor:
    """Return the weights (N, size, side) of the input pixels of a line for each output pixel.

    Args:
        start_N: First pixel of the box; pixels outside of the box have weight 0.
        length_N: Length of the box.
        side: Length of the input line.
        size: Length of the output line.
        interpolation: The interpolation.
    """
    pixel = (torch.arange(side, device=start_N.device) - start_N[:, None])[:, None]
    length = length_N[:, None, None]
    scale = length / size
    center = (torch.arange(size, device=start_N.device)[:, None] + 0.5) * scale
    # The unit of the distance is one input pixel when enlarging, and one output pixel when shrinking.
    away = (pixel + 0.5 - center).abs() / scale.clamp(min=1)
    if interpolation == "bilinear":
        weight = (1 - away).clamp(min=0)
    else:  # the cubic filter of PIL (Keys, 1981)
        near, far = (1.5 * away - 2.5) * away * away + 1, ((-0.5 * away + 2.5) * away - 4) * away + 2
        weight = torch.where(away < 1, near, torch.where(away < 2, far, 0))
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


# Random parameters of any shape, drawn from a generator on its device


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


# Gray levels: lookup tables (LUTs, uint8 N or 1, C or 1, 256) and blends of uint8 images, in the integer arithmetic of PIL


def where_samples(mask_N: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the samples of x where the mask is true, and those of y elsewhere."""
    return torch.where(per_sample(mask_N, x), x, y)


def per_sample(value_N: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of one value per sample, with dimensions added so that it broadcasts with x."""
    return value_N.view(-1, *[1] * (x.ndim - 1))


def apply_lut(x: Tensor, lut: Tensor) -> Tensor:
    """Replace every pixel by the entry in the table of its sample and channel."""
    table = lut.expand(x.shape[0], x.shape[1], 256)
    return table.gather(2, x.flatten(2).long()).view_as(x)


def all_levels(x: Tensor) -> Tensor:
    """Return the levels 0 to 255 as a table on the device of x; this is the identity."""
    return torch.arange(256, device=x.device, dtype=torch.uint8).view(1, 1, 256)


def invert_lut(x: Tensor) -> Tensor:
    """Invert all levels."""
    return 255 - all_levels(x)


def posterize_lut(x: Tensor, bits_N: Tensor) -> Tensor:
    """Keep the leading bits of each level."""
    dropped = 8 - per_sample(bits_N.int(), all_levels(x))
    return (all_levels(x) >> dropped << dropped).to(torch.uint8)


def solarize_lut(x: Tensor, threshold_N: Tensor) -> Tensor:
    """Invert the levels at or above the threshold."""
    level = all_levels(x)
    return torch.where(level < per_sample(threshold_N, level), level, 255 - level)


def solarize_add_lut(x: Tensor, added_N: Tensor) -> Tensor:
    """Add to the levels below 128."""
    level = all_levels(x)
    raised = (level.int() + per_sample(added_N.int(), level)).clamp(0, 255).to(torch.uint8)
    return torch.where(level < 128, raised, level)


def brightness_lut(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with black."""
    return blend(torch.zeros_like(all_levels(x)), all_levels(x), factor_N)


def contrast_lut(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the rounded mean of the gray image."""
    pixels = x.shape[2] * x.shape[3]
    mean = (2 * gray_levels(x).sum((2, 3)) + pixels) // (2 * pixels)
    return blend(mean[..., None], all_levels(x), factor_N)


def autocontrast_lut(x: Tensor) -> Tensor:
    """Stretch each channel to [0, 255]. Constant channels are not changed."""
    low, high = x.amin((2, 3)).double()[..., None], x.amax((2, 3)).double()[..., None]
    # Double precision and this order of operations give the same result as PIL when truncated. torch would compute `255 / span`
    # with a number as a reciprocal and a product, which can differ in the last bit, so both operands are tensors.
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)
    stretched = (all_levels(x) * scale + -low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, all_levels(x))


def equalize_lut(x: Tensor) -> Tensor:
    """Equalize the histogram of each channel. Channels with too few different pixels are not changed."""
    value = x.flatten(2).long()
    count = torch.zeros(*x.shape[:2], 256, dtype=torch.long, device=x.device)
    count.scatter_add_(2, value, value.new_ones(1, 1, 1).expand_as(value))
    brightest = count.gather(2, value.amax(2, keepdim=True))
    step = (value.shape[2] - brightest) // 255  # pixels per output level
    darker = count.cumsum(2) - count
    flat = ((step // 2 + darker) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step > 0, flat, all_levels(x))


# Blends


def blend(degenerate: Tensor, x: Tensor, factor_N: Tensor) -> Tensor:
    """Blend gray levels as PIL: in single precision, clipped and truncated to uint8.

    Args:
        degenerate: The result for factor 0.
        x: The result for factor 1. Factors above 1 extrapolate.
        factor_N: The factor of each sample.
    """
    start = degenerate.float()
    return (start + per_sample(factor_N, x) * (x - start)).clamp(0, 255).to(torch.uint8)


def gray_levels(x: Tensor) -> Tensor:
    """Return the luminance (N, 1, H, W) as integers, in PIL's 16-bit fixed-point arithmetic."""
    red, green, blue = x.int().unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000 >> 16)[:, None]


def smooth(x: Tensor) -> Tensor:
    """Apply PIL's SMOOTH filter: a 3x3 mean with weight 5 at the center. Border pixels stay. The result is rounded floats."""
    x = x.float()
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smoothed = x.clone()
    smoothed[:, :, 1:-1, 1:-1] = ((box + 4 * x[:, :, 1:-1, 1:-1]) / 13).round()
    return smoothed


# Operations on float images in [0, 1], as defined by torchvision's ColorJitter


def grayscale(x: Tensor) -> Tensor:
    """Return the luminance in all three channels."""
    return _luminance(x).expand_as(x)


def _luminance(x: Tensor) -> Tensor:
    red, green, blue = x.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def color_jitter(
    x: Tensor, brightness_N: Tensor, contrast_N: Tensor, saturation_N: Tensor, hue_N: Tensor, order_N4: Tensor
) -> Tensor:
    """Apply torchvision's ColorJitter with given parameters.

    Args:
        x: Float images.
        brightness_N: Factors of brightness.
        contrast_N: Factors of contrast.
        saturation_N: Factors of saturation.
        hue_N: Shifts of the hue; 1 is the whole circle.
        order_N4: The order for each sample, a permutation of 0 brightness, 1 contrast, 2 saturation, 3 hue.
    """
    factor_N4 = torch.stack((brightness_N, contrast_N, saturation_N, torch.ones_like(hue_N)), 1).gather(1, order_N4)
    # Shifting the hue is expensive, so it is done once for all samples: first the changes before it, then hue, then the rest.
    turn = order_N4.argmax(1, keepdim=True)
    step = torch.arange(4, device=x.device)
    early, late = (torch.where(when, factor_N4, 1.0) for when in (step < turn, step > turn))
    for k in (0, 1, 2):
        x = _adjust(x, order_N4[:, k], early[:, k])
    x = shift_hue(x, hue_N)
    for k in (1, 2, 3):
        x = _adjust(x, order_N4[:, k], late[:, k])
    return x


def tone_jitter(x: Tensor, factor_N3: Tensor, order_N3: Tensor) -> Tensor:
    """Apply torchvision's ColorJitter without hue.

    Args:
        x: Float images.
        factor_N3: Factors of brightness, contrast and saturation.
        order_N3: The order for each sample, a permutation of 0, 1, 2.
    """
    for k in range(3):
        kind_N = order_N3[:, k]
        x = _adjust(x, kind_N, factor_N3.gather(1, kind_N[:, None])[:, 0])
    return x


def _adjust(x: Tensor, kind_N: Tensor, factor_N: Tensor) -> Tensor:
    """Blend each sample with black (kind 0), the mean of its gray image (1) or its gray image (2)."""
    gray = _luminance(x)
    mean = gray.mean((2, 3), keepdim=True) * per_sample(kind_N == 1, gray)
    other = where_samples(kind_N == 2, gray, mean)
    factor = per_sample(factor_N, x)
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def shift_hue(x: Tensor, hue_N: Tensor) -> Tensor:
    """Shift the hue by hue_N of the circle. Value and saturation are not changed."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    unit = torch.where(chroma > 0, chroma, 1.0)  # a gray pixel has hue 0
    on_green_or_blue = torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit)
    sixths = torch.where(value == red, (green - blue) / unit, on_green_or_blue) + 6 * per_sample(hue_N, value)
    # Along the hue circle a channel is at its maximum, falls, is at its minimum and rises. The channels are shifted by a third.
    phase = (sixths[:, None] + torch.arange(5, 0, -2, device=x.device).view(3, 1, 1)) % 6
    return value[:, None] - chroma[:, None] * (2 - (phase - 2).abs()).clamp(0, 1)
