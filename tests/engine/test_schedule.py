"""The learning rate at hand-computed steps."""

import math

import pytest

from longtail import recipes
from longtail.config import OptimConfig
from longtail.engine.optim import learning_rate

STEPS = 84  # an epoch of CIFAR-100-LT at imbalance 100, batch 128


def at(optim: OptimConfig, epoch: float, epochs: int = 400) -> float:
    return learning_rate(optim, round(epoch * STEPS), STEPS, epochs)


def test_released_paco_schedule_overshoots_and_steps():
    optim = recipes.cifar100_lt("paco").optim
    rates = {0: 0.005, 0.99: 0.005, 1: 0.01, 9: 0.05, 10: 0.055, 11: 0.05}
    rates |= {320.9: 0.05, 321: 0.005, 360.9: 0.005, 361: 0.0005, 399.9: 0.0005}
    for epoch, rate in rates.items():
        assert at(optim, epoch) == pytest.approx(rate), epoch


def test_milestones_in_shares_follow_the_length_and_in_epochs_do_not():
    shares, epochs = (OptimConfig(lr=1.0, schedule="step", milestones=m) for m in ((0.8, 0.9), (160, 180)))
    for e in (0, 159.9, 160, 179.9, 180, 199):
        assert at(shares, e, 200) == at(epochs, e, 200)
    assert at(shares, 17, 20) == pytest.approx(0.1) and at(epochs, 17, 20) == 1.0


def test_plain_warm_up_by_epoch_does_not_overshoot():
    optim = OptimConfig(lr=0.1, schedule="constant", warmup_epochs=5, warmup_by="epoch")
    assert [at(optim, e) for e in (0, 4, 5, 6)] == pytest.approx([0.02, 0.1, 0.1, 0.1])


def test_cosine_starts_after_the_warm_up_and_ends_at_zero():
    optim = OptimConfig(lr=0.1, schedule="cosine", warmup_epochs=10, warmup_start=0.5)
    assert at(optim, 0) == pytest.approx(0.05)
    assert at(optim, 5) == pytest.approx(0.075)
    assert at(optim, 10) == pytest.approx(0.1)
    assert at(optim, 205) == pytest.approx(0.05)
    last = learning_rate(optim, 400 * STEPS - 1, STEPS, 400)
    assert last == pytest.approx(0.05 * (1 + math.cos(math.pi * (390 * STEPS - 1) / (390 * STEPS)))) and last < 1e-8


def test_constant_without_warm_up():
    optim = OptimConfig(lr=0.3, schedule="constant")
    assert {at(optim, e) for e in (0, 100, 399)} == {0.3}
