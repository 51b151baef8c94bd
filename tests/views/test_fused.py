"""Test the augmentation kernels against the operations in `views.ops`: on a GPU, and on the CPU with the emulator."""

import pytest
import torch

from longtail.config import ViewConfig, ViewsConfig
from longtail.kernels import nvrtc, views
from longtail.kernels.nvrtc import template_instance
from longtail.views import Views, ops, policies
from longtail.views.ops import Op
from longtail.views.view import STATISTICS, draw_box
from tests.emulator import ORDERS, Emulated, emulate

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("device", [*ORDERS, pytest.param("cuda", marks=cuda)], indirect=True)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Emulated:
    return emulate(views.cuda_source(), tmp_path_factory.mktemp("views"))


@pytest.fixture
def device(request) -> str:
    """Return the device of the test: CUDA, or the CPU with the emulator and an order of threads."""
    if request.param == "cuda":
        return "cuda"
    compiled, monkeypatch = request.getfixturevalue("compiled"), request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(views, "cuda_source", lambda: compiled)
    monkeypatch.setattr(compiled, "order", request.param)
    monkeypatch.setattr(nvrtc, "is_available", lambda device: True)
    return "cpu"


INSTANCES = [
    *(template_instance("apply_draw", side, bilinear) for side in (32, 224) for bilinear in (False, True)),
    *(template_instance(name, side) for side in (32, 224) for name in ("apply_sim", "apply_tone", "crop")),
    *(template_instance("normalize", floats) for floats in (False, True)),
]


@pytest.mark.parametrize("name", INSTANCES)
def test_kernels_compile(name, tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="comes with torch for CUDA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, lowered = views.cuda_source().cubin(name, "sm_80")
    assert code[:4] == b"\x7fELF" and name.split("<")[0] in lowered


def test_kernels_are_not_used_on_the_cpu():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert not views.supports(images)


def make_images(n: int, device: str, side: int = 32) -> torch.Tensor:
    """Return noise, ramps, dark and constant images."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, side, side), generator=rng, dtype=torch.uint8)
    x[1::4] = (torch.arange(side * side).view(side, side) // 4).to(torch.uint8)
    x[2::4] //= 5
    x[3::8] = 77
    return x.to(device)


# In shared memory, and beyond it (from 41 pixels for floats and 82 for bytes, with more threads).
sides = pytest.mark.parametrize("side", [32, 45, 84])


def values(op: Op, n: int, side: int) -> torch.Tensor:
    """Return values over the range of an operation."""
    spread = torch.linspace(-1, 1, n)
    shift = 0.45 * side
    scale = {Op.SHEAR_X: 0.3, Op.SHEAR_Y: 0.3, Op.TRANSLATE_X: shift, Op.TRANSLATE_Y: shift, Op.ROTATE: 30}.get(op)
    if scale is not None:
        return scale * spread
    return {Op.POSTERIZE: 8, Op.SOLARIZE: 256, Op.SOLARIZE_ADD: 110}.get(op, 1.9) * spread.abs()


@everywhere
@sides
@pytest.mark.parametrize("op", list(Op))
def test_each_operation_is_bit_identical(op, side, device):
    n = 32 if side == 32 else 8
    x, value = make_images(n, device, side), values(op, n, side).to(device)
    code = torch.full((n, 1), int(op), device=device)
    wanted = ops.apply_op(x, code[:, 0], value, 128)
    assert torch.equal(views.apply_draw(x, code, value[:, None], 128), wanted)


@everywhere
@sides
@pytest.mark.parametrize("op", [Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y, Op.ROTATE])
def test_bilinear_interpolation_is_equal_up_to_rounding(op, side, device):
    """Products are computed in another order, so a level halfway between two may be rounded differently."""
    n = 16 if side == 32 else 8
    x, value = make_images(n, device, side), values(op, n, side).to(device)
    code = torch.full((n, 1), int(op), device=device)
    wanted = ops.apply_op(x, code[:, 0], value, 128, bilinear=True).int()
    far = (views.apply_draw(x, code, value[:, None], 128, bilinear=True).int() - wanted).abs()
    edges = far > 1  # a source position exactly on the border may be outside for one of the two
    assert (far > 0).float().mean() < 0.02 and edges.float().mean() < 1e-3


def many(device: str) -> int:
    return 4096 if device == "cuda" else 200


@everywhere
def test_two_operations_are_bit_identical(device):
    x, rng = make_images(many(device), device), torch.Generator(device).manual_seed(1)
    draw = policies.draw_autoaugment(len(x), 32, rng)
    wanted = x
    for op_N, value_N in zip(draw.op.unbind(1), draw.value.unbind(1), strict=True):
        wanted = ops.apply_op(wanted, op_N, value_N, 128)
    assert views.supports(x) and torch.equal(policies.apply_draw(x, draw, 128, kernels=True), wanted)


@everywhere
@sides
def test_sim_is_equal_up_to_rounding(side, device):
    """Sums are computed in another order, and hues at a corner of the hue circle may differ."""
    x = make_images(many(device) if side == 32 else 24, device, side)
    draw = policies.draw_sim(len(x), torch.Generator(device).manual_seed(2))
    wanted, found = policies.apply_sim(ops.to_float(x), draw), views.apply_sim(x, *draw)
    far = (found - wanted).abs()
    assert far.max() < (1e-3 if device == "cuda" else 2e-6) and far.mean() < 1e-6


@everywhere
@sides
def test_tone_jitter_is_equal_up_to_rounding(side, device):
    x, rng = make_images(24, device, side), torch.Generator(device).manual_seed(3)
    factor = 0.6 + 0.8 * torch.rand(24, 3, generator=rng, device=device)
    order = torch.rand(24, 3, generator=rng, device=device).argsort(1)
    wanted = ops.to_uint8(255 * ops.tone_jitter(ops.to_float(x), factor, order)).int()
    far = (views.apply_tone(x, factor, order).int() - wanted).abs()
    assert far.max() <= 1 and (far > 0).float().mean() < 1e-3


@everywhere
@pytest.mark.parametrize("side, size", [(32, 32), (64, 24), (50, 70)])
def test_crops_are_equal_up_to_rounding(side, size, device):
    x, rng = make_images(24, device, side), torch.Generator(device).manual_seed(4)
    sizes = torch.randint(side // 3, side + 1, (24, 2), generator=rng, device=device)
    sizes[0] = side
    box = draw_box(sizes, (0.08, 1.0), rng)
    flip = torch.rand(24, generator=rng, device=device) < 0.5
    wanted = ops.to_uint8(ops.resized_crop(x, *box, size, flip)).int()
    far = (views.crop(x, *box, size, flip).int() - wanted).abs()
    assert far.max() <= 1 and (far > 0).float().mean() < 5e-3


@everywhere
@pytest.mark.parametrize("side", [32, 84])
@pytest.mark.parametrize("floats", [False, True])
def test_normalize_into(floats, side, device):
    """The kernel multiplies by 1/255 where torch on the CPU divides by 255, so the rounding of ties can differ."""
    x, out = make_images(12, device, side), torch.empty(12, 3, side, side, device=device, dtype=torch.bfloat16)
    x, out = ops.to_float(x) ** 0.5 if floats else x, out.to(memory_format=torch.channels_last)
    scale = [torch.tensor(values, device=device)[:, None, None] for values in STATISTICS["imagenet"]]
    wanted = ops.normalize(ops.to_float(x), *scale).bfloat16()
    assert views.can_normalize_into(x, out) and views.normalize_into(x, *scale, out) is out
    assert torch.equal(out, wanted) or (not floats and device == "cpu" and (out != wanted).float().mean() < 1e-3)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0)


def test_can_normalize_into(monkeypatch):
    monkeypatch.setattr(nvrtc, "is_available", lambda device: True)
    x, last = torch.zeros(2, 3, 8, 8), torch.channels_last
    out = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16).to(memory_format=last)
    assert views.can_normalize_into(x, out) and views.can_normalize_into(x.byte(), out)
    assert (
        not views.can_normalize_into(x.mT, out)
        and not views.can_normalize_into(x.half(), out)
        and not views.can_normalize_into(x[:, :1], out)
    )
    assert not views.can_normalize_into(x, out.float()) and not views.can_normalize_into(x, out.contiguous())


@everywhere
@pytest.mark.parametrize("policy", ["none", "sim", "rand", "stacked-rand", "auto"])
def test_views_with_and_without_kernels_are_equal(policy, device):
    """Images on canvases with crop, jitter and policy; later operations may amplify a difference in rounding."""
    x, sizes = make_images(16, device, 48), torch.tensor([[48, 48], [40, 30]], device=device).repeat(8, 1)
    view = ViewConfig(crop="resized", policy=policy, jitter=0.4 if policy != "auto" else 0.0)
    plain, kernels = (
        Views(ViewsConfig(query=view, normalize="half"), 36, k).query(x, torch.Generator(device).manual_seed(5), sizes)
        for k in (False, True)
    )
    far = (plain - kernels).abs() * 127.5
    assert (far > 1.01).float().mean() < 0.01 and far.mean() < 0.05
    for layout in (torch.channels_last, torch.contiguous_format):
        out = torch.empty_like(kernels, dtype=torch.bfloat16, memory_format=layout)
        by_kernels = Views(ViewsConfig(query=view, normalize="half"), 36, True)
        assert by_kernels.query(x, torch.Generator(device).manual_seed(5), sizes, out) is out
        torch.testing.assert_close(out.float(), kernels, rtol=2**-8, atol=1e-6)
