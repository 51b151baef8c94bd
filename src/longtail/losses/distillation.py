"""Losses of knowledge distillation on long-tailed data. They compare a teacher and a student in the same logit space.

With the logits t of a teacher and s of a student, both free of class frequencies, and the class frequencies π of the training
images, the prior-adjusted logits are a = t + log π and b = s + log π. On training images these are the logits of the posterior,
so that they, and not t and s, are compared (`log_mean_softmax` gives the a of several teachers):

    kd            T² · KL( softmax(a/T) ‖ softmax(b/T) )                                             (Hinton et al., 2015)
    standardized  the same with Z(a) and Z(b), where Z(z) = (z - mean of z) / std of z               (Sun et al., 2024)
    dkd           T² · ( α · KL(p ‖ q) + β · KL(p̂ ‖ q̂) )                                             (Zhao et al., 2022)

`class_contrast_loss` compares a feature q of the student with features k of the teacher, as in GML (Suh and Seo, 2023). The
score z_c of a class is the log of a mean over the n_c features of the teacher for images of this class, with a temperature T_c:

    contrast      cross-entropy( z + log π, y )      with      z_c = log( 1/n_c · Σ exp(q·k_j / T_c) )

In `dkd`, p = (p_y, 1 - p_y) has the probabilities of the image's class y and of all others together, by softmax(a/T), and p̂ is
the softmax of a/T over the other classes; q and q̂ are those of the student.

Shapes: K teachers or features, B images, C classes, D width of a feature.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
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


def class_contrast_loss(
    q_BD: Tensor, keys_KD: Tensor, labels_K: Tensor, y_B: Tensor, log_prior_C: Tensor, temperature_C: Tensor
) -> Tensor:
    """Return the mean over images of the contrast of the module's docstring. Classes without a key are left out.

    Args:
        q_BD: The features of the student, with length 1.
        keys_KD: The features of the teacher, with length 1.
        labels_K: Their labels; a negative label marks an empty slot.
        y_B: The labels of the images. Each of these classes has a key.
        log_prior_C: The log class frequencies of the training images, log π.
        temperature_C: The temperature T_c of each class.
    """
    q_BD, temperature_C = at_least_float32(q_BD), at_least_float32(temperature_C)
    check_labels(y_B, len(log_prior_C))
    of_class_KC = labels_K[:, None] == torch.arange(len(log_prior_C), device=labels_K.device)
    n_C = of_class_KC.sum(0)
    z_BK = q_BD @ keys_KD.to(q_BD.dtype).T / temperature_C[labels_K.clamp(min=0)]
    largest_B1 = z_BK.detach().masked_fill(labels_K < 0, -math.inf).amax(1, keepdim=True)
    # An empty slot has no influence: it is in no class, and without the mask its exponential could overflow.
    exp_BK = (z_BK - largest_B1).masked_fill(labels_K < 0, -math.inf).exp()
    mean_BC = exp_BK @ of_class_KC.to(exp_BK.dtype) / n_C.clamp(min=1)
    z_BC = largest_B1 + mean_BC.clamp(min=torch.finfo(mean_BC.dtype).tiny).log()
    return F.cross_entropy((z_BC + log_prior_C.to(z_BC.dtype)).masked_fill(n_C == 0, -math.inf), y_B)
