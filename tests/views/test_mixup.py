"""Test mixup against a loop, and batches of images that encode their labels, so that a wrong label is detected."""

import copy
import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longtail.config import OptimConfig, ViewConfig, ViewsConfig
from longtail.data.loader import ResidentLoader
from longtail.data.samplers import epoch_order
from longtail.data.sources import Split
from longtail.engine.batches import Batches
from longtail.methods import Batch, Stage
from longtail.views import Views
from longtail.views.view import draw_mixture, mixup


def mixed(batches: int, batch: int, alpha: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    """Return images and the result of mixup. The label of an image is its index, so that its partner is known."""
    n = batches * batch
    images = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(5))
    return images, *mixup(images, torch.arange(n), batch, alpha, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("batches", "batch"), [(1, 8), (6, 5), (3, 1)])
def test_an_image_is_its_share_and_the_rest_of_its_partner(batches, batch):
    images, made, partner, share = mixed(batches, batch)
    assert share.shape == (batches,) and partner.shape == (batches * batch,)
    for i in range(batches * batch):
        part = share[i // batch].item()
        wanted = part * images[i].double() + (1 - part) * images[partner[i]].double()
        torch.testing.assert_close(made[i].double(), wanted, rtol=1e-5, atol=1e-6)


def test_partners_are_a_permutation_of_the_batch():
    _, _, partner, _ = mixed(50, 7)
    rows = torch.arange(350).view(50, 7)
    assert torch.equal(partner.view(50, 7).sort(1).values, rows)
    found = Counter(tuple(row) for row in (mixed(6000, 3)[2].view(-1, 3) % 3).tolist())
    assert set(found) == set(permutations(range(3)))
    slack = 5 * math.sqrt(6000 / 6 * 5 / 6)
    assert all(abs(n - 1000) < slack for n in found.values())


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_follow_the_beta_distribution(alpha):
    """The mean is 1/2 and the variance 1/(4 (2 alpha + 1)); the fourth moment gives the standard error of the variance."""
    n = 20_000
    share = mixed(n, 1, alpha)[3].double()
    assert share.min() >= 0 and share.max() <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = variance**2 * (3 - 6 / (2 * alpha + 3))
    assert share.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(variance / n))
    assert share.var().item() == pytest.approx(variance, abs=5 * math.sqrt((fourth - variance**2) / n))


def test_mixup_is_a_function_of_the_generator():
    one, two, other = mixed(4, 6)[1:], mixed(4, 6)[1:], mixed(4, 6, seed=1)[1:]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nothing_waits_for_the_host():
    """Fake tensors have no data, so `.item()` and shapes that depend on data raise errors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        images, labels = torch.zeros(12, 3, 2, 2), torch.zeros(12, dtype=torch.int64)
        made, other, share = mixup(images, labels, 4, 1.0, torch.Generator())
    assert made.shape == (12, 3, 2, 2) and other.shape == (12,) and share.shape == (3,)


# Batches

LABELS = np.random.RandomState(0).permutation(np.repeat(np.arange(6), [60, 30, 20, 12, 6, 2]))  # 130 images
B = 16
LEVEL = 40  # gray levels from one label to the next


def batches(stage: Stage, accumulate: int = 1, first_epoch: int = 0) -> Batches:
    images = np.broadcast_to((LEVEL * LABELS).astype(np.uint8)[:, None, None, None], (130, 4, 4, 3)).copy()
    source = Split(images, LABELS, tuple("abcdef"), np.arange(130))
    loader = ResidentLoader(source, B, 3, torch.device("cpu"))
    plain = ViewConfig(crop="none", flip=False)
    views = Views(ViewsConfig(query=plain, key=plain, normalize="half"), 4)
    made = Batches(loader, views, accumulate, torch.channels_last, torch.float32)
    made.start_stage(1, stage, first_epoch, captured=False)
    return made


def stage(**changes) -> Stage:
    return Stage("some", 3, OptimConfig(), **changes)


def shown(images: Tensor) -> Tensor:
    """Return the label that each image encodes, or the weighted mean of two labels."""
    flat = images.double().flatten(1)
    assert (flat.amax(1) - flat.amin(1)).max() < 1e-5
    return (flat.mean(1) * 0.5 + 0.5) * 255 / LEVEL


def steps(made: Batches, first_epoch: int = 0, epochs: int = 2) -> list[list[Batch]]:
    """Return copies of the batches of each step, because the next step may overwrite them."""
    found = []
    for step in range(epochs * made.steps_per_epoch):
        made.prepare(first_epoch + step // made.steps_per_epoch, step)
        found.append([copy.deepcopy(made.next()) for _ in range(made.accumulate)])
    return found


def labels_of(sampler: str, epoch: int, done: float, purpose: str = "order") -> Tensor:
    y = torch.from_numpy(LABELS)
    return y[epoch_order(sampler, y, 3, epoch, done, purpose)]


@pytest.fixture(params=[1, 3], ids=["one step ahead", "three steps ahead"])
def ahead(request, monkeypatch):
    """Use the numbers of steps of a CPU and of a GPU."""
    monkeypatch.setattr(Batches, "_choose_steps_ahead", lambda self: request.param)


def test_taking_a_batch_does_not_wait_for_the_host():
    """On a GPU the step is captured, which fails if the host reads a value."""
    made = batches(stage(mixup=1.0, partner="reversed", two_views=True))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for name in ("cursor", "rows_B"):
            setattr(made, name, fake.from_tensor(getattr(made, name)))
        for i, room in enumerate(made.buffers):
            there = {k: v for k, v in room._asdict().items() if isinstance(v, Tensor)}
            mixed = room.mixed and tuple(map(fake.from_tensor, room.mixed))
            made.buffers[i] = room._replace(**{k: fake.from_tensor(v) for k, v in there.items()}, mixed=mixed)
        batch = made.next()
    assert batch.mixed.share.shape == () and batch.partner.query.shape == batch.query.shape


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mixed_batches_have_the_labels_and_shares_of_their_images(ahead, accumulate):
    made = batches(stage(mixup=1.0, two_views=True), accumulate)
    every = [batch for step in steps(made) for batch in step]
    for batch in every:
        share, other = batch.mixed.share, batch.mixed.y_B
        assert share.shape == () and sorted(other.tolist()) == sorted(batch.y_B.tolist())
        torch.testing.assert_close(
            shown(batch.query), share * batch.y_B.double() + (1 - share) * other, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(shown(batch.key), batch.y_B.double(), rtol=1e-4, atol=1e-4)  # not mixed
    assert len({batch.mixed.share.item() for batch in every}) == len(every) == 16
    taken = torch.cat([batch.y_B for batch in every])
    assert torch.equal(taken, torch.cat([labels_of("uniform", epoch, 0)[: 8 * B] for epoch in (0, 1)]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_partner_batches_have_the_labels_of_their_images_and_draws_of_their_own(ahead, accumulate):
    made = batches(stage(partner="reversed", mixup=0.5), accumulate)
    every = [batch for step in steps(made) for batch in step]
    for batch in every:
        assert batch.partner.mixed is None and batch.partner.partner is None and batch.partner.key is None
        torch.testing.assert_close(shown(batch.partner.query), batch.partner.y_B.double(), rtol=1e-4, atol=1e-4)
    first = torch.cat([batch.y_B for batch in every])
    second = torch.cat([batch.partner.y_B for batch in every])
    for found, sampler, purpose in ((first, "uniform", "order"), (second, "reversed", "partner")):
        wanted = [labels_of(sampler, epoch, epoch / 2, purpose)[: 8 * B] for epoch in (0, 1)]
        assert torch.equal(found, torch.cat(wanted))


def test_without_mixup_and_partner_there_are_none(ahead):
    (batch,) = steps(batches(stage()))[0]
    assert batch.mixed is None and batch.partner is None and batch.key is None
    torch.testing.assert_close(shown(batch.query), batch.y_B.double(), rtol=1e-4, atol=1e-4)


def test_sampler_of_a_later_stage_counts_the_epochs_of_the_stage(ahead):
    """The samplers of a stage count the epochs of the stage, not of the run."""
    made = batches(stage(sampler="progressive", partner="progressive"), first_epoch=7)
    every = steps(made, first_epoch=7, epochs=3)
    for i in range(3):
        mine = [step[0] for step in every[8 * i : 8 * i + 8]]
        for of, purpose in ((mine, "order"), ([batch.partner for batch in mine], "partner")):
            wanted = labels_of("progressive", 7 + i, i / 2, purpose)[: 8 * B]
            assert torch.equal(torch.cat([batch.y_B for batch in of]), wanted)


def test_mixtures_depend_on_the_step_only(ahead):
    one, other = (batches(stage(mixup=1.0, partner="balanced"), accumulate=2) for _ in range(2))
    in_order = steps(one)
    for step in (5, 1, 6, 2):  # as after a resume
        other.prepare(step // 4, step)
        for batch in in_order[step]:
            again = other.next()
            assert torch.equal(again.query, batch.query) and torch.equal(again.partner.query, batch.partner.query)
            assert all(torch.equal(a, b) for a, b in zip(again.mixed, batch.mixed, strict=True))


def test_further_views_are_drawn_after_the_others(ahead):
    """Further views have separate random draws, and do not change query, key, mixup and partner."""
    settings = {"two_views": True, "mixup": 1.0, "partner": "balanced"}
    fewer, more = (steps(batches(stage(**settings, extra_views=extra))) for extra in ((), ("key", "query")))
    for (a,), (b,) in zip(fewer, more, strict=True):
        assert not a.extra and len(b.extra) == 2
        assert torch.equal(a.query, b.query) and torch.equal(a.key, b.key) and torch.equal(a.mixed.share, b.mixed.share)
        assert torch.equal(a.partner.query, b.partner.query)
        for view in b.extra:
            torch.testing.assert_close(shown(view), b.y_B.double(), rtol=1e-4, atol=1e-4)  # not mixed


def test_further_views_have_the_settings_of_their_kind():
    images = np.random.RandomState(0).randint(0, 256, (32, 4, 4, 3), np.uint8)
    loader = ResidentLoader(
        Split(images, np.arange(32), tuple(map(str, range(32))), np.arange(32)), B, 3, torch.device("cpu")
    )
    plain = ViewConfig(crop="none", flip=False)
    views = Views(ViewsConfig(query=plain, key=ViewConfig(crop="pad"), normalize="half"), 4)
    made = Batches(loader, views, 1, torch.channels_last, torch.float32)
    made.start_stage(0, stage(two_views=True, extra_views=("query", "key", "key")), 0, captured=False)
    made.prepare(0, 0)
    batch = made.next()
    query, *keys = batch.extra
    assert torch.equal(query, batch.query)
    drawn = [batch.key, *keys]
    assert not any(torch.equal(a, b) for a, b in [(drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[1], drawn[2])])


# CutMix


def test_cutmix_takes_a_box_from_the_partner():
    side, batch, batches = 16, 6, 200
    n = batch * batches
    images = torch.arange(n).float()[:, None, None, None].expand(n, 3, side, side)  # an image has its index everywhere
    mixture = draw_mixture("cutmix", n, batch, side, 1.0, torch.Generator().manual_seed(0))
    made = mixture.apply(images)
    is_own = made == images
    assert torch.equal(torch.where(is_own, images, images[mixture.partner_N]), made)
    for i in range(batches):
        own, partner = is_own[i * batch : (i + 1) * batch], mixture.partner_N[i * batch : (i + 1) * batch]
        mixed = own[partner != torch.arange(i * batch, (i + 1) * batch)]
        if len(mixed):
            outside = mixed[0, 0]
            assert (mixed == outside).all()  # all images of a batch have the same box
            assert outside.float().mean().item() == pytest.approx(mixture.share[i].item())
            rows, columns = (~outside).any(1).nonzero()[:, 0], (~outside).any(0).nonzero()[:, 0]
            assert (~outside).sum() == len(rows) * len(columns)  # one box without gaps
            assert len(rows) == 0 or (
                rows[-1] - rows[0] + 1 == len(rows) and columns[-1] - columns[0] + 1 == len(columns)
            )
    assert torch.equal(mixture.partner_N.view(batches, batch).sort(1).values, torch.arange(n).view(batches, batch))


def test_the_area_of_a_box_follows_the_drawn_share():
    """A box may extend beyond the image, so that the share of the first image is at least the drawn one (up to rounding)."""
    mixed, cut = (
        draw_mixture(kind, 4000, 1, 32, 1.0, torch.Generator().manual_seed(3)) for kind in ("mixup", "cutmix")
    )
    assert (cut.share >= mixed.share - 0.07).all() and (cut.share > mixed.share + 0.1).any()
    inside = (cut.share - mixed.share).abs() < 0.05
    assert inside.float().mean() > 0.2


def test_both_kinds_are_drawn_equally_often():
    mixture = draw_mixture("both", 4000, 2, 8, 1.0, torch.Generator().manual_seed(0))
    is_cut = ((mixture.weight == 0) | (mixture.weight == 1)).flatten(1).all(1)[::2]
    assert abs(is_cut.float().mean().item() - 0.5) < 5 * 0.5 / 2000**0.5
    torch.testing.assert_close(mixture.weight.mean((1, 2, 3))[::2], mixture.share)


def test_drawing_a_box_does_not_wait_for_the_host():
    with FakeTensorMode(allow_non_fake_inputs=True):
        mixture = draw_mixture("both", 12, 4, 8, 1.0, torch.Generator())
        assert mixture.apply(torch.zeros(12, 3, 8, 8)).shape == (12, 3, 8, 8)


def test_further_views_can_be_mixed_like_the_query(ahead):
    made = batches(stage(mixup=1.0, mixture="mixup", mixes_extra=True, extra_views=("query", "query")))
    for (batch,) in steps(made):
        for view in batch.extra:
            torch.testing.assert_close(
                view, batch.query
            )  # views without augmentation, partners and shares are the same
    cut = batches(stage(mixup=1.0, mixture="cutmix", mixes_extra=True, extra_views=("query",)))
    for (batch,) in steps(cut):
        assert torch.equal(batch.extra[0], batch.query)
        mean = shown(batch.query.mean((2, 3)))
        wanted = batch.mixed.share * batch.y_B.double() + (1 - batch.mixed.share) * batch.mixed.y_B
        torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=1e-4)


def test_cutmix_depends_on_the_step_alone(ahead):
    one, other = (batches(stage(mixup=1.0, mixture="both", extra_views=("query",))) for _ in range(2))
    in_order = steps(one)
    for step in (5, 1, 6):
        other.prepare(step // 8, step)
        again, (batch,) = other.next(), in_order[step]
        assert torch.equal(again.query, batch.query) and torch.equal(again.mixed.share, batch.mixed.share)
