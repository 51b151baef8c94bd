"""Gray levels: tables of 256 entries and blends, batched, in PIL's integer arithmetic; see `ops.py`."""

# N samples, C channels (red, green, blue), H x W pixels; x is N,C,H,W, uint8. A table (lut) is (N or 1, C or 1, 256), uint8.

import torch
from torch import Tensor


def choose(mask_N: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The samples of x where the mask holds, else those of y."""
    return torch.where(along(mask_N, x), x, y)


def along(value_N: Tensor, x: Tensor) -> Tensor:
    """A value per sample, shaped to broadcast over the dimensions of x."""
    return value_N.view(-1, *[1] * (x.ndim - 1))


def apply_lut(x: Tensor, lut: Tensor) -> Tensor:
    """Every pixel looked up in the table of its sample and channel."""
    table = lut.expand(x.shape[0], x.shape[1], 256)
    return table.gather(2, x.flatten(2).long()).view_as(x)


def every_level(x: Tensor) -> Tensor:
    return torch.arange(256, device=x.device, dtype=torch.uint8).view(1, 1, 256)


def invert_lut(x: Tensor) -> Tensor:
    return 255 - every_level(x)


def posterize_lut(x: Tensor, bits_N: Tensor) -> Tensor:
    """The `bits` leading bits of each level."""
    dropped = 8 - along(bits_N.int(), every_level(x))
    return (every_level(x) >> dropped << dropped).to(torch.uint8)


def solarize_lut(x: Tensor, threshold_N: Tensor) -> Tensor:
    """Levels from the threshold up inverted."""
    level = every_level(x)
    return torch.where(level < along(threshold_N, level), level, 255 - level)


def solarize_add_lut(x: Tensor, added_N: Tensor) -> Tensor:
    """Levels below 128 raised."""
    level = every_level(x)
    raised = (level.int() + along(added_N.int(), level)).clamp(0, 255).to(torch.uint8)
    return torch.where(level < 128, raised, level)


def brightness_lut(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blended with black."""
    return blend(torch.zeros_like(every_level(x)), every_level(x), factor_N)


def contrast_lut(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blended with the rounded mean of the gray image."""
    pixels = x.shape[2] * x.shape[3]
    mean = (2 * gray_levels(x).sum((2, 3)) + pixels) // (2 * pixels)
    return blend(mean[..., None], every_level(x), factor_N)


def autocontrast_lut(x: Tensor) -> Tensor:
    """Each channel stretched to [0, 255]; a constant one stays."""
    low, high = x.amin((2, 3)).double()[..., None], x.amax((2, 3)).double()[..., None]
    # In double precision and in this order, as PIL, so that the truncation falls on the same side; a tensor over a
    # tensor, as torch would make `255 / span` a reciprocal and a product, one bit off.
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)
    stretched = (every_level(x) * scale + -low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, every_level(x))


def equalize_lut(x: Tensor) -> Tensor:
    """Each channel's histogram flattened; a channel with too few different pixels stays."""
    value = x.flatten(2).long()
    count = torch.zeros(*x.shape[:2], 256, dtype=torch.long, device=x.device)
    count.scatter_add_(2, value, value.new_ones(1, 1, 1).expand_as(value))
    brightest = count.gather(2, value.amax(2, keepdim=True))
    step = (value.shape[2] - brightest) // 255  # pixels per output level
    darker = count.cumsum(2) - count
    flat = ((step // 2 + darker) // step.clamp(min=1)).clamp(max=255).to(torch.uint8)
    return torch.where(step > 0, flat, every_level(x))


# Blends.


def blend(degenerate: Tensor, x: Tensor, factor_N: Tensor) -> Tensor:
    """PIL's blend of gray levels, extrapolating beyond factor 1: single precision, clipped, truncated to uint8."""
    start = degenerate.float()
    return (start + along(factor_N, x) * (x - start)).clamp(0, 255).to(torch.uint8)


def saturation(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blended with the gray image."""
    return blend(gray_levels(x), x, factor_N)


def sharpness(x: Tensor, factor_N: Tensor) -> Tensor:
    """Blended with the smoothed image."""
    return blend(smooth(x), x, factor_N)


def gray_levels(x: Tensor) -> Tensor:
    """(N, 1, H, W) PIL's 16-bit fixed-point luminance, as integers."""
    red, green, blue = x.int().unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000 >> 16)[:, None]


def smooth(x: Tensor) -> Tensor:
    """PIL's SMOOTH, rounded levels as floats: a 3 x 3 mean of weight 5 at the center; the border pixels stay."""
    x = x.float()
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smoothed = x.clone()
    smoothed[:, :, 1:-1, 1:-1] = ((box + 4 * x[:, :, 1:-1, 1:-1]) / 13).round()
    return smoothed
