"""How often samplers draw classes and images, compared with explicit shares, and what the order depends on."""

import math
import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch

from longtail.data.loader import ResidentLoader
from longtail.data.samplers import class_shares, epoch_order
from longtail.data.sources import Split

COUNTS = torch.tensor([240, 0, 60, 31, 9, 3, 1])  # 344 images; a class without any among them
C, THERE, N = len(COUNTS), COUNTS > 0, int(COUNTS.sum())
LABELS = torch.arange(C).repeat_interleave(COUNTS)[torch.randperm(N, generator=torch.Generator().manual_seed(8))]
EPOCHS = 100
SAMPLERS = ["uniform", "balanced", "sqrt", "reversed", "progressive"]


def wanted_shares(sampler: str, done: float = 0.0) -> torch.Tensor:
    """Return the expected shares, computed class by class."""
    weight = {
        "uniform": lambda n: n,
        "balanced": lambda n: 1,
        "sqrt": lambda n: math.sqrt(n),
        "reversed": lambda n: 1 / n,
        "progressive": lambda n: (1 - done) * n / N + done / int(THERE.sum()),
    }[sampler]
    weights = torch.tensor([weight(n) if n else 0.0 for n in COUNTS.tolist()], dtype=torch.float64)
    return weights / weights.sum()


def drawn(sampler: str, done: float = 0.0) -> torch.Tensor:
    """Return the drawn images of many epochs."""
    return torch.cat([epoch_order(sampler, LABELS, 0, epoch, done) for epoch in range(EPOCHS)])


def too_far(found: torch.Tensor, share: torch.Tensor) -> bool:
    """Return whether the chi-square statistic of counts against shares exceeds its mean by six standard deviations."""
    expected, free = share * found.sum(), len(found) - 1
    return float(((found - expected) ** 2 / expected).sum()) > free + 6 * math.sqrt(2 * free)


DRAWS = [("balanced", 0.0), ("sqrt", 0.0), ("reversed", 0.0), *(("progressive", done) for done in (0.0, 0.5, 1.0))]


@pytest.mark.parametrize(("sampler", "done"), DRAWS)
def test_classes_are_drawn_by_their_shares(sampler, done):
    found = torch.bincount(LABELS[drawn(sampler, done)], minlength=C).double()
    assert found.sum() == EPOCHS * N and (found[~THERE] == 0).all()
    assert not too_far(found[THERE], wanted_shares(sampler, done)[THERE])
    # the test can fail: `progressive` ends as `balanced`, and all others differ
    others = [wanted_shares(s, d)[THERE] for s, d in DRAWS]
    alike = [other for other in others if torch.allclose(other, wanted_shares(sampler, done)[THERE])]
    assert sum(not too_far(found[THERE], other) for other in others) == len(alike) <= 2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_shares_are_those_of_the_formula(sampler):
    for done in (0.0, 0.3, 1.0):
        torch.testing.assert_close(class_shares(sampler, COUNTS, done), wanted_shares(sampler, done))


@pytest.mark.parametrize("sampler", SAMPLERS[1:])
def test_images_of_a_class_are_equally_likely(sampler):
    found = torch.bincount(drawn(sampler, 0.5), minlength=N).double()
    for c in (0, 2, 3, 4, 5):
        mine = found[LABELS.eq(c)]
        assert not too_far(mine, torch.full_like(mine, 1 / len(mine)))


def test_uniform_is_every_image_once():
    orders = [epoch_order("uniform", LABELS, 0, epoch) for epoch in range(20)]
    assert all(torch.equal(order.sort().values, torch.arange(N)) for order in orders)
    first = torch.stack([epoch_order("uniform", LABELS, seed, 0)[:50] for seed in range(40)])
    assert not too_far(torch.histc(first.double(), 10, 0, N), torch.full((10,), 0.1))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_order_is_a_function_of_seed_epoch_and_purpose(sampler):
    def order(seed=0, epoch=3, purpose="order"):
        torch.manual_seed(17)  # other generators have no effect
        torch.rand(epoch)
        return epoch_order(sampler, LABELS, seed, epoch, 0.5, purpose)

    assert torch.equal(order(), epoch_order(sampler, LABELS, 0, 3, 0.5, "order"))
    before = torch.get_rng_state()
    epoch_order(sampler, LABELS, 0, 3)
    assert torch.equal(torch.get_rng_state(), before)
    several = [order(), order(seed=1), order(epoch=4), order(purpose="partner"), order(seed=3, epoch=0)]
    for one, other in combinations(several, 2):
        assert (one == other).double().mean() < 0.6  # `reversed` draws the only image of a class in 4 of 9 draws


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_one_order_out(sampler, world):
    labels = LABELS[: N - 1]  # 343 is no multiple of 2 or 3
    whole = epoch_order(sampler, labels, 0, 5)
    parts = [epoch_order(sampler, labels, 0, 5, rank=rank, world_size=world) for rank in range(world)]
    each = len(whole) // world
    assert [len(part) for part in parts] == [each] * world
    assert torch.equal(torch.stack(parts, 1).flatten(), whole[: each * world])
    if sampler == "uniform":
        assert len(torch.cat(parts).unique()) == each * world  # no image twice


# The loader


def loader(batch: int = 32) -> ResidentLoader:
    """Return a loader of images that encode their number."""
    images = np.zeros((N, 4, 4, 3), np.uint8)
    images[..., 0], images[..., 1] = (np.arange(N)[:, None, None] // k % 256 for k in (256, 1))
    source = Split(images, LABELS.numpy(), tuple("abcdefg"), np.arange(N))
    return ResidentLoader(source, batch, 0, torch.device("cpu"))


def numbers(images: torch.Tensor) -> torch.Tensor:
    return 256 * images[:, 0, 0, 0].long() + images[:, 1, 0, 0]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_loader_takes_the_stages_draw_in_its_order(sampler):
    ours = loader()
    ours.set_stage(sampler, 2, 5)
    order = epoch_order(sampler, LABELS, 0, 4, 0.5)  # the third of five epochs
    ours.seek(4, 3)
    (images, _), y = ours.take(2)
    assert torch.equal(numbers(images), order[3 * 32 : 5 * 32]) and torch.equal(y, LABELS[order[3 * 32 : 5 * 32]])
    ours.seek(4, 10)
    assert torch.equal(numbers(ours.take(1)[0].images), torch.cat([order[320:], order[: 352 - N]]))


def test_new_stage_draws_a_new_order():
    """This also holds if the first epoch of the stage is the present epoch of the loader."""
    ours = loader()
    ours.seek(0, 0)
    before = ours.take(10)[1]
    ours.set_stage("balanced", 0, 3)
    ours.seek(0, 0)
    after = ours.take(10)[1]
    assert torch.equal(after, LABELS[epoch_order("balanced", LABELS, 0, 0)][:320])
    assert (before == 0).double().mean() > 0.6 and (after == 0).double().mean() < 0.3


def test_progressive_depends_on_the_epochs_of_its_stage():
    ours = loader()
    for first, epochs in ((0, 5), (7, 5), (7, 2)):
        ours.set_stage("progressive", first, epochs)
        for i in range(epochs):
            wanted = epoch_order("progressive", LABELS, 0, first + i, i / (epochs - 1))
            assert torch.equal(ours.order(first + i), wanted)
    ours.set_stage("progressive", 7, 1)
    assert torch.equal(ours.order(7), epoch_order("progressive", LABELS, 0, 7, 0.0))


def test_second_loader_shares_the_images_and_draws_another_order():
    ours = loader()
    other = ours.clone("partner")
    assert other.images_N.data_ptr() == ours.images_N.data_ptr() and other.batch_size == ours.batch_size
    assert torch.equal(other.order(1), epoch_order("uniform", LABELS, 0, 1, purpose="partner"))
    other.set_stage("reversed", 0, 5)
    ours.seek(1, 0), other.seek(1, 0)
    assert torch.equal(ours.take(1)[1], LABELS[epoch_order("uniform", LABELS, 0, 1)[:32]])
    assert torch.equal(other.take(1)[1], LABELS[epoch_order("reversed", LABELS, 0, 1, purpose="partner")[:32]])


@pytest.mark.parametrize("sampler", ["uniform", "balanced"])
def test_loaders_of_several_processes_share_an_epoch_out(sampler, monkeypatch):
    made = []
    for rank in range(3):
        monkeypatch.setattr("longtail.data.loader.rank_and_world_size", lambda rank=rank: (rank, 3))
        made.append(loader())
        made[-1].set_stage(sampler, 0, 5)
        made[-1].seek(2, 0)
    assert {one.num_batches for one in made} == {N // 3 // 32} and {len(one.order_N) for one in made} == {N // 3}
    together = torch.stack([one.order_N for one in made], 1).flatten()
    assert torch.equal(together, epoch_order(sampler, LABELS, 0, 2, 0.5)[: N // 3 * 3])


SCRIPT = """
import sys, numpy as np, torch, torch.distributed as dist
from longtail.data.loader import ResidentLoader
from longtail.data.sources import Split
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
labels = np.arange(40) % 4
split = Split(np.zeros((40, 2, 2, 3), np.uint8), labels, tuple("abcd"), np.arange(40))
made = ResidentLoader(split, 8, 0, torch.device("cpu"))
made.seek(1, 0)
torch.save(made.order_N, f"{path}/{rank}.pt")
dist.destroy_process_group()
"""


def test_two_real_processes_see_each_image_once(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path)], env=environment) for r in (0, 1)]
    assert [process.wait(120) for process in ranks] == [0, 0]
    seen = torch.cat([torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)])
    assert sorted(seen.tolist()) == list(range(40))
