"""Methods against explicit losses: the samples in A(i), gradients, and the content of the queue over time."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longtail import methods
from longtail.losses import balanced_softmax_loss, cross_entropy_loss, paco_loss, supcon_loss
from longtail.methods import Batch
from longtail.models.momentum import EMPTY_LABEL
from longtail.models.side_stream import SideStream
from tests.conftest import tiny

COUNTS = np.array([50, 20, 10, 5, 3, 2, 2, 1, 1, 1])
B = 12
HERE = SideStream(torch.device("cpu"))


def make(name: str, **changes):
    torch.manual_seed(0)
    config = tiny(name)
    return methods.make(replace(config, method=replace(config.method, queue=32, **changes)), COUNTS)


def batch(seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(B, 3, 8, 8, generator=g), torch.randn(B, 3, 8, 8, generator=g), torch.randint(10, (B,), generator=g)
    )


def by_hand(method, b: Batch):
    """Compute q, k, the labels of A(i) and the drop mask without the code of the method."""
    twin = copy.deepcopy(method)
    x = twin.net.trunk(b.query)
    q = F.normalize(twin.G(x))
    k = F.normalize(twin.key.net(b.key)).detach()
    filled = method.queue.labels_K != EMPTY_LABEL
    z = torch.cat([q, k, method.queue.keys_KD[filled]])
    y = torch.cat([b.y_B, b.y_B, method.queue.labels_K[filled]])
    return twin, x, q, z, y, torch.eye(B, len(z)).bool()


@pytest.mark.parametrize("name", ["paco", "paco-no-rebalance"])
@pytest.mark.parametrize("pushed", [0, 2, 5])
def test_paco_contrasts_query_key_and_filled_queue(name, pushed):
    config = tiny(name)
    torch.manual_seed(0)
    method = methods.make(replace(config, method=replace(config.method, queue=32, center_tau=0.5)), COUNTS)
    for i in range(pushed):  # 5 · 12 > 32: the queue wraps
        method.loss(batch(i + 1))
        method.after_backward(HERE), method.after_step()
    twin, x, q, z, y, drop = by_hand(method, batch())
    prior = torch.log(torch.tensor(COUNTS / COUNTS.sum())).float() if name == "paco" else None
    wanted = paco_loss(twin.net.head(x), q @ z.T, batch().y_B, y, drop, prior, 0.05, 0.1, 0.5)
    terms = method.loss(batch())
    torch.testing.assert_close(terms["loss"], wanted)
    wanted.backward(), terms["loss"].backward()
    for a, b in zip(method.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_supcon_stages():
    method = make("supcon")
    contrast, linear = method.stages
    method.set_stage(contrast)
    method.train()
    _, _, q, z, y, drop = by_hand(method, batch())
    torch.testing.assert_close(method.loss(batch())["loss"], supcon_loss(q @ z.T, batch().y_B, y, drop, 0.1))
    method.after_backward(HERE), method.after_step()

    method.set_stage(linear)
    method.train()
    learning = {n for n, p in method.named_parameters() if p.requires_grad}
    assert learning == {"net.head.weight", "net.head.bias"}
    state = copy.deepcopy(method.state_dict())
    terms = method.loss(Batch(batch().query, None, batch().y_B))
    torch.testing.assert_close(terms["loss"], cross_entropy_loss(method(batch().query), batch().y_B))
    method.after_backward(HERE), method.after_step()
    assert all(torch.equal(state[n], t) for n, t in method.state_dict().items())  # running averages and queue too


def test_softmax_methods():
    ce, balanced = (methods.make(tiny(n), COUNTS).eval() for n in ("ce", "balanced-softmax"))
    b = Batch(batch().query, None, batch().y_B)
    torch.testing.assert_close(ce.loss(b)["loss"], cross_entropy_loss(ce(b.query), b.y_B))
    prior = torch.log(torch.tensor(COUNTS / COUNTS.sum())).float()
    torch.testing.assert_close(balanced.loss(b)["loss"], balanced_softmax_loss(balanced(b.query), b.y_B, prior))


def test_queue_is_read_before_the_push_and_takes_every_batch_of_a_step():
    method = make("paco")
    method.loss(batch(1)), method.loss(batch(2))  # two batches accumulated into one step
    assert (method.queue.labels_K == EMPTY_LABEL).all()
    method.after_backward(HERE), method.after_step()
    assert method.queue.labels_K[: 2 * B].tolist() == [*batch(1).y_B.tolist(), *batch(2).y_B.tolist()]
    torch.testing.assert_close(method.queue.keys_KD[: 2 * B].norm(dim=1), torch.ones(2 * B))


def test_key_network_gets_no_gradient_and_follows():
    method = make("paco")
    method.loss(batch())["loss"].backward()
    assert all(p.grad is None for p in method.key.parameters())
    before = method.key.net[1][0].weight.clone()
    with torch.no_grad():
        method.G[0].weight += 1
    method.after_backward(HERE), method.after_step()
    torch.testing.assert_close(method.key.net[1][0].weight, before + 0.01)  # momentum 0.99


def test_paper_and_released_choices_reach_the_network():
    paper, released = make("paco", projection_norm=False, key_norm="ema"), make("paco")
    assert [type(m).__name__ for m in paper.G] == ["Linear", "ReLU", "Linear"] and len(released.G) == 4
    assert not paper.train().key.net.training and released.train().key.net.training
    bare = methods.make(replace(tiny("paco"), model=replace(tiny().model, bias=False)), COUNTS)
    assert bare.net.head.bias is None


def test_accuracy_is_that_of_the_logits_without_prior():
    method = make("paco").eval()
    right = (method(batch().query).argmax(1) == batch().y_B).float().mean() * 100
    assert method.loss(batch())["accuracy"] == right


@pytest.mark.parametrize("method", ["paco", "ride-2", "bbn", "crt"])
def test_only_the_convolutions_of_the_last_block_are_trained_on_request(method):
    """This is about the backbone: parts that a method adds are trained, and so are all batch norms."""
    config = tiny(method)
    config = replace(config, model=replace(config.model, name="resnet20_cifar", trainable="last-block"))
    made = methods.make(config, np.array([40, 20, 10]))
    made.set_stage(made.stages[0])
    trunk = made.net.trunk
    frozen = {name for name, p in trunk.named_parameters() if not p.requires_grad}
    convolutions = {f"{name}.weight" for name, m in trunk.named_modules() if isinstance(m, nn.Conv2d)}
    learn = convolutions - frozen
    own = {
        "paco": "body.stages.2.2.",
        "crt": "body.stages.2.2.",
        "bbn": ("body.left.", "body.right."),
        "ride-2": "body.experts.",
    }
    assert frozen < convolutions and frozen and learn == {n for n in convolutions if n.startswith(own[method])}
    if len(made.stages) > 1 and made.stages[1].frozen:
        made.set_stage(made.stages[1])
        assert not any(p.requires_grad for p in trunk.parameters())
        made.set_stage(made.stages[0])
        assert {name for name, p in trunk.named_parameters() if not p.requires_grad} == frozen
