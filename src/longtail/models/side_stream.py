"""Work in parallel to the main CUDA stream, which a captured step keeps as a branch of its graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream on which `run` starts work whose result is not needed before `join`. Without CUDA, `run` does the work at once.

    The CUDA allocator assigns memory to one stream. Therefore the arguments of the work are kept until `join`, and its result
    is made known to the stream that joins.
    """

    def __init__(self, device: torch.device, line: int = 0) -> None:
        """Choose a stream.

        Args:
            device: The device of the work.
            line: The number of the side stream; each pair of the current stream and a number has a stream of its own.
        """
        self.stream = _find_stream(torch.cuda.current_stream(device), line) if device.type == "cuda" else None
        self.kept: list[object] = []
        self.results: list[Tensor] = []

    def run(self, work: Callable[..., Any], *args: object) -> Any:
        """Start `work(*args)` after the work that is queued on the current stream, and return its (future) result."""
        if self.stream is None:
            return work(*args)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work(*args)
        self.kept += [work, args]
        if isinstance(result, Tensor):
            self.results.append(result)
        return result

    def join(self) -> None:
        """Make the current stream wait for the work that was started."""
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for result in self.results:
                result.record_stream(here)
            self.results, self.kept = [], []


@functools.cache
def _find_stream(first: torch.cuda.Stream, line: int) -> torch.cuda.Stream:
    """Return the side stream with a number of another stream, with the same priority."""
    return torch.cuda.Stream(first.device, priority=first.priority)
