"""Evaluation: k-NN against a loop, plausible latency and peak memory, and files of examples."""

import json
import math
import time

import numpy as np
import pytest
import torch

from longtail import methods
from longtail.data.sources import load
from longtail.engine import evaluate as evaluation
from longtail.engine import predictions
from longtail.engine.evaluate import Evaluator, knn_top1, latency, peak_memory, to_float16
from longtail.engine.examples import write_examples
from longtail.engine.predictions import predict
from longtail.views import Views
from tests.conftest import tiny
from tests.raises import raises

CPU = torch.device("cpu")
DATA = load(tiny().data)


def test_knn_equals_a_loop():
    g = torch.Generator().manual_seed(0)
    train, test = torch.randn(60, 8, generator=g), torch.randn(25, 8, generator=g)
    y_N, y_M = torch.randint(5, (60,), generator=g), torch.randint(5, (25,), generator=g)
    right = 0
    for x, y in zip(test, y_M, strict=True):
        cosine = [float(x @ t / (x.norm() * t.norm())) for t in train]
        near = sorted(range(60), key=lambda i: -cosine[i])[:7]
        votes = [sum(math.exp(cosine[i] / 0.07) for i in near if y_N[i] == c) for c in range(5)]
        right += votes.index(max(votes)) == y
    assert knn_top1(train, y_N, test, y_M, k=7) == 100 * right / 25


def test_knn_with_fewer_images_than_neighbors():
    x = torch.eye(3)
    assert knn_top1(x, torch.arange(3), x, torch.arange(3)) == 100


def test_balanced_accuracy_weights_classes_equally():
    method = methods.make(tiny("ce"), DATA.train.counts)
    views = Views(tiny().views, 8)
    predicted = method.eval()(views.plain(torch.from_numpy(DATA.train.images).permute(0, 3, 1, 2))).argmax(1).numpy()
    wanted = np.mean([100 * (predicted[DATA.train.labels == c] == c).mean() for c in range(10)])
    method.train()
    assert Evaluator(method, DATA, views, CPU, 50).balanced_accuracy(DATA.train) == wanted and method.training


def test_of_many_classes_the_largest_logits_are_kept(monkeypatch):
    """Logits are computed in chunks of images. Predictions, confidences and probabilities are those of all logits."""
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(30, 8, generator=rng), torch.randn(1_500, 8, generator=rng)
    seen: list[int] = []

    def classify(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return some @ weight.T

    monkeypatch.setattr(predictions, "LOGITS_AT_ONCE", 1_500 * 8)
    guess, sure, kept = predict(classify, x, 1_500)
    assert seen == [8, 8, 8, 6]
    logits = (x @ weight.T).double()
    assert guess.tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(sure, logits.softmax(1).amax(1), rtol=1e-5)
    assert {name: a.shape for name, a in kept.items()} == {
        "top_logits": (30, 20),
        "top_classes": (30, 20),
        "log_sum_exp": (30,),
    }
    probabilities = logits.softmax(1).gather(1, torch.from_numpy(kept["top_classes"]).long())
    np.testing.assert_allclose(np.exp(kept["top_logits"] - kept["log_sum_exp"][:, None]), probabilities, rtol=1e-4)
    few = predict(lambda some: some @ weight[:1_000].T, x, 1_000)
    assert list(few.kept) == ["logits"] and few.kept["logits"].shape == (30, 1_000)
    weight[3] = torch.nan
    with raises("non-finite", "30 images"):
        predict(classify, x, 1_500)


def test_neighbors_of_many_classes_vote_some_images_at_a_time(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 8, generator=rng), torch.randint(7, (60,), generator=rng)
    whole = knn_top1(x[:40], y[:40], x[40:], y[40:])
    monkeypatch.setattr(evaluation, "LOGITS_AT_ONCE", 40 * 3)
    assert knn_top1(x[:40], y[:40], x[40:], y[40:]) == whole


def test_latency_and_memory():
    method = methods.make(tiny("ce"), DATA.train.counts)
    assert (
        0 < latency(method, DATA.test, Views(tiny().views, 8), CPU, repeats=3) < 10_000
        and method.training
        and peak_memory(CPU) > 10**7
    )


def test_latency_of_a_slow_network_is_measured_with_a_few_images(monkeypatch):
    method, batches = methods.make(tiny("ce"), DATA.train.counts), []
    monkeypatch.setattr(evaluation, "LATENCY_SECONDS", 0.05)

    def sleep(module: object, inputs: tuple[torch.Tensor]) -> None:
        batches.append(len(inputs[0]))
        time.sleep(0.002 * len(inputs[0]))

    method.net.trunk.body.register_forward_pre_hook(sleep)
    assert 128 <= latency(method, DATA.test, Views(tiny().views, 8), CPU) < 1_000  # 2 ms for each of 64 images
    assert batches == [8, 8, 8]


@pytest.mark.filterwarnings("error")
def test_large_features_are_stored_without_a_warning():
    assert to_float16(np.array([[1e5, -1e5, 2.0]], np.float32)).tolist() == [[np.inf, -np.inf, 2.0]]


def test_evaluation_is_not_compiled():
    method, seen = methods.make(tiny("ce"), DATA.train.counts), []
    method.net.trunk.body.compile(backend=lambda graph, _: seen.append(graph) or graph)
    Evaluator(method, DATA, Views(tiny().views, 8), CPU, 50).balanced_accuracy(DATA.train)
    latency(method, DATA.test, Views(tiny().views, 8), CPU, repeats=1)
    assert not seen
    method.features(torch.zeros(2, 3, 8, 8))
    assert seen  # what a step does


def test_examples_show_the_worst_confusions_and_rare_classes(tmp_path):
    truth = DATA.test.labels
    predicted = np.where(truth == 9, 4, truth)
    predicted[truth == 8] = np.where(np.arange(40) < 10, 3, 8)
    write_examples(tmp_path / "examples", DATA, predicted)
    index = json.loads((tmp_path / "examples/index.json").read_text())
    assert [(e["truth"], e["predicted"], e["share"]) for e in index["confusions"]] == [(9, 4, 1.0), (8, 3, 0.25)]
    assert index["worst_rare"][0]["class"] == 9 and index["worst_rare"][0]["accuracy"] == 0
    assert index["best_rare"][0]["accuracy"] == 100
    for item in index["confusions"][0]["items"]:
        assert truth[item] == 9 and (tmp_path / f"examples/{item}.png").exists()


@pytest.mark.parametrize(
    ("wrong", "best", "worst"), [([9], [6, 7, 8], [9]), ([5, 6, 7, 8, 9], [], [9, 8, 7, 6, 5]), ([], [7, 8, 9], [])]
)
def test_a_rare_class_is_best_or_worst_or_neither(tmp_path, wrong, best, worst):
    """A class with accuracy 0 is not among the best, and one with accuracy 100 not among the worst."""
    truth = DATA.test.labels
    write_examples(tmp_path / "examples", DATA, np.where(np.isin(truth, wrong), 0, truth))
    index = json.loads((tmp_path / "examples/index.json").read_text())
    found = [sorted(entry["class"] for entry in index[key]) for key in ("best_rare", "worst_rare")]
    assert found == [best, sorted(worst)]
