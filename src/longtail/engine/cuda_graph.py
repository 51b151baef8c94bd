"""Execution of steps: eager, compiled, or captured as a CUDA graph, which replays hundreds of small kernels by one launch."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.engine.device import compile_kernels
from longtail.engine.meter import NEVER

if TYPE_CHECKING:
    from longtail.engine.trainer import Trainer

WARM_UP_CALLS = 3
"""Calls before a capture, which choose kernels and allocate permanent memory."""
WARM_UP_STREAM, VIEW_STREAM, STEP_STREAM = 0, -1, -2
"""Numbers of streams; those from 1 on are branches of a captured step."""


def make_step(trainers: "Sequence[Trainer]", train_step: "Callable[[Trainer], None]") -> Callable[[], None]:
    """Return a function that makes one step of each trainer: eager, compiled, or captured.

    Args:
        trainers: The trainers, which are all at the same step.
        train_step: The device's part of a step of one trainer.
    """

    def run_all() -> None:
        share_batches(trainers)
        for trainer in trainers:
            train_step(trainer)

    first = trainers[0]
    if not (first.is_captured or first.is_compiled) or first.is_stage_done():
        return run_all
    start, step = time.perf_counter(), run_all
    compile_kernels(first.method)
    with warnings.catch_warnings():  # the compiler's advice on precision is for developers
        warnings.filterwarnings("ignore", module=r"torch\._inductor")
        if first.is_captured:
            step = CapturedStep(trainers, train_step)
            torch.cuda.synchronize()
        else:
            warm_up_and_restore(trainers, train_step)
    for trainer in trainers:
        trainer.setup_seconds += time.perf_counter() - start
    return step


def share_batches(trainers: "Sequence[Trainer]") -> None:
    """Get the batches of a step once for all trainers if they share their views, with the outputs of teachers.

    The trainers keep them until the next step: in a captured step, their memory must not be used again before all branches end.
    """
    first = trainers[0]
    if len(trainers) == 1 or trainers[1].batches is not first.batches:
        return
    with first.matmul_precision():
        shared = [first.method.prepare_batch(first.batches.next()) for _ in range(first.accumulate)]
    for trainer in trainers:
        trainer.shared = shared


class CapturedFunction:
    """A captured function without arguments, which takes random numbers from `rng` and accesses tensors on the device only."""

    def __init__(self, work: Callable[[], None], rng: torch.Generator) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(rng)
        warm_up(work)
        with capture(self.graph):
            work()

    def __call__(self) -> None:
        self.graph.replay()


class CapturedStep:
    """A captured step of each trainer. What changes between steps (`Trainer.prepare`) is in tensors on the device.

    The trainers are branches of one graph, which the device runs in parallel.
    """

    def __init__(self, trainers: "Sequence[Trainer]", train_step: "Callable[[Trainer], None]") -> None:
        warm_up_and_restore(trainers, train_step)
        self.graph = torch.cuda.CUDAGraph()
        streams = [get_stream(1 + branch) for branch in range(len(trainers))]
        with capture(self.graph):
            main = torch.cuda.current_stream()
            share_batches(trainers)
            for trainer, branch in zip(trainers, streams, strict=True):
                branch.wait_stream(main)
                with torch.cuda.stream(branch):
                    train_step(trainer)
            for branch in streams:
                main.wait_stream(branch)

    def __call__(self) -> None:
        self.graph.replay()


def capture(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
    """Return a context that captures the work of this thread; another thread may allocate memory for images meanwhile."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def get_stream(number: int) -> torch.cuda.Stream:
    """Return the stream with a number on the current device.

    torch has 32 streams of each priority and assigns them in turn, so that a new stream may be one that is in use already.
    Branches of a graph that share a stream would also share memory. A step has priority over the views of the next step.
    """
    return _make_stream(number, torch.cuda.current_device())


@functools.cache
def _make_stream(number: int, device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0 if number == VIEW_STREAM else -1)


@contextlib.contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Use a stream other than the default one of CUDA, which synchronizes with the streams of some libraries."""
    if device.type != "cuda":
        yield
        return
    default, own = torch.cuda.current_stream(), get_stream(STEP_STREAM)
    own.wait_stream(default)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        default.wait_stream(own)


def warm_up_and_restore(trainers: "Sequence[Trainer]", train_step: "Callable[[Trainer], None]") -> None:
    """Make steps that compile, choose kernels and allocate permanent memory, and restore the state afterward.

    Args:
        trainers: The trainers.
        train_step: The device's part of a step of one trainer.
    """
    cuda = trainers[0].device.type == "cuda"
    before = [{name: t.clone() for name, t in step_state(trainer).items()} for trainer in trainers]
    rng_state = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()

    def once() -> None:
        for trainer in trainers:
            trainer.prepare(trainer.step)
        share_batches(trainers)
        for trainer in trainers:
            train_step(trainer)

    if cuda:
        warm_up(once)
    else:
        once()
    for trainer, tensors in zip(trainers, before, strict=True):
        restore_state(trainer, tensors)
        trainer.epoch = -1  # what the method did at the start of the epoch was undone, too
        trainer.prepare(trainer.step)
    (torch.cuda.set_rng_state if cuda else torch.set_rng_state)(rng_state)


def warm_up(work: Callable[[], None]) -> None:
    """Call a function several times on another stream, as capturing requires."""
    side = get_stream(WARM_UP_STREAM)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            work()
    torch.cuda.current_stream().wait_stream(side)


def step_state(trainer: "Trainer") -> dict[str, Tensor]:
    """Return all tensors that a step changes and a later one reads, by name."""
    tensors = dict(trainer.method.state_dict())
    for i, group in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"optimizer {i} {name}": t for name, t in group.items() if isinstance(t, Tensor)}
    tensors |= {f"average {name}": tensor for name, tensor in trainer.average.state_dict().items()}
    return tensors | {
        "meter": trainer.meter.sums,
        "first_bad": trainer.meter.first_bad,
        "gradients": trainer.gradients.sums_C,
    }


@torch.no_grad()
def restore_state(trainer: "Trainer", before: dict[str, Tensor]) -> None:
    """Restore the state in place, because a graph refers to tensors by address. Tensors that are new become zero."""
    for name, tensor in step_state(trainer).items():
        if name in before and before[name].shape == tensor.shape:
            tensor.copy_(before[name])
        elif name == "first_bad":
            tensor.fill_(NEVER)
        else:
            tensor.zero_()
