"""Batch norm by other batches than a process's own: in groups of a few images, or over all processes.

A layer is converted in place and keeps its parameters, their names, and the activation that timm's norms have inside. In test
mode it is the plain layer. N images of C channels, G groups, W processes.
"""

import functools

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from longtail.models.collective import gather_with_gradient


def convert(network: nn.Module, norm: str, ghost: int) -> None:
    """Every batch norm of a network, to the kind that `--model.norm` names."""
    for layer in network.modules():
        if norm != "batch" and isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.__class__ = variant({"ghost": Ghost, "sync": Sync}[norm], type(layer))  # type: ignore[arg-type]
            layer.ghost = ghost  # type: ignore[assignment]


@functools.cache
def variant(kind: type, base: type) -> type:
    return type(kind.__name__ + base.__name__, (kind, base), {})


class Other(_BatchNorm):
    """A batch norm that trains by other statistics, which subclasses choose."""

    ghost: int
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        x = self.normalise(x)
        return self.act(self.drop(x)) if isinstance(self, BatchNormAct2d) else x

    def normalise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def share(self) -> float:
        """How far the running averages move at this step."""
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class Ghost(Other):
    """Ghost batch norm (Hoffer et al., 2017): group g of G has every G-th image from the g-th on, as process g of G would.

    The running averages move once, by the mean over the groups: what G processes with norms of their own have on average.
    """

    def normalise(self, x: Tensor) -> Tensor:
        N, C = x.shape[:2]
        G = groups(N, self.ghost)
        mean_GC, var_GC = self.running_mean.repeat(G), self.running_var.repeat(G)
        weight, bias = (None if p is None else p.repeat(G) for p in (self.weight, self.bias))
        rows = x.reshape(N // G, G * C, *x.shape[2:])  # to torch, groups are further channels
        out = F.batch_norm(rows, mean_GC, var_GC, weight, bias, True, self.share(), self.eps)
        self.running_mean.copy_(mean_GC.view(G, C).mean(0))
        self.running_var.copy_(var_GC.view(G, C).mean(0))
        return out.view(x.shape)


def groups(images: int, least: int) -> int:
    """As many equal groups as can be made that have at least so many images each."""
    return next(g for g in range(max(images // least, 1), 0, -1) if images % g == 0)


class Sync(Other):
    """Statistics of the images of all processes, through which the gradient flows. torch's own knows no CPU."""

    def normalise(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        own_2C = torch.stack(torch.var_mean(exact, [d for d in range(x.dim()) if d != 1], correction=0))
        var_WC, mean_WC = gather_with_gradient(own_2C[None]).unbind(1)
        mean_C = mean_WC.mean(0)
        var_C = var_WC.mean(0) + mean_WC.var(0, correction=0)  # within the processes, and between them
        self.follow(mean_C.detach(), var_C.detach(), len(mean_WC) * x.numel() // x.shape[1])
        scale_C = (var_C + self.eps).rsqrt()
        shape = (1, -1) + (1,) * (x.dim() - 2)
        out = (exact - mean_C.view(shape)) * (scale_C if self.weight is None else scale_C * self.weight).view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(x.dtype)

    def follow(self, mean_C: Tensor, var_C: Tensor, n: int) -> None:
        """Move the running averages; that of the variance is of its estimate from n numbers, without bias."""
        share = self.share()
        self.running_mean.lerp_(mean_C, share)
        self.running_var.lerp_(var_C * (n / max(n - 1, 1)), share)
