"""gradients.npz: gradient norms of the classifier by class, against loops over the equation and autograd."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from longtail import methods, recipes, run_folder
from longtail.config import Config
from longtail.engine import distributed
from longtail.engine.cuda_graph import warm_up_and_restore
from longtail.engine.loop import train_step
from longtail.engine.meter import GradientNorms, class_norms
from longtail.engine.train import train
from longtail.engine.trainer import Trainer
from longtail.methods.softmax import CrossEntropy
from tests.conftest import tiny
from tests.engine.test_train import CPU, DATA, log_of, run_until, state_of
from tests.processes import together
from tests.raises import raises


def watched(method: str, **train_changes) -> Config:
    config = tiny(method, **train_changes)
    return replace(config, log=replace(config.log, gradients=True))


def norms_of(folder) -> np.ndarray:
    with np.load(folder / run_folder.GRADIENTS, allow_pickle=False) as stored:
        return stored["norms"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_are_those_of_the_equation(accumulate, tmp_path, monkeypatch):
    """For cross-entropy, dL/dw_k is the mean over images of (p_k - [y = k])·x, computed in float64 image by image."""
    seen = []
    terms = CrossEntropy.loss_from_features

    def kept(self, x_BF, y_B, *mixed):
        head = self.linear
        seen.append([t.detach().double().numpy().copy() for t in (x_BF, head.weight, head.bias)] + [y_B.numpy().copy()])
        return terms(self, x_BF, y_B, *mixed)

    monkeypatch.setattr(CrossEntropy, "loss_from_features", kept)
    run = run_until(watched("ce", epochs=2, accumulate=accumulate), tmp_path)
    gradients = []
    for x_BF, w_CF, b_C, y_B in seen:
        gradient_CF = np.zeros_like(w_CF)
        for x_F, y in zip(x_BF, y_B, strict=True):
            weights = np.exp(w_CF @ x_F + b_C)
            for k in range(len(w_CF)):
                gradient_CF[k] += (weights[k] / weights.sum() - (k == y)) * x_F / len(y_B)
        gradients.append(gradient_CF)
    steps = np.array(gradients).reshape(2, run.steps_per_epoch, accumulate, *gradients[0].shape).mean(2)
    wanted = np.sqrt((steps**2).sum(3)).mean(1)
    assert norms_of(tmp_path).dtype == np.float32 and norms_of(tmp_path).shape == wanted.shape == (2, 10)
    np.testing.assert_allclose(norms_of(tmp_path), wanted, rtol=1e-4)


@pytest.mark.parametrize("name", ["paco", "gpaco", "supcon", "lws", "reslt", "oltr", "ride-2", "ldam-drw"])
def test_norms_are_those_of_the_gradients_that_the_optimizer_gets(name, tmp_path, monkeypatch):
    """This holds in every stage that trains the classifier; other stages have NaN."""
    taken = []

    def step(optimizer, *args, **kwargs):
        gradient = current[0].method.class_weights.grad
        taken.append(None if gradient is None else gradient.double().numpy().copy())
        return sgd(optimizer, *args, **kwargs)

    current, made, sgd = [], Trainer.__init__, torch.optim.SGD.step
    monkeypatch.setattr(Trainer, "__init__", lambda self, *args: (made(self, *args), current.append(self))[0])
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    run = run_until(watched(name, epochs=1), tmp_path)
    epochs = [taken[i : i + run.steps_per_epoch] for i in range(0, len(taken), run.steps_per_epoch)]
    assert len(epochs) == len(norms_of(tmp_path)) == sum(stage.epochs for stage in run.method.stages)
    for gradients, row in zip(epochs, norms_of(tmp_path), strict=True):
        if gradients[0] is None:
            assert np.isnan(row).all() and all(gradient is None for gradient in gradients)
            continue
        each = [[np.sqrt((gradient[..., c, :] ** 2).sum()) for c in range(10)] for gradient in gradients]
        np.testing.assert_allclose(row, np.mean(each, 0), rtol=1e-5)
    learned = {stage for row, stage in zip(norms_of(tmp_path), stages_of(tmp_path), strict=True) if row[0] > 0}
    wanted = {"supcon": {"linear"}, "oltr": {"train", "memory"}}
    assert learned == wanted.get(name, {"train"})


def stages_of(folder) -> list[str]:
    with np.load(folder / run_folder.GRADIENTS, allow_pickle=False) as stored:
        return stored["stages"].tolist()


def test_rows_of_several_classifiers_are_one_class():
    gradient_ECF = torch.zeros(2, 3, 4)
    gradient_ECF[0, 1], gradient_ECF[1, 1] = 3, 4
    assert class_norms(gradient_ECF).tolist() == [0, 10, 0]


@pytest.mark.parametrize("name", recipes.METHODS)
def test_every_method_has_a_row_for_each_class(name):
    config = tiny(name)
    method = methods.make(config, DATA.train.counts)
    for stage in method.stages:
        method.set_stage(stage)
        assert method.class_weights.shape[-2] == 10 and method.class_weights.dim() in (2, 3)


@pytest.mark.parametrize("name", ["paco", "supcon"])
def test_recording_gradients_does_not_change_the_run(name, tmp_path):
    plain, seen = run_until(tiny(name), tmp_path / "plain"), run_until(watched(name), tmp_path / "seen")
    one, two = state_of(plain), state_of(seen)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "plain") == log_of(tmp_path / "seen")
    assert tiny(name).identity() == watched(name).identity()
    assert not (tmp_path / "plain" / run_folder.GRADIENTS).exists()


@pytest.mark.parametrize("name", ["paco", "supcon"])
def test_resumed_in_parts_the_file_is_that_of_the_unbroken_run(name, tmp_path):
    """The run is stopped in the middle of an epoch, at the end of a stage, and in the next stage."""
    config = watched(name)
    run_until(config, tmp_path / "whole")
    for stop in (4, 12, 18, 21):
        run_until(config, tmp_path / "parts", stop)
        assert (tmp_path / "parts" / run_folder.GRADIENTS).exists() == (stop > 6)  # an epoch has six steps
    run_until(config, tmp_path / "parts")
    assert np.array_equal(norms_of(tmp_path / "whole"), norms_of(tmp_path / "parts"), equal_nan=True)
    assert stages_of(tmp_path / "whole") == stages_of(tmp_path / "parts")


def test_gradients_after_the_last_checkpoint_are_written_again(tmp_path):
    """The file may be older or newer than the checkpoint; in both cases the result is correct."""
    config = watched("ce")
    run_until(config, tmp_path / "parts", 8)
    shutil.copytree(tmp_path / "parts/checkpoint", tmp_path / "kept")
    run_until(config, tmp_path / "parts")
    whole = norms_of(tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoint")
    shutil.copytree(tmp_path / "kept", tmp_path / "parts/checkpoint")
    run_until(config, tmp_path / "parts")
    assert len(whole) == 3 and np.array_equal(norms_of(tmp_path / "parts"), whole)


def test_gradients_that_are_requested_at_a_resume_start_there(tmp_path):
    """Means are over the recorded steps, earlier epochs have NaN, and a resume without the flag does not change the file."""
    run_until(tiny("ce"), tmp_path, 8)
    run_until(watched("ce"), tmp_path, 12)
    norms = norms_of(tmp_path)
    assert np.isnan(norms[0]).all() and (norms[1] > 0).all() and len(norms) == 2
    run_until(watched("ce", epochs=3), tmp_path / "whole")
    assert norms[1] == pytest.approx(norms_of(tmp_path / "whole")[1], rel=0.5)  # of 4 steps and of 6
    run_until(tiny("ce"), tmp_path)
    assert np.array_equal(norms_of(tmp_path), norms, equal_nan=True)


def test_a_damaged_file_says_so(tmp_path):
    run_until(watched("ce"), tmp_path, 8)
    (tmp_path / run_folder.GRADIENTS).write_bytes(b"no archive")
    with raises("damaged-file", tmp_path / run_folder.GRADIENTS):
        run_until(watched("ce"), tmp_path)


@pytest.mark.parametrize("count", [-1, 10**400, 1.5, None])
def test_an_impossible_number_of_steps_in_a_checkpoint_is_refused(count):
    norms = GradientNorms(True, 3, ["train"], torch.device("cpu"))
    with pytest.raises(ValueError):
        norms.load_state_dict({"sums": torch.zeros(3), "count": count})
    norms.load_state_dict({"sums": torch.ones(3), "count": 7})
    assert norms.count == 7 and norms.sums_C.tolist() == [1, 1, 1]


def test_steps_of_the_warm_up_are_not_counted(tmp_path):
    run = Trainer(watched("ce"), 0, DATA, tmp_path, CPU)
    place = run.gradients.sums_C.data_ptr()
    warm_up_and_restore([run], train_step)
    assert run.gradients.sums_C.tolist() == [0] * 10 and run.gradients.count == 0
    run.prepare(0)
    train_step(run)
    assert (run.gradients.sums_C > 0).all() and run.gradients.sums_C.data_ptr() == place


def two_steps(config: Config, folder) -> list[torch.Tensor]:
    """Return the gradients of this process before averaging, and the recorded sums."""
    own, average = [], distributed.average_gradients

    def kept(method):
        own.append(method.class_weights.grad.clone())
        average(method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtail.engine.loop.average_gradients", kept)
        run = Trainer(config, 0, DATA, folder, CPU)
        for step in range(2):
            run.prepare(step)
            train_step(run)
    return [torch.stack(own), run.gradients.sums_C]


def test_several_processes_measure_the_gradient_that_they_share(tmp_path):
    """Each process records the norm of the mean gradient, and not the mean of the norms."""
    config = watched("ce", batch_size=24, processes=2)
    (a_SCF, sums_C), (b_SCF, other_C) = together(2, tmp_path / "ranks", two_steps, config, tmp_path)
    assert torch.equal(sums_C, other_C) and not torch.equal(a_SCF, b_SCF)
    wanted_C = ((a_SCF + b_SCF) / 2).double().norm(dim=2).sum(0)
    torch.testing.assert_close(sums_C, wanted_C, rtol=1e-5, atol=0)


def test_trained_by_the_verb_it_is_in_the_run_folder(tmp_path):
    (folder,) = train(watched("paco", epochs=2, checkpoint_every=10), tmp_path, data=DATA)
    assert norms_of(folder).shape == (2, 10) and stages_of(folder) == ["train", "train"]
