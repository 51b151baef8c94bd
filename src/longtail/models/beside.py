"""Work beside the main line: on CUDA on a second stream, which a captured step keeps as a branch of its graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch


class Beside:
    """`run` starts something that nobody needs before `join`. What it reads must be kept until then: on a second stream
    the allocator does not know that it is still in use."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _second(torch.cuda.current_stream(device)) if device.type == "cuda" else None

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
def _second(first: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream, so that lines which run in parallel do not meet in it."""
    return torch.cuda.Stream(first.device)
