"""Augmentation policies: SimAugment, RandAugment, both stacked, and the CIFAR AutoAugment policy.

Random parameters are drawn for the whole batch at once, with fixed shapes, from one generator on the device of the images. The
same generator state gives the same views. Policies are composed of the operations in `ops`.
"""

# N samples, S operations per sample.

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.config import ViewConfig
from longtail.kernels import views
from longtail.views import ops
from longtail.views.ops import Op, bernoulli, randint, random_sign, uniform


class OpDraw(NamedTuple):
    """The operations of each sample, in the order of application, with their values."""

    op: Tensor  # (N, S) int64, codes of Op
    value: Tensor  # (N, S) float32


def apply_draw(x: Tensor, draw: OpDraw, fill: int, bilinear: bool = False, kernels: bool = False) -> Tensor:
    """Apply the drawn operations to uint8 images.

    Args:
        x: uint8 images.
        draw: The operations.
        fill: Gray level of uncovered pixels.
        bilinear: Interpolate bilinearly instead of taking the nearest pixel.
        kernels: Use the CUDA kernels if they support the images.
    """
    if kernels and views.supports(x):
        return views.apply_draw(x, draw.op, draw.value, fill, bilinear)
    for op_N, value_N in zip(draw.op.unbind(1), draw.value.unbind(1), strict=True):
        x = ops.apply_op(x, op_N, value_N, fill, bilinear)
    return x


# AutoAugment (Cubuk et al. 2019): the policy found on CIFAR-10, with the magnitudes of torchvision

# Pairs of (operation, probability, magnitude bin 0 to 9).
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
    """Return (base, swing) of an operation on images of `side` pixels: its value is base + swing or base - swing at random."""
    fraction = magnitude_bin / 9
    match op:
        case Op.SHEAR_X | Op.SHEAR_Y:
            return 0, 0.3 * fraction
        case Op.TRANSLATE_X | Op.TRANSLATE_Y:
            return 0, int(150 / 331 * side * fraction)  # up to 150 pixels of images of 331 pixels in the paper
        case Op.ROTATE:
            return 0, 30 * fraction
        case Op.BRIGHTNESS | Op.COLOR | Op.CONTRAST | Op.SHARPNESS:
            return 1, 0.9 * fraction
        case Op.POSTERIZE:
            return 8 - round(4 * fraction), 0
        case Op.SOLARIZE:
            return 255 * (1 - fraction), 0
    return 0, 0


@functools.cache
def _auto_table(side: int, device: torch.device) -> Tensor:
    """Return operation, probability, base and swing of the policy, (25, 2, 4); cached, to copy them to the device only once."""
    rows = [[(op, p, *auto_value(op, level, side)) for op, p, level in pair] for pair in CIFAR_POLICY]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def draw_autoaugment(n: int, side: int, rng: torch.Generator) -> OpDraw:
    """Draw one of the 25 pairs for each sample; each of its operations has a probability and a random sign.

    Args:
        n: Number of samples.
        side: Height and width of the images.
        rng: The random generator.
    """
    pair_N = randint((n,), len(CIFAR_POLICY), rng)
    op, probability, base, swing = _auto_table(side, rng.device)[pair_N].unbind(2)
    used = bernoulli((n, 2), probability, rng)
    value = base + swing * random_sign((n, 2), rng)
    return OpDraw((op * used).long(), value.float())  # Op.IDENTITY is 0


# RandAugment (Cubuk et al. 2020), with the distribution of timm's `rand-nS-mM-mstdD`

RAND_PROBABILITY = 0.5  # with which each drawn operation is applied

# Operation; value at level 0; difference of the value at level 10; random sign; truncated to an integer. Translations are
# fractions of the image size.
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
    """Return the values of operations.

    Args:
        row: Rows of RAND_OPS, (..., 5).
        level: Levels, 0 to 10.
        sign: 1 or -1, for operations with a random sign.
        side: Height and width of the images.
    """
    op, base, span, is_signed, is_integer = row.unbind(-1)
    value = base + level / 10 * span  # float64, so that int(0.7 * 110) is the same as in timm
    value = torch.where(is_integer > 0, value.trunc(), value)
    is_translation = (op == Op.TRANSLATE_X) | (op == Op.TRANSLATE_Y)
    return torch.where(is_signed > 0, value * sign, value) * torch.where(is_translation, side, 1)


def draw_randaugment(n: int, side: int, ops: int, magnitude: float, std: float, rng: torch.Generator) -> OpDraw:
    """Draw operations for each sample, with replacement.

    Args:
        n: Number of samples.
        side: Height and width of the images.
        ops: Number of operations per sample.
        magnitude: Mean level.
        std: Standard deviation of the normally distributed level, which is clipped to [0, 10].
        rng: The random generator.
    """
    shape = (n, ops)
    row = _rand_table(rng.device)[randint(shape, len(RAND_OPS), rng)]
    used = bernoulli(shape, RAND_PROBABILITY, rng)
    noise = torch.randn(shape, generator=rng, device=rng.device)
    level = (magnitude + std * noise.double()).clamp(0, 10)
    value = rand_value(row, level, random_sign(shape, rng), side)
    return OpDraw((row[..., 0] * used).long(), value.float())


# SimAugment (SimCLR, MoCo v2): color jitter, grayscale and blur, each with a probability


class SimDraw(NamedTuple):
    """The random parameters of SimAugment."""

    jittered: Tensor  # (N,) bool: apply color jitter
    factor: Tensor  # (N, 3): brightness, contrast and saturation
    hue: Tensor  # (N,): shift on the hue circle of length 1
    order: Tensor  # (N, 4): permutations for ops.color_jitter
    gray: Tensor  # (N,) bool: convert to grayscale
    sigma: Tensor  # (N,) of the blur in pixels; 0: no blur


def draw_sim(n: int, rng: torch.Generator, has_jitter: bool = True) -> SimDraw:
    """Draw the random parameters of SimAugment.

    Args:
        n: Number of samples.
        rng: The random generator.
        has_jitter: If false, no sample gets color jitter. The same number of random values is drawn.
    """
    return SimDraw(
        jittered=bernoulli((n,), 0.8 if has_jitter else 0.0, rng),
        factor=uniform((n, 3), 0.6, 1.4, rng),
        hue=uniform((n,), -0.1, 0.1, rng),
        order=uniform((n, 4), 0, 1, rng).argsort(1),
        gray=bernoulli((n,), 0.2, rng),
        sigma=uniform((n,), 0.1, 2.0, rng) * bernoulli((n,), 0.5, rng),
    )


def apply_sim(x: Tensor, draw: SimDraw, has_jitter: bool = True) -> Tensor:
    """Apply SimAugment.

    Args:
        x: Float images in [0, 1].
        draw: The random parameters.
        has_jitter: If false, skip color jitter; no sample of `draw` may have it.
    """
    if has_jitter:
        brightness, contrast, saturation = draw.factor.unbind(1)
        jittered = ops.color_jitter(x, brightness, contrast, saturation, draw.hue, draw.order)
        x = ops.where_samples(draw.jittered, jittered, x)
    x = ops.where_samples(draw.gray, ops.grayscale(x), x)
    return ops.gaussian_blur(x, draw.sigma)


# Policies: functions from uint8 images to uint8 images or to floats in [0, 1]


def _none_policy(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    return x


def _sim_policy(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    has_jitter = not view.jitter  # otherwise it has been applied already
    draw = draw_sim(len(x), rng, has_jitter)
    return views.apply_sim(x, *draw) if kernels and views.supports(x) else apply_sim(ops.to_float(x), draw, has_jitter)


def _rand_policy(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    draw = draw_randaugment(len(x), x.shape[3], view.rand_ops, view.rand_magnitude, view.rand_std, rng)
    # timm chooses bilinear or bicubic interpolation at random; here it is always bilinear.
    return apply_draw(x, draw, view.fill, bilinear=True, kernels=kernels)


def _stacked_rand_policy(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    """Apply SimAugment, round to uint8, and apply RandAugment."""
    return _rand_policy(ops.to_uint8(255 * _sim_policy(x, view, rng, kernels)), view, rng, kernels)


def _auto_policy(x: Tensor, view: ViewConfig, rng: torch.Generator, kernels: bool) -> Tensor:
    return apply_draw(x, draw_autoaugment(len(x), x.shape[3], rng), view.fill, kernels=kernels)


POLICIES: dict[str, Callable[[Tensor, ViewConfig, torch.Generator, bool], Tensor]] = {
    "none": _none_policy,
    "sim": _sim_policy,
    "rand": _rand_policy,
    "stacked-rand": _stacked_rand_policy,
    "auto": _auto_policy,
}


def random_color_jitter(x: Tensor, amount: float, rng: torch.Generator, kernels: bool) -> Tensor:
    """Apply torchvision's ColorJitter(amount, amount, amount) to uint8 images.

    Args:
        x: uint8 images.
        amount: Maximum deviation of the factors from 1.
        rng: The random generator.
        kernels: Use the CUDA kernels if they support the images.
    """
    factor_N3 = uniform((len(x), 3), 1 - amount, 1 + amount, rng)
    order_N3 = uniform((len(x), 3), 0, 1, rng).argsort(1)
    if kernels and views.supports(x):
        return views.apply_tone(x, factor_N3, order_N3)
    return ops.to_uint8(255 * ops.tone_jitter(ops.to_float(x), factor_N3, order_N3))


def random_cutout(x: Tensor, side: int, rng: torch.Generator) -> Tensor:
    """Apply Cutout with a square of `side` pixels at a random position."""
    center_y, center_x = (randint((len(x),), length, rng) for length in x.shape[2:])
    return ops.cutout(x, center_y, center_x, side)


def random_rotate(x: Tensor, max_degrees: float, rng: torch.Generator, kernels: bool) -> Tensor:
    """Rotate uint8 images by random angles, as torchvision's RandomRotation. Uncovered pixels are black.

    Args:
        x: uint8 images.
        max_degrees: Maximum angle.
        rng: The random generator.
        kernels: Use the CUDA kernels if they support the images.
    """
    angle = uniform((len(x), 1), -max_degrees, max_degrees, rng)
    return apply_draw(x, OpDraw(torch.full_like(angle, Op.ROTATE, dtype=torch.int64), angle), 0, kernels=kernels)
