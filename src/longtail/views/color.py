"""Operations on gray levels and colors, batched. See `ops.py`.

Lookup tables (LUTs) and blends take uint8 images, in the integer arithmetic of PIL. Color operations take float images.
"""

# N samples, C channels (red, green, blue), H x W pixels; x is N,C,H,W. A lookup table is uint8 (N or 1, C or 1, 256).

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
