"""Every method from training to prediction on the digits: it learns, a resumed run equals the uninterrupted one bit for bit,
and the stored network is the deployed one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import longtail
from longtail import methods, recipes, run_folder
from longtail.config import Config
from longtail.engine.evaluate import Evaluator, evaluate
from longtail.engine.train import train
from longtail.views import Views
from tests.conftest import tiny
from tests.engine.test_train import load_once, log_of, run_until, state_of

EPOCHS, SECOND, BATCH = 3, 2, 32  # epochs of the first stage and of the second; images a step


@pytest.fixture(scope="module", params=recipes.METHODS)
def finished(request, tmp_path_factory) -> tuple[Config, Path]:
    """Return the configuration and the folder of an uninterrupted run."""
    config = tiny(request.param, epochs=EPOCHS, batch_size=BATCH, checkpoint_every=100)
    config = replace(config, optim=replace(config.optim, warmup_epochs=0))
    if config.method.second_stage_epochs_field:
        config = replace(config, method=replace(config.method, **{config.method.second_stage_epochs_field: SECOND}))
    (folder,) = train(config, tmp_path_factory.mktemp(request.param), data=load_once(config.data))
    return config, folder


def test_resumed_run_equals_the_uninterrupted_one(finished, tmp_path):
    """The run is stopped in the middle of an epoch of either stage, and between the stages."""
    config, folder = finished
    epoch = len(load_once(config.data).train.labels) // BATCH
    boundary, end = EPOCHS * epoch, (EPOCHS + config.method.second_epochs) * epoch
    for stop in (4, boundary, boundary + epoch + 3):
        if stop < end or stop == boundary:
            assert run_until(config, tmp_path, stop).steps_done() == stop
    parts = run_until(config, tmp_path)
    assert parts.steps_done() == end and parts.stage_index == len(parts.method.stages) - 1
    stored, found = load_file(folder / run_folder.MODEL), parts.method.net.state_dict()
    assert stored.keys() == found.keys() and all(torch.equal(stored[k], found[k]) for k in stored)
    one, two = state_of(run_until(config, folder)), state_of(parts)  # momenta, key networks and queues too
    assert one.keys() == two.keys() and len(one) > 20 and all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(folder) == log_of(tmp_path) and len(log_of(folder)) == end // epoch


def test_it_learns(finished):
    """There are ten classes, so chance is 10 %."""
    metrics = json.loads((finished[1] / run_folder.METRICS).read_text())
    assert metrics["top1"] > 30 and metrics["knn_top1"] > 45


def test_stored_network_is_the_deployed_one(finished):
    """The evaluation is repeated from the run folder only."""
    _, folder = finished
    metrics, logits = (
        json.loads((folder / run_folder.METRICS).read_text()),
        np.load(folder / "predictions.npz")["logits"],
    )
    torch.manual_seed(99)
    again = evaluate(folder, device="cpu")[folder]
    assert again["top1"] == metrics["top1"] and again["per_class"] == metrics["per_class"]
    assert again == metrics | {"latency_b64": again["latency_b64"]}  # which is evaluated again
    assert np.array_equal(np.load(folder / "predictions.npz")["logits"], logits)


def test_it_is_loaded_without_its_data(finished, monkeypatch):
    """The images are passed as a user would pass them."""
    config, folder = finished
    images = load_once(config.data).test.images
    monkeypatch.setattr("longtail.data.sources.load", None)
    model, stored = longtail.load(folder), np.load(folder / "predictions.npz", allow_pickle=False)
    np.testing.assert_allclose([said.logits for said in model(images)], stored["logits"], rtol=1e-4, atol=1e-4)
    assert (model.temperature is not None) == (config.data.val_fraction > 0)


def test_evaluated_network_is_in_test_mode(finished):
    """Logits are computed from images without stored features, because the head of Causal Norm depends on the mode."""
    config, folder = finished
    data, views = load_once(config.data), Views(config.views, config.data.image_size)
    method = methods.make(config, data.train.counts, stored=True)
    method.set_stage(method.stages[-1])
    method.net.load_state_dict(load_file(folder / run_folder.MODEL))
    method.eval()
    with torch.no_grad():
        wanted = method(views.plain(torch.from_numpy(data.test.images).permute(0, 3, 1, 2)))
    logits = torch.from_numpy(np.load(folder / "predictions.npz")["logits"])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    by_class = [(wanted.argmax(1).numpy() == data.test.labels)[data.test.labels == c].mean() for c in range(10)]
    measured = Evaluator(method.train(), data, views, torch.device("cpu"), 64).balanced_accuracy(data.test)
    assert measured == pytest.approx(100 * np.mean(by_class))
