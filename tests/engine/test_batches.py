"""Views of several steps at once: the images and random draws of a step depend on the step only."""

import pytest
import torch

from longtail.engine.batches import Batches
from longtail.engine.trainer import Trainer
from tests.conftest import tiny
from tests.engine.test_train import CPU, DATA, run_until, state_of


@pytest.fixture
def four_ahead(monkeypatch):
    """Make views for four steps at once, as on a GPU; an epoch of six steps has parts of four and two."""
    monkeypatch.setattr(Batches, "_choose_steps_ahead", lambda self: 4)


def seen(run: Trainer, step: int) -> list[torch.Tensor]:
    run.prepare(step)
    return [t for t in run.batches.next() if isinstance(t, torch.Tensor)]


def test_a_step_sees_the_same_views_wherever_the_run_comes_from(four_ahead, tmp_path):
    one, other = (Trainer(tiny("paco"), 0, DATA, tmp_path, CPU) for _ in range(2))
    steps = range(2 * one.steps_per_epoch)
    in_order = [seen(one, step) for step in steps]
    for step in (7, 2, 11, 3, 6, 5):  # as after a resume
        assert all(torch.equal(a, b) for a, b in zip(in_order[step], seen(other, step), strict=True))
    for a in steps:
        assert not any(torch.equal(in_order[a][0], in_order[b][0]) for b in range(a))


def test_views_ahead_show_each_image_once_in_an_epoch(four_ahead, tmp_path):
    """The labels of an epoch follow its order batch by batch; the remainder is dropped."""
    run = Trainer(tiny("paco"), 0, DATA, tmp_path, CPU)
    for epoch in (0, 1):
        labels = [seen(run, epoch * 6 + step)[-1] for step in range(6)]
        order = run.loader.order(epoch)[: 6 * 64]
        assert torch.equal(torch.cat(labels), run.loader.y_N[order])


def test_accumulated_batches_follow_one_another(four_ahead, tmp_path):
    run = Trainer(tiny("paco", accumulate=2), 0, DATA, tmp_path, CPU)
    run.prepare(1)
    labels = torch.cat([run.batches.next().y_B for _ in range(2)])
    assert torch.equal(labels, run.loader.y_N[run.loader.order(0)[128:256]])


def test_resume_in_the_middle_of_views_made_ahead_is_bit_for_bit(four_ahead, tmp_path):
    config = tiny("paco")
    whole = run_until(config, tmp_path / "whole")
    for stop in (2, 9):
        run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = state_of(whole), state_of(parts)
    assert all(torch.equal(one[k], two[k]) for k in one)
