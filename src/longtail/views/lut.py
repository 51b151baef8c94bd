"""Operations on gray levels, batched: lookup tables (LUTs) and blends, in the integer arithmetic of PIL. See `ops.py`."""

# N samples, C channels (red, green, blue), H x W pixels; x is uint8 N,C,H,W. A lookup table is uint8 (N or 1, C or 1, 256).

import torch
from torch import Tensor


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


def adjust_saturation(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the gray image."""
    return blend(gray_levels(x), x, factor_N)


def adjust_sharpness(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the smoothed image."""
    return blend(smooth(x), x, factor_N)


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
