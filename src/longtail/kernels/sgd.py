"""A step of SGD, and of a key network's moving average, in one launch for all parameters; torch takes one block per tensor."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.kernels.nvrtc import CudaSource, read

PIECE = 1024  # numbers that a block works on
MOST = 256  # tensors of a launch; as in update.cu
Pair = tuple[Tensor, Tensor]


@functools.cache
def source() -> CudaSource:
    return read(Path(__file__).with_name("sgd.cu"))


class Pieces:
    """Pairs of tensors cut into pieces, MOST pairs to a table; made again only if a tensor has moved, as a step being recorded
    cannot ask the host."""

    def __init__(self) -> None:
        self.where: list[tuple[int, int]] = []
        self.tables: list[Tensor] = []

    def of(self, pairs: Sequence[Pair]) -> list[Tensor]:
        where = [(to.data_ptr(), other.data_ptr()) for to, other in pairs]
        if where != self.where:
            for to, other in pairs:
                check_layout(to, other)
            parts = [pairs[i : i + MOST] for i in range(0, len(pairs), MOST)]
            self.where, self.tables = where, [table(part) for part in parts]
        return self.tables


def table(pairs: Sequence[Pair]) -> Tensor:
    rows = []
    for tensor, (to, other) in enumerate(pairs):
        for start in range(0, to.numel(), PIECE):
            rows.append([to.data_ptr(), other.data_ptr(), tensor, start, min(PIECE, to.numel() - start)])
    return torch.tensor(rows, dtype=torch.int64).to(pairs[0][0].device)


def check_layout(one: Tensor, other: Tensor) -> None:
    """Number by number in the memory's order, two tensors must have the same one."""
    dense = one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)
    same = one.stride() == other.stride() and one.dtype == other.dtype == torch.float32
    if not (dense and same and one.shape == other.shape):
        raise ValueError(f"{one.shape}, {one.stride()} against {other.shape}, {other.stride()}")


class SGD(torch.optim.SGD):
    """torch's, with its state; the rate is a float32 tensor on the device."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.pieces = [Pieces() for _ in self.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pieces = [Pieces() for _ in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, pieces in zip(self.param_groups, self.pieces, strict=True):
            rate = group["lr"]
            if not isinstance(rate, Tensor) or rate.dtype != torch.float32:
                raise TypeError(f"the rate must be a float32 tensor, not {rate!r}")
            learning = [p for p in group["params"] if p.grad is not None]
            pairs = [(p, self.momentum(p)) for p in learning]
            numbers = float(group["weight_decay"]), float(group["momentum"]), int(group["nesterov"])
            for i, rows in enumerate(pieces.of(pairs)):
                grads = gradients(learning[i * MOST : (i + 1) * MOST])
                source().kernel("sgd")((len(rows), 1), 256, rows, grads, rate, *numbers)

    def momentum(self, p: Tensor) -> Tensor:
        """As torch keeps it; zero where there has been none (torch stores none for a momentum of 0)."""
        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def gradients(parameters: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Their addresses, to be passed by value."""
    found = []
    for p in parameters:
        assert p.grad is not None
        check_layout(p, p.grad)
        found.append(p.grad.data_ptr())
    return (ctypes.c_void_p * MOST)(*found)


def follow(pairs: Sequence[Pair], share: float, pieces: Pieces) -> None:
    """Move the first of each pair toward the second by this share of the way."""
    for rows in pieces.of(pairs):
        source().kernel("follow")((len(rows), 1), 256, rows, share)
