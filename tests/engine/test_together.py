"""Parallel seeds: each equals a separate run. On the CPU they take turns; test_cuda.py tests branches of a graph."""

import signal

import pytest
import torch

from longtail import run_folder
from longtail.engine.evaluate import Evaluator
from longtail.engine.failures import describe_non_finite
from longtail.engine.loggers import Log
from longtail.engine.loop import fit
from longtail.engine.meter import NonFiniteError
from longtail.engine.train import group_by_step, train_group
from longtail.engine.trainer import Trainer
from longtail.errors import Interrupted, UserError
from tests.conftest import tiny
from tests.engine.test_train import CPU, DATA, StopAt, log_of, run_until, state_of
from tests.raises import raises


def make(config, folder, seeds) -> list[Trainer]:
    made: list[Trainer] = []
    for seed in seeds:
        place = folder / f"seed{seed}"
        place.mkdir(parents=True, exist_ok=True)
        made.append(Trainer(config, seed, DATA, place, CPU, made[0] if made else None))
        made[-1].resume()
    return made


def train_together(made: list[Trainer], step: int | None = None) -> None:
    logs = [Log(run.folder / run_folder.LOG, run.total_steps(), "none", "") for run in made]
    fit(made, logs, StopAt(made[0], step))


@pytest.mark.parametrize("method", ["supcon", "paco"])
def test_each_of_several_seeds_is_the_run_alone(method, tmp_path):
    config = tiny(method)
    made = make(config, tmp_path / "together", (0, 1))
    train_together(made)
    alone = run_until(config, tmp_path / "alone")
    one, two = state_of(made[0]), state_of(alone)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(made[0].folder) == log_of(tmp_path / "alone")
    assert not torch.equal(state_of(made[1])["net.head.weight"], one["net.head.weight"])


def test_parallel_seeds_share_only_their_images(tmp_path):
    a, b = make(tiny("paco"), tmp_path, (0, 1))
    assert a.loader.images_N.data_ptr() == b.loader.images_N.data_ptr()
    mine, other = ({t.data_ptr() for t in run.method.state_dict().values()} for run in (a, b))
    assert not mine & other and not torch.equal(a.loader.order(0), b.loader.order(0))


def test_a_stop_saves_all_of_them_and_they_go_on_together(tmp_path):
    config = tiny("paco")
    with raises("interrupted", "step 8", "seed0", "seed1", "--resume", error=Interrupted) as caught:
        train_together(make(config, tmp_path / "parts", (0, 1)), 8)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    again = make(config, tmp_path / "parts", (0, 1))
    assert [run.steps_done() for run in again] == [8, 8]
    train_together(again)
    whole = make(config, tmp_path / "whole", (0, 1))
    train_together(whole)
    for one, two in zip(again, whole, strict=True):
        assert all(torch.equal(state_of(one)[k], state_of(two)[k]) for k in state_of(one))


def test_seeds_at_different_steps_train_in_groups(tmp_path):
    """This is the case after a crash between two checkpoints."""
    config = tiny("ce")
    for seed, stop in ((0, 3), (1, 6), (2, 3)):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        run = Trainer(config, seed, DATA, folder, CPU)
        with Log(folder / run_folder.LOG, run.total_steps(), "none", "") as log, pytest.raises(Interrupted):
            fit([run], [log], StopAt(run, stop))
    groups = group_by_step(make(config, tmp_path, (0, 1, 2)))
    assert [[run.seed for run in group] for group in groups] == [[0, 2], [1]]


def spoil(monkeypatch, bad: Trainer, at: int) -> None:
    """Make the loss of a run NaN from step `at` on."""
    loss = bad.method.loss_from_features

    def spoilt(x_BF, y_B):
        terms = loss(x_BF, y_B)
        return terms | {"loss": terms["loss"] + torch.where(bad.clock >= at, torch.nan, 0.0)}

    monkeypatch.setattr(bad.method, "loss_from_features", spoilt)


def test_a_seed_that_diverges_leaves_the_others_saved(tmp_path, monkeypatch):
    """The others are saved at the end of the epoch, whichever seed diverges and whether or not a checkpoint is due."""
    config = tiny("ce", checkpoint_every=100)
    made = make(config, tmp_path, (0, 1, 2))
    spoil(monkeypatch, made[1], 8)
    with pytest.raises(NonFiniteError) as caught:
        train_together(made)
    assert caught.value.trainer is made[1] and caught.value.step == 8
    saved = make(config, tmp_path, (0, 1, 2))
    assert [run.steps_done() for run in saved] == [12, 0, 12]


def test_a_stop_saves_the_healthy_ones(tmp_path, monkeypatch):
    config = tiny("ce", checkpoint_every=100)
    made = make(config, tmp_path, (0, 1, 2))
    spoil(monkeypatch, made[0], 2)
    with pytest.raises(NonFiniteError):
        train_together(made, 4)
    assert [run.steps_done() for run in make(config, tmp_path, (0, 1, 2))] == [0, 4, 4]


def test_the_advice_names_the_folder_and_the_others(tmp_path):
    (run,) = make(tiny("ce", seeds=(0, 1, 2)), tmp_path, (1,))
    advice = describe_non_finite(run, NonFiniteError(5, ["loss"]))
    assert str(run.folder) in advice and "--optim.lr" in advice and "--resume" in advice
    assert advice.split("--train.seeds ")[1].split()[:2] == ["0", "2"]


def test_one_that_cannot_be_evaluated_does_not_keep_the_next_from_it(tmp_path, monkeypatch):
    done = []

    def finish(self, folder, cost):
        if folder.name == "seed0":
            raise UserError("no")
        done.append((folder.name, cost["together"]))

    monkeypatch.setattr(Evaluator, "finish", finish)
    with pytest.raises(UserError, match="no"):
        train_group(make(tiny("ce", epochs=1), tmp_path, (0, 1, 2)))
    assert done == [("seed1", 3), ("seed2", 3)]


@pytest.mark.parametrize("method", ["paco", "crt"])
def test_seeds_with_the_same_views_are_the_runs_alone(method, tmp_path):
    """The views are made once; in both stages; stopped and resumed, too."""
    config = tiny(method, view_seed=7)
    made = make(config, tmp_path / "together", (0, 1))
    with raises("interrupted", error=Interrupted):
        train_together(made, 8)
    made = make(config, tmp_path / "together", (0, 1))
    train_together(made)
    assert made[0].batches is made[1].batches
    for seed, run in enumerate(made):
        (alone,) = make(config, tmp_path / f"alone{seed}", (seed,))
        train_together([alone])
        assert all(torch.equal(state_of(run)[k], state_of(alone)[k]) for k in state_of(run))
        assert torch.equal(run.batches.loader.order(0), alone.loader.order(0))
    if method == "crt":
        return  # whose last stage has another order
    own = make(tiny(method), tmp_path / "own", (0, 7))
    assert not torch.equal(own[0].loader.order(0), made[0].batches.loader.order(0))
    assert torch.equal(own[1].loader.order(0), made[0].batches.loader.order(0))


def test_shared_views_are_those_of_the_seed(tmp_path):
    """A run whose views have its own seed is the usual run."""
    usual, shared = (run_until(tiny("ce", **more), tmp_path / str(len(more))) for more in ({}, {"view_seed": 0}))
    assert all(torch.equal(state_of(usual)[k], state_of(shared)[k]) for k in state_of(usual))
