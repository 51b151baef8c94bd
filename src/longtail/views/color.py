"""Colors of float images in [0, 1], batched, as torchvision's ColorJitter has them; see `ops.py`."""

# N samples, H x W pixels; x is N,3,H,W.

import torch
from torch import Tensor

from longtail.views.lut import along, choose


def grayscale(x: Tensor) -> Tensor:
    """The luminance in all three channels."""
    return _luminance(x).expand_as(x)


def _luminance(x: Tensor) -> Tensor:
    red, green, blue = x.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def color_jitter(
    x: Tensor, brightness_N: Tensor, contrast_N: Tensor, saturation_N: Tensor, hue_N: Tensor, order_N4: Tensor
) -> Tensor:
    """torchvision's ColorJitter: factors, a turn of the hue circle, and in row i of order_N4 the order for sample i.

    The order is a permutation of 0 brightness, 1 contrast, 2 saturation, 3 hue.
    """
    factor_N4 = torch.stack((brightness_N, contrast_N, saturation_N, torch.ones_like(hue_N)), 1).gather(1, order_N4)
    # Hue is dear and comes once in each order: blend before its turn, shift it for all, blend after its turn.
    turn = order_N4.argmax(1, keepdim=True)
    step = torch.arange(4, device=x.device)
    early, late = (torch.where(when, factor_N4, 1.0) for when in (step < turn, step > turn))
    for k in (0, 1, 2):
        x = _tone(x, order_N4[:, k], early[:, k])
    x = shift_hue(x, hue_N)
    for k in (1, 2, 3):
        x = _tone(x, order_N4[:, k], late[:, k])
    return x


def tone_jitter(x: Tensor, factor_N3: Tensor, order_N3: Tensor) -> Tensor:
    """The same without hue: factors of brightness, contrast and saturation, in the order that each sample has."""
    for k in range(3):
        kind_N = order_N3[:, k]
        x = _tone(x, kind_N, factor_N3.gather(1, kind_N[:, None])[:, 0])
    return x


def _tone(x: Tensor, kind_N: Tensor, factor_N: Tensor) -> Tensor:
    """Each sample's blend with black (0), its mean gray (1) or its gray image (2)."""
    gray = _luminance(x)
    mean = gray.mean((2, 3), keepdim=True) * along(kind_N == 1, gray)
    other = choose(kind_N == 2, gray, mean)
    factor = along(factor_N, x)
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def shift_hue(x: Tensor, hue_N: Tensor) -> Tensor:
    """The hue turned by hue_N of the circle, value and saturation kept."""
    red, green, blue = x.unbind(1)
    value = x.amax(1)
    chroma = value - x.amin(1)
    unit = torch.where(chroma > 0, chroma, 1.0)  # a gray pixel has hue 0
    on_green_or_blue = torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit)
    sixths = torch.where(value == red, (green - blue) / unit, on_green_or_blue) + 6 * along(hue_N, value)
    # Around the circle a channel is full, falls, is empty and rises; the three are a third of it apart.
    phase = (sixths[:, None] + torch.arange(5, 0, -2, device=x.device).view(3, 1, 1)) % 6
    return value[:, None] - chroma[:, None] * (2 - (phase - 2).abs()).clamp(0, 1)
