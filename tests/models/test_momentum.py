"""The queue against a plain list, the moving average against its formula, and two processes against one another."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longtail import methods
from longtail.methods import Batch
from longtail.models.momentum import EMPTY_LABEL, LabeledQueue, MomentumNetwork
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.processes import together

D = 3


def batches(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, D, generator=g), torch.randint(9, (n,), generator=g)) for n in sizes]


@pytest.mark.parametrize("length", [1, 4, 7, 16])
@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [5, 1, 7, 2], [16, 5], [40], [1] * 20])
def test_queue_holds_the_newest_keys_with_their_labels(length, sizes):
    queue, history = LabeledQueue(length, D), []
    for keys, y in batches(sizes):
        queue.push(keys, y)
        history += list(zip(keys.tolist(), y.tolist(), strict=True))
        held = [
            (k, y) for k, y in zip(queue.keys_KD.tolist(), queue.labels_K.tolist(), strict=True) if y != EMPTY_LABEL
        ]
        assert sorted(held) == sorted(history[-length:])


def test_oldest_slot_is_overwritten_first_across_the_wrap():
    queue = LabeledQueue(5, 1)
    for start in (0, 3):
        values = torch.arange(start, start + 3)
        queue.push(values[:, None].float(), values)
    assert queue.labels_K.tolist() == [5, 1, 2, 3, 4] and queue.position == 1


def test_empty_slots_are_marked_and_zero():
    queue = LabeledQueue(4, D)
    assert queue.labels_K.tolist() == [EMPTY_LABEL] * 4 and not queue.keys_KD.any()


def test_a_queue_of_no_length_takes_anything():
    queue = LabeledQueue(0, D)
    queue.push(*batches([3])[0])
    assert queue.keys_KD.shape == (0, D)


def test_queue_state_survives_a_checkpoint():
    one, two = LabeledQueue(5, D), LabeledQueue(5, D)
    data = batches([3, 4, 2])
    one.push(*data[0])
    two.load_state_dict(one.state_dict())
    for keys, y in data[1:]:
        one.push(keys, y), two.push(keys, y)
    assert torch.equal(one.keys_KD, two.keys_KD) and torch.equal(one.labels_K, two.labels_K)
    assert one.position == two.position


def trained_paco() -> dict[str, torch.Tensor]:
    """Make three steps in one of two processes on its own batches, with summed gradients."""
    torch.manual_seed(0)
    method = methods.make(tiny("paco"), list(range(10, 0, -1)))
    learning = [p for p in method.parameters() if p.requires_grad]
    optimizer, g = torch.optim.SGD(learning, lr=0.1), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(2, 6, 3, 8, 8, generator=g)
        method.loss(Batch(*x, torch.randint(10, (6,), generator=g)))["loss"].backward()
        for p in learning:
            dist.all_reduce(p.grad)
        method.after_backward(SideStream(torch.device("cpu")))
        optimizer.step(), optimizer.zero_grad(), method.after_step()
    return {n: t for n, t in method.state_dict().items() if "running" not in n}


def test_key_network_and_queue_are_the_same_on_two_processes(tmp_path):
    """The processes train on different batches with averaged gradients; only batch-norm statistics differ."""
    one, two = together(2, tmp_path, trained_paco)
    assert all(torch.equal(one[n], two[n]) for n in one) and (one["queue.labels_K"] >= 0).sum() == 36
    assert not torch.equal(one["key.net.1.0.weight"], one["G.0.weight"])


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("norm", ["batch", "ema"])
def test_key_network_follows_the_query(norm):
    torch.manual_seed(0)
    query = network()
    key = MomentumNetwork(query, 0.9, norm)
    before = {n: t.clone() for n, t in key.net.state_dict().items()}
    query(torch.randn(8, 3, 4, 4))  # moves the running averages
    with torch.no_grad():
        for p in query.parameters():
            p += torch.randn_like(p)
    key.follow(query)
    for name, now in key.net.state_dict().items():
        follows = norm == "ema" or "running" not in name
        if now.is_floating_point():
            wanted = 0.9 * before[name] + 0.1 * query.state_dict()[name] if follows else before[name]
            torch.testing.assert_close(now, wanted)
    assert not any(p.requires_grad for p in key.parameters())


def test_norm_batch_uses_the_batch_and_norm_ema_does_not():
    x = torch.randn(8, 3, 4, 4) * 5 + 3
    query = network()
    batch, ema = MomentumNetwork(query, 0.9, "batch").train(), MomentumNetwork(query, 0.9, "ema").train()
    assert torch.equal(batch.net[1].running_mean, ema.net[1].running_mean)
    moved, kept = batch.net(x), ema.net(x)
    assert not torch.allclose(moved, kept) and batch.net[1].running_mean.any() and not ema.net[1].running_mean.any()


def pushed() -> dict[str, torch.Tensor]:
    queue, g = LabeledQueue(7, D), torch.Generator().manual_seed(dist.get_rank())
    for n in (2, 5, 1):
        queue.push(torch.randn(n, D, generator=g), torch.randint(9, (n,), generator=g))
    return queue.state_dict()


def test_queue_is_the_same_on_two_processes(tmp_path):
    """Both processes have the queue of one process that gets the keys of rank 0, then those of rank 1."""
    states = together(2, tmp_path, pushed)
    alone, streams = LabeledQueue(7, D), [torch.Generator().manual_seed(r) for r in (0, 1)]
    for n in (2, 5, 1):
        parts = [(torch.randn(n, D, generator=g), torch.randint(9, (n,), generator=g)) for g in streams]
        alone.push(torch.cat([k for k, _ in parts]), torch.cat([y for _, y in parts]))
    for name, wanted in alone.state_dict().items():
        assert torch.equal(states[0][name], wanted) and torch.equal(states[1][name], wanted), name
