"""Methods for very many classes: losses, gradients and logged values in chunks equal those of all pairs at once."""

import copy
from dataclasses import replace

import pytest
import torch

from longtail import methods
from longtail.config import ChunkedSettings
from longtail.losses import chunked
from longtail.methods import Batch, Method
from tests.conftest import tiny
from tests.engine.test_host import OnTheDeviceAlone
from tests.methods.test_contrastive import after_steps, assert_same_gradients
from tests.methods.test_methods import COUNTS, batch
from tests.raises import raises

NAMES = [
    "ce",
    "balanced-softmax",
    "logit-adjustment",
    "logit-adjustment-post-hoc",
    "paco",
    "paco-no-rebalance",
    "gpaco",
]


def make(name: str, chunk: int, bias: bool = True) -> Method:
    """Return a method with non-default settings of the loss; contrastive methods have made two steps."""
    config = tiny(name)
    changes = {"queue": 56, "center_tau": 0.7, "smoothing": 0.1} if hasattr(config.method, "queue") else {}
    if name == "logit-adjustment":
        changes = {"strength": 1.3}
    torch.manual_seed(0)
    made = replace(
        config, model=replace(config.model, bias=bias), method=replace(config.method, chunk=chunk, **changes)
    )
    method = methods.make(made, COUNTS)
    return after_steps(method, 2) if changes.get("queue") else method


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_terms_and_gradients_are_those_of_all_pairs_at_once(name, chunk):
    whole, parts = make(name, 0), make(name, chunk)
    parts.load_state_dict(whole.state_dict())
    wanted, found = whole.loss(batch()), parts.loss(batch())
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    wanted["loss"].backward(), found["loss"].backward()
    assert_same_gradients(parts, whole)


@pytest.mark.parametrize("name", ["balanced-softmax", "paco"])
def test_also_without_bias(name):
    whole, parts = make(name, 0, bias=False), make(name, 7, bias=False)
    parts.load_state_dict(whole.state_dict())
    torch.testing.assert_close(parts.loss(batch())["loss"], whole.loss(batch())["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_stay_on_the_device(name):
    method = make(name, 7)
    method.loss(batch())["loss"].backward()
    with OnTheDeviceAlone():
        method.loss(batch())["loss"].backward()


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_automatic_for_many_pairs(name, monkeypatch):
    def logits(x_BF: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all logits at once")

    method = make(name, 0)
    wanted = copy.deepcopy(method).loss(batch())["loss"]
    monkeypatch.setattr(method.net.head, "forward", logits)
    with pytest.raises(AssertionError, match="at once"):
        method.loss(batch())
    monkeypatch.setattr(chunked, "MAX_PLAIN_PAIRS", 12 * 9)  # below 12 anchors and 10 classes
    torch.testing.assert_close(method.loss(batch())["loss"], wanted)


def test_methods_with_other_losses_have_no_such_setting():
    assert not isinstance(tiny("crt").method, ChunkedSettings)
    method = methods.make(tiny("crt"), COUNTS)
    method.loss(Batch(batch().query, None, batch().y_B))


def test_chunk_does_not_distinguish_runs_and_is_not_negative():
    config = tiny("paco")
    assert replace(config, method=replace(config.method, chunk=5)).identity() == config.identity()
    with raises("invalid-value", "--method.chunk -1", "0"):
        replace(config.method, chunk=-1)
