"""Color operations on float images in [0, 1], batched, as defined by torchvision's ColorJitter. See `ops.py`."""

# N samples, H x W pixels; x is N,3,H,W.

import torch
from torch import Tensor

from longtail.views.lut import per_sample, where_samples


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
