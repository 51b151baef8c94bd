"""BCL and ProCo against explicit losses: contrasted views, stored state, and the deployed network."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longtail import methods
from longtail.engine.cuda_graph import warm_up_and_restore
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer
from longtail.losses import balanced_softmax_loss, bcl_loss, proco_loss
from longtail.losses.contrast_set import ContrastSet
from longtail.methods import Batch
from longtail.methods.proco import ClassMeans, ProCo
from tests.conftest import tiny
from tests.engine.test_train import CPU, load_once, run_until, state_of
from tests.methods.test_contrastive import assert_same_gradients
from tests.methods.test_methods import COUNTS, B, batch

NAMES = ["bcl", "proco"]
LOG_PRIOR = torch.from_numpy(COUNTS / COUNTS.sum()).log().float()


def make(name: str, **changes):
    torch.manual_seed(0)
    config = tiny(name)
    return methods.make(replace(config, method=replace(config.method, **changes)), COUNTS)


def three_views(seed: int = 0) -> Batch:
    return batch(seed)._replace(extra=(batch(seed + 100).query,))


def by_hand(method, b: Batch):
    """Return a copy of the method, its logits of the query view, and its projections of the key views."""
    twin = copy.deepcopy(method)
    x = twin.net.trunk(torch.cat([b.query, b.key, *b.extra]))
    return twin, twin.net.head(x[:B]), F.normalize(twin.G(x))[B:]


def test_bcl_contrasts_key_views_with_each_other_and_with_projected_centers():
    method, b = make("bcl", softmax_weight=0.7, weight=0.4, scale=20.0), three_views()
    twin, logits, z = by_hand(method, b)
    torch.testing.assert_close(logits.abs().amax() < 20, torch.tensor(True))  # scaled cosines
    centers, y = F.normalize(twin.center_G(twin.net.head.weight)), b.y_B.repeat(2)
    contrast = ContrastSet(z, torch.cat([z, centers]), torch.cat([y, torch.arange(10)]), torch.arange(2 * B))
    softmax, contrast_loss = balanced_softmax_loss(logits, b.y_B, LOG_PRIOR), bcl_loss(contrast, y, 10, 0.1)
    wanted, terms = 0.7 * softmax + 0.4 * contrast_loss, method.loss(b)
    torch.testing.assert_close((terms["softmax"], terms["contrast"]), (softmax, contrast_loss))
    torch.testing.assert_close(terms["loss"], wanted)
    wanted.backward(), terms["loss"].backward()
    assert_same_gradients(method, twin)
    assert all(p.grad is not None for p in method.parameters())


def test_proco_contrasts_key_views_with_the_means_that_contain_them():
    method, b = make("proco", softmax_weight=0.7, weight=0.4), three_views()
    method.on_epoch_start(0, 3)
    seen = [(z.detach(), t.y_B.repeat(2)) for t in (three_views(1), b) for z in [by_hand(method, t)[2]]]
    method.eval().train()
    twin, logits, z = by_hand(method, b)
    method.means.update(*seen[0])
    terms = method.loss(b)
    z_ND, y_N = (torch.cat(t) for t in zip(*seen, strict=True))
    mean_CD = torch.stack(
        [z_ND[y_N == c].double().mean(0) if (y_N == c).any() else torch.zeros(128) for c in range(10)]
    )
    y = b.y_B.repeat(2)
    softmax, contrast = balanced_softmax_loss(logits, b.y_B, LOG_PRIOR), proco_loss(z, y, mean_CD, LOG_PRIOR, 0.1)
    torch.testing.assert_close((terms["softmax"], terms["contrast"]), (softmax, contrast))
    torch.testing.assert_close(terms["loss"], 0.7 * softmax + 0.4 * contrast)
    (0.7 * softmax + 0.4 * contrast).backward(), terms["loss"].backward()
    assert_same_gradients(method, twin)


def test_class_means_are_the_means_of_this_and_the_previous_epoch():
    means, g = ClassMeans(4, 3), torch.Generator().manual_seed(0)
    z_ENVD = F.normalize(torch.randn(3, 5, 8, 3, generator=g), dim=-1)  # three epochs of five steps
    y_ENV = torch.randint(3, (3, 5, 8), generator=g)  # class 3 never occurs
    for epoch in range(3):
        means.start_epoch(epoch)
        for step in range(5):
            means.update(z_ENVD[epoch, step], y_ENV[epoch, step])
            z_ND = torch.cat(
                [z_ENVD[epoch - 1].flatten(0, 1)] * (epoch > 0) + [z_ENVD[epoch, : step + 1].flatten(0, 1)]
            )
            y_N = torch.cat([y_ENV[epoch - 1].flatten()] * (epoch > 0) + [y_ENV[epoch, : step + 1].flatten()])
            wanted_CD = torch.stack([z_ND[y_N == c].double().sum(0) / max((y_N == c).sum(), 1) for c in range(4)])
            torch.testing.assert_close(means(), wanted_CD, rtol=1e-5, atol=1e-6)
            stored = copy.deepcopy(means.state_dict())
            means.start_epoch(epoch)  # as after a resume within the epoch
            assert all(torch.equal(stored[name], value) for name, value in means.state_dict().items())
    assert (means()[3] == 0).all() and set(stored) == {"sum_CD", "count_C", "new_sum_CD", "new_count_C", "epoch"}


@pytest.mark.parametrize("epochs_before", [0, 1])
def test_a_warm_up_does_not_undo_the_start_of_the_epoch(epochs_before, tmp_path):
    """Before a capture, steps are made and their effect is undone, also where a run continues at the start of an epoch."""
    config = tiny("proco", epochs=2)
    steps = run_until(config, tmp_path / "plain").steps_per_epoch
    if epochs_before:
        run_until(config, tmp_path / "warm", steps)
    run = Trainer(config, 0, load_once(config.data), tmp_path / "warm", CPU)
    assert run.resume() == bool(epochs_before)
    assert isinstance(run.method, ProCo) and run.method.means.epoch == epochs_before - 1
    before = run.method.means.new_sum_CD.clone()
    warm_up_and_restore([run], train_step)
    assert run.method.means.epoch == epochs_before and not run.method.means.new_sum_CD.any()
    torch.testing.assert_close(run.method.means.sum_CD, before)
    for step in range(run.step, 2 * steps):
        run.prepare(step)
        train_step(run)
        run.count_step()
    plain = run_until(config, tmp_path / "again")
    assert all(torch.equal(state_of(plain)[key], value) for key, value in state_of(run).items() if "mean" in key)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_classifier_is_deployed(name):
    method = make(name).eval()
    x = torch.rand(2, 3, 8, 8)
    before, names = method(x), set(method.net.state_dict())
    assert torch.equal(method.drop_training_modules()(x), before)
    assert set(method.state_dict()) == {f"net.{key}" for key in names}
    plain = methods.make(tiny("balanced-softmax"), COUNTS)
    bias = 0 if name == "proco" else 10
    assert sum(p.numel() for p in method.parameters()) == sum(p.numel() for p in plain.net.parameters()) - bias


@pytest.mark.parametrize("name", NAMES)
def test_labels_out_of_range_are_errors(name):
    method, b = make(name), three_views()
    for label in (-1, 10):
        y_B = b.y_B.clone()
        y_B[3] = label
        with pytest.raises(IndexError):
            method.loss(b._replace(y_B=y_B))
