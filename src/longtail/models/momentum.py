"""The key network, a slow average of the query network, and the queue of its labeled keys (He et al., 2020).

All state is in buffers and parameters, so a checkpoint keeps it. B: keys pushed, K: queue length, D: projected width.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from longtail.config.section import require
from longtail.data.samplers import place
from longtail.kernels.sgd import PieceTables, update_average
from longtail.models.collective import gather

EMPTY = -1  # the label of a slot that holds no key yet


class MomentumNetwork(nn.Module):
    """A copy of the query network that follows it: key <- momentum · key + (1 - momentum) · query, never trained itself.

    norm "batch": batch norm sees the keys' own batch and keeps its own running averages, as the released code does;
    norm "shuffled": as "batch", on keys that `Shuffle` has mixed; norm "ema": it uses running averages, which follow the
    query's as the parameters do.
    """

    def __init__(self, query: nn.Module, momentum: float = 0.999, norm: str = "batch") -> None:
        super().__init__()
        require(0 <= momentum <= 1, "momentum", momentum, "between 0 and 1: try 0.999")
        self.momentum, self.norm = momentum, norm
        self.pieces: PieceTables | None = None  # where our kernel moves it
        self.net = copy.deepcopy(query).requires_grad_(False)

    def train(self, mode: bool = True) -> "MomentumNetwork":
        super().train(mode)
        self.net.train(mode and self.norm != "ema")
        return self

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    @torch.no_grad()
    def follow(self, query: nn.Module) -> None:
        """One step of the moving average; in the parameters' own (full) precision."""
        keys, queries = list(self._followers(self.net)), list(self._followers(query))
        if self.pieces is not None:
            update_average(list(zip(keys, queries, strict=True)), 1 - self.momentum, self.pieces)
        else:
            torch._foreach_lerp_(keys, queries, 1 - self.momentum)

    def _followers(self, net: nn.Module) -> Iterator[Tensor]:
        yield from net.parameters()
        if self.norm == "ema":
            yield from (b for b in net.buffers() if b.is_floating_point())


class LabeledQueue(nn.Module):
    """The newest K keys with their labels, in a ring; a slot not filled yet has the label EMPTY and no contrast."""

    keys_KD: Tensor
    labels_K: Tensor
    position: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.register_buffer("keys_KD", torch.zeros(length, width))
        self.register_buffer("labels_K", torch.full((length,), EMPTY))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))  # on the device: no host synchronization

    @torch.no_grad()
    def push(self, keys_BD: Tensor, y_B: Tensor) -> None:
        """Overwrite the oldest slots; every process pushes the keys of all, in rank order, so that queues stay equal."""
        keys_BD, y_B = gather(keys_BD)[-self.length :], gather(y_B)[-self.length :]
        if self.length == 0:
            return
        slots_B = (self.position + torch.arange(len(y_B), device=y_B.device)) % self.length
        self.keys_KD.index_copy_(0, slots_B, keys_BD.to(self.keys_KD.dtype))
        self.labels_K.index_copy_(0, slots_B, y_B)
        self.position.add_(len(y_B)).remainder_(self.length)


class Shuffle(nn.Module):
    """Keys are normalized in other company than their queries, or batch norm would tell the two which belong together.

    The images of all processes change places, go through the network, and their keys change back. The places are a function
    of the run's seed and the batches so far, the same on every process, found on the device and without the host.
    """

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.randint(2**62, ()))

    def forward(self, network: Callable[[Tensor], Tensor], images_B: Tensor) -> Tensor:
        images_N, first, B = gather(images_B), place()[0] * len(images_B), len(images_B)
        order_N = permutation(len(images_N), self.turn)
        self.turn.add_(1)
        keys_ND = gather(network(images_N[order_N[first : first + B]]))
        return keys_ND[order_N.argsort()[first : first + B]]


def permutation(n: int, turn: Tensor) -> Tensor:
    """Of n places, by `turn` alone: they are numbered by a hash and sorted."""
    return scrambled(scrambled(turn) + torch.arange(n, device=turn.device)).argsort(stable=True)


def scrambled(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014): every bit of the result depends on every bit of x."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift) & (1 << 64 - shift) - 1) * factor
    return x ^ (x >> 31) & (1 << 33) - 1
