"""The views' kernels against the operations they stand for: on a GPU, and on the CPU by the emulator."""

import pytest
import torch

from longtail import kernels
from longtail.kernels import expression
from longtail.views import fused, ops, policies
from longtail.views.ops import Op
from tests.emulator import ORDERS, Emulated, emulate

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("device", [*ORDERS, pytest.param("cuda", marks=cuda)], indirect=True)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Emulated:
    return emulate(fused.source(), tmp_path_factory.mktemp("views"))


@pytest.fixture
def device(request) -> str:
    """Where the kernels run: on CUDA, or on the CPU with an order of threads."""
    if request.param == "cuda":
        return "cuda"
    compiled, monkeypatch = request.getfixturevalue("compiled"), request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(fused, "source", lambda: compiled)
    monkeypatch.setattr(compiled, "order", request.param)
    monkeypatch.setattr(kernels, "available", lambda device: True)
    return "cpu"


@pytest.mark.parametrize("name", ["apply_draw", "apply_sim"])
def test_the_kernels_compile(name, tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="comes with torch for CUDA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, lowered = fused.source().cubin(expression(name, fused.SIDE), "sm_80")
    assert code[:4] == b"\x7fELF" and name in lowered


def test_elsewhere_the_operations_answer():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert not fused.knows(images)


def pictures(n: int, device: str) -> torch.Tensor:
    """Noise, ramps, dark and constant images."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8)
    x[1::4] = (torch.arange(32 * 32).view(32, 32) // 4).to(torch.uint8)
    x[2::4] //= 5
    x[3::8] = 77
    return x.to(device)


@everywhere
@pytest.mark.parametrize("op", list(Op))
def test_each_operation_is_bit_for_bit(op, device):
    n = 32
    x, spread = pictures(n, device), torch.linspace(-1, 1, n)
    scale = {Op.SHEAR_X: 0.3, Op.SHEAR_Y: 0.3, Op.TRANSLATE_X: 14, Op.TRANSLATE_Y: 14, Op.ROTATE: 30}.get(op)
    if scale is None:
        scale, spread = {Op.POSTERIZE: 8, Op.SOLARIZE: 256, Op.SOLARIZE_ADD: 110}.get(op, 1.9), spread.abs()
    value = (scale * spread).to(device)
    code = torch.full((n, 1), int(op), device=device)
    wanted = ops.apply_op(x, code[:, 0], value, 128)
    assert torch.equal(fused.apply_draw(x, code, value[:, None], 128), wanted)


def many(device: str) -> int:
    return 4096 if device == "cuda" else 200


@everywhere
def test_two_operations_in_a_row_are_bit_for_bit(device):
    x, rng = pictures(many(device), device), torch.Generator(device).manual_seed(1)
    draw = policies.draw_autoaugment(len(x), 32, rng)
    wanted = x
    for op_N, value_N in zip(draw.op.unbind(1), draw.value.unbind(1), strict=True):
        wanted = ops.apply_op(wanted, op_N, value_N, 128)
    assert fused.knows(x) and torch.equal(policies.apply_draw(x, draw, 128, kernels=True), wanted)


@everywhere
def test_sim_is_the_operations_up_to_rounding(device):
    """Sums are in another order; a pixel whose hue stands at a corner of the circle may fall on the other side of it."""
    x, rng = pictures(many(device), device), torch.Generator(device).manual_seed(2)
    draw = policies.draw_sim(len(x), rng)
    wanted, found = policies.apply_sim(ops.to_float(x), draw), fused.apply_sim(x, *draw)
    far = (found - wanted).abs()
    assert far.max() < (1e-3 if device == "cuda" else 2e-6) and far.mean() < 1e-6
