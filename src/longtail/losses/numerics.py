"""Checks and conversions that every loss applies to its input: valid labels, enough precision, and no infinities."""

import torch
from torch import Tensor

NO_LABEL = -(2**62)
"""An `ignore_index` for torch's losses, which by default leave out images labeled -100: here every label is checked."""


def check_labels(y_B: Tensor, classes: int) -> None:
    """Raise IndexError for a label below 0 or above the last class, on the CPU.

    On a GPU the host would have to wait for the labels. There, and in compiled code, the losses use labels only as indices of
    operations that check them: an invalid one is a device assertion, or a RuntimeError of compiled code.
    """
    if y_B.device.type != "cpu" or torch.compiler.is_compiling():
        return
    try:
        y_B.new_empty(classes).index_select(0, y_B)
    except IndexError as error:
        wrong_B = (y_B < 0) | (y_B >= classes)
        label = int(y_B[wrong_B][0])
        raise IndexError(f"Target {label} is out of bounds: labels are from 0 to {classes - 1}.") from error


def of_class(values_C: Tensor, y_B: Tensor) -> Tensor:
    """Return values_C[y_B], where a label below 0 is an error instead of counting from the end."""
    return values_C.gather(0, y_B)


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
