"""Small configurations that train in a second."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from longtail import recipes
from longtail.cli.console import print_messages
from longtail.config import Config
from longtail.engine import evaluate
from longtail.reporting.embedding import WORKER

evaluate.LATENCY_SECONDS = 0.0  # six passes instead of a hundred after every training
torch.set_num_threads(1)  # 2 cores, small networks: threads cost more than they give

# Tests send these signals. A shell ignores them in the processes that it starts in the background.
for number, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, number) and signal.getsignal(getattr(signal, number)) is signal.SIG_IGN:
        signal.signal(getattr(signal, number), handler)


def tiny(method: str = "paco", **train) -> Config:
    """Return a configuration for the digits at 8 pixels with a ResNet-8: three epochs of a few steps."""
    config = recipes.digits_lt(method)
    values = {"epochs": 3, "batch_size": 64, "device": "cpu", "checkpoint_every": 1} | train
    chosen = (
        replace(config.method, **{config.method.second_stage_epochs_field: 2})
        if config.method.second_stage_epochs_field
        else config.method
    )
    return replace(
        config, method=chosen, train=replace(config.train, **values), log=replace(config.log, progress="none")
    )


@pytest.fixture(scope="session", autouse=True)
def feature_cache(tmp_path_factory):
    """Tests never use the feature cache of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGTAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("LONGTAIL_CACHE_SIZE", raising=False)
        yield


@pytest.fixture
def printed_messages():
    """Print the messages of the library, as the command line does, so that capsys captures them."""
    with print_messages():
        yield


@pytest.fixture
def simple_maps(monkeypatch):
    """Use the first two features in place of t-SNE, which takes longer than everything else; tests of the report compute it."""
    monkeypatch.setattr(WORKER, "embed", lambda x_NF: x_NF[:, :2])


os.environ["LONGTAIL_TRACEBACK"] = "1"  # unexpected exceptions fail tests instead of becoming one line
