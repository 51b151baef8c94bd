"""Multi-task and GPaCo against explicit losses: contrast sets, gradients, and the content of the queue."""

import copy

import pytest
import torch
import torch.nn.functional as F

from longtail.losses import (
    balanced_softmax_loss,
    cross_entropy_loss,
    effective_number_weights,
    paco_loss,
    supcon_loss,
)
from longtail.methods import Batch
from longtail.models.momentum import EMPTY_LABEL, MomentumNetwork
from tests.methods.test_methods import COUNTS, HERE, B, batch, by_hand, make

N_C = torch.from_numpy(COUNTS)
LOG_PRIOR = (N_C / N_C.sum()).log()


def after_steps(method, pushed: int):
    """Return the method after pushing this number of batches; 5 · 12 > 32, so that the queue wraps around."""
    for i in range(pushed):
        method.loss(batch(i + 1))
        method.after_backward(HERE), method.after_step()
    return method


def assert_same_gradients(method, twin) -> None:
    found = 0
    for (name, a), b in zip(method.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
            found += 1
    assert found > 20


# Multi-task

VARIANTS = {
    "ce-supcon": (False, "plain"),
    "ce-supcon-reweighted": (False, "reweighted"),
    "ce-supcon-balanced": (False, "balanced"),
    "balanced-softmax-supcon": (True, "reweighted"),
}


@pytest.mark.parametrize("pushed", [0, 2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_multi_task_is_a_softmax_loss_and_a_weighted_supcon(name, pushed):
    rebalance, kind = VARIANTS[name]
    method = after_steps(make(name, weight=0.4, beta=0.9), pushed)
    b = batch()
    twin, x, q, z, y, drop = by_hand(method, b)
    weight_B = effective_number_weights(N_C, 0.9)[b.y_B] if kind == "reweighted" else None
    log_prior_M = LOG_PRIOR[y] if kind == "balanced" else None
    contrast = supcon_loss(q @ z.T, b.y_B, y, drop, 0.1, weight_B, log_prior_M)
    logits = twin.net.head(x)
    softmax = balanced_softmax_loss(logits, b.y_B, LOG_PRIOR) if rebalance else cross_entropy_loss(logits, b.y_B)
    terms = method.loss(b)
    torch.testing.assert_close(terms["loss"], softmax + 0.4 * contrast)
    torch.testing.assert_close((terms["softmax"], terms["contrast"]), (softmax, contrast))
    (softmax + 0.4 * contrast).backward(), terms["loss"].backward()
    assert_same_gradients(method, twin)
    assert all(p.grad is None for p in method.key.parameters())


def test_multi_task_of_weight_0_leaves_the_projection_alone():
    method = make("ce-supcon", weight=0.0)
    method.loss(batch())["loss"].backward()
    assert all((p.grad == 0).all() for p in method.G.parameters())
    assert any((p.grad != 0).any() for p in method.net.trunk.parameters())


def test_multi_task_queues_its_keys_and_its_key_network_follows():
    method = make("ce-supcon")
    keys = F.normalize(copy.deepcopy(method).key.net(batch().key))
    method.loss(batch())
    before = method.key.net[1][0].weight.clone()
    with torch.no_grad():
        method.G[0].weight += 1
    method.after_backward(HERE), method.after_step()
    assert method.queue.labels_K[:B].tolist() == batch().y_B.tolist()
    torch.testing.assert_close(method.queue.keys_KD[:B], keys)
    torch.testing.assert_close(method.key.net[1][0].weight, before + 0.01)  # momentum 0.99


# GPaCo


def both_views(method, b: Batch):
    """Return a copy, features and projections of both views, samples, their labels, and the drop mask."""
    twin = copy.deepcopy(method)
    x = twin.net.trunk(torch.cat([b.query, b.key]))
    q = F.normalize(twin.G(x))
    filled = method.queue.labels_K != EMPTY_LABEL
    z = torch.cat([q, method.queue.keys_KD[filled]])
    y = torch.cat([b.y_B, b.y_B, method.queue.labels_K[filled]])
    return twin, x, q, z, y, torch.eye(2 * B, len(z)).bool()


@pytest.mark.parametrize("pushed", [0, 2, 5])
@pytest.mark.parametrize(("rebalance", "smoothing"), [(True, 0.0), (True, 0.2), (False, 0.2)])
def test_gpaco_has_both_views_as_anchors_and_as_partners(rebalance, smoothing, pushed):
    method = after_steps(make("gpaco", rebalance=rebalance, smoothing=smoothing, center_tau=0.5), pushed)
    twin, x, q, z, y, drop = both_views(method, batch())
    assert len(z) == 2 * B + min(pushed * B, 32)
    prior = LOG_PRIOR if rebalance else None
    wanted = paco_loss(twin.net.head(x), q @ z.T, y[: 2 * B], y, drop, prior, 0.05, 0.1, 0.5, smoothing)
    terms = method.loss(batch())
    torch.testing.assert_close(terms["loss"], wanted)
    wanted.backward(), terms["loss"].backward()
    assert_same_gradients(method, twin)


def test_gpaco_learns_through_both_views():
    """Both views have the gradients of the explicit loss, of similar size."""
    method, b = make("gpaco"), batch()
    mine, theirs = (
        b._replace(query=b.query.clone().requires_grad_(), key=b.key.clone().requires_grad_()) for _ in "ab"
    )
    twin, x, q, z, y, drop = both_views(method, theirs)
    paco_loss(twin.net.head(x), q @ z.T, y[: 2 * B], y, drop, LOG_PRIOR, 0.05, 0.1).backward()
    method.loss(mine)["loss"].backward()
    for a, b in ((mine.query, theirs.query), (mine.key, theirs.key)):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert 0.3 < mine.query.grad.norm() / mine.key.grad.norm() < 3


def test_gpaco_treats_both_views_equally():
    """Exchanging the views does not change the loss, only the queue. Batch norm uses running averages, which ignore order."""
    method = after_steps(make("gpaco"), 2).eval()
    b = batch()
    one, other = (method.loss(views)["loss"] for views in (b, b._replace(query=b.key, key=b.query)))
    torch.testing.assert_close(one, other)


def test_gpaco_queues_the_second_view_after_it_was_read():
    method = make("gpaco")
    _, _, q, *_ = both_views(method, batch())
    method.loss(batch())
    assert (method.queue.labels_K == EMPTY_LABEL).all() and not method.queue.waiting[0][0].requires_grad
    method.after_backward(HERE)
    assert (
        method.queue.labels_K[:B].tolist() == batch().y_B.tolist() and (method.queue.labels_K[B:] == EMPTY_LABEL).all()
    )
    torch.testing.assert_close(method.queue.keys_KD[:B], q[B:].detach())
    assert not method.queue.waiting


def test_gpaco_has_no_key_network_and_three_layers_without_batch_norm():
    method = make("gpaco")
    assert not any(isinstance(m, MomentumNetwork) for m in method.modules())
    assert {name.split(".")[0] for name, _ in method.named_parameters()} == {"net", "G"}
    assert [type(m).__name__ for m in method.G] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    before = copy.deepcopy(method.state_dict())
    method.after_step()
    assert all(torch.equal(before[name], t) for name, t in method.state_dict().items())
