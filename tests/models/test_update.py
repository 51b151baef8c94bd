"""Test the kernels of sgd.cu against torch: on the CPU with the emulator, and on CUDA if it is available."""

import copy

import pytest
import torch

from longtail.kernels import sgd
from tests.emulator import Emulated, emulate

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)], indirect=True)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Emulated:
    source = emulate(sgd.cuda_source(), tmp_path_factory.mktemp("update"))
    source.compile_all(["sgd", "update_average"])
    return source


@pytest.fixture
def device(request, monkeypatch) -> str:
    """Return the device of the test; on the CPU the kernels are emulated."""
    if request.param == "cpu":
        source = request.getfixturevalue("compiled")
        monkeypatch.setattr(sgd, "cuda_source", lambda: source)
    return request.param


def tensors(device: str, seed: int = 0) -> list[torch.Tensor]:
    """Return more tensors than fit into one launch, some larger than a block's piece, and one in channels_last."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(), (3,), (sgd.PIECE_SIZE,), (2 * sgd.PIECE_SIZE + 5,), *[(4,)] * sgd.MAX_TENSORS]
    made = [torch.randn(shape, generator=random).to(device) for shape in shapes]
    conv = torch.randn(16, 5, 3, 3, generator=random).to(device, memory_format=torch.channels_last)
    return [*made, conv]


@everywhere
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_steps_equal_torch(device, nesterov):
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 5e-2}
    ours, theirs = tensors(device), tensors(device)
    optimizers = [
        sgd.SGD(ours, lr=torch.tensor(0.1, device=device), **options),
        torch.optim.SGD(theirs, lr=0.1, **options),
    ]
    for step in range(3):
        for optimizer, learning in zip(optimizers, (ours, theirs), strict=True):
            for p, g in zip(learning, tensors(device, step + 1), strict=True):
                p.grad = g
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
    one, two = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for i in two:
        torch.testing.assert_close(one[i]["momentum_buffer"], two[i]["momentum_buffer"])


@everywhere
def test_a_run_can_go_on_with_either(device):
    """The state of torch.optim.SGD can be loaded; a new learning rate and new addresses are used."""
    made, grads = tensors(device), tensors(device, 1)
    theirs = torch.optim.SGD(made, lr=0.1, momentum=0.9)
    for p, g in zip(made, grads, strict=True):
        p.grad = g
    theirs.step()
    copies = [p.clone().requires_grad_() for p in made]
    ours = sgd.SGD(copies, lr=torch.tensor(0.1, device=device), momentum=0.9)
    here = ours.state_dict()["param_groups"]
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()) | {"param_groups": here})
    ours.param_groups[0]["lr"].fill_(0.05)
    theirs.param_groups[0]["lr"] = 0.05
    for p, g in zip(copies, grads, strict=True):
        p.grad = g.clone()
    for optimizer in (theirs, ours):
        optimizer.step()
    for p, q in zip(made, copies, strict=True):
        torch.testing.assert_close(p, q.detach())


@everywhere
def test_without_momentum_torch_keeps_no_state_and_ours_goes_on_from_there(device):
    made = tensors(device)[:3]
    for p in made:
        p.grad = torch.ones_like(p)
    theirs = torch.optim.SGD(made, lr=0.1, momentum=0)
    theirs.step()
    ours = copy.deepcopy(sgd.SGD(made, lr=torch.tensor(0.1, device=device), momentum=0))
    ours.load_state_dict(theirs.state_dict() | {"param_groups": ours.state_dict()["param_groups"]})
    moved = ours.param_groups[0]["params"]
    before = [p.clone() for p in moved]
    for p in moved:
        p.grad = torch.ones_like(p)
    ours.step()
    for p, old in zip(moved, before, strict=True):
        torch.testing.assert_close(p, old - 0.1)


def test_lr_must_be_a_float32_tensor():
    for rate in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        p = torch.ones(3, requires_grad=True)
        p.grad = torch.ones(3)
        with pytest.raises(TypeError):
            sgd.SGD([p], lr=rate).step()


@everywhere
def test_parameters_without_gradient_are_not_updated(device):
    made = tensors(device)[1:3]
    made[0].grad = torch.ones_like(made[0])
    before = [p.clone() for p in made]
    sgd.SGD(made, lr=torch.tensor(0.1, device=device), momentum=0.9).step()
    torch.testing.assert_close(made[0], before[0] - 0.1)
    torch.testing.assert_close(made[1], before[1], rtol=0, atol=0)


@everywhere
def test_update_average_is_lerp(device):
    keys, queries, pieces = tensors(device), tensors(device, 1), sgd.PieceTables()
    for _ in range(2):
        wanted = [k.lerp(q, 0.01) for k, q in zip(keys, queries, strict=True)]
        sgd.update_average(list(zip(keys, queries, strict=True)), 0.01, pieces)
        for k, w in zip(keys, wanted, strict=True):
            torch.testing.assert_close(k, w)


def test_tensors_with_different_strides_are_rejected():
    one = torch.randn(16, 5, 3, 3)
    with pytest.raises(ValueError):
        sgd.PieceTables().get([(one, one.to(memory_format=torch.channels_last))])
