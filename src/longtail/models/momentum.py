"""The key network, a moving average of the query network, and the queue of its labeled keys (He et al., 2020).

All state is in buffers and parameters, so that a checkpoint contains it. B: keys pushed, K: queue length, D: projected width.
"""

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor, nn

from longtail.distributed import all_gather, rank
from longtail.errors import UserError
from longtail.models.side_stream import SideStream

if TYPE_CHECKING:
    from longtail.kernels.sgd import PieceTables

EMPTY_LABEL = -1
"""The label of a queue slot that holds no key yet."""


class MomentumNetwork(nn.Module):
    """A copy of the query network that follows it: key <- momentum · key + (1 - momentum) · query. It is never trained itself.

    Args:
        query: The query network.
        momentum: The share of itself that the copy keeps at each step.
        norm: "batch": batch norm uses the statistics of the key batch and has its own running averages, as in the released
            code. "shuffled": the same on images that are shuffled between processes (`Shuffle`). "ema": batch norm uses running
            averages, which follow those of the query network like the parameters.
    """

    def __init__(self, query: nn.Module, momentum: float = 0.999, norm: str = "batch") -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise UserError(f"--momentum {momentum}: it must be between 0 and 1, for example 0.999")
        self.momentum, self.norm = momentum, norm
        self.pieces: PieceTables | None = None  # set where a CUDA kernel updates the network
        self.net = copy.deepcopy(query).requires_grad_(False)

    def train(self, mode: bool = True) -> "MomentumNetwork":
        super().train(mode)
        self.net.train(mode and self.norm != "ema")
        return self

    def make_shuffle(self) -> Optional["Shuffle"]:
        """Return the `Shuffle` that `norm` asks for, which has its own state; None for other values."""
        return Shuffle() if self.norm == "shuffled" else None

    @torch.no_grad()
    def forward(self, x: Tensor, shuffle: Optional["Shuffle"] = None) -> Tensor:
        """Return the keys of a batch of images. With `shuffle`, those of all processes are shuffled."""
        return self.net(x) if shuffle is None else shuffle(self.net, x)

    @torch.no_grad()
    def follow(self, query: nn.Module) -> None:
        """Make one step of the moving average, in the full precision of the parameters."""
        keys, queries = list(self._followers(self.net)), list(self._followers(query))
        if self.pieces is not None:
            from longtail.kernels.sgd import update_average  # needs CUDA

            update_average(list(zip(keys, queries, strict=True)), 1 - self.momentum, self.pieces)
        else:
            torch._foreach_lerp_(keys, queries, 1 - self.momentum)

    def _followers(self, net: nn.Module) -> Iterator[Tensor]:
        yield from net.parameters()
        if self.norm == "ema":
            yield from (b for b in net.buffers() if b.is_floating_point())


class LabeledQueue(nn.Module):
    """A ring buffer of the newest K keys with their labels. A slot that is not filled yet has the
    label `EMPTY_LABEL` (-1).

    The keys of a step enter after its backward pass, because the queue is among the samples of that step: the forward pass
    appends them to `waiting`, and `push_waiting` follows the backward pass.
    """

    keys_KD: Tensor
    labels_K: Tensor
    position: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.waiting: list[tuple[Tensor, Tensor]] = []  # keys of the current step, with their labels
        self.register_buffer("keys_KD", torch.zeros(length, width))
        self.register_buffer("labels_K", torch.full((length,), EMPTY_LABEL))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))  # on the device: no host synchronization

    def push_waiting(self, side: SideStream) -> None:
        """Push the keys that wait, on a side stream."""
        for keys_BD, y_B in self.waiting:
            side.run(self.push, keys_BD, y_B)
        self.waiting = []

    @torch.no_grad()
    def push(self, keys_BD: Tensor, y_B: Tensor) -> None:
        """Overwrite the oldest slots with new keys.

        Every process pushes the keys of all processes in the order of ranks, so that the queues stay equal.
        """
        keys_BD, y_B = all_gather(keys_BD)[-self.length :], all_gather(y_B)[-self.length :]
        if self.length == 0:
            return
        slots_B = (self.position + torch.arange(len(y_B), device=y_B.device)) % self.length
        self.keys_KD.index_copy_(0, slots_B, keys_BD.to(self.keys_KD.dtype))
        self.labels_K.index_copy_(0, slots_B, y_B)
        self.position.add_(len(y_B)).remainder_(self.length)


class Shuffle(nn.Module):
    """Shuffling BN (MoCo): keys are batch-normalized in a shuffled batch, so that statistics cannot reveal the matching query.

    The images of all processes are permuted, go through the network, and their keys are put back in order. The permutation is a
    function of the seed and the number of past batches. All processes compute the same one, on the device.
    """

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.randint(2**62, ()))

    def forward(self, network: Callable[[Tensor], Tensor], images_B: Tensor) -> Tensor:
        images_N, first, B = all_gather(images_B), rank() * len(images_B), len(images_B)
        order_N = permutation(len(images_N), self.turn)
        self.turn.add_(1)
        keys_ND = all_gather(network(images_N[order_N[first : first + B]]))
        return keys_ND[order_N.argsort()[first : first + B]]


def permutation(n: int, turn: Tensor) -> Tensor:
    """Return a permutation of n items that is a function of `turn`: the order of their hashes."""
    return hash_int64(hash_int64(turn) + torch.arange(n, device=turn.device)).argsort(stable=True)


def hash_int64(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 (Steele et al., 2014): every bit of the result depends on every bit of x."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift) & (1 << 64 - shift) - 1) * factor
    return x ^ (x >> 31) & (1 << 33) - 1
