"""Checks and conversions that every loss applies to its input: valid labels, enough precision, and no infinities."""

import torch
from torch import Tensor

PAIRS_AT_ONCE = 2**22
"""The number of pairs of an anchor and a partner that a loss processes at once: a matrix of 16 MB in float32."""

NO_LABEL = -(2**62)
"""An `ignore_index` for torch's losses, which skip the label -100 by default; here every label is checked."""


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


def weighted_mean(loss_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the mean of the losses of images, weighted by image if `weight_B` is given."""
    return loss_B.mean() if weight_B is None else (weight_B * loss_B).sum() / weight_B.sum()


def gather_class_values(values_C: Tensor, y_B: Tensor) -> Tensor:
    """Return values_C[y_B], where a label below 0 is an error instead of counting from the end."""
    return values_C.gather(0, y_B)


def at_least_float32(x: Tensor, *others: Tensor) -> Tensor:
    """Convert x to float32, or to float64 if x or one of the others has it: half precision cannot represent exp(-20)."""
    dtype = torch.float32
    for t in (x, *others):
        dtype = torch.promote_types(dtype, t.dtype)
    return x.to(dtype)


def replace_log_zero(log_x: Tensor) -> Tensor:
    """Replace log 0 by the lowest finite number: zero times infinity would be NaN."""
    return log_x.clamp(min=torch.finfo(log_x.dtype).min)


def mask_out_(log_psi: Tensor, drop: Tensor) -> Tensor:
    """Set psi to 0 in place where `drop` is True, by the lowest finite number, so that a row without partners is finite."""
    return log_psi.masked_fill_(drop, torch.finfo(log_psi.dtype).min)


def smoothing_weights(smoothing: float, log_q_C: Tensor) -> Tensor | None:
    """Return the weight that label smoothing gives to each class, equal for all classes that occur; None without smoothing."""
    if not smoothing:
        return None
    occurs_C = (log_q_C > torch.finfo(log_q_C.dtype).min).to(log_q_C.dtype)
    return smoothing * occurs_C / occurs_C.sum()


def percent_correct(guess_B: Tensor, y_B: Tensor) -> Tensor:
    """Return the percentage of guesses that equal their label."""
    return 100 * (guess_B == y_B).to(torch.float32).mean()


def row_max_abs(logits: Tensor) -> Tensor:
    """Return the largest magnitude in each row, without gradient."""
    return logits.detach().abs().amax(1)
