"""Work recorded once as a CUDA graph and replayed: hundreds of small kernels for the price of one launch."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.engine.meter import NEVER

if TYPE_CHECKING:
    from longtail.engine.run import Run

WARM_UP = 3  # calls that choose kernels and allocate what lives on
REHEARSAL, VIEWS, STEPS = 0, -1, -2  # streams; those from 1 on are branches of a captured step


class Captured:
    """A function of nothing that draws from `rng`: all it reads and writes lives in tensors on the device."""

    def __init__(self, work: Callable[[], None], rng: torch.Generator) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(rng)
        warm_up(work)
        with recorded(self.graph):
            work()

    def __call__(self) -> None:
        self.graph.replay()


class CapturedStep:
    """A step of each run, without the host: what changes from one to the next (`run.prepare`) lives on the device.

    Runs are branches of one graph, which the device works on side by side.
    """

    def __init__(self, runs: "Sequence[Run]", advance: "Callable[[Run], None]") -> None:
        rehearse(runs, advance)
        self.graph = torch.cuda.CUDAGraph()
        streams = [stream(1 + branch) for branch in range(len(runs))]
        with recorded(self.graph):
            main = torch.cuda.current_stream()
            for run, branch in zip(runs, streams, strict=True):
                branch.wait_stream(main)
                with torch.cuda.stream(branch):
                    advance(run)
            for branch in streams:
                main.wait_stream(branch)

    def __call__(self) -> None:
        self.graph.replay()


def recorded(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
    """What this thread starts; another may be bringing images meanwhile, for which it allocates memory."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def stream(number: int) -> torch.cuda.Stream:
    """The same for the same number, on the current device. torch has 32 streams of a priority and hands them out in turn: a new
    one may be an old one, and branches of a graph that unknowingly share a stream also share memory.

    A step goes before the views of the next, which find room where its kernels leave some.
    """
    return _stream(number, torch.cuda.current_device())


@functools.cache
def _stream(number: int, device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0 if number == VIEWS else -1)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Steps leave CUDA's default stream alone, with which the streams of libraries may wait in turn."""
    if device.type != "cuda":
        yield
        return
    usual, own = torch.cuda.current_stream(), stream(STEPS)
    own.wait_stream(usual)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        usual.wait_stream(own)


def rehearse(runs: "Sequence[Run]", advance: "Callable[[Run], None]") -> None:
    """Steps that are taken back: they compile, choose kernels and allocate what lives on."""
    cuda = runs[0].device.type == "cuda"
    before = [{name: t.clone() for name, t in state(run).items()} for run in runs]
    drawn = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()

    def once() -> None:
        for run in runs:
            run.prepare(run.step)
            advance(run)

    if cuda:
        warm_up(once)
    else:
        once()
    for run, tensors in zip(runs, before, strict=True):
        undo(run, tensors)
        run.prepare(run.step)
    (torch.cuda.set_rng_state if cuda else torch.set_rng_state)(drawn)


def warm_up(work: Callable[[], None]) -> None:
    """On another stream than the usual one, as recording wants it."""
    side = stream(REHEARSAL)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)


def state(run: "Run") -> dict[str, Tensor]:
    """Every tensor that a step changes and a later one reads."""
    tensors = dict(run.method.state_dict())
    for i, group in enumerate(run.optimizer.state.values()):
        tensors |= {f"optimizer {i} {name}": t for name, t in group.items() if isinstance(t, Tensor)}
    return tensors | {
        "meter": run.meter.sums,
        "first_bad": run.meter.first_bad,
        "gradients": run.gradients.sums_C,
    }


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
