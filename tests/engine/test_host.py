"""No step waits for the host or copies numbers from it, which a CUDA graph could not record; tested on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longtail import recipes
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.engine.test_train import CPU, load_once

aten = torch.ops.aten
ASKS = {  # a value, or a shape that depends on values
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.unique_dim.default,
    aten._unique2.default,
}
BRINGS = {aten.lift_fresh.default}  # torch.tensor(number): on a GPU a copy from the host's memory


class OnTheDeviceAlone(TorchDispatchMode):
    """Raise an error for operations that would make the host wait, or that copy from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ASKS | BRINGS:
            raise AssertionError(f"{func} in a step")
        if func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise AssertionError("a mask as an index: how many it takes is known to the host only when it is done")
        return func(*args, **(kwargs or {}))


def step(run: Trainer) -> None:
    """Do what `train_step` does, without the optimizer, which differs between CPU and GPU."""
    beside = SideStream(run.device)
    terms = run.method.loss(run.batches.next())
    run.meter.add(terms, run.clock)
    terms["loss"].backward()
    run.method.after_backward(beside)
    run.method.after_step()
    run.average.update()


def test_dispatch_mode_detects_operations_of_the_host():
    x = torch.ones(3)
    for asks in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.new_tensor(2.0), lambda: bool(x[0] > 0)):
        with pytest.raises(AssertionError), OnTheDeviceAlone():
            asks()
    with OnTheDeviceAlone():
        assert torch.where(x > 0, x, 0.0).shape == (3,)


@pytest.mark.parametrize("method", recipes.METHODS)
def test_a_step_of_every_stage_stays_on_the_device(method, tmp_path):
    config = tiny(method, ema=0.9)
    if hasattr(config.method, "drw_from"):
        config = replace(config, method=replace(config.method, drw_from=0.0))
    check_steps(config, tmp_path)


def check_steps(config, tmp_path) -> None:
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    for index, stage in enumerate(run.method.stages):
        run.set_stage(index)
        run.method.on_stage_start(run.stage_data())
        run.method.train()
        if stage.epochs:
            run.prepare(0)
            train_step(run)  # the first step allocates permanent memory
            run.prepare(1)
            with OnTheDeviceAlone():
                run.batches.make_views()
                step(run)
