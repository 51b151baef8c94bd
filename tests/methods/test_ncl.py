"""NCL against an explicit loss: each network has its own view and weights, and the first is deployed."""

from dataclasses import replace

import torch

from longtail import methods
from longtail.engine.fit_head import make_feature_method
from longtail.losses import ncl_loss
from longtail.methods import Batch
from tests.conftest import tiny
from tests.methods.test_methods import COUNTS, batch


def make(**changes):
    torch.manual_seed(0)
    config = tiny("ncl")
    return methods.make(replace(config, method=replace(config.method, **changes)), COUNTS)


def several_views() -> Batch:
    return batch()._replace(key=None, extra=(batch(1).query, batch(2).query))


def test_each_network_has_its_own_view():
    method, b = make(hard=4, weight=0.3), several_views()
    assert method.stages[0].extra_views == ("query", "query") and not method.stages[0].two_views
    one, two = method.others
    logits = torch.stack([net(x) for net, x in ((method.net, b.query), (one, b.extra[0]), (two, b.extra[1]))])
    individual, mutual = ncl_loss(logits, b.y_B, torch.from_numpy(COUNTS).log(), 4)
    terms = method.loss(b)
    torch.testing.assert_close((terms["individual"], terms["mutual"]), (individual, mutual))
    torch.testing.assert_close(terms["loss"], individual + 0.3 * mutual)
    terms["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in method.parameters() if p.dim() > 1)


def test_networks_begin_with_different_weights():
    method = make()
    weights = [net.get_parameter("trunk.body.conv1.weight") for net in (method.net, *method.others)]
    heads = [net.get_parameter("head.weight") for net in (method.net, *method.others)]
    for kind in (weights, heads):
        assert not any(torch.equal(kind[a], kind[b]) for a in range(3) for b in range(a))


def test_the_networks_of_a_frozen_backbone_are_frozen():
    method = make()
    method.set_stage(replace(method.stages[0], frozen=True))
    learning = {name for name, p in method.named_parameters() if p.requires_grad}
    assert learning == {f"{net}.head.{p}" for net in ("net", "others.0", "others.1") for p in ("weight", "bias")}


def test_on_stored_features_there_are_heads_only():
    method = make_feature_method(tiny("ncl"), torch.from_numpy(COUNTS), 12)
    assert sum(p.numel() for p in method.parameters()) == 3 * (12 * 10 + 10)


def test_the_first_network_is_deployed():
    method = make(networks=2).eval()
    x = torch.rand(2, 3, 8, 8)
    before = method(x)
    assert torch.equal(before, method.net(x)) and not torch.equal(before, method.others[0](x))
    assert torch.equal(method.drop_training_modules()(x), before)
    assert all(name.startswith("net.") for name in method.state_dict())
