"""mixup (Zhang et al., 2018): images and losses in the same shares."""

import torch
from torch import Tensor


def mixup(
    images_N: Tensor, y_N: Tensor, batch: int, alpha: float, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Every image mixed with another of its batch; N is a number of batches.

    The mixed images, the labels of the second ones, and for each batch the share of the first, drawn from Beta(alpha, alpha).
    """
    batches, device = len(y_N) // batch, images_N.device
    gamma = torch._standard_gamma(torch.full((2, batches), alpha, device=device), generator=rng)
    share = gamma[0] / gamma.sum(0).clamp(min=1e-30)
    partner = torch.rand(batches, batch, device=device, generator=rng).argsort(1)
    partner_N = (partner + batch * torch.arange(batches, device=device)[:, None]).flatten()
    share_N = share.repeat_interleave(batch, output_size=len(y_N))[:, None, None, None].to(images_N.dtype)
    return torch.lerp(images_N[partner_N], images_N, share_N), y_N[partner_N], share
