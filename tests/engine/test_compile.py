"""The compiled step on the CPU, because CI has no GPU; test_cuda.py compares it with captured and eager steps on CUDA."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.conftest import tiny
from tests.engine.test_train import log_of, run_until


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("method", ["paco", "bcl", "proco"])
def test_compiled_networks_give_the_losses_of_eager_ones(method, tmp_path):
    states, setup = [], []
    for step in ("eager", "compiled"):
        config = tiny(method, epochs=2, execution=step)
        config = replace(
            config, optim=replace(config.optim, lr=0.01)
        )  # at 0.1 rounding grows to 2e-3 in these twelve steps
        run = run_until(config, tmp_path / step)
        states.append(run.method.state_dict())
        setup.append(run.setup_seconds)
    assert setup[1] > setup[0]  # the time for compiling is not part of the training time
    one, two = ([row["loss"] for row in log_of(tmp_path / step)] for step in ("eager", "compiled"))
    assert one == pytest.approx(two, rel=1e-3) and states[0].keys() == states[1].keys()
    assert not all(torch.equal(states[0][k], states[1][k]) for k in states[0])  # the compiled code was used
