"""PaCoLoss against the equation and, in a plain loop, against the method PaCo; its state and its errors."""

import copy
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import longtail
from longtail import methods, theory
from longtail.methods import Batch
from longtail.models.backbones import make_trunk
from longtail.models.momentum import EMPTY_LABEL
from longtail.models.side_stream import SideStream
from longtail.nn import LabeledQueue, MomentumNetwork, PaCoLoss
from tests.conftest import tiny
from tests.processes import together
from tests.raises import raises

COUNTS = [50, 20, 10, 5, 3, 2, 2, 1, 1, 1]
B, WIDTH, D = 12, 64, 32
SETTINGS = {"alpha": 0.05, "tau": 0.1, "queue": 32, "projection_dim": D}


def made(**changes) -> PaCoLoss:
    torch.manual_seed(0)
    return PaCoLoss(WIDTH, COUNTS, **(SETTINGS | changes))


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (B,), generator=g)
    return torch.randn(B, WIDTH, generator=g), torch.randn(B, D, generator=g), y


def batches(n: int) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    return [Batch(*torch.randn(2, B, 3, 8, 8, generator=g), torch.randint(10, (B,), generator=g)) for _ in range(n)]


# Against the equation


def by_equation(criterion: PaCoLoss, features, keys, y, past) -> float:
    """Compute Eq. 8 in float64, pair by pair; `past` has the keys and labels of the queue."""
    twin = copy.deepcopy(criterion).double().requires_grad_(False)
    x, c = features.double(), twin.config
    q = F.normalize(twin.G(x))
    samples = [(z, int(label)) for z, label in zip(q, y, strict=True)]
    samples += [(F.normalize(k, dim=0), int(label)) for k, label in zip(keys.double(), y, strict=True)]
    samples += [(F.normalize(k.double(), dim=0), int(label)) for k, label in past]
    total = 0.0
    for i, label in enumerate(y.tolist()):
        psi_c = [
            math.exp(float(twin.centers(x[i])[k]) / c.center_tau) * (n / sum(COUNTS) if c.rebalance else 1)
            for k, n in enumerate(COUNTS)
        ]
        psi_z = [(math.exp(float(q[i] @ z) / c.tau), m == label) for j, (z, m) in enumerate(samples) if j != i]
        Z = sum(psi_c) + sum(psi for psi, _ in psi_z)
        positives = [psi for psi, same in psi_z if same]
        pull = math.log(psi_c[label] / Z) + criterion.alpha * sum(math.log(psi / Z) for psi in positives)
        total -= pull / (1 + criterion.alpha * len(positives))
    return total / len(y)


@pytest.mark.parametrize("changes", [{}, {"rebalance": False}, {"center_tau": 0.5, "alpha": 0.3}, {"chunk": 7}])
def test_it_is_the_equation_with_a_queue_that_is_empty_half_full_and_wrapped(changes):
    criterion, past = made(**changes), []
    for step in range(4):
        features, keys, y = given(step)
        wanted = by_equation(criterion, features, keys, y, past[-32:])
        assert criterion(features, keys, y).item() == pytest.approx(wanted, rel=1e-5)
        past += list(zip(keys, y, strict=True))


# Against the method


def by_method(config, steps: list[Batch]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    method, losses = methods.make(config, torch.tensor(COUNTS)), []
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for batch in steps:
        loss = method.loss(batch)["loss"]
        loss.backward()
        method.after_backward(SideStream(torch.device("cpu")))
        optimizer.step(), optimizer.zero_grad(), method.after_step()
        losses.append(loss.item())
    return losses, method


def by_plain_loop(norm: str, steps: list[Batch], **changes) -> tuple[list[float], dict[str, nn.Module]]:
    torch.manual_seed(0)
    net = make_trunk("resnet8_cifar", image_size=8)
    criterion = PaCoLoss(net.width, COUNTS, **(SETTINGS | changes))
    query = nn.Sequential(net, criterion.G)
    key, losses = MomentumNetwork(query, 0.99, norm), []
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1, momentum=0.9)
    for images, others, y in (batch[:3] for batch in steps):
        loss = criterion(net(images), key(others), y)
        loss.backward()
        optimizer.step(), optimizer.zero_grad(), key.follow(query)
        losses.append(loss.item())
    return losses, {
        "net.trunk": net,
        "net.head": criterion.centers,
        "G": criterion.G,
        "key": key,
        "queue": criterion.queue,
    }


@pytest.mark.parametrize(
    ("norm", "changes"),
    [
        ("batch", {}),
        ("ema", {"rebalance": False, "center_tau": 0.5, "projection_norm": False}),
        ("batch", {"alpha": "auto", "smoothing": 0.1, "chunk": 7}),
    ],
)
def test_a_plain_loop_is_the_method_bit_for_bit(norm, changes):
    config, steps = tiny("paco"), batches(8)  # 8 · 12 > 32: the queue wraps
    config = replace(config, method=replace(config.method, **SETTINGS | changes, momentum=0.99, key_norm=norm))
    wanted, method = by_method(replace(config, train=replace(config.train, batch_size=B)), steps)
    found, parts = by_plain_loop(norm, steps, **changes, **({"batch": B} if "alpha" in changes else {}))
    assert found == wanted and len(set(found)) == 8
    state = {f"{part}.{name}": t for part, module in parts.items() for name, t in module.state_dict().items()}
    assert state.keys() == method.state_dict().keys()
    assert all(torch.equal(state[name], t) for name, t in method.state_dict().items())


# What it is made of


def test_the_centers_may_be_the_network_s_own_classifier():
    own = nn.Linear(WIDTH, 10, bias=False)
    criterion = made(centers=own)
    criterion(*given()).backward()
    assert criterion.centers is own and own.weight.grad.abs().sum() > 0
    x = given()[0]
    assert torch.equal(criterion.classify(x), own(x))


def test_terms_tell_of_the_training_and_the_loss_is_among_them():
    criterion = made().eval()
    terms, (x, _, y) = criterion.terms(*given()), given()
    assert terms["loss"] == criterion(*given()) and 0 < terms["P_sup"] < 1
    assert terms["accuracy"] == 100 * (criterion.classify(x).argmax(1) == y).float().mean()


def test_auto_alpha_is_that_of_the_theory():
    assert made(alpha="auto", batch=B).alpha == theory.auto_alpha(COUNTS, 32, B) != 0.05


def test_keys_are_put_away_in_training_and_get_no_gradient():
    criterion, (x, keys, y) = made(), given()
    keys.requires_grad_()
    criterion.eval()(x, keys, y)
    assert (criterion.queue.labels_K == EMPTY_LABEL).all()
    criterion.train()(x, keys, y).backward()
    assert criterion.queue.labels_K[:B].tolist() == y.tolist() and keys.grad is None
    torch.testing.assert_close(criterion.queue.keys_KD[:B], F.normalize(keys.detach()))


def test_autocast_leaves_the_loss_in_float32():
    criterion = made().eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = criterion(*given())
    assert found == criterion(*given())
    x, keys, y = given()
    half = criterion(x.bfloat16(), keys.bfloat16(), y)
    assert half.dtype == torch.float32 and half == criterion(x.bfloat16().float(), keys.bfloat16().float(), y)


def test_state_goes_through_a_checkpoint():
    one, two = made(), PaCoLoss(WIDTH, COUNTS, **SETTINGS)
    one(*given(1))
    two.load_state_dict(one.state_dict())
    assert one(*given(2)) == two(*given(2)) and "log_prior_C" not in one.state_dict()


def test_key_network_and_queue_serve_by_themselves():
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    key = MomentumNetwork(net)
    assert torch.equal(key(x), net(x)) and not key(x).requires_grad and key.momentum == 0.999
    queue = LabeledQueue(4, 2)
    queue.push(key(x), torch.arange(5))
    assert queue.labels_K.tolist() == [1, 2, 3, 4]


# Several processes


class Together(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, WIDTH)
        self.criterion = PaCoLoss(WIDTH, COUNTS, **SETTINGS, contrast="global")
        self.query = nn.Sequential(self.net, self.criterion.G)
        self.key = MomentumNetwork(self.query, 0.9)

    def forward(self, one, other, y):
        return self.criterion(self.net(one), self.key(other), y)


def trained_in_parallel() -> dict[str, torch.Tensor]:
    """Make three steps with DistributedDataParallel in one of two processes, each on its own images."""
    module, g = Together(), torch.Generator().manual_seed(dist.get_rank())
    parallel = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        parallel(*torch.randn(2, 4, 6, generator=g), torch.randint(10, (4,), generator=g)).backward()
        optimizer.step(), optimizer.zero_grad(), module.key.follow(module.query)
    return {name: t for name, t in module.state_dict().items() if "running" not in name}


def test_data_parallel_processes_have_one_network_and_one_queue(tmp_path):
    one, two = together(2, tmp_path, trained_in_parallel)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (one["criterion.queue.labels_K"] >= 0).sum() == 2 * 3 * 4
    before = Together().state_dict()
    assert not any(torch.equal(one[name], before[name]) for name in ("net.weight", "criterion.centers.weight"))
    assert not torch.equal(one["key.net.0.weight"], before["key.net.0.weight"])


# What it refuses


@pytest.mark.parametrize(
    ("changes", "kind", "values"),
    [
        ({"alpha": 1.5}, "invalid-value", ["alpha 1.5", "[0, 1)"]),
        ({"tau": 0}, "invalid-value", ["tau 0.0", "greater"]),
        ({"alpha": "auto"}, "invalid-value", ["batch=128"]),
        ({"centers": nn.Linear(WIDTH, 9)}, "mismatch", ["64 features", "9 classes", "10 classes"]),
    ],
)
def test_settings_that_cannot_be(changes, kind, values):
    with raises(kind, *values):
        made(**changes)


@pytest.mark.parametrize("counts", [[5], [0, 0], [3, -1], [[1, 2]]])
def test_counts_that_cannot_be(counts):
    with raises("invalid-value", "class_counts", counts):
        PaCoLoss(WIDTH, counts)


def test_shapes_that_cannot_be():
    criterion, (x, keys, y) = made(), given()
    for wrong, values in {
        (x[:5], keys, y): ["features", (5, 64), (12, 64)],
        (x, x, y): ["keys", (12, 64), (12, 32), "criterion.G"],
        (x, keys, y[:, None]): ["labels", (12, 1), "(12,)"],
    }.items():
        with raises("mismatch", *values):
            criterion(*wrong)


def test_invalid_momentum_is_an_error():
    with raises("invalid-value", "momentum 1.5"):
        MomentumNetwork(nn.Linear(2, 2), 1.5)


def test_the_public_name_is_this_one():
    assert longtail.PaCoLoss is PaCoLoss and longtail.nn.PaCoLoss is PaCoLoss


def test_importing_the_module_registers_the_cifar_resnets():
    """In a process of its own, because other tests import the backbones."""
    code = 'import longtail.nn, timm; assert timm.create_model("resnet8_cifar", num_classes=0).num_features == 64'
    subprocess.run([sys.executable, "-c", code], check=True)
