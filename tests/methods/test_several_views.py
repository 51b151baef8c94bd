"""Balanced Softmax and PaCo on several query views of each image, with a consistency term."""

from dataclasses import replace

import pytest
import torch

from longtail import methods
from longtail.config import BalancedSoftmaxSettings, Config, PaCoSettings, from_dict, to_dict
from longtail.losses import balanced_softmax_loss, consistency_loss
from longtail.methods import Batch
from tests.conftest import tiny
from tests.engine.test_host import check_steps
from tests.engine.test_train import log_of, run_until, state_of
from tests.methods.test_methods import COUNTS, B, batch
from tests.raises import raises

NAMES = ["balanced-softmax", "paco"]
LOG_PRIOR = torch.from_numpy(COUNTS / COUNTS.sum()).log().float()


def with_views(name: str, views: int, consistency: float = 0.0, **train) -> Config:
    config = tiny(name, **train)
    return replace(config, method=replace(config.method, views=views, consistency=consistency))


def make(name: str, views: int, consistency: float = 0.0) -> methods.Method:
    torch.manual_seed(0)
    return methods.make(with_views(name, views, consistency), COUNTS)


def make_views(views: int) -> Batch:
    return batch()._replace(extra=tuple(batch(100 + v).query for v in range(1, views)))


def test_the_loss_is_the_mean_over_views_plus_the_weighted_consistency():
    method, b = make("balanced-softmax", 3, 0.7), make_views(3)
    logits = method.net(torch.cat([b.query, *b.extra]))
    softmax = balanced_softmax_loss(logits, b.y_B.repeat(3), LOG_PRIOR)
    consistency = consistency_loss((logits + LOG_PRIOR).view(3, B, -1))
    found = method.loss(b)
    torch.testing.assert_close((found["loss"], found["consistency"]), (softmax + 0.7 * consistency, consistency))
    assert method.stages[0].extra_views == ("query", "query")


@pytest.mark.parametrize("rebalance", [True, False])
def test_paco_compares_the_posteriors_of_its_centers(rebalance):
    config = with_views("paco", 2, 0.7)
    config = replace(config, method=replace(config.method, rebalance=rebalance, center_tau=0.5))
    b, twin = make_views(2), replace(config, method=replace(config.method, consistency=0.0))
    terms = []
    for each in (config, twin):
        torch.manual_seed(0)
        terms.append(methods.make(each, COUNTS).loss(b))
    torch.manual_seed(0)
    x = methods.make(twin, COUNTS).net(torch.cat([b.query, *b.extra])) / 0.5 + (LOG_PRIOR if rebalance else 0)
    consistency = consistency_loss(x.view(2, B, -1))
    torch.testing.assert_close(terms[0]["consistency"], consistency)
    torch.testing.assert_close(terms[0]["loss"], terms[1]["loss"] + 0.7 * consistency)
    assert "consistency" not in terms[1]


def test_every_query_view_of_paco_is_an_anchor_and_only_keys_enter_the_queue():
    method, b = make("paco", 3), make_views(3)
    seen = []
    loss = method.loss_from_projections
    method.loss_from_projections = lambda *args: seen.append(args) or loss(*args)
    method.loss(b)["loss"].backward()
    x, q, k, y = seen[0]
    assert len(x) == len(q) == len(y) == 3 * B and len(k) == B and torch.equal(y, b.y_B.repeat(3))
    (entered,) = method.queue.waiting
    assert torch.equal(entered[0], k) and torch.equal(entered[1], b.y_B)


def test_weights_of_images_are_those_of_all_views():
    method, b = make("balanced-softmax", 2), make_views(2)
    weight = torch.arange(B).float()
    found = method.loss(b._replace(weight_B=weight))["loss"]
    logits = method.net(torch.cat([b.query, *b.extra]))
    wanted = balanced_softmax_loss(logits, b.y_B.repeat(2), LOG_PRIOR, weight.repeat(2))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    config = with_views(name, 2, 0.5, ema=0.9)
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, None):
        parts = run_until(config, tmp_path / "parts", stop)
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    assert all(row["consistency"] > 0 for row in log_of(tmp_path / "whole"))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_stays_on_the_device(name, tmp_path):
    check_steps(with_views(name, 2, 0.5, ema=0.9), tmp_path)


def test_the_consistency_makes_views_agree(tmp_path):
    rows = [log_of(run_until(with_views("balanced-softmax", 2, w), tmp_path / str(w)).folder) for w in (1e-6, 5.0)]
    assert rows[1][-1]["consistency"] < 0.5 * rows[0][-1]["consistency"]


def test_settings():
    config = with_views("paco", 2, 0.5)
    assert from_dict(Config, to_dict(config)) == config and config.method.label == "PaCo, 2 views"
    with raises("invalid-value", "--method.consistency"):
        BalancedSoftmaxSettings(consistency=0.5)
    with raises("invalid-value", "--method.alpha"):
        PaCoSettings(views=2, alpha="auto")
