"""What every loss does to its input before the mathematics: enough precision, and no infinities."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision cannot hold exp(-20), so the loss works in float32 (or float64, if that comes in)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mask_out(log_psi: Tensor, drop: Tensor) -> Tensor:
    """The lowest finite number rather than -inf: a row that drops everything keeps a finite value and gradient."""
    return log_psi.masked_fill(drop, torch.finfo(log_psi.dtype).min)
