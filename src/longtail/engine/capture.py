"""The step recorded once as a CUDA graph and replayed: hundreds of small kernels for the price of one launch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.engine.meter import NEVER

if TYPE_CHECKING:
    from longtail.engine.run import Run

WARM_UP = 3  # steps that choose kernels and allocate what lives on; their effect is undone


class CapturedStep:
    """A step without the host: what changes from one to the next (`run.prepare`) lives in tensors on the device."""

    def __init__(self, run: "Run", advance: Callable[[], None]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(run.rng)
        before, drawn = {name: t.clone() for name, t in state(run).items()}, torch.cuda.get_rng_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run.prepare(run.step)
                advance()
        torch.cuda.current_stream().wait_stream(side)
        undo(run, before)
        torch.cuda.set_rng_state(drawn)
        run.prepare(run.step)
        with torch.cuda.graph(self.graph):
            advance()

    def __call__(self) -> None:
        self.graph.replay()


def state(run: "Run") -> dict[str, Tensor]:
    """Every tensor that a step changes and a later one reads."""
    tensors = dict(run.method.state_dict())
    for i, group in enumerate(run.optimiser.state.values()):
        tensors |= {f"optimiser {i} {name}": t for name, t in group.items() if isinstance(t, Tensor)}
    return tensors | {"meter": run.meter.sums, "first_bad": run.meter.first_bad}


@torch.no_grad()
def undo(run: "Run", before: dict[str, Tensor]) -> None:
    """In place, as the graph will know the tensors by their addresses; what was not there before starts from nothing."""
    for name, tensor in state(run).items():
        if name in before and before[name].shape == tensor.shape:
            tensor.copy_(before[name])
        elif name == "first_bad":
            tensor.fill_(NEVER)
        else:
            tensor.zero_()
