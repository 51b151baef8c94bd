"""What the networks see of an image: SimAugment, RandAugment, both stacked, and the CIFAR AutoAugment policy.

Each is drawn for the whole batch at once, with fixed shapes and from one generator on the images' device (the same
generator state gives the same views), and made of `ops`.
"""

# N samples, S operations in a row per sample.

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.config import ViewConfig
from longtail.kernels import views
from longtail.views import color, lut, ops
from longtail.views.ops import Op
from longtail.views.random import bernoulli, randint, sign, uniform


class Draw(NamedTuple):
    """The operations of each sample, in the order of application, with their values."""

    op: Tensor  # (N, S) int64, codes of Op
    value: Tensor  # (N, S) float32


def apply_draw(x: Tensor, draw: Draw, fill: int, bilinear: bool = False, kernels: bool = False) -> Tensor:
    """uint8 to uint8."""
    if kernels and views.supports(x):
        return views.apply_draw(x, draw.op, draw.value, fill, bilinear)
    for op_N, value_N in zip(draw.op.unbind(1), draw.value.unbind(1), strict=True):
        x = ops.apply_op(x, op_N, value_N, fill, bilinear)
    return x


# AutoAugment (Cubuk et al. 2019): the policy found on CIFAR-10, with the magnitudes of torchvision.

# Pairs of operation, probability and magnitude bin (0 to 9).
CIFAR_POLICY = (
    ((Op.INVERT, 0.1, 0), (Op.CONTRAST, 0.2, 6)),
    ((Op.ROTATE, 0.7, 2), (Op.TRANSLATE_X, 0.3, 9)),
    ((Op.SHARPNESS, 0.8, 1), (Op.SHARPNESS, 0.9, 3)),
    ((Op.SHEAR_Y, 0.5, 8), (Op.TRANSLATE_Y, 0.7, 9)),
    ((Op.AUTOCONTRAST, 0.5, 0), (Op.EQUALIZE, 0.9, 0)),
    ((Op.SHEAR_Y, 0.2, 7), (Op.POSTERIZE, 0.3, 7)),
    ((Op.COLOR, 0.4, 3), (Op.BRIGHTNESS, 0.6, 7)),
    ((Op.SHARPNESS, 0.3, 9), (Op.BRIGHTNESS, 0.7, 9)),
    ((Op.EQUALIZE, 0.6, 0), (Op.EQUALIZE, 0.5, 0)),
    ((Op.CONTRAST, 0.6, 7), (Op.SHARPNESS, 0.6, 5)),
    ((Op.COLOR, 0.7, 7), (Op.TRANSLATE_X, 0.5, 8)),
    ((Op.EQUALIZE, 0.3, 0), (Op.AUTOCONTRAST, 0.4, 0)),
    ((Op.TRANSLATE_Y, 0.4, 3), (Op.SHARPNESS, 0.2, 6)),
    ((Op.BRIGHTNESS, 0.9, 6), (Op.COLOR, 0.2, 8)),
    ((Op.SOLARIZE, 0.5, 2), (Op.INVERT, 0.0, 0)),
    ((Op.EQUALIZE, 0.2, 0), (Op.AUTOCONTRAST, 0.6, 0)),
    ((Op.EQUALIZE, 0.2, 0), (Op.EQUALIZE, 0.6, 0)),
    ((Op.COLOR, 0.9, 9), (Op.EQUALIZE, 0.6, 0)),
    ((Op.AUTOCONTRAST, 0.8, 0), (Op.SOLARIZE, 0.2, 8)),
    ((Op.BRIGHTNESS, 0.1, 3), (Op.COLOR, 0.7, 0)),
    ((Op.SOLARIZE, 0.4, 5), (Op.AUTOCONTRAST, 0.9, 0)),
    ((Op.TRANSLATE_Y, 0.9, 9), (Op.TRANSLATE_Y, 0.7, 9)),
    ((Op.AUTOCONTRAST, 0.9, 0), (Op.SOLARIZE, 0.8, 3)),
    ((Op.EQUALIZE, 0.8, 0), (Op.INVERT, 0.1, 0)),
    ((Op.TRANSLATE_Y, 0.7, 9), (Op.AUTOCONTRAST, 0.9, 0)),
)


def auto_value(op: Op, magnitude_bin: int, side: int) -> tuple[float, float]:
    """Base and swing: the operation's value is base + swing or base - swing, for images of `side` pixels."""
    share = magnitude_bin / 9
    match op:
        case Op.SHEAR_X | Op.SHEAR_Y:
            return 0, 0.3 * share
        case Op.TRANSLATE_X | Op.TRANSLATE_Y:
            return 0, int(150 / 331 * side * share)  # 150 pixels of the 331 that the search used
        case Op.ROTATE:
            return 0, 30 * share
        case Op.BRIGHTNESS | Op.COLOR | Op.CONTRAST | Op.SHARPNESS:
            return 1, 0.9 * share
        case Op.POSTERIZE:
            return 8 - round(4 * share), 0
        case Op.SOLARIZE:
            return 255 * (1 - share), 0
    return 0, 0


@functools.cache
def _auto_table(side: int, device: torch.device) -> Tensor:
    """(25, 2, 4): operation, probability, base and swing; made once per device, as a copy from the host waits."""
    rows = [[(op, p, *auto_value(op, level, side)) for op, p, level in pair] for pair in CIFAR_POLICY]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def draw_autoaugment(n: int, side: int, rng: torch.Generator) -> Draw:
    """One of the 25 pairs per sample, each half with its probability and a random sign."""
    pair_N = randint((n,), len(CIFAR_POLICY), rng)
    op, probability, base, swing = _auto_table(side, rng.device)[pair_N].unbind(2)
    used = bernoulli((n, 2), probability, rng)
    value = base + swing * sign((n, 2), rng)
    return Draw((op * used).long(), value.float())  # Op.IDENTITY is 0


# RandAugment (Cubuk et al. 2020), as timm draws it for `rand-nS-mM-mstdD`.

RAND_PROBABILITY = 0.5  # of each operation that was drawn

# Operation; its value at level 0; what level 10 adds; random sign; cut to a whole number. Shifts: shares of the side.
RAND_OPS = (
    (Op.AUTOCONTRAST, 0.0, 0.0, False, False),
    (Op.EQUALIZE, 0.0, 0.0, False, False),
    (Op.INVERT, 0.0, 0.0, False, False),
    (Op.ROTATE, 0.0, 30.0, True, False),
    (Op.POSTERIZE, 0.0, 4.0, False, True),
    (Op.SOLARIZE, 0.0, 256.0, False, True),
    (Op.SOLARIZE_ADD, 0.0, 110.0, False, True),
    (Op.COLOR, 0.1, 1.8, False, False),
    (Op.CONTRAST, 0.1, 1.8, False, False),
    (Op.BRIGHTNESS, 0.1, 1.8, False, False),
    (Op.SHARPNESS, 0.1, 1.8, False, False),
    (Op.SHEAR_X, 0.0, 0.3, True, False),
    (Op.SHEAR_Y, 0.0, 0.3, True, False),
    (Op.TRANSLATE_X, 0.0, 0.45, True, False),
    (Op.TRANSLATE_Y, 0.0, 0.45, True, False),
)


@functools.cache
def _rand_table(device: torch.device) -> Tensor:
    return torch.tensor(RAND_OPS, dtype=torch.float64, device=device)


def rand_value(row: Tensor, level: Tensor, sign: Tensor, side: int) -> Tensor:
    """The value at levels 0 to 10 of operations given as rows (..., 5) of RAND_OPS."""
    op, base, span, signed, whole = row.unbind(-1)
    value = base + level / 10 * span  # float64: int(0.7 * 110) must fall where timm's does
    value = torch.where(whole > 0, value.trunc(), value)
    shift = (op == Op.TRANSLATE_X) | (op == Op.TRANSLATE_Y)
    return torch.where(signed > 0, value * sign, value) * torch.where(shift, side, 1)


def draw_randaugment(n: int, side: int, ops: int, magnitude: float, std: float, rng: torch.Generator) -> Draw:
    """`ops` operations per sample, drawn with replacement, at levels Normal(magnitude, std) cut to [0, 10]."""
    shape = (n, ops)
    row = _rand_table(rng.device)[randint(shape, len(RAND_OPS), rng)]
    used = bernoulli(shape, RAND_PROBABILITY, rng)
    noise = torch.randn(shape, generator=rng, device=rng.device)
    level = (magnitude + std * noise.double()).clamp(0, 10)
    value = rand_value(row, level, sign(shape, rng), side)
    return Draw((row[..., 0] * used).long(), value.float())


# SimAugment (SimCLR, MoCo v2): color jitter, grayscale and blur, each with its probability.


class SimDraw(NamedTuple):
    jittered: Tensor  # (N,) bool
    factor: Tensor  # (N, 3) of brightness, contrast and saturation
    hue: Tensor  # (N,) turns
    order: Tensor  # (N, 4) permutations, as tones.color_jitter has them
    gray: Tensor  # (N,) bool
    sigma: Tensor  # (N,) pixels, 0: no blur


def draw_sim(n: int, rng: torch.Generator, jitters: bool = True) -> SimDraw:
    return SimDraw(
        jittered=bernoulli((n,), 0.8 if jitters else 0.0, rng),
        factor=uniform((n, 3), 0.6, 1.4, rng),
        hue=uniform((n,), -0.1, 0.1, rng),
        order=uniform((n, 4), 0, 1, rng).argsort(1),
        gray=bernoulli((n,), 0.2, rng),
        sigma=uniform((n,), 0.1, 2.0, rng) * bernoulli((n,), 0.5, rng),
    )


def apply_sim(x: Tensor, draw: SimDraw, jitters: bool = True) -> Tensor:
    """Floats in [0, 1] to the same."""
    if jitters:
        brightness, contrast, saturation = draw.factor.unbind(1)
        jittered = color.color_jitter(x, brightness, contrast, saturation, draw.hue, draw.order)
        x = lut.choose(draw.jittered, jittered, x)
    x = lut.choose(draw.gray, color.grayscale(x), x)
    return ops.gaussian_blur(x, draw.sigma)


# Policies, from uint8 images to the same, or to floats in [0, 1].


def _plain(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    return x


def _sim(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    jitters = not view.jitter  # else it was done
    draw = draw_sim(len(x), rng, jitters)
    return views.apply_sim(x, *draw) if kernels and views.supports(x) else apply_sim(ops.to_float(x), draw, jitters)


def _rand(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    draw = draw_randaugment(len(x), x.shape[3], view.rand_ops, view.rand_magnitude, view.rand_std, rng)
    # timm interpolates, bilinear or bicubic at random; bilinear here.
    return apply_draw(x, draw, view.fill, bilinear=True, kernels=kernels)


def _stacked_rand(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    """Jitter with probability 0.8, grayscale 0.2 and blur 0.5, then RandAugment on the rounded result."""
    return _rand(ops.to_uint8(255 * _sim(x, view, rng, kernels)), view, rng, kernels)


def _auto(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    return apply_draw(x, draw_autoaugment(len(x), x.shape[3], rng), view.fill, kernels=kernels)


POLICIES: dict[str, Callable[[Tensor, ViewConfig, torch.Generator, bool], Tensor]] = {
    "none": _plain,
    "sim": _sim,
    "rand": _rand,
    "stacked-rand": _stacked_rand,
    "auto": _auto,
}


def jitter(x: Tensor, amount: float, rng: torch.Generator, kernels: bool) -> Tensor:
    """torchvision's ColorJitter(amount, amount, amount): uint8 to uint8."""
    factor_N3 = uniform((len(x), 3), 1 - amount, 1 + amount, rng)
    order_N3 = uniform((len(x), 3), 0, 1, rng).argsort(1)
    if kernels and views.supports(x):
        return views.apply_tone(x, factor_N3, order_N3)
    return ops.to_uint8(255 * color.tone_jitter(ops.to_float(x), factor_N3, order_N3))


def random_cutout(x: Tensor, side: int, rng: torch.Generator) -> Tensor:
    center_y, center_x = (randint((len(x),), length, rng) for length in x.shape[2:])
    return ops.cutout(x, center_y, center_x, side)


def random_rotate(x: Tensor, most: float, rng: torch.Generator, kernels: bool) -> Tensor:
    """By an angle of up to `most` degrees, what it uncovers black, as torchvision's RandomRotation."""
    angle = uniform((len(x), 1), -most, most, rng)
    return apply_draw(x, Draw(torch.full_like(angle, Op.ROTATE, dtype=torch.int64), angle), 0, kernels=kernels)
