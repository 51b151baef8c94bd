"""The recipes hold the published settings (methods.md of the design documents, parts 1.15, 1.11 and 3)."""

import numpy as np
import pytest

from longtail import methods, recipes
from longtail.data.long_tail import exponential_counts
from longtail.engine.optim import learning_rate
from tests.raises import raises


def test_released_paco_on_cifar():
    c = recipes.cifar100_lt("paco", 100, "released")
    m, o = c.method, c.optim
    assert (m.tau, m.alpha, m.queue, m.momentum, m.projection_dim, m.center_tau) == (0.05, 0.01, 1024, 0.999, 32, 1.0)
    assert m.rebalance and m.projection_norm and m.key_norm == "batch" and m.projection_hidden == 0
    assert (o.lr, o.weight_decay, o.momentum, o.nesterov, o.schedule, o.milestones) == (
        0.05,
        5e-4,
        0.9,
        False,
        "step",
        (0.8025, 0.9025),
    )
    assert (c.train.epochs, c.train.batch_size, c.model.name, c.model.bias) == (400, 128, "resnet32_cifar", True)
    q, k = c.views.query, c.views.key
    assert (q.crop, q.policy, q.cutout, k.crop, k.crop_scale, k.policy) == (
        "pad",
        "auto",
        16,
        "resized",
        (0.2, 1.0),
        "sim",
    )
    assert c.views.normalize == "cifar10"


def test_paper_setting_differs_where_the_text_does():
    c = recipes.cifar100_lt("paco", 100, "paper")
    assert (c.method.alpha, c.method.center_tau, c.method.projection_norm, c.model.bias) == (0.02, 0.05, False, False)
    assert (c.optim.lr, c.optim.schedule, c.train.batch_size, c.train.epochs) == (0.1, "cosine", 512, 400)


def test_equal_setting_is_one_budget():
    configs = [recipes.cifar100_lt(m, 50, "equal") for m in recipes.METHODS]
    assert len({(c.optim, c.train, c.views, c.model) for c in configs}) == 1
    held_out = {c.method.name: c.data.val_fraction for c in configs if c.data != configs[0].data}
    assert held_out == {e.settings_class.name: e.data["val_fraction"] for e in recipes.METHODS.values() if e.data}
    assert held_out["tau-norm"] == 0.1  # it chooses its power on it


@pytest.mark.parametrize(("imbalance", "epochs"), [(100, 619), (50, 542), (10, 342)])
def test_balanced_softmax_trains_13000_steps_of_512(imbalance, epochs):
    c = recipes.cifar100_lt("balanced-softmax", imbalance, "released")
    assert c.train.epochs == epochs and c.train.batch_size == 512
    steps_per_epoch = exponential_counts(500, 100, imbalance).sum() // 512  # the loader leaves the remainder out
    assert abs(c.train.epochs * steps_per_epoch - 13_000) <= steps_per_epoch / 2


def test_full_cifar100_has_no_rebalance():
    c = recipes.cifar100()
    assert (c.method.tau, c.method.alpha, c.method.rebalance) == (0.07, 0.008, False)
    assert (c.train.batch_size, c.optim.lr, c.optim.weight_decay, c.model.name) == (256, 0.1, 5e-4, "resnet50_cifar")
    assert c.views.query.policy == c.views.key.policy == "sim" and c.data.imbalance == 1


def test_cifar10_follows_cifar100():
    a, b = recipes.cifar10_lt("paco", 50), recipes.cifar100_lt("paco", 50)
    assert (a.method, a.optim, a.views, a.train) == (b.method, b.optim, b.views, b.train) and a.data.name == "cifar10"


@pytest.mark.parametrize(("strategy", "query", "key"), [(1, "sim", "sim"), (2, "rand", "rand"), (3, "rand", "sim")])
def test_strategies_of_the_paper(strategy, query, key):
    c = recipes.with_strategy(recipes.cifar100_lt(), strategy)
    assert (c.views.query.policy, c.views.key.policy) == (query, key)
    assert {(v.crop, v.cutout) for v in (c.views.query, c.views.key)} == {("resized", 0)}


def test_unknown_names():
    with raises("unknown-name", "digit-lt", "'digits-lt'"):
        recipes.make("digit-lt")
    with raises("unknown-name", "'pacho'", "'paco'"):
        recipes.digits_lt("pacho")
    with raises("unknown-name", "'relased'"):
        recipes.cifar100_lt(setting="relased")


def rates(optim, epochs):
    """Return the learning rate of the first step of each epoch."""
    return [learning_rate(optim, 10 * epoch, 10, epochs) for epoch in range(epochs)]


def test_schedules_of_bbn_and_of_methods_that_adopted_it():
    """The warm-up starts at a third of the rate. Milestones are one epoch early, because these codes count from 1."""
    for method, lr, drops in (("bbn", 0.1, (119, 159)), ("causal-norm", 0.2, (119, 159)), ("crt", 0.1, (159, 179))):
        found = rates(recipes.cifar100_lt(method, 100, "released").optim, 200)
        assert found[:5] == pytest.approx([lr * (1 / 3 + 2 / 3 * (e + 1) / 5) for e in range(5)])
        assert found[drops[0] - 1 : drops[0] + 1] == pytest.approx([lr, lr / 100])
        assert found[drops[1] - 1 : drops[1] + 1] == pytest.approx([lr / 100, lr / 10_000])
    assert [recipes.cifar100_lt(m, 100, "released").optim.nesterov for m in ("bbn", "crt", "causal-norm")] == [
        True,
        True,
        False,
    ]


def test_decoupling_as_in_the_bag_of_tricks():
    config = recipes.cifar100_lt("crt", 100, "released")
    linear = methods.make(config, np.full(100, 5)).stages[1]
    found = rates(linear.optim, linear.epochs)
    assert found == pytest.approx([0.1] * 10 + [0.01] * 10 + [0.001] * 10)
    tau = recipes.cifar100_lt("tau-norm", 100, "released")
    assert (tau.method.power, tau.data.val_fraction) == (1.0, 0.0)
    assert rates(methods.make(recipes.cifar100_lt("crt", 100, "equal"), np.full(100, 5)).stages[1].optim, 10)[5] == 0.05
    mislas = recipes.cifar100_lt("mislas", 100, "released")
    assert mislas.optim.weight_decay == mislas.method.linear_decay == 2e-4


@pytest.mark.parametrize(("name", "lr", "decay"), [("bcl", 0.15, 5e-4), ("proco", 0.3, 2e-4)])
@pytest.mark.parametrize("imbalance", [100, 50, 10])
def test_three_views_as_published(name, lr, decay, imbalance):
    released, equal = (recipes.cifar100_lt(name, imbalance, setting) for setting in ("released", "equal"))
    assert (released.train.epochs, released.train.batch_size, released.optim.weight_decay) == (200, 256, decay)
    found = rates(released.optim, 200)
    assert found[:5] == pytest.approx([lr * (epoch + 1) / 5 for epoch in range(5)])
    assert [found[epoch] for epoch in (159, 160, 179, 180)] == pytest.approx([lr, lr / 10, lr / 10, lr / 100])
    query, key = released.views.query, released.views.key
    assert (query.crop, query.policy, query.cutout, key.crop, key.policy) == ("pad", "auto", 16, "resized", "sim")
    assert key.crop_scale == (0.08, 1.0) and equal.views.key.crop_scale == (0.2, 1.0)
    m = released.method
    assert equal.method == m and (m.tau, m.projection_hidden, m.projection_dim, m.projection_norm) == (
        0.1,
        512,
        128,
        True,
    )
    assert (m.softmax_weight, m.weight) == ((2.0, 0.6) if name == "bcl" else (1.0, 1.0))
    assert recipes.RECIPES["cifar100-lt"].published[name, imbalance] in (51.9, 56.6, 64.9, 52.8, 57.1, 65.5)


def test_the_weights_of_bcl_on_other_data_are_those_for_imagenet():
    assert (recipes.digits_lt("bcl").method.softmax_weight, recipes.digits_lt("bcl").method.weight) == (1.0, 0.35)


def test_ncl_as_in_its_code():
    released = recipes.cifar100_lt("ncl", 100, "released")
    assert (released.train.epochs, released.train.batch_size, released.optim.weight_decay) == (400, 64, 2e-4)
    found = rates(released.optim, 400)
    assert [found[epoch] for epoch in (5, 318, 319, 358, 359)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert (released.views.query.policy, released.views.query.cutout) == ("auto", 16)
    assert released.method == recipes.cifar100_lt("ncl", 100, "equal").method
    assert (released.method.networks, released.method.hard, released.method.weight) == (3, 30, 0.6)
