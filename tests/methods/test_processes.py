"""Several processes against one, in float64: "global" is the whole batch in one process, "local" groups of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longtail import methods
from longtail.distributed import all_sum, rank_and_world_size, world_size
from longtail.engine.distributed import average_gradients
from longtail.methods import Batch, Method
from longtail.models.momentum import permutation
from longtail.models.norms import count_groups
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.processes import together

COUNTS = np.array([50, 20, 10, 5, 3, 2, 2, 1, 1, 1])
N, STEPS = 24, 3  # images a step of all processes together
NAMES = ["paco", "supcon", "ce-supcon", "ce-supcon-reweighted", "gpaco", "bcl", "ce", "causal-norm", "proco"]
CONTRASTIVE = NAMES[:6]
VIEWS = {"gpaco": 2, "bcl": 3, "proco": 3}
"""The number of views of an image that go through the network at once."""
State = dict[str, torch.Tensor]


def make(name: str, norm: str = "batch", ghost: int = 2, **changes: Any) -> Method:
    torch.manual_seed(0)
    config = tiny(name)
    if hasattr(config.method, "queue"):
        changes["queue"] = 2 * N  # wraps at the third step
    config = replace(
        config, model=replace(config.model, norm=norm, ghost=ghost), method=replace(config.method, **changes)
    )
    method = methods.make(config, COUNTS).double()
    method.set_stage(method.stages[0])
    return method.train()


def batch(step: int, first: int = 0, every: int = 1) -> Batch:
    """Return images of different scales, so that the result depends on which images are normalized together."""
    g = torch.Generator().manual_seed(step)
    query, key = torch.randn(2, N, 3, 8, 8, generator=g, dtype=torch.float64) * torch.arange(1, N + 1).view(-1, 1, 1, 1)
    y, other = torch.randint(10, (N,), generator=g), key.flip(3)
    return Batch(query[first::every], key[first::every], y[first::every], extra=(other[first::every],))


def loss_of(method: Method, batch: Batch) -> torch.Tensor:
    """The loss of the views that the method wants."""
    return method.loss(batch if method.stage.extra_views else batch._replace(extra=()))["loss"]


def trained(method: Method, loss) -> State:
    """Return state, gradients and losses after some steps of SGD with `loss(batch number)`."""
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses, grads = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        method.after_backward(SideStream(torch.device("cpu")))
        average_gradients(method)
        grads = {f"grad {n}": p.grad.clone() for n, p in method.named_parameters() if p.grad is not None}
        losses.append(all_sum(value) / world_size())
        optimizer.step()
        method.after_step()
    return {**method.state_dict(), **grads, "losses": torch.stack(losses).detach()}


def one_of_several(name: str, norm: str, changes: dict[str, Any]) -> State:
    rank, world = rank_and_world_size()
    method = make(name, norm, **changes)
    return trained(method, lambda step: loss_of(method, batch(step, rank, world)))


def all_of_several(settings: list[tuple[str, str, dict[str, Any]]]) -> list[State]:
    return [one_of_several(*setting) for setting in settings]


def assert_same(found: State, wanted: State) -> None:
    """Compare states; the rows of the queue may differ in order, because processes push one after the other."""
    assert found.keys() == wanted.keys() and len(found) > 20
    # The batch of the centers is the same in all processes, and here it is normalized once for each group of images. Its
    # running averages are used nowhere.
    unused = {f"center_G.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    for name in wanted.keys() - unused:
        one, other = (
            by_first_number(state, name) if name.startswith("queue.") else state[name] for state in (found, wanted)
        )
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)


def by_first_number(state: State, name: str) -> torch.Tensor:
    return state[name] if name == "queue.position" else state[name][state["queue.keys_KD"][:, 0].argsort()]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_global_contrast_with_sync_norm_is_one_process_with_the_whole_batch(world, tmp_path: Path):
    """Losses, gradients, running averages, key network and queue of three steps agree, also in chunks of classes."""
    cases = [(name, {"contrast": "global"} if name in CONTRASTIVE else {}) for name in NAMES]
    cases += [(name, {"contrast": "global", "chunk": 7}) for name in ("paco", "gpaco")]
    several = {"views": 2, "consistency": 0.5}
    cases += [("paco", several | {"contrast": "global"}), ("balanced-softmax", several)]
    found = together(world, tmp_path, all_of_several, [(name, "sync", changes) for name, changes in cases])
    for which, (name, changes) in enumerate(cases):
        method = make(name, **{key: changes[key] for key in changes.keys() & several})
        wanted = trained(method, lambda step, method=method: loss_of(method, batch(step)))
        ranks = [rank[which] for rank in found]
        assert_same(ranks[0], wanted)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks for key in wanted), name


def in_groups(method: Method, step: int, world: int) -> torch.Tensor:
    """Return the mean loss of groups of images that are contrasted with the same group and the queue only."""
    b = batch(step)
    if not hasattr(method, "queue") and not hasattr(method, "center_G"):
        return loss_of(method, b)
    if hasattr(method, "center_G"):
        x = method.features(torch.cat([b.query, b.key, *b.extra]))
        x, q, k, y = x[:N], method.G(x)[N:], None, b.y_B
    elif hasattr(method, "key"):
        x, k, y = method.features(b.query), method.key(b.key), b.y_B
        method.queue.waiting.append((k, y))
        q = method.G(x)
    else:
        x, y = method.features(torch.cat([b.query, b.key])), b.y_B.repeat(2)
        q = method.G(x)
        method.queue.waiting.append((q[N:].detach(), b.y_B))
        k = None
    given = [t for t in (x, q, k, y) if t is not None]
    parts = [[t[g::world] for t in given] for g in range(world)]
    return torch.stack([method.loss_from_projections(*part)["loss"] for part in parts]).mean()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_local_contrast_is_one_process_in_groups_with_ghost_norm(world, tmp_path: Path):
    """The state agrees with that of groups, and differs from that of the whole batch."""
    changes = {name: {"contrast": "local"} if name in CONTRASTIVE else {} for name in NAMES}
    found = together(world, tmp_path, all_of_several, [(name, "batch", changes[name]) for name in NAMES])
    for which, name in enumerate(NAMES):
        ghost = VIEWS.get(name, 1) * N // world
        method = make(name, "ghost", ghost, **changes[name])
        wanted = trained(method, lambda step, method=method: in_groups(method, step, world))
        ranks = [rank[which] for rank in found]
        assert_same(ranks[0], wanted)
        assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks for key in wanted), name
        if name in CONTRASTIVE:
            whole = make(name, "ghost", ghost, **changes[name])
            assert (loss_of(whole, batch(0)) - wanted["losses"][0]).abs() > 1e-3


# Shuffled keys


def test_permutations_are_valid_and_uniform():
    """The chi-square statistic of the position of the first of 8 items has 7 degrees of freedom (limit: 1 in 10,000)."""
    orders = torch.stack([permutation(8, torch.tensor(2**61 + turn)) for turn in range(4000)])
    assert torch.equal(orders.sort(1)[0], torch.arange(8).expand(4000, 8))
    counts = torch.stack([torch.bincount(orders[:, place], minlength=8) for place in range(8)])
    assert ((counts - 500) ** 2 / 500).sum(1).max() < 29.9
    following = (orders[1:] == orders[:-1]).double().mean()
    assert abs(following - 1 / 8) < 0.01  # consecutive permutations are independent


def shuffled_keys() -> dict[str, Any]:
    """Return the keys of two batches in one of several processes, and its running averages."""
    rank, world = rank_and_world_size()
    method = make("paco", key_norm="shuffled")
    keys = [method.key(batch(step, rank, world).key, method.shuffle) for step in (0, 1)]
    return {"keys": keys, "mean": method.get_buffer("key.net.0.body.bn1.running_mean")}


def test_keys_are_normalized_in_shuffled_batches_and_restored(tmp_path: Path):
    world, B = 2, N // 2
    found, method = together(world, tmp_path, shuffled_keys), make("paco", key_norm="shuffled")
    seed = method.shuffle.turn.clone()
    alone = [make("paco") for _ in range(world)]
    for step in (0, 1):
        images = torch.cat([batch(step, rank, world).key for rank in range(world)])
        order = permutation(N, seed + step)
        keys = torch.cat([alone[r].key(images[order[r * B : (r + 1) * B]]) for r in range(world)])
        wanted = torch.empty_like(keys).index_copy(0, order, keys)
        for rank in range(world):
            torch.testing.assert_close(found[rank]["keys"][step], wanted[rank * B : (rank + 1) * B])
    assert not torch.allclose(found[0]["keys"][0], make("paco").key(batch(0, 0, world).key))
    torch.testing.assert_close(found[1]["mean"], alone[1].get_buffer("key.net.0.body.bn1.running_mean"))


def test_in_one_process_keys_are_mixed_across_ghost_groups():
    method, plain = make("paco", "ghost", 6, key_norm="shuffled"), make("paco", "ghost", 6)
    order, images = permutation(N, method.shuffle.turn), batch(0).key
    wanted = torch.empty(N, 32, dtype=torch.float64).index_copy(0, order, plain.key(images[order]))
    torch.testing.assert_close(method.key(images, method.shuffle), wanted)
    assert not torch.allclose(make("paco", "ghost", 6).key(images), wanted) and count_groups(N, 6) == 4
    before = method.shuffle.turn.clone()
    loss_of(method, batch(0))
    assert method.shuffle.turn == before + 1 and torch.equal(method.state_dict()["shuffle.turn"], method.shuffle.turn)
