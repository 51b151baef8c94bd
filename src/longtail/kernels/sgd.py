"""SGD steps and exponential moving averages of all parameters in one CUDA launch; PyTorch uses a block per tensor."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.kernels.nvrtc import CudaSource, read_source

PIECE_SIZE = 1024  # elements that a thread block processes
MAX_TENSORS = 256  # tensors of a launch; as in sgd.cu
TensorPair = tuple[Tensor, Tensor]


@functools.cache
def cuda_source() -> CudaSource:
    """Return the source sgd.cu; it is read once."""
    return read_source(Path(__file__).with_name("sgd.cu"))


class PieceTables:
    """Tables on the device that divide pairs of tensors into pieces, for at most MAX_TENSORS pairs each.

    The tables are kept and made again only if a tensor has moved, because a CUDA graph cannot be captured while they are copied
    from the host.
    """

    def __init__(self) -> None:
        self.addresses: list[tuple[int, int]] = []
        self.tables: list[Tensor] = []

    def get(self, pairs: Sequence[TensorPair]) -> list[Tensor]:
        """Return the tables of these pairs."""
        addresses = [(to.data_ptr(), other.data_ptr()) for to, other in pairs]
        if addresses != self.addresses:
            for to, other in pairs:
                _check_layout(to, other)
            parts = [pairs[i : i + MAX_TENSORS] for i in range(0, len(pairs), MAX_TENSORS)]
            self.addresses, self.tables = addresses, [_make_table(part) for part in parts]
        return self.tables


def _make_table(pairs: Sequence[TensorPair]) -> Tensor:
    rows = []
    for tensor, (to, other) in enumerate(pairs):
        for start in range(0, to.numel(), PIECE_SIZE):
            rows.append([to.data_ptr(), other.data_ptr(), tensor, start, min(PIECE_SIZE, to.numel() - start)])
    return torch.tensor(rows, dtype=torch.int64).to(pairs[0][0].device)


def _check_layout(one: Tensor, other: Tensor) -> None:
    """Raise ValueError unless both are dense float32 tensors with the same strides; the kernels read them in memory order."""
    dense = one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)
    same = one.stride() == other.stride() and one.dtype == other.dtype == torch.float32
    if not (dense and same and one.shape == other.shape):
        raise ValueError(
            "the kernels need two dense float32 tensors of the same shape and strides, got "
            f"{one.dtype} {tuple(one.shape)} {one.stride()} and {other.dtype} {tuple(other.shape)} {other.stride()}"
        )


class SGD(torch.optim.SGD):
    """`torch.optim.SGD` with the same state. The learning rate must be a float32 tensor on the device."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.piece_tables = [PieceTables() for _ in self.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.piece_tables = [PieceTables() for _ in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, piece_tables in zip(self.param_groups, self.piece_tables, strict=True):
            rate = group["lr"]
            if not isinstance(rate, Tensor) or rate.dtype != torch.float32:
                raise TypeError(f"lr must be a float32 tensor, got {rate!r}")
            params = [p for p in group["params"] if p.grad is not None]
            pairs = [(p, self._momentum_buffer(p)) for p in params]
            numbers = float(group["weight_decay"]), float(group["momentum"]), int(group["nesterov"])
            for i, table in enumerate(piece_tables.get(pairs)):
                grads = _gradient_addresses(params[i * MAX_TENSORS : (i + 1) * MAX_TENSORS])
                cuda_source().kernel("sgd")((len(table), 1), 256, table, grads, rate, *numbers)

    def _momentum_buffer(self, p: Tensor) -> Tensor:
        """Return the momentum buffer of a parameter, made of zeros if there is none (torch stores none for momentum 0)."""
        state = self.state[p]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def _gradient_addresses(params: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of the gradients as a C array, which is passed to the kernel by value."""
    addresses = []
    for p in params:
        assert p.grad is not None
        _check_layout(p, p.grad)
        addresses.append(p.grad.data_ptr())
    return (ctypes.c_void_p * MAX_TENSORS)(*addresses)


def update_average(pairs: Sequence[TensorPair], weight: float, piece_tables: PieceTables) -> None:
    """Update exponential moving averages in place: average += weight * (value - average).

    Args:
        pairs: Each average with its new value.
        weight: The weight of the new values.
        piece_tables: The tables of these pairs from previous calls.
    """
    for table in piece_tables.get(pairs):
        cuda_source().kernel("update_average")((len(table), 1), 256, table, weight)
