"""Operations against PIL and torchvision, sample by sample, on patches of photographs."""

import functools
import itertools
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sklearn.datasets import load_sample_images
from torch import Tensor

from longtail.views import ops
from longtail.views.ops import Op
from tests.views.reference import apply_by_torchvision

FILL = 77  # a level that is not at an end of the range
SHAPES = [(32, 32), (64, 64), (8, 8), (24, 40)]


@functools.cache
def patches(height: int, width: int, n: int = 24) -> Tensor:
    """Return n patches of two photographs, reduced so that a patch shows a part of an object."""
    tiles = []
    for photo in load_sample_images().images:
        small = np.asarray(Image.fromarray(photo).resize((6 * width, 4 * height)))
        tiles += [small[i * height :, j * width :][:height, :width] for i in range(4) for j in range(6)]
    chosen = np.stack(tiles)[:: len(tiles) // n][:n]
    return torch.from_numpy(chosen).permute(0, 3, 1, 2).contiguous()


def to_pil(x: Tensor) -> Image.Image:
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def by_pil(x: Tensor, function: Callable[..., Image.Image], *params: Tensor) -> Tensor:
    """Apply a function of PIL to each sample, with parameters as plain numbers."""
    rows = zip(x, *(p.tolist() for p in params), strict=True)
    return torch.stack([from_pil(function(to_pil(image), *values)) for image, *values in rows])


def by_torchvision(x: Tensor, function: Callable[..., Tensor], *params: Tensor) -> Tensor:
    rows = zip(x, *(p.tolist() for p in params), strict=True)
    return torch.stack([function(image, *values) for image, *values in rows])


def uniform(n: int, low: float, high: float, seed: int = 0) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=torch.Generator().manual_seed(seed))


def gap(a: Tensor, b: Tensor) -> Tensor:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs()


def differing(a: Tensor, b: Tensor) -> float:
    """Return the share of pixels that differ in any channel."""
    return (gap(a, b).amax(1) > 0).double().mean().item()


def boxes(n: int, height: int, width: int) -> tuple[Tensor, ...]:
    """Return random boxes of at least 2 x 2 pixels; the first is the whole image."""
    rng = np.random.default_rng(0)
    h, w = rng.integers(2, height + 1, n), rng.integers(2, width + 1, n)
    h[0], w[0] = height, width
    top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
    return tuple(torch.from_numpy(v) for v in (top, left, h, w))


# Resampling.


@pytest.mark.parametrize("few_pixels", [0, 10_000], ids=["one by one", "batched"])
@pytest.mark.parametrize("interpolation", get_args(ops.Interpolation))
@pytest.mark.parametrize("size", [16, 32, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_resized_crop(
    shape: tuple[int, int],
    size: int,
    interpolation: ops.Interpolation,
    few_pixels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "FEW_PIXELS", few_pixels)
    x, box = patches(*shape), boxes(24, *shape)
    ours = ops.resized_crop(x, *box, size, torch.zeros(24, dtype=torch.bool), interpolation)

    def pil(image: Image.Image, top: int, left: int, h: int, w: int) -> Image.Image:
        return image.crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling[interpolation.upper()])

    def torchvision(image: Tensor, top: int, left: int, h: int, w: int) -> Tensor:
        mode = TF.InterpolationMode(interpolation)
        return TF.resized_crop(image, top, left, h, w, [size, size], mode, antialias=True)

    assert gap(ours, by_torchvision(x.float(), torchvision, *box)).max() < 2e-3  # of 255 gray levels
    # PIL rounds to a level after each direction, and clips values of a bicubic filter below 0 and above 255.
    assert gap(ours.clamp(0, 255), by_pil(x, pil, *box)).max() < (1.01 if interpolation == "bilinear" else 8)


@pytest.mark.parametrize("few_pixels", [0, 10_000], ids=["one by one", "batched"])
def test_resized_crop_flips_per_sample_and_sees_only_its_box(few_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "FEW_PIXELS", few_pixels)
    x, box, flip = patches(32, 32), boxes(24, 32, 32), torch.arange(24) % 2 == 0
    plain = ops.resized_crop(x, *box, 32, torch.zeros(24, dtype=torch.bool))
    flipped = ops.resized_crop(x, *box, 32, flip)
    assert torch.equal(flipped[flip], plain[flip].flip(3)) and torch.equal(flipped[~flip], plain[~flip])
    scribbled = torch.full_like(x, 255)
    for i, (top, left, h, w) in enumerate(zip(*(b.tolist() for b in box), strict=True)):
        scribbled[i, :, top : top + h, left : left + w] = x[i, :, top : top + h, left : left + w]
    assert torch.equal(ops.resized_crop(scribbled, *box, 32, flip), flipped)


def test_resized_crop_of_the_whole_image_at_its_size_is_the_identity() -> None:
    x = patches(32, 32)
    zero = torch.zeros(24, dtype=torch.long)
    assert torch.equal(ops.resized_crop(x, zero, zero, zero + 32, zero + 32, 32, zero > 0), x.float())


@pytest.mark.parametrize("shape", [*SHAPES, (5, 5)])
def test_gaussian_blur(shape: tuple[int, int]) -> None:
    x, sigma = patches(*shape) / 255, uniform(24, 0.1, 2.0)
    kernel = [2 * min(ops.BLUR_RADIUS, side - 1) + 1 for side in reversed(shape)]
    oracle = by_torchvision(x, lambda image, s: TF.gaussian_blur(image, kernel, [s, s]), sigma)
    assert gap(ops.gaussian_blur(x, sigma), oracle).max() < 1e-5
    assert gap(oracle, x).max() > 0.1


def test_gaussian_blur_is_near_pils() -> None:
    x, sigma = patches(64, 64), uniform(24, 0.1, 2.0)
    ours = ops.to_uint8(ops.gaussian_blur(x.float(), sigma))
    oracle = by_pil(x, lambda image, s: image.filter(ImageFilter.GaussianBlur(s)), sigma)
    # PIL approximates the Gaussian by repeated box filters and extends the border otherwise.
    assert gap(ours, oracle)[:, :, 6:-6, 6:-6].mean() < 1.0 < gap(x, oracle)[:, :, 6:-6, 6:-6].mean()


def test_gaussian_blur_of_sigma_zero_is_the_identity() -> None:
    x = patches(32, 32) / 255
    sigma = uniform(24, 0.5, 2.0) * (torch.arange(24) % 2)
    ours = ops.gaussian_blur(x, sigma)
    assert torch.equal(ours[::2], x[::2])
    assert (gap(ours[1::2], x[1::2]).amax((1, 2, 3)) > 0.01).all()


# Geometry.


@pytest.mark.parametrize("shape", SHAPES)
def test_padded_crop(shape: tuple[int, int]) -> None:
    x, pad = patches(*shape), 4
    top, left = torch.arange(24) % 9, torch.arange(24) // 3
    oracle = by_torchvision(x, lambda image, t, w: TF.crop(TF.pad(image, [pad]), t, w, *shape), top, left)
    assert torch.equal(ops.padded_crop(x, top, left, pad), oracle)
    assert torch.equal(ops.padded_crop(x.float(), top, left, pad), oracle.float())

    def pil(image: Image.Image, t: int, w: int) -> Image.Image:
        return ImageOps.expand(image, pad, fill=0).crop((w, t, w + shape[1], t + shape[0]))

    assert torch.equal(ops.padded_crop(x, top, left, pad), by_pil(x, pil, top, left))


def test_flip() -> None:
    x, mirrored = patches(24, 40), torch.arange(24) % 3 == 0
    oracle = by_pil(x, lambda image, on: ImageOps.mirror(image) if on else image, mirrored)
    assert torch.equal(ops.flip(x, mirrored), oracle)


GEOMETRY = {
    Op.SHEAR_X: uniform(24, -0.3, 0.3),
    Op.SHEAR_Y: uniform(24, -0.3, 0.3),
    Op.TRANSLATE_X: uniform(24, -14, 14).round(),
    Op.TRANSLATE_Y: uniform(24, -14, 14).round(),
    Op.ROTATE: uniform(24, -30, 30),
}


@pytest.mark.parametrize("op", GEOMETRY)
@pytest.mark.parametrize("shape", SHAPES)
def test_geometry_is_torchvisions(shape: tuple[int, int], op: Op) -> None:
    x, value = patches(*shape), GEOMETRY[op]
    ours = ops.apply_op(x, torch.full((24,), op), value, FILL)
    of_pil = by_pil(x, lambda image, v: apply_by_torchvision(image, op, v, FILL), value)
    of_tensors = by_torchvision(x, lambda image, v: apply_by_torchvision(image, op, v, FILL), value)
    # PIL has 16-bit fixed-point positions, torchvision normalized ones: ties fall on either side.
    assert differing(ours, of_pil) < 0.002
    assert differing(ours, of_tensors) < 0.02
    assert differing(ours, x) > 0.3


@pytest.mark.parametrize("shape", SHAPES)
def test_affine_takes_any_matrix(shape: tuple[int, int]) -> None:
    x, matrix = patches(*shape), torch.eye(2, 3).repeat(24, 1, 1)
    matrix += torch.stack([uniform(24, -0.3, 0.3, seed) for seed in range(6)], 1).view(24, 2, 3)
    matrix[:, :, 2] *= 20  # shifts of up to 6 pixels, fractions too

    def pil(resample: Image.Resampling) -> Tensor:
        def transform(image: Image.Image, *m: float) -> Image.Image:
            return image.transform(image.size, Image.Transform.AFFINE, m, resample, fillcolor=(FILL,) * 3)

        return by_pil(x, transform, *matrix.flatten(1).unbind(1))

    assert differing(ops.affine(x, matrix, FILL), pil(Image.Resampling.NEAREST)) < 0.002
    smooth, oracle = ops.affine(x, matrix, FILL, bilinear=True), pil(Image.Resampling.BILINEAR)
    assert (gap(smooth, oracle) > 1).double().mean() < 1e-3  # PIL truncates, and the border may fall on either side
    assert differing(smooth, ops.affine(x, matrix, FILL)) > 0.3


def test_affine_fills_the_uncovered_with_fill_alone() -> None:
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    moved = ops.affine(white, ops.translation_matrix(torch.tensor([3.0]), torch.tensor([-2.0])), FILL)
    expected = torch.full((8, 8), 255, dtype=torch.uint8)
    expected[:, :3], expected[6:] = FILL, FILL
    assert torch.equal(moved, expected.expand(1, 3, 8, 8))


# Gray levels.


def solarize_add(image: Image.Image, added: float) -> Image.Image:
    return image.point([min(255, i + int(added)) if i < 128 else i for i in range(256)] * 3)


def posterize(image: Image.Image, bits: float) -> Image.Image:
    if bits == 0:  # black in the PIL that RandAugment was written for, refused by later ones
        return image.point([0] * 768)
    return ImageOps.posterize(image, int(bits))


FACTORS = torch.cat([torch.tensor([0.0, 1.0, 0.1, 1.9]), uniform(20, 0.0, 2.0)])
NONE = torch.zeros(24)
PHOTOMETRY: dict[Op, tuple[Callable[[Image.Image, float], Image.Image], Tensor]] = {
    Op.IDENTITY: (lambda image, v: image, FACTORS),
    Op.BRIGHTNESS: (lambda image, v: ImageEnhance.Brightness(image).enhance(v), FACTORS),
    Op.COLOR: (lambda image, v: ImageEnhance.Color(image).enhance(v), FACTORS),
    Op.CONTRAST: (lambda image, v: ImageEnhance.Contrast(image).enhance(v), FACTORS),
    Op.SHARPNESS: (lambda image, v: ImageEnhance.Sharpness(image).enhance(v), FACTORS),
    Op.POSTERIZE: (posterize, torch.arange(24.0) % 9),
    Op.SOLARIZE: (lambda image, v: ImageOps.solarize(image, v), torch.linspace(0, 256, 24).round()),
    Op.SOLARIZE_ADD: (solarize_add, torch.linspace(0, 128, 24).round()),
    Op.AUTOCONTRAST: (lambda image, v: ImageOps.autocontrast(image), NONE),
    Op.EQUALIZE: (lambda image, v: ImageOps.equalize(image), NONE),
    Op.INVERT: (lambda image, v: ImageOps.invert(image), NONE),
}
LUTS: dict[Op, Callable[..., Tensor]] = {
    Op.BRIGHTNESS: ops.brightness_lut,
    Op.CONTRAST: ops.contrast_lut,
    Op.POSTERIZE: ops.posterize_lut,
    Op.SOLARIZE: ops.solarize_lut,
    Op.SOLARIZE_ADD: ops.solarize_add_lut,
    Op.AUTOCONTRAST: ops.autocontrast_lut,
    Op.EQUALIZE: ops.equalize_lut,
    Op.INVERT: ops.invert_lut,
}


def hard_images(height: int, width: int) -> Tensor:
    """Return patches that are difficult for integer algorithms: unchanged, dark, gray, constant, and of two levels."""
    x = patches(height, width).clone()
    x[:4] = x[:4] // 4 + 90
    x[4:8] = x[4:8, :1]
    x[8] = 130
    x[9] = 0
    x[10] = 255
    x[11] = 100 + (x[11] > 128).to(torch.uint8)
    return x


def test_every_operation_has_an_oracle() -> None:
    assert set(PHOTOMETRY) | set(GEOMETRY) == set(Op)


@pytest.mark.parametrize("op", PHOTOMETRY)
@pytest.mark.parametrize("shape", [*SHAPES, (23, 23)])
def test_photometry_is_exactly_pils(shape: tuple[int, int], op: Op) -> None:
    x, (function, value) = hard_images(*shape), PHOTOMETRY[op]
    oracle = by_pil(x, function, value)
    assert torch.equal(ops.apply_op(x, torch.full((24,), op), value, FILL), oracle)
    assert op == Op.IDENTITY or not torch.equal(x, oracle) or (op == Op.EQUALIZE and shape == (8, 8))


@pytest.mark.parametrize("op", LUTS)
def test_tables_are_exactly_pils(op: Op) -> None:
    x, (function, value) = hard_images(32, 32), PHOTOMETRY[op]
    bare = op in (Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT)
    table = LUTS[op](x) if bare else LUTS[op](x, value)
    assert table.dtype == torch.uint8 and table.shape[2] == 256
    assert torch.equal(ops.apply_lut(x, table), by_pil(x, function, value))


@pytest.mark.parametrize("op", [Op.COLOR, Op.SHARPNESS])
def test_blends_are_exactly_pils(op: Op) -> None:
    x, degenerate = hard_images(32, 32), {Op.COLOR: ops.gray_levels, Op.SHARPNESS: ops.smooth}[op]
    assert torch.equal(ops.blend(degenerate(x), x, FACTORS), by_pil(x, PHOTOMETRY[op][0], FACTORS))


def test_photometry_agrees_with_torchvision_on_tensors() -> None:
    x = patches(32, 32)
    for op, value in (
        (Op.INVERT, NONE),
        (Op.EQUALIZE, NONE),
        (Op.POSTERIZE, torch.arange(24.0) % 5 + 4),
        (Op.SOLARIZE, torch.linspace(0, 255, 24)),
    ):
        ours = ops.apply_op(x, torch.full((24,), op), value, FILL)
        oracle = by_torchvision(x, lambda image, v, op=op: apply_by_torchvision(image, op, v, FILL), value)
        assert torch.equal(ours, oracle), op


def test_constant_images_stay_under_equalize_and_autocontrast() -> None:
    flat = torch.arange(0, 256, 5, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32)
    for op in (Op.EQUALIZE, Op.AUTOCONTRAST):
        assert torch.equal(ops.apply_op(flat, torch.full((len(flat),), op), torch.zeros(len(flat)), FILL), flat)


NEUTRAL = {Op.BRIGHTNESS: 1, Op.COLOR: 1, Op.CONTRAST: 1, Op.SHARPNESS: 1, Op.POSTERIZE: 8, Op.SOLARIZE: 256}


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (33, 17)])
def test_magnitude_zero_is_the_identity(shape: tuple[int, int], bilinear: bool) -> None:
    plain = [op for op in Op if op not in (Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT)]
    x = patches(*shape)[: len(plain)]
    value = torch.tensor([float(NEUTRAL.get(op, 0)) for op in plain])
    assert torch.equal(ops.apply_op(x, torch.tensor(plain), value, FILL, bilinear), x)


@pytest.mark.parametrize("bilinear", [False, True])
def test_samples_of_a_batch_are_independent(bilinear: bool) -> None:
    """A batch with a different operation for each sample gives the results of single samples."""
    x, op = patches(32, 32)[: len(Op)], torch.tensor(list(Op))
    values = {op: value for op, (_, value) in PHOTOMETRY.items()} | GEOMETRY
    value = torch.stack([values[o][5] for o in Op])
    together = ops.apply_op(x, op, value, FILL, bilinear)
    alone = [ops.apply_op(x[i : i + 1], op[i : i + 1], value[i : i + 1], FILL, bilinear) for i in range(len(Op))]
    assert torch.equal(together, torch.cat(alone))
    assert together.dtype == torch.uint8


def test_memory_format_does_not_matter() -> None:
    x, op = patches(32, 32)[: len(Op)], torch.tensor(list(Op))
    value = torch.full((len(Op),), 0.3)
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(ops.apply_op(last, op, value, FILL), ops.apply_op(x, op, value, FILL))


# Float images.


def jitter_oracle(image: Tensor, b: float, c: float, s: float, h: float, order: list[int]) -> Tensor:
    steps = (
        lambda i: TF.adjust_brightness(i, b),
        lambda i: TF.adjust_contrast(i, c),
        lambda i: TF.adjust_saturation(i, s),
        lambda i: TF.adjust_hue(i, h),
    )
    for k in order:
        image = steps[k](image)
    return image


def jitters(n: int) -> tuple[Tensor, ...]:
    factors = [uniform(n, 0.6, 1.4, seed) for seed in range(3)]
    order = torch.tensor(list(itertools.permutations(range(4))))[:n]
    return *factors, uniform(n, -0.1, 0.1, 3), order


@pytest.mark.parametrize("shape", SHAPES)
def test_color_jitter_in_all_orders(shape: tuple[int, int]) -> None:
    x, params = hard_images(*shape) / 255, jitters(24)
    oracle = by_torchvision(x, jitter_oracle, *params)
    assert gap(ops.color_jitter(x, *params), oracle).max() < 1e-4
    backwards = (*params[:4], params[4].flip(1))
    assert gap(ops.color_jitter(x, *backwards), oracle).max() > 0.02


def test_color_jitter_is_near_pils() -> None:
    x, params = patches(32, 32), jitters(24)
    ours = 255 * ops.color_jitter(x / 255, *params)
    oracle = by_pil(x, jitter_oracle, *params)
    assert gap(ours, oracle).mean() < 2 < gap(x, oracle).mean()  # gray levels; PIL cuts to whole levels at each step


def test_shift_hue() -> None:
    x, hue = hard_images(32, 32) / 255, torch.linspace(-0.5, 0.5, 24)
    assert gap(ops.shift_hue(x, hue), by_torchvision(x, TF.adjust_hue, hue)).max() < 1e-4
    gray = x[:, :1].expand_as(x)
    assert torch.equal(ops.shift_hue(gray, hue), gray)


def test_grayscale() -> None:
    x = patches(32, 32)
    ours = ops.grayscale(x / 255)
    assert gap(ours, TF.rgb_to_grayscale(x / 255, 3)).max() < 1e-6
    assert gap(255 * ours, by_pil(x, lambda image: image.convert("L").convert("RGB"))).max() < 1
    assert torch.equal(ops.gray_levels(x).expand_as(x), by_pil(x, lambda i: i.convert("L").convert("RGB")).int())


@pytest.mark.parametrize("side", [1, 7, 16, 100])
def test_cutout(side: int) -> None:
    x = patches(24, 40) / 255 + 0.1
    y, z = torch.arange(24), torch.arange(24) * 39 // 23
    oracle = x.clone()
    for i, (row, column) in enumerate(zip(y.tolist(), z.tolist(), strict=True)):
        top, left = row - side // 2, column - side // 2
        oracle[i, :, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
    assert torch.equal(ops.cutout(x, y, z, side), oracle)
    inner = (oracle == 0).all(1).sum((1, 2)).max().item()
    assert inner == min(side, 24) * min(side, 40)


def test_normalize() -> None:
    x, mean, std = patches(32, 32) / 255, torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.1])
    ours = ops.normalize(x, mean[:, None, None], std[:, None, None])
    assert gap(ours, TF.normalize(x, mean.tolist(), std.tolist())).max() < 1e-6


def test_conversions() -> None:
    x = patches(32, 32)
    assert torch.equal(ops.to_float(x), by_torchvision(x, lambda image: TF.convert_image_dtype(image)))
    assert torch.equal(ops.to_uint8(255 * ops.to_float(x)), x)
    assert ops.to_uint8(torch.tensor([-3.0, 1.4, 1.6, 300.0])).tolist() == [0, 1, 2, 255]
