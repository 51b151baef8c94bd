"""Work beside the main line: on CUDA on another stream, which a captured step keeps as a branch of its graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch


class Beside:
    """`run` starts something that nobody needs before `join`. What it reads must be kept until then: on another stream
    the allocator does not know that it is still in use."""

    def __init__(self, device: torch.device, line: int = 0) -> None:
        self.stream = _other(torch.cuda.current_stream(device), line) if device.type == "cuda" else None

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self.stream is None:
            return work(*args)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return work(*args)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


@functools.cache
def _other(first: torch.cuda.Stream, line: int) -> torch.cuda.Stream:
    """Of each stream and line its own, so that what runs in parallel does not meet in it."""
    return torch.cuda.Stream(first.device)
