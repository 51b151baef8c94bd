"""What every loss does to its input before the mathematics: enough precision, and no infinities."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor, *others: Tensor) -> Tensor:
    """Half precision cannot hold exp(-20), so the loss works in float32 (or float64, if x or one of the others has it)."""
    dtype = torch.float32
    for t in (x, *others):
        dtype = torch.promote_types(dtype, t.dtype)
    return x.to(dtype)


def finite(log_x: Tensor) -> Tensor:
    """The lowest finite number for log 0: zero times that is zero, where zero times infinity is no number."""
    return log_x.clamp(min=torch.finfo(log_x.dtype).min)


def mask_out_(log_psi: Tensor, drop: Tensor) -> Tensor:
    """In place, psi = 0 where dropped; by the lowest finite number, so that a row without partners stays finite."""
    return log_psi.masked_fill_(drop, torch.finfo(log_psi.dtype).min)
