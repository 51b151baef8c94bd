"""The loss of NCL (Li et al., CVPR 2022): several networks are trained by Balanced Softmax, and learn from each other.

With the logits z_e of network e and the number of training images n, b_e = z_e + log n are its balanced logits. In h_e the
balanced logits of all classes but the hard ones are replaced by 0. The hard classes of an image are those with the largest
logits of the first network, and always its own class. The loss is

    sum over e of  CE(b_e) + CE(h_e)   +   weight · sum over e, f with e ≠ f of  ( KL(b_f || b_e) + KL(h_f || h_e) ) / (E - 1),

where KL compares the softmax of balanced logits, with a gradient through both.

NCL++ also compares the views of an image with each other. `consistency_loss` does this for the views of one network, with the
prior-adjusted logits b_v = z_v + log π of view v and the class frequencies π of the training images:

    1 / (V · (V - 1)) · sum over v, w with v ≠ w of  KL( softmax(b_w) ‖ softmax(b_v) )

Shapes: E networks, V views, B images, C classes.
"""

import torch
from torch import Tensor

from longtail.losses.numerics import at_least_float32, check_labels
from longtail.losses.softmax import cross_entropy_loss

LOG_NO_IMAGES = -1e4
"""Takes the place of log 0 for a class without images. Products of its probability 0 and its log probability are then 0."""


def ncl_loss(logits_EBC: Tensor, y_B: Tensor, log_counts_C: Tensor, hard: int = 30) -> tuple[Tensor, Tensor]:
    """Return the two parts of the NCL loss: the sum of all cross-entropies, and the unweighted sum of the divergences.

    Args:
        logits_EBC: The logits of the networks.
        y_B: The labels.
        log_counts_C: The log of the number of training images of each class.
        hard: The number of hard classes of an image, with its own class.
    """
    check_labels(y_B, logits_EBC.shape[2])
    logits_EBC = at_least_float32(logits_EBC)
    b_EBC = logits_EBC + log_counts_C.clamp(min=LOG_NO_IMAGES)
    h_EBC = torch.where(find_hard_classes(logits_EBC[0].detach(), y_B, hard), b_EBC, 0.0)
    individual = mutual = logits_EBC.new_zeros(())
    for each_EBC in (b_EBC, h_EBC):
        individual = individual + cross_entropy_loss(each_EBC.flatten(0, 1), y_B.repeat(len(each_EBC))) * len(each_EBC)
        mutual = mutual + mutual_divergence(each_EBC)
    return individual, mutual


def find_hard_classes(logits_BC: Tensor, y_B: Tensor, hard: int) -> Tensor:
    """Return a mask (B, C) of the class of each image and the classes with the largest other logits.

    Args:
        logits_BC: The logits.
        y_B: The labels.
        hard: The number of classes that are selected; at most all.
    """
    first_BC = logits_BC.scatter(1, y_B[:, None], torch.inf)
    top_BH = first_BC.topk(min(hard, first_BC.shape[1]), 1)[1]
    return torch.zeros_like(first_BC, dtype=torch.bool).scatter(1, top_BH, True)


def mutual_divergence(logits_EBC: Tensor) -> Tensor:
    """Return the sum of KL(p_f || p_e) over all pairs of different networks, divided by E - 1, as a mean over images."""
    networks, log_p_EBC = len(logits_EBC), logits_EBC.log_softmax(2)
    p_EBC = log_p_EBC.exp()
    own_BC, crossed_BC = (p_EBC * log_p_EBC).sum(0), p_EBC.sum(0) * log_p_EBC.sum(0)
    return (networks * own_BC - crossed_BC).sum(1).mean() / max(networks - 1, 1)


def consistency_loss(adjusted_VBC: Tensor) -> Tensor:
    """Return the mean of KL(p_w || p_v) over all ordered pairs of different views, as a mean over images.

    It is symmetric in the views, and its gradient flows through both sides. For one view it is zero.

    Args:
        adjusted_VBC: The prior-adjusted logits of each view, whose softmax is p_v.
    """
    return mutual_divergence(at_least_float32(adjusted_VBC).clamp(min=LOG_NO_IMAGES)) / len(adjusted_VBC)
