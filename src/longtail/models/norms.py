"""Batch norm with other statistics than those of a process's own batch: ghost batch norm and synchronized batch norm.

Layers are converted in place. They keep their parameters and names, and the activation of timm's norm layers. In evaluation
mode they are the original layers. Shapes: N images, C channels, G groups, W processes.
"""

import functools

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from longtail.distributed import gather_with_grad


def convert_batch_norms(network: nn.Module, norm: str, ghost: int) -> None:
    """Convert every batch norm of a network in place.

    Args:
        network: The network.
        norm: The value of `--model.norm`: "ghost", "sync" or "batch" (no change).
        ghost: Minimum number of images per group of ghost batch norm.
    """
    for layer in network.modules():
        if norm != "batch" and isinstance(layer, _BatchNorm) and layer.track_running_stats:
            kind = {"ghost": GhostBatchNorm, "sync": SyncBatchNorm}[norm]
            layer.__class__ = _combine_classes(kind, type(layer))  # type: ignore[arg-type]
            layer.ghost = ghost  # type: ignore[assignment]


@functools.cache
def _combine_classes(kind: type, base: type) -> type:
    return type(f"{kind.__name__}_{base.__name__}", (kind, base), {})


class CustomStatsBatchNorm(_BatchNorm):
    """Base class of batch norms that use other statistics in training; subclasses implement `normalize`."""

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
        """Normalize x in training mode and update the running statistics."""
        raise NotImplementedError

    def count_batch(self) -> float:
        """Increment `num_batches_tracked`; return the weight of this batch in the running statistics."""
        self.num_batches_tracked.add_(1)
        return 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def apply_statistics(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalize x and apply weight and bias. The statistics have all dimensions of x from the second up to the channels."""
        shape = (*mean.shape, *(1,) * (x.dim() - 1 - mean.dim()))
        scale = (var + self.eps).rsqrt()
        out = (x - mean.view(shape)) * (scale if self.weight is None else scale * self.weight).view(shape)
        return out if self.bias is None else out + self.bias.view(-1, *shape[mean.dim() :])

    def update_running_stats(self, mean_C: Tensor, var_C: Tensor, n: int) -> None:
        """Update the running mean, and the running variance with the unbiased estimate from n values."""
        weight = self.count_batch()
        self.running_mean.lerp_(mean_C.detach(), weight)
        self.running_var.lerp_(var_C.detach() * (n / max(n - 1, 1)), weight)


class GhostBatchNorm(CustomStatsBatchNorm):
    """Ghost batch norm (Hoffer et al., 2017): each of G groups of images is normalized with its own statistics.

    Group g has the images g, g + G, g + 2G, …, as process g of G processes would. The running statistics are updated once with
    the mean over the groups, which is the average over G processes with separate norms.
    """

    def normalize(self, x: Tensor) -> Tensor:
        G = count_groups(len(x), self.ghost)
        return self.normalize_in_one_expression(x, G) if torch.compiler.is_compiling() else self.normalize_groups(x, G)

    def normalize_in_one_expression(self, x: Tensor, G: int) -> Tensor:
        """Normalize all groups in one expression, which a compiler fuses; without a compiler this is slow."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (-1, G))
        dims = [d for d in range(exact.dim()) if d not in (1, 2)]
        var_GC, mean_GC = torch.var_mean(exact, dims, correction=0)
        self.update_running_stats(mean_GC.mean(0), var_GC.mean(0), x.numel() // var_GC.numel())
        return self.apply_statistics(exact, mean_GC, var_GC).flatten(0, 1).to(x.dtype)

    def normalize_groups(self, x: Tensor, G: int) -> Tensor:
        """Normalize each group with torch's batch norm.

        The memory format channels_last is kept in the result and in its gradient. Otherwise every convolution would convert it.
        """
        is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        weight, (mean_GC, var_GC) = self.count_batch(), (t.repeat(G, 1) for t in (self.running_mean, self.running_var))

        def normalize_group(group: Tensor, mean_C: Tensor, var_C: Tensor) -> Tensor:
            group = group.contiguous().permute(0, 3, 1, 2) if is_last else group
            out = F.batch_norm(group, mean_C, var_C, self.weight, self.bias, True, weight, self.eps)
            if is_last and out.requires_grad:  # torch's kernel for channels_last requires a dense gradient
                out.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))
            return out.permute(0, 2, 3, 1) if is_last else out

        groups = (x.permute(0, 2, 3, 1) if is_last else x).unflatten(0, (-1, G)).unbind(1)
        out = torch.stack(list(map(normalize_group, groups, mean_GC, var_GC)), 1).flatten(0, 1)
        self.running_mean.copy_(mean_GC.mean(0))
        self.running_var.copy_(var_GC.mean(0))
        return out.permute(0, 3, 1, 2) if is_last else out


def count_groups(images: int, min_size: int) -> int:
    """Return the largest number of equal groups that have at least `min_size` images each; at least 1."""
    return next(g for g in range(max(images // min_size, 1), 0, -1) if images % g == 0)


class SyncBatchNorm(CustomStatsBatchNorm):
    """Synchronized batch norm: statistics over the images of all processes, with gradients. It also runs on the CPU."""

    def normalize(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        own_2C = torch.stack(torch.var_mean(exact, [d for d in range(x.dim()) if d != 1], correction=0))
        var_WC, mean_WC = gather_with_grad(own_2C[None]).unbind(1)
        mean_C = mean_WC.mean(0)
        var_C = var_WC.mean(0) + mean_WC.var(0, correction=0)  # within and between the processes
        self.update_running_stats(mean_C, var_C, len(mean_WC) * x.numel() // x.shape[1])
        return self.apply_statistics(exact, mean_C, var_C).to(x.dtype)
