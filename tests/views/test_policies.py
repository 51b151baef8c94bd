"""Random draws against published tables and the distributions of torchvision, and views against PIL and torchvision."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision.transforms as T
import torchvision.transforms.functional as TF
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms.autoaugment import AutoAugment, AutoAugmentPolicy

from longtail.config import ViewConfig, ViewsConfig
from longtail.views import Views, make_view, ops, policies
from longtail.views.ops import Op
from longtail.views.view import ASPECT_RATIO, STATISTICS, draw_box
from longtail.views.view import normalization_tensors as statistics_of
from tests.raises import raises
from tests.views.reference import apply_by_torchvision, move_by_pil
from tests.views.test_ops import GEOMETRY, PHOTOMETRY

DRAWS = 6000
SIGMAS = 5  # a right sampler fails one such comparison in two million
FILL = 128
PLAIN = ViewConfig(crop="none", flip=False)
BARE = (torch.zeros(3, 1, 1), torch.ones(3, 1, 1))  # no normalization


@functools.cache
def patches(side: int, n: int = 16) -> Tensor:
    tiles = []
    for photo in load_sample_images().images:
        small = np.asarray(Image.fromarray(photo).resize((4 * side, 2 * side)))
        tiles += [small[i * side :, j * side :][:side, :side] for i in range(2) for j in range(4)]
    return torch.from_numpy(np.stack(tiles)[:n]).permute(0, 3, 1, 2).contiguous()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def raw(x: Tensor, view: ViewConfig, size: int, seed: int = 0) -> Tensor:
    """Return the view before normalization, in [0, 1]."""
    return make_view(x, view, size, seeded(seed), *BARE)


def after_flip(n: int, seed: int = 0) -> torch.Generator:
    """Return the generator in the state after the flip of a view without a crop."""
    rng = seeded(seed)
    torch.rand(n, generator=rng)
    return rng


def assert_share(hits: Tensor, p: float) -> None:
    """Check that the share of hits fits a binomial distribution."""
    slack = SIGMAS * math.sqrt(p * (1 - p) / hits.numel())
    assert abs(hits.double().mean().item() - p) <= slack + 1e-12, (hits.double().mean().item(), p, slack)


def assert_uniform(sample: Tensor, low: float, high: float) -> None:
    """Compare with the uniform distribution by a Kolmogorov-Smirnov test."""
    assert low <= sample.min() and sample.max() <= high
    at = ((sample.double() - low) / (high - low)).sort().values
    rank = torch.arange(1, len(at) + 1) / len(at)
    assert (at - rank).abs().max() < 2.3 / math.sqrt(len(at))  # exceeded once in 20 000


def assert_same_distribution(a: Tensor, b: Tensor) -> None:
    """Compare two samples by a Kolmogorov-Smirnov test."""
    grid = torch.cat((a, b)).double().unique()
    below = [torch.searchsorted(s.double().sort().values, grid, right=True) / len(s) for s in (a, b)]
    assert (below[0] - below[1]).abs().max() < 2.3 * math.sqrt(1 / len(a) + 1 / len(b))


# AutoAugment.

NAMES = {
    "ShearX": Op.SHEAR_X,
    "ShearY": Op.SHEAR_Y,
    "TranslateX": Op.TRANSLATE_X,
    "TranslateY": Op.TRANSLATE_Y,
    "Rotate": Op.ROTATE,
    "Brightness": Op.BRIGHTNESS,
    "Color": Op.COLOR,
    "Contrast": Op.CONTRAST,
    "Sharpness": Op.SHARPNESS,
    "Posterize": Op.POSTERIZE,
    "Solarize": Op.SOLARIZE,
    "AutoContrast": Op.AUTOCONTRAST,
    "Equalize": Op.EQUALIZE,
    "Invert": Op.INVERT,
}
ENHANCE = (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS)


def test_cifar_policy_is_torchvisions() -> None:
    theirs = AutoAugment(AutoAugmentPolicy.CIFAR10).policies
    named = tuple(tuple((NAMES[name], p, level or 0) for name, p, level in pair) for pair in theirs)
    assert named == policies.CIFAR_POLICY


@pytest.mark.parametrize(
    ("side", "shifts"),
    [
        (8, (0, 0, 0, 1, 1, 2, 2, 2, 3, 3)),
        (32, (0, 1, 3, 4, 6, 8, 9, 11, 12, 14)),
        (224, (0, 11, 22, 33, 45, 56, 67, 78, 90, 101)),
    ],
)
def test_auto_values_are_the_published_ones(side: int, shifts: tuple[int, ...]) -> None:
    """Each operation has ten magnitudes; a signed one is added to the neutral value or subtracted from it."""
    signed = dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y), np.linspace(0, 0.3, 10))
    signed |= dict.fromkeys((Op.TRANSLATE_X, Op.TRANSLATE_Y), shifts)
    signed |= {Op.ROTATE: np.linspace(0, 30, 10)} | dict.fromkeys(ENHANCE, np.linspace(0, 0.9, 10))
    plain = {Op.POSTERIZE: (8, 8, 7, 7, 6, 6, 5, 5, 4, 4), Op.SOLARIZE: np.linspace(255, 0, 10)}
    plain |= dict.fromkeys((Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT), np.zeros(10))
    assert signed.keys() | plain.keys() == set(NAMES.values())
    for level in range(10):
        for op, values in signed.items():
            wanted = (int(op in ENHANCE), pytest.approx(values[level]))
            assert policies.auto_value(op, level, side) == wanted, (op, level)
        for op, values in plain.items():
            assert policies.auto_value(op, level, side) == (pytest.approx(values[level]), 0), (op, level)


def test_autoaugment_draws_each_pair_equally_often() -> None:
    draw = policies.draw_autoaugment(DRAWS, 32, seeded())
    assert draw.op.dtype == torch.int64 and draw.value.dtype == torch.float32
    expected: Counter[tuple[int, int]] = Counter()
    for (a, p, _), (b, q, _) in policies.CIFAR_POLICY:
        for op, chance in ((a, p), (Op.IDENTITY, 1 - p)):
            for then, chance_then in ((b, q), (Op.IDENTITY, 1 - q)):
                expected[op, then] += chance * chance_then / 25
    for op, then in itertools.product(Op, Op):
        assert_share((draw.op[:, 0] == op) & (draw.op[:, 1] == then), min(expected[op, then], 1.0))


def test_autoaugment_draws_the_policys_values_with_either_sign() -> None:
    draw = policies.draw_autoaugment(DRAWS, 32, seeded())
    for slot in range(2):
        allowed: dict[Op, set[float]] = {}
        for pair in policies.CIFAR_POLICY:
            op, p, level = pair[slot]
            base, swing = policies.auto_value(op, level, 32)
            if p > 0:
                allowed.setdefault(op, set()).update((round(base + swing, 4), round(base - swing, 4)))
        for op, values in allowed.items():
            drawn = draw.value[:, slot][draw.op[:, slot] == op]
            assert {round(v, 4) for v in drawn.tolist()} == values
            if len(values) > 1 and op != Op.SOLARIZE:
                middle = 1 if op in ENHANCE else 0
                assert_share((drawn > middle)[drawn != middle], 0.5)


def test_auto_view_is_torchvisions_pipeline() -> None:
    x = patches(32)
    draw = policies.draw_autoaugment(16, 32, after_flip(16))

    def oracle(image: Image.Image, op: list[int], value: list[float]) -> Tensor:
        for o, v in zip(op, value, strict=True):
            image = apply_by_torchvision(image, Op(o), v, FILL)
        return TF.to_tensor(image)

    rows = zip(x, draw.op.tolist(), draw.value.tolist(), strict=True)
    theirs = torch.stack([oracle(TF.to_pil_image(image), o, v) for image, o, v in rows])
    ours = raw(x, ViewConfig(crop="none", flip=False, policy="auto", fill=FILL), 32)
    assert ((ours - theirs).abs() > 1e-6).double().mean() < 0.002  # PIL's fixed-point positions
    assert (ours - ops.to_float(x)).abs().mean() > 0.02


# RandAugment.


# The value at a level from 0 to 10, for images of 64 pixels, as timm computes it for `rand-m...`.
RAND_VALUES: dict[Op, Callable[[float], float]] = {
    **dict.fromkeys((Op.AUTOCONTRAST, Op.EQUALIZE, Op.INVERT), lambda level: 0.0),
    **dict.fromkeys(ENHANCE, lambda level: level / 10 * 1.8 + 0.1),
    Op.POSTERIZE: lambda level: int(level / 10 * 4),
    Op.SOLARIZE: lambda level: int(level / 10 * 256),
    Op.SOLARIZE_ADD: lambda level: int(level / 10 * 110),
    Op.ROTATE: lambda level: level / 10 * 30,
    **dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y), lambda level: level / 10 * 0.3),
    **dict.fromkeys((Op.TRANSLATE_X, Op.TRANSLATE_Y), lambda level: level / 10 * 0.45 * 64),
}


def test_rand_has_every_operation_once() -> None:
    assert sorted(row[0] for row in policies.RAND_OPS) == sorted(RAND_VALUES) == sorted(set(Op) - {Op.IDENTITY})


@pytest.mark.parametrize("row", policies.RAND_OPS, ids=lambda row: row[0].name)
def test_rand_values(row: tuple[Op, float, float, bool, bool]) -> None:
    op, level = row[0], torch.linspace(0, 10, 101, dtype=torch.float64)
    rows = torch.tensor(row, dtype=torch.float64).expand(101, 5)
    plus, minus = (policies.rand_value(rows, level, torch.tensor(s), 64) for s in (1.0, -1.0))
    wanted = torch.tensor([RAND_VALUES[op](v) for v in level.tolist()], dtype=torch.float64)
    assert torch.allclose(plus, wanted, rtol=1e-12)
    assert torch.equal(minus, -plus if op in GEOMETRY else plus)


def test_randaugment_draws_with_replacement_and_probability_one_half() -> None:
    draw = policies.draw_randaugment(DRAWS, 32, 2, 10, 0.5, seeded())
    assert draw.op.shape == draw.value.shape == (DRAWS, 2)
    assert draw.op.dtype == torch.int64 and draw.value.dtype == torch.float32
    first, second = draw.op.unbind(1)
    for slot in (first, second):
        assert_share(slot == Op.IDENTITY, 0.5)
        for row in policies.RAND_OPS:
            assert_share(slot == row[0], 0.5 / 15)
    both = (first != Op.IDENTITY) & (second != Op.IDENTITY)
    assert_share(both, 0.25)
    assert_share((first == second)[both], 1 / 15)


def test_randaugment_magnitudes() -> None:
    def levels(magnitude: float, std: float) -> Tensor:
        draw = policies.draw_randaugment(8 * DRAWS, 32, 1, magnitude, std, seeded())
        return (draw.value[draw.op == Op.BRIGHTNESS] - 0.1) / 1.8 * 10

    middle = levels(5, 0.5)
    assert middle.mean().item() == pytest.approx(5, abs=SIGMAS * 0.5 / math.sqrt(len(middle)))
    assert middle.std().item() == pytest.approx(0.5, abs=SIGMAS * 0.5 / math.sqrt(2 * len(middle)))
    top = levels(10, 0.5)
    assert top.max().item() == pytest.approx(10, abs=1e-5)
    assert_share(top > 9.9999, 0.5)  # half of the normal is cut to 10
    assert levels(0, 1).min().item() == pytest.approx(0, abs=1e-5)
    assert torch.allclose(levels(7, 0), torch.tensor(7.0))


def test_randaugment_signs_and_shifts() -> None:
    draw = policies.draw_randaugment(4 * DRAWS, 40, 2, 9, 0, seeded())
    strength = {Op.ROTATE: 27.0, Op.SHEAR_X: 0.27, Op.SHEAR_Y: 0.27, Op.TRANSLATE_X: 16.2, Op.TRANSLATE_Y: 16.2}
    for op, value in strength.items():
        drawn = draw.value[draw.op == op]
        assert torch.allclose(drawn.abs(), torch.tensor(value))
        assert_share(drawn > 0, 0.5)


def test_rand_view_is_pils_pipeline() -> None:
    x = patches(32)
    draw = policies.draw_randaugment(16, 32, 4, 8, 0.5, after_flip(16))

    def oracle(image: Image.Image, op: list[int], value: list[float]) -> Tensor:
        for o, v in zip(map(Op, op), value, strict=True):
            image = move_by_pil(image, o, v, FILL) if o in GEOMETRY else PHOTOMETRY[o][0](image, v)
        return TF.to_tensor(image)

    rows = zip(x, draw.op.tolist(), draw.value.tolist(), strict=True)
    theirs = torch.stack([oracle(TF.to_pil_image(image), o, v) for image, o, v in rows])
    view = ViewConfig(crop="none", flip=False, policy="rand", rand_ops=4, rand_magnitude=8, fill=FILL)
    gap = 255 * (raw(x, view, 32) - theirs).abs()
    # PIL truncates interpolated levels, and later operations (solarize, equalize) may widen that step.
    assert gap.median() == 0 and gap.mean() < 2 and (gap > 3).double().mean() < 0.03
    assert (255 * (ops.to_float(x) - theirs).abs()).mean() > 10


# SimAugment.


def test_sim_draws() -> None:
    draw = policies.draw_sim(DRAWS, seeded())
    assert_share(draw.jittered, 0.8)
    assert_share(draw.gray, 0.2)
    assert_share(draw.sigma > 0, 0.5)
    assert_uniform(draw.sigma[draw.sigma > 0], 0.1, 2.0)
    for factor in draw.factor.unbind(1):
        assert_uniform(factor, 0.6, 1.4)
    assert_uniform(draw.hue, -0.1, 0.1)
    pairs = itertools.combinations([draw.jittered, draw.gray, draw.sigma > 0, *draw.factor.T, draw.hue], 2)
    for a, b in pairs:  # independent of one another
        assert abs(np.corrcoef(a, b)[0, 1]) < SIGMAS / math.sqrt(DRAWS)


def test_sim_orders_are_equally_frequent() -> None:
    order = policies.draw_sim(DRAWS, seeded()).order
    code = (order * torch.tensor([64, 16, 4, 1])).sum(1)
    assert len(code.unique()) == 24
    for permutation in itertools.permutations(range(4)):
        assert_share((order == torch.tensor(permutation)).all(1), 1 / 24)


@pytest.mark.parametrize("crop", ["none", "pad"])
def test_sim_view_is_torchvisions_pipeline(crop: str) -> None:
    x = patches(32)
    rng = after_flip(16)
    if crop == "pad":
        top, left = torch.randint(9, (2, 16), generator=rng)
        x = ops.padded_crop(x, top, left, 4)
    draw = policies.draw_sim(16, rng)

    def oracle(i: int) -> Tensor:
        image = ops.to_float(x[i])
        b, c, s = draw.factor[i].tolist()
        adjust = (
            lambda y: TF.adjust_brightness(y, b),
            lambda y: TF.adjust_contrast(y, c),
            lambda y: TF.adjust_saturation(y, s),
            lambda y: TF.adjust_hue(y, draw.hue[i].item()),
        )
        for k in draw.order[i].tolist() if draw.jittered[i] else []:
            image = adjust[k](image)
        image = TF.rgb_to_grayscale(image, 3) if draw.gray[i] else image
        return TF.gaussian_blur(image, [13, 13], [draw.sigma[i].item()]) if draw.sigma[i] else image

    ours = raw(patches(32), ViewConfig(crop=crop, flip=False, policy="sim"), 32)
    assert (ours - torch.stack([oracle(i) for i in range(16)])).abs().max() < 1e-4


def test_stacked_rand_is_sim_then_rand() -> None:
    x, stacked = patches(32), ViewConfig(crop="none", flip=False, policy="stacked-rand", rand_ops=3)
    rng = after_flip(16)
    jittered = ops.to_uint8(255 * policies.apply_sim(ops.to_float(x), policies.draw_sim(16, rng)))
    draw = policies.draw_randaugment(16, 32, 3, 10.0, 0.5, rng)
    assert torch.equal(raw(x, stacked, 32), ops.to_float(policies.apply_draw(jittered, draw, 128, bilinear=True)))


# Color jitter before the policy.


def jittered(x: Tensor, amount: float, rng: torch.Generator) -> Tensor:
    """Apply torchvision's ColorJitter without hue, with the random draws of a view."""
    factor = 1 - amount + 2 * amount * torch.rand(len(x), 3, generator=rng)
    order = torch.rand(len(x), 3, generator=rng).argsort(1)
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)

    def one(image: Tensor, factors: list[float], turns: list[int]) -> Tensor:
        for k in turns:
            image = adjust[k](image, factors[k])
        return image

    rows = zip(ops.to_float(x), factor.tolist(), order.tolist(), strict=True)
    return torch.stack([one(*row) for row in rows])


def test_jitter_is_torchvisions() -> None:
    x, rng = patches(32), after_flip(16)
    wanted = jittered(x, 0.4, rng)
    ours = raw(x, ViewConfig(crop="none", flip=False, jitter=0.4), 32)
    assert 255 * (ours - wanted).abs().max() < 0.51 < 5 < 255 * (ours - ops.to_float(x)).abs().mean()


def test_jitter_comes_before_randaugment() -> None:
    x, rng = patches(32), after_flip(16)
    before = ops.to_uint8(255 * jittered(x, 0.4, rng))
    draw = policies.draw_randaugment(16, 32, 2, 10.0, 0.5, rng)
    wanted = ops.to_float(policies.apply_draw(before, draw, 128, bilinear=True))
    ours = raw(x, ViewConfig(crop="none", flip=False, policy="rand", jitter=0.4), 32)
    assert (255 * (ours - wanted).abs() > 1.01).double().mean() < 1e-3


def test_jitter_replaces_that_of_sim_augment() -> None:
    """SimAugment still applies grayscale and blur; in the stacked policy RandAugment follows."""
    x, rng = patches(32), after_flip(16)
    before = jittered(x, 0.4, rng)
    draw = policies.draw_sim(16, rng, has_jitter=False)
    wanted = policies.apply_sim(before, draw._replace(jittered=torch.zeros(16, dtype=torch.bool)))
    assert not draw.jittered.any() and draw.gray.any() and (draw.sigma > 0).any()
    ours = raw(x, ViewConfig(crop="none", flip=False, policy="sim", jitter=0.4), 32)
    assert 255 * (ours - wanted).abs().max() < 0.51
    rand = policies.draw_randaugment(16, 32, 3, 10.0, 0.5, rng)
    after = ops.to_float(policies.apply_draw(ops.to_uint8(255 * ours), rand, 128, bilinear=True))
    stacked = ViewConfig(crop="none", flip=False, policy="stacked-rand", rand_ops=3, jitter=0.4)
    assert torch.equal(raw(x, stacked, 32), after)


# Crops and Cutout.


def sizes(n: int, height: int, width: int) -> Tensor:
    return torch.tensor([[height, width]]).expand(n, 2)


@pytest.mark.parametrize("height, width, scale", [(32, 32, (0.2, 1.0)), (48, 80, (0.08, 1.0)), (30, 64, (0.5, 1.0))])
def test_box_is_torchvisions(height: int, width: int, scale: tuple[float, float]) -> None:
    box = draw_box(sizes(DRAWS, height, width), scale, seeded())
    blank = torch.empty(3, height, width)
    torch.manual_seed(0)
    drawn = [T.RandomResizedCrop.get_params(blank, list(scale), list(ASPECT_RATIO)) for _ in range(3000)]
    top, left, h, w = torch.tensor(drawn).unbind(1)
    assert (box.top >= 0).all() and (box.top + box.height <= height).all()
    assert (box.left >= 0).all() and (box.left + box.width <= width).all()
    for ours, theirs in (
        (box.height, h),
        (box.width, w),
        (box.height * box.width, h * w),
        (box.width / box.height, w / h),
        (box.top, top),
        (box.left, left),
        (box.top / (height - box.height).clamp(min=1), top / (height - h).clamp(min=1)),
        (box.left / (width - box.width).clamp(min=1), left / (width - w).clamp(min=1)),
    ):
        assert_same_distribution(ours, theirs)


@pytest.mark.parametrize("height, width", [(8, 64), (64, 8), (9, 12), (50, 49)])
def test_box_falls_back_to_the_center(height: int, width: int) -> None:
    """If no candidate fits (the whole area with another aspect ratio), the box is that of torchvision."""
    box = draw_box(sizes(200, height, width), (1.0, 1.0), seeded())
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    theirs = Counter(T.RandomResizedCrop.get_params(blank, [1.0, 1.0], list(ASPECT_RATIO)) for _ in range(200))
    ours = Counter(zip(*(b.tolist() for b in box), strict=True))
    assert ours.most_common(1)[0][0] == theirs.most_common(1)[0][0]
    assert max(height, width) / min(height, width) < 1.5 or len(ours) == 1


def places(side: int, n: int) -> Tensor:
    """Return images whose red and green channels encode the position of each pixel from 1; padding is 0."""
    row, column = torch.meshgrid(torch.arange(1, side + 1), torch.arange(1, side + 1), indexing="ij")
    return torch.stack((row, column, row)).to(torch.uint8).expand(n, 3, side, side)


# Whole images on canvases


def canvases(fill: int) -> tuple[Tensor, Tensor]:
    """Return crops of photographs of many shapes, in the upper left corner of canvases with the value `fill`."""
    sizes = torch.tensor([[96, 96], [96, 64], [50, 96], [33, 70], [80, 41], [32, 32], [95, 33], [64, 64]])
    x = torch.full((8, 3, 96, 96), fill, dtype=torch.uint8)
    for canvas, photo, (height, width) in zip(x, patches(96), sizes.tolist(), strict=False):
        canvas[:, :height, :width] = photo[:, :height, :width]
    return x, sizes


KINDS = [
    ViewConfig(crop="resized", crop_scale=(0.08, 1.0), policy="sim"),
    ViewConfig(crop="resized", policy="rand"),
    ViewConfig(crop="pad", policy="auto", cutout=8),
    ViewConfig(crop="none", rotate=10),
]


@pytest.mark.parametrize("view", KINDS, ids=lambda view: view.crop + view.policy)
def test_canvas_around_an_image_has_no_effect(view: ViewConfig) -> None:
    black, white = (canvases(fill) for fill in (0, 255))
    one, two = (make_view(x, view, 32, seeded(), *BARE, size_N2=sizes) for x, sizes in (black, white))
    assert torch.equal(one, two) and one.shape == (8, 3, 32, 32)


def test_a_canvas_that_is_full_is_an_image() -> None:
    x = patches(96)
    full = torch.full((16, 2), 96)
    for view in KINDS[:2]:
        assert torch.equal(raw(x, view, 32), make_view(x, view, 32, seeded(), *BARE, size_N2=full))


def test_boxes_lie_within_their_images() -> None:
    wanted = torch.tensor([[40, 96], [96, 40], [33, 33], [7, 90]]).repeat(500, 1)
    top, left, height, width = draw_box(wanted, (0.08, 1.0), seeded())
    inside = (top >= 0) & (left >= 0) & (top + height <= wanted[:, 0]) & (left + width <= wanted[:, 1])
    assert inside.all() and (height > 0).all() and (width > 0).all()
    share = (height * width) / (wanted[:, 0] * wanted[:, 1])
    for i in range(3):
        assert share[i::4].min() < 0.15 and share[i::4].max() > 0.5  # of its own image, each


@pytest.mark.parametrize("share", [1.0, 0.875])
def test_the_plain_view_is_the_central_square(share: float) -> None:
    x, sizes = canvases(0)
    ours = 255 * Views(ViewsConfig(normalize="half", test_crop=share), 28).plain(x, sizes).mul(0.5).add(0.5)
    for i, (height, width) in enumerate(sizes.tolist()):
        side = round(min(height, width) * share)
        box = (height - side) // 2, (width - side) // 2, side, side
        theirs = TF.resized_crop(TF.to_pil_image(x[i, :, :height, :width]), *box, [28, 28])
        assert (ours[i] - 255 * TF.to_tensor(theirs)).abs().max() <= 1.01


def test_padded_crop_and_flip_draws() -> None:
    seen = (255 * raw(places(32, DRAWS), ViewConfig(crop="pad"), 32)).round().long()
    center, right = seen[:, :2, 16, 16], seen[:, 1, 16, 17]
    flipped = right < center[:, 1]
    assert_share(flipped, 0.5)
    row_shift, column_shift = center[:, 0] - 17, center[:, 1] - torch.where(flipped, 16, 17)
    for down, across in itertools.product(range(-4, 5), repeat=2):
        assert_share((row_shift == down) & (column_shift == across), 1 / 81)


def test_flip_can_be_off() -> None:
    x = patches(32)
    assert torch.equal(raw(x, PLAIN, 32), ops.to_float(x))
    flipped = raw(x, ViewConfig(crop="none"), 32)
    assert not torch.equal(flipped, ops.to_float(x))


def test_resized_crop_view_is_torchvisions() -> None:
    x, rng = patches(64), seeded()
    flips = torch.rand(16, generator=rng) < 0.5
    box = draw_box(sizes(16, 64, 64), (0.2, 1.0), rng)
    ours = raw(x, ViewConfig(crop="resized", crop_scale=(0.2, 1.0)), 32)
    for i, (top, left, h, w) in enumerate(zip(*(b.tolist() for b in box), strict=True)):
        theirs = TF.resized_crop(TF.to_pil_image(x[i]), top, left, h, w, [32, 32])
        theirs = TF.hflip(theirs) if flips[i] else theirs
        assert (ours[i] - TF.to_tensor(theirs)).abs().max() < 1.5 / 255


def test_cutout_centers_are_uniform() -> None:
    white = torch.full((DRAWS, 3, 32, 32), 255, dtype=torch.uint8)
    black = raw(white, ViewConfig(crop="none", cutout=16), 32).amax(1) == 0
    assert black.flatten(1).any(1).all()
    assert black.sum((1, 2)).max() == 256
    reach = torch.tensor([sum(c - 8 <= p < c + 8 for c in range(32)) / 32 for p in range(32)])
    for row, column in itertools.product((0, 5, 16, 31), repeat=2):
        assert_share(black[:, row, column], (reach[row] * reach[column]).item())


def test_cutout_is_black_before_normalization() -> None:
    x, view = patches(32), ViewConfig(crop="none", flip=False, cutout=8)
    mean, std = statistics_of("cifar10", x.device)
    ours = make_view(x, view, 32, seeded(), mean, std)
    hole = raw(x, view, 32) != ops.to_float(x)
    assert torch.equal(ours[hole], (-mean / std).expand_as(ours)[hole])
    assert torch.equal(ours[~hole], Views(ViewsConfig(), 32).plain(x)[~hole])


# Whole views.

EVERY = [
    ViewConfig(crop=crop, policy=policy, cutout=cutout)
    for crop, cutout in (("none", 0), ("pad", 16), ("resized", 0))
    for policy in policies.POLICIES
]


@pytest.mark.parametrize("view", EVERY, ids=lambda v: f"{v.crop}-{v.policy}")
def test_view_is_a_function_of_the_generator(view: ViewConfig) -> None:
    x = patches(32)
    a, b, other = raw(x, view, 32), raw(x, view, 32), raw(x, view, 32, seed=1)
    assert a.shape == (16, 3, 32, 32) and a.dtype == torch.float32
    assert a.min() >= 0 and a.max() <= 1
    assert torch.equal(a, b)
    assert not torch.equal(a, other)


@pytest.mark.parametrize("view", EVERY[1:], ids=lambda v: f"{v.crop}-{v.policy}")
def test_samples_draw_their_own_parameters(view: ViewConfig) -> None:
    same = patches(32)[5:6].expand(64, -1, -1, -1)
    distinct = {tuple(image.flatten().tolist()) for image in raw(same, view, 32)}
    assert len(distinct) > 20


@pytest.mark.parametrize("view", EVERY, ids=lambda v: f"{v.crop}-{v.policy}")
@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 3, 32, 32), (3, 3, 8, 8)])
def test_small_batches_and_images(shape: tuple[int, ...], view: ViewConfig) -> None:
    x = patches(shape[2])[: shape[0]]
    out = raw(x, view, shape[2])
    assert out.shape == shape and out.isfinite().all()


@pytest.mark.parametrize("view", EVERY, ids=lambda v: f"{v.crop}-{v.policy}")
def test_nothing_waits_for_the_host(view: ViewConfig) -> None:
    """Fake tensors have no data, so `.item()` and shapes that depend on data raise errors."""
    raw(patches(32), view, 32)  # fills the caches with real tables
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
        assert make_view(x, view, 32, seeded(), *BARE).shape == (4, 3, 32, 32)


def test_autocast_leaves_views_exact() -> None:
    x = patches(64)
    for policy in ("sim", "rand"):
        view = ViewConfig(crop="resized", policy=policy)
        plain = raw(x, view, 32)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(raw(x, view, 32), plain)


def test_pad_crop_refuses_another_size() -> None:
    with raises("conflict", "64x64", "32x32", "--views.query.crop"):
        raw(patches(64), ViewConfig(crop="pad"), 32)


def test_views() -> None:
    x = patches(64)
    config = ViewsConfig(
        query=ViewConfig(crop="resized", policy="auto", cutout=8),
        key=ViewConfig(crop="resized", policy="sim"),
        normalize="imagenet",
    )
    views, statistics = Views(config, 32), statistics_of("imagenet", x.device)
    for made, view in ((views.query, config.query), (views.key, config.key)):
        assert torch.equal(made(x, seeded()), make_view(x, view, 32, seeded(), *statistics))
    steps = [T.Resize(32), T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    theirs = torch.stack([T.Compose(steps)(TF.to_pil_image(image)) for image in x])
    assert (views.plain(x) - theirs).abs().max() < 1.5 / 255 / 0.224  # one gray level
    assert torch.equal(Views(config, 64).plain(x), ops.normalize(ops.to_float(x), *statistics))


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_made_once(name: str) -> None:
    device = torch.device("cpu")
    mean, std = statistics_of(name, device)
    assert statistics_of(name, torch.device("cpu"))[0] is mean
    assert mean.shape == std.shape == (3, 1, 1)
    assert [mean.flatten().tolist(), std.flatten().tolist()] == [pytest.approx(values) for values in STATISTICS[name]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("view", EVERY, ids=lambda v: f"{v.crop}-{v.policy}")
def test_view_is_captured_in_a_cuda_graph(view: ViewConfig) -> None:
    x, rng = patches(32).cuda(), torch.Generator("cuda").manual_seed(0)
    statistics = statistics_of("cifar10", x.device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # fills the caches: tables are copied from the host once
        make_view(x, view, 32, rng, *statistics)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(rng)
    with torch.cuda.graph(graph):
        captured = make_view(x, view, 32, rng, *statistics)
    rng.manual_seed(3)
    graph.replay()
    eager = make_view(x, view, 32, torch.Generator("cuda").manual_seed(3), *statistics)
    assert torch.equal(captured, eager)


# Turns.


def turned_by_pil(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate as torchvision's RandomRotation does: counter-clockwise, nearest pixel, black where uncovered."""
    rows = zip(x, angle.flatten().tolist(), strict=True)
    return torch.stack([TF.to_tensor(TF.to_pil_image(image).rotate(degrees)) for image, degrees in rows])


@pytest.mark.parametrize("flip", [False, True])
def test_a_turned_view_is_pils_rotation_of_the_mirrored_image(flip: bool) -> None:
    x, view = patches(32), ViewConfig(crop="none", flip=flip, rotate=15, fill=FILL)
    rng = seeded()
    mirrored = ops.flip(x, (torch.rand(16, generator=rng) < 0.5) & flip)
    angle = 30 * torch.rand(16, 1, generator=rng) - 15
    theirs = turned_by_pil(mirrored, angle)
    off = (raw(x, view, 32) - theirs).abs().amax(1) > 1e-6
    assert off.double().mean() < 0.002  # PIL has 16-bit fixed-point positions: ties fall on either side
    assert ((ops.to_float(mirrored) - theirs).abs().amax(1) > 1e-6).double().mean() > 0.3
    assert (theirs.amax(1) == 0).double().mean() > 0.02  # corners that were uncovered


def test_angles_are_uniform_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[policies.OpDraw] = []
    monkeypatch.setattr(policies, "apply_draw", lambda x, draw, fill, **_: drawn.append(draw) or x)
    raw(torch.zeros(DRAWS, 3, 4, 4, dtype=torch.uint8), ViewConfig(crop="none", rotate=15), 4)
    assert (drawn[0].op == Op.ROTATE).all() and len(drawn) == 1
    assert_uniform(drawn[0].value.flatten(), -15, 15)


def test_view_rotates_before_policy_and_cutout() -> None:
    x, view = patches(32), ViewConfig(crop="none", flip=False, rotate=45, policy="auto", cutout=8)
    turned = ops.to_uint8(255 * raw(x, ViewConfig(crop="none", flip=False, rotate=45), 32))
    rng = after_flip(16)
    torch.rand(16, 1, generator=rng)  # the angles
    assert torch.equal(
        raw(x, view, 32), ops.to_float(policies.random_cutout(policies._auto_policy(turned, view, rng, False), 8, rng))
    )
