"""Mixup (Zhang et al., 2018): convex combinations of images; the losses of both labels are combined with the same weights."""

import torch
from torch import Tensor


def mixup(
    images_N: Tensor, y_N: Tensor, batch: int, alpha: float, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix every image with a random one of its batch.

    Args:
        images_N: Images, or features, of one or more batches.
        y_N: Their labels.
        batch: Number of images per batch.
        alpha: Parameter of the Beta(alpha, alpha) distribution, from which each batch draws the weight of the first images.
        rng: The random generator.

    Returns:
        The mixed images, the labels of the second images, and the weight of the first images for each batch.
    """
    batches, device = len(y_N) // batch, images_N.device
    gamma = torch._standard_gamma(torch.full((2, batches), alpha, device=device), generator=rng)
    weight = gamma[0] / gamma.sum(0).clamp(min=1e-30)
    partner = torch.rand(batches, batch, device=device, generator=rng).argsort(1)
    partner_N = (partner + batch * torch.arange(batches, device=device)[:, None]).flatten()
    weight_N = weight.repeat_interleave(batch, output_size=len(y_N)).to(images_N.dtype)
    weight_N = weight_N.view(-1, *[1] * (images_N.ndim - 1))
    return torch.lerp(images_N[partner_N], images_N, weight_N), y_N[partner_N], weight
