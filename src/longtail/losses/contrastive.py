"""Supervised contrastive losses.

`supcon_loss` is supervised contrastive learning (Khosla et al., 2020) with the queue of MoCo: Eq. 3 of the PaCo paper, divided
by |P(i)|. `bcl_loss` is the balanced contrastive loss of BCL (Zhu et al., CVPR 2022):

An anchor x_i of class y is compared with the samples of A(i), which contain a center of every class ("class complement"). In
the denominator the exponentials of each class are averaged instead of summed ("class averaging"), so that a frequent class does
not push anchors away more than a rare one:

    L_i = -1/|P(i)| · sum_{z+ in P(i)} log( exp(z+·q_i/tau) / Z_i ),
    Z_i = sum over classes c of  1/|A_c(i)| · sum_{z in A_c(i)} exp(z·q_i/tau),

where A_c(i) are the samples of A(i) of class c, and P(i) = A_y(i).

Shapes: B anchors, M samples, C classes.
"""

import torch
from torch import Tensor

from longtail.losses.contrast_set import ContrastSet
from longtail.losses.numerics import at_least_float32, check_labels, gather_class_values, mask_out_


def supcon_loss(
    contrast_BM: Tensor,
    y_B: Tensor,
    y_M: Tensor,
    drop_BM: Tensor,
    tau: float = 0.2,
    weight_B: Tensor | None = None,
    log_prior_M: Tensor | None = None,
) -> Tensor:
    """Return the supervised contrastive loss (SupCon), a mean over the anchors that have positives.

    The loss of an anchor is -1/|P(i)| · sum_{z+ in P(i)} log(exp(z+·T(x_i)/tau) / sum over A(i)).
    Anchors without positives are left out of the mean; if there are no others, the loss is zero.

    Args:
        contrast_BM: The products z·T(x) of anchors and samples.
        y_B: The labels of the anchors.
        y_M: The labels of the samples.
        drop_BM: A mask that is True where a sample is not in A(i).
        tau: The temperature.
        weight_B: The weight of each anchor's term, for the re-weighted baseline of the paper.
        log_prior_M: log q of each sample's class. Every exp is multiplied by q, as in Balanced Softmax.
    """
    logit_BM = at_least_float32(contrast_BM) / tau
    if log_prior_M is not None:
        logit_BM = logit_BM + log_prior_M
    logit_BM = mask_out_(logit_BM, drop_BM)
    in_P_BM = (y_B[:, None] == y_M[None, :]) & ~drop_BM
    P_B = in_P_BM.sum(1, dtype=logit_BM.dtype)
    log_p_BM = logit_BM - logit_BM.logsumexp(1, keepdim=True)
    loss_B = -torch.where(in_P_BM, log_p_BM, 0.0).sum(1) / P_B.clamp(min=1)
    if weight_B is not None:
        loss_B = weight_B * loss_B
    return loss_B.sum() / (P_B > 0).sum().clamp(min=1)


def bcl_loss(contrast: ContrastSet, y_B: Tensor, classes: int, tau: float = 0.1) -> Tensor:
    """Return the balanced contrastive loss (BCL), a mean over the anchors that have positives; zero if no anchor has any.

    Args:
        contrast: The anchors, and the samples that they are compared with, including the centers and the anchors themselves.
        y_B: The labels of the anchors.
        classes: The number of classes. All labels must be from 0 to C - 1.
        tau: The temperature.
    """
    y_M = contrast.y_M
    check_labels(y_B, classes)
    check_labels(y_M, classes)
    logit_BM = at_least_float32(contrast.products()) / tau
    same_BM, drop_BM = y_B[:, None] == y_M, contrast.drop_mask()
    n_C = logit_BM.new_zeros(classes).scatter_add(0, y_M, torch.ones_like(y_M, dtype=logit_BM.dtype))
    n_BM = gather_class_values(n_C, y_M) - same_BM.to(logit_BM.dtype)  # an anchor is not in its own A(i)
    log_Z_B = mask_out_(logit_BM - n_BM.clamp(min=1).log(), drop_BM).logsumexp(1)
    in_P_BM = same_BM & ~drop_BM
    P_B = in_P_BM.sum(1, dtype=logit_BM.dtype)
    pull_B = torch.where(in_P_BM, logit_BM, 0.0).sum(1) / P_B.clamp(min=1)
    has_P_B = P_B > 0
    return torch.where(has_P_B, log_Z_B - pull_B, 0.0).sum() / has_P_B.sum().clamp(min=1)
