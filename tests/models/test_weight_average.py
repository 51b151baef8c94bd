"""Test the moving average of weights against its recursion, and in whole trainings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from longtail import run_folder
from longtail.engine.fit_head import fit_head, head_config
from longtail.engine.train import train
from longtail.models.weight_average import WeightAverage
from tests.conftest import tiny
from tests.engine.test_train import load_once, log_of, run_until, state_of


def with_ema(method: str, decay: float = 0.9, **changes):
    return tiny(method, ema=decay, batch_size=32, **changes)


def decay_of(step: int, decay: float) -> float:
    return min(decay, (1 + step) / (10 + step))


def test_is_the_recursion():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    average, wanted = WeightAverage(net, 0.5), {k: v.clone() for k, v in net.state_dict().items()}
    for step in range(30):  # the decay is limited by the step in the first eight steps
        with torch.no_grad():
            for tensor in net.state_dict().values():
                tensor.add_(1) if tensor.dtype == torch.int64 else tensor.normal_()
        average.set_step(step)
        average.update()
        d = decay_of(step, 0.5)
        for name, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                wanted[name] = d * wanted[name] + (1 - d) * tensor
    before = {k: v.clone() for k, v in net.state_dict().items()}
    addresses = [v.data_ptr() for v in net.state_dict().values()]
    with average.applied():
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(
                tensor, wanted[name] if tensor.is_floating_point() else before[name], rtol=1e-6, atol=1e-7
            )
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    average.deploy()
    torch.testing.assert_close(net[1].running_mean, wanted["1.running_mean"], rtol=1e-6, atol=1e-7)
    assert net[1].num_batches_tracked == 30 and addresses == [v.data_ptr() for v in net.state_dict().values()]


def test_without_a_decay_nothing_changes():
    net = nn.Linear(2, 2)
    before, average = net.weight.clone(), WeightAverage(net, 0.0)
    average.update()
    average.swap()
    average.deploy()
    assert torch.equal(net.weight, before) and average.state_dict() == {}


def test_the_average_of_another_network_is_refused():
    average = WeightAverage(nn.Linear(2, 2), 0.9)
    for state in ({}, {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}):
        with pytest.raises(ValueError):
            average.load_state_dict(state)


def test_the_stored_network_is_the_average_of_all_steps(tmp_path, monkeypatch):
    """The weights of each step are recorded, and averaged in float64."""
    steps, update = [], WeightAverage.update

    def record(self):
        steps.append({k: v.double().clone() for k, v in self.current.items()})
        update(self)

    monkeypatch.setattr(WeightAverage, "update", record)
    config = with_ema("ce")
    torch.manual_seed(0)
    (folder,) = train(config, tmp_path, data=load_once(config.data))
    stored = load_file(folder / run_folder.MODEL)
    average = None
    monkeypatch.setattr(WeightAverage, "update", update)
    first = run_until(replace(config, optim=replace(config.optim, lr=1e-30, warmup_epochs=0)), tmp_path / "first", 0)
    average = {k: v.double() for k, v in first.method.net.state_dict().items() if v.is_floating_point()}
    for t, weights in enumerate(steps):
        d = decay_of(t, 0.9)
        average = {k: d * average[k] + (1 - d) * v for k, v in weights.items()}
    assert len(steps) == 3 * (len(load_once(config.data).train.labels) // 32)
    for name, wanted in average.items():
        torch.testing.assert_close(stored[name].double(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stored["head.weight"].double(), steps[-1]["head.weight"], rtol=1e-3)


@pytest.mark.parametrize("method", ["ce", "crt", "paco"])
def test_resume_is_exact(method, tmp_path):
    """Stopped in the middle of an epoch, in the second stage, and at the end of the first, whose average the next one uses."""
    config = with_ema(method)
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, 3 * whole.steps_per_epoch, 3 * whole.steps_per_epoch + 5):
        if stop < whole.total_steps():
            run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert whole.average.averages.keys() == parts.average.averages.keys() != set()
    assert all(torch.equal(v, parts.average.averages[k]) for k, v in whole.average.averages.items())
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


def test_a_finished_run_is_evaluated_with_the_average(tmp_path):
    config = with_ema("ce")
    (folder,) = train(config, tmp_path, data=load_once(config.data))
    (plain,) = train(with_ema("ce", 0.0), tmp_path / "plain", data=load_once(config.data))
    logits, others = (np.load(f / "predictions.npz")["logits"] for f in (folder, plain))
    assert not np.allclose(logits, others) and log_of(folder) == log_of(plain)  # the training is the same


def test_validation_uses_the_average(tmp_path, monkeypatch):
    config = with_ema("ce", validate_every=1)
    config = replace(config, data=replace(config.data, val_fraction=0.1))
    found = []
    from longtail.engine.evaluate import Evaluator

    measure = Evaluator.balanced_accuracy
    monkeypatch.setattr(
        Evaluator,
        "balanced_accuracy",
        lambda self, source: (found.append(self.method.net.head.weight.clone()), measure(self, source))[1],
    )
    trainer = run_until(config, tmp_path)
    assert len(found) == 3 and torch.equal(found[-1], trainer.method.net.head.weight)  # which is the average at the end


def test_heads_on_stored_features_have_averaged_weights():
    x_VNF = torch.randn(1, 40, 6, generator=torch.Generator().manual_seed(0))
    y_N = torch.arange(40) % 4
    config = head_config("ce", 40, epochs=3)
    averaged = replace(config, train=replace(config.train, ema=0.9))
    one, other = (fit_head(x_VNF, y_N, c, 4) for c in (config, averaged))
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert other.linear.weight.norm() < one.linear.weight.norm()  # it begins with zeros
