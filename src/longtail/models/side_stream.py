"""Work beside the main line: on CUDA on another stream, which a captured step keeps as a branch of its graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """`run` starts something that nobody needs before `join`, and gives what will be its result.

    The allocator thinks of memory as one stream's: what is handed over to be read beside is kept until `join`, and a result is
    made known to the stream that joins.
    """

    def __init__(self, device: torch.device, line: int = 0) -> None:
        self.stream = _other(torch.cuda.current_stream(device), line) if device.type == "cuda" else None
        self.kept: list[object] = []
        self.results: list[Tensor] = []

    def run(self, work: Callable[..., Any], *args: object) -> Any:
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
        if self.stream is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self.stream)
            for result in self.results:
                result.record_stream(here)
            self.results, self.kept = [], []


@functools.cache
def _other(first: torch.cuda.Stream, line: int) -> torch.cuda.Stream:
    """Of each stream and line its own, as urgent."""
    return torch.cuda.Stream(first.device, priority=first.priority)
