"""Losses of knowledge distillation on long-tailed data. They compare a teacher and a student in the same logit space.

With the logits t of a teacher and s of a student, both free of class frequencies, and the class frequencies π of the training
images, the prior-adjusted logits are a = t + log π and b = s + log π. On training images these are the logits of the posterior,
so that they, and not t and s, are compared (`log_mean_softmax` gives the a of several teachers):

    kd            T² · KL( softmax(a/T) ‖ softmax(b/T) )                                             (Hinton et al., 2015)
    standardized  the same with Z(a) and Z(b), where Z(z) = (z - mean of z) / std of z               (Sun et al., 2024)
    dkd           T² · ( α · KL(p ‖ q) + β · KL(p̂ ‖ q̂) )                                             (Zhao et al., 2022)

In `dkd`, p = (p_y, 1 - p_y) has the probabilities of the image's class y and of all others together, by softmax(a/T), and p̂ is
the softmax of a/T over the other classes; q and q̂ are those of the student.

Shapes: K teachers, B images, C classes.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from longtail.losses.numerics import at_least_float32, check_labels

DistillationTarget = Literal["kd", "standardized", "dkd"]
MIN_STD = 1e-7
"""Added to the standard deviation of logits, as in the code of Sun et al."""


def log_mean_softmax(logits_KBC: Tensor) -> Tensor:
    """Return the log of the mean probabilities of several teachers, which are the logits of the ensemble."""
    return at_least_float32(logits_KBC).log_softmax(2).logsumexp(0) - math.log(len(logits_KBC))


def distillation_loss(
    teacher_BC: Tensor,
    student_BC: Tensor,
    y_B: Tensor,
    temperature: float = 1.0,
    target: DistillationTarget = "kd",
    alpha: float = 1.0,
    beta: float = 8.0,
) -> Tensor:
    """Return the mean over images of a loss of the module's docstring. Gradients flow to the student only.

    Args:
        teacher_BC: The prior-adjusted logits a of the teacher.
        student_BC: The prior-adjusted logits b of the student.
        y_B: The labels, which only "dkd" uses.
        temperature: The temperature T.
        target: The loss: "kd", "standardized" or "dkd".
        alpha: The weight α of "dkd".
        beta: The weight β of "dkd".
    """
    a_BC, b_BC = at_least_float32(teacher_BC, student_BC).detach(), at_least_float32(student_BC, teacher_BC)
    if target == "standardized":
        a_BC, b_BC = standardize(a_BC), standardize(b_BC)
    a_BC, b_BC = a_BC / temperature, b_BC / temperature
    if target != "dkd":
        return temperature**2 * divergence(a_BC, b_BC)
    check_labels(y_B, a_BC.shape[1])
    others_a, others_b = take_other_classes(a_BC, y_B), take_other_classes(b_BC, y_B)
    of_class = divergence(split_off_class(a_BC, others_a, y_B), split_off_class(b_BC, others_b, y_B))
    return temperature**2 * (alpha * of_class + beta * divergence(others_a, others_b))


def divergence(a_BC: Tensor, b_BC: Tensor) -> Tensor:
    """Return KL(softmax(a) ‖ softmax(b)) as a mean over images."""
    log_p_BC, log_q_BC = a_BC.log_softmax(1), b_BC.log_softmax(1)
    return (log_p_BC.exp() * (log_p_BC - log_q_BC)).sum(1).mean()


def standardize(logits_BC: Tensor) -> Tensor:
    """Return the logits of each image with mean 0 and standard deviation 1."""
    mean_B1, std_B1 = logits_BC.mean(1, keepdim=True), logits_BC.std(1, keepdim=True)
    return (logits_BC - mean_B1) / (std_B1 + MIN_STD)


def take_other_classes(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Return the logits (B, C - 1) of all classes but that of the image."""
    column_C = torch.arange(logits_BC.shape[1] - 1, device=y_B.device)
    return logits_BC.gather(1, column_C + (column_C >= y_B[:, None]))


def split_off_class(logits_BC: Tensor, others: Tensor, y_B: Tensor) -> Tensor:
    """Return logits (B, 2) of the class of each image and of all others together.

    Args:
        logits_BC: The logits of all classes.
        others: Those of the other classes.
        y_B: The labels.
    """
    return torch.cat([logits_BC.gather(1, y_B[:, None]), others.logsumexp(1, keepdim=True)], 1)
