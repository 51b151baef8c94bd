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

from longtail.distributed import gather_with_grad


def convert(network: nn.Module, norm: str, ghost: int) -> None:
    """Every batch norm of a network, to the kind that `--model.norm` names."""
    for layer in network.modules():
        if norm != "batch" and isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.__class__ = variant({"ghost": Ghost, "sync": Sync}[norm], type(layer))  # type: ignore[arg-type]
            layer.ghost = ghost  # type: ignore[assignment]


@functools.cache
def variant(kind: type, base: type) -> type:
    return type(kind.__name__ + base.__name__, (kind, base), {})


class CustomStatsBatchNorm(_BatchNorm):
    """A batch norm that trains by other statistics, which subclasses choose."""

    ghost: int
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        x = self.normalize(x)
        return self.act(self.drop(x)) if isinstance(self, BatchNormAct2d) else x

    def normalize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def share(self) -> float:
        """How far the running averages move at this step."""
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def scaled(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """By statistics that have every dimension of x but the first up to its channels."""
        shape = (*mean.shape, *(1,) * (x.dim() - 1 - mean.dim()))
        scale = (var + self.eps).rsqrt()
        out = (x - mean.view(shape)) * (scale if self.weight is None else scale * self.weight).view(shape)
        return out if self.bias is None else out + self.bias.view(-1, *shape[mean.dim() :])

    def follow(self, mean_C: Tensor, var_C: Tensor, n: int) -> None:
        """Move the running averages; that of the variance is of its estimate from n numbers, without bias."""
        share = self.share()
        self.running_mean.lerp_(mean_C.detach(), share)
        self.running_var.lerp_(var_C.detach() * (n / max(n - 1, 1)), share)


class Ghost(CustomStatsBatchNorm):
    """Ghost batch norm (Hoffer et al., 2017): group g of G has every G-th image from the g-th on, as process g of G would.

    The running averages move once, by the mean over the groups: what G processes with norms of their own have on average. To a
    compiler it is written as one expression; torch by itself would make many passes of that, and has kernels for a group.
    """

    def normalize(self, x: Tensor) -> Tensor:
        G = groups(len(x), self.ghost)
        return self.expressed(x, G) if torch.compiler.is_compiling() else self.in_turn(x, G)

    def expressed(self, x: Tensor, G: int) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (-1, G))
        others = [d for d in range(exact.dim()) if d not in (1, 2)]
        var_GC, mean_GC = torch.var_mean(exact, others, correction=0)
        self.follow(mean_GC.mean(0), var_GC.mean(0), x.numel() // var_GC.numel())
        return self.scaled(exact, mean_GC, var_GC).flatten(0, 1).to(x.dtype)

    def in_turn(self, x: Tensor, G: int) -> Tensor:
        """What lies with its channels last stays so, its gradient too: else every convolution would turn it round."""
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        share, (mean_GC, var_GC) = self.share(), (t.repeat(G, 1) for t in (self.running_mean, self.running_var))

        def normalized(group: Tensor, mean_C: Tensor, var_C: Tensor) -> Tensor:
            group = group.contiguous().permute(0, 3, 1, 2) if last else group
            out = F.batch_norm(group, mean_C, var_C, self.weight, self.bias, True, share, self.eps)
            if last and out.requires_grad:  # torch's kernel for this layout wants no gaps between images
                out.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))
            return out.permute(0, 2, 3, 1) if last else out

        each = (x.permute(0, 2, 3, 1) if last else x).unflatten(0, (-1, G)).unbind(1)
        out = torch.stack(list(map(normalized, each, mean_GC, var_GC)), 1).flatten(0, 1)
        self.running_mean.copy_(mean_GC.mean(0))
        self.running_var.copy_(var_GC.mean(0))
        return out.permute(0, 3, 1, 2) if last else out


def groups(images: int, least: int) -> int:
    """As many equal groups as can be made that have at least so many images each."""
    return next(g for g in range(max(images // least, 1), 0, -1) if images % g == 0)


class Sync(CustomStatsBatchNorm):
    """Statistics of the images of all processes, through which the gradient flows. torch's own knows no CPU."""

    def normalize(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        own_2C = torch.stack(torch.var_mean(exact, [d for d in range(x.dim()) if d != 1], correction=0))
        var_WC, mean_WC = gather_with_grad(own_2C[None]).unbind(1)
        mean_C = mean_WC.mean(0)
        var_C = var_WC.mean(0) + mean_WC.var(0, correction=0)  # within the processes, and between them
        self.follow(mean_C, var_C, len(mean_WC) * x.numel() // x.shape[1])
        return self.scaled(exact, mean_C, var_C).to(x.dtype)
