"""Closed forms of Remarks 1 and 2, of Eqs. 5 to 7 and of the gradient in the supplement of Cui et al., ICCV 2021.

An anchor of class y has K_y positives among the samples. Let p be its softmax over all contrasted samples and centers. Its loss
before scaling is

    SupCon   L = - sum_{z+ in P} log p+                        minimal at p+ = 1 / K_y                      (Remark 1)
    PaCo     L = - log p_c - alpha · sum_{z+ in P} log p+      minimal at p+ = alpha / (1 + alpha·K_y),
                                                                          p_c = 1 / (1 + alpha·K_y)         (Remark 2)

with probability 0 for all negatives. The implemented losses are these divided by K_y and by 1 + alpha·K_y, which does not
change the optimum. The log q of Eq. 8 shifts the logits of the centers, but not their optimal probabilities.

Arguments are numbers, or arrays that can be broadcast.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Count = Literal["text", "supplement", "expected"]
COUNTS: tuple[Count, ...] = get_args(Count)

Floats = npt.NDArray[np.float64]


def positives(counts: npt.ArrayLike, queue: int, batch: int, count: Count = "expected") -> Floats:
    """Return K_y, the expected number of positives of an anchor of each class, if images are sampled independently.

    There are three ways of counting:

    text         q(y) · queue                            the approximation in the paper;
    supplement   q(y) · (queue + 2·batch - 1)            all samples in A(i) are random;
    expected     1 + q(y) · (queue + 2·batch - 2)        the true expectation: A(i) always contains the anchor's own key.

    For a class with 5 of 10,847 images they result in 0.5, 0.6 and 1.6.

    Args:
        counts: Number of training images of each class.
        queue: Queue length.
        batch: Batch size. Each image has a query and a key.
        count: The way of counting.
    """
    q_C = frequencies(counts)
    match count:
        case "text":
            return q_C * queue
        case "supplement":
            return q_C * (queue + 2 * batch - 1)
        case "expected":
            return 1 + q_C * (queue + 2 * batch - 2)


def absent(counts: npt.ArrayLike, queue: int) -> Floats:
    """Return the fraction of the steps at which the queue has no sample of each class."""
    return (1 - frequencies(counts)) ** queue


def frequencies(counts: npt.ArrayLike) -> Floats:
    """Return the class frequencies q(y)."""
    n_C = np.asarray(counts, np.float64)
    return n_C / n_C.sum()


# Remark 1


def supcon_pair(K: npt.ArrayLike) -> Floats:
    """Return the optimal probability of a positive pair for SupCon."""
    return 1 / np.asarray(K, np.float64)


def supcon_minimum(K: npt.ArrayLike) -> Floats:
    """Return the minimum of an anchor's SupCon loss (divided by K). It increases with K, so that the head has the most
    weight."""
    return np.log(K)


# Remark 2


def pair(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Return the optimal probability of a positive pair for PaCo."""
    return np.multiply(alpha, center(alpha, K))


def center(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Return the optimal probability of the center of the anchor's class for PaCo.

    All other centers have probability 0, so that this is also the optimal P_sup.
    """
    return 1 / (1 + np.multiply(alpha, K))


def minimum(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Return the minimum of an anchor's PaCo loss (divided by 1 + alpha·K)."""
    return np.log1p(np.multiply(alpha, K)) - np.multiply(K, x_log_x(alpha)) * center(alpha, K)


def range_of(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Return the ratio of the largest to the smallest optimal pair probability of the classes.

    It is (1/alpha + K_head) / (1/alpha + K_tail). It decreases with alpha to 1. For large alpha it approaches K_head / K_tail,
    the ratio of SupCon.
    """
    K_C = np.asarray(K, np.float64)
    return center(alpha, K_C.min()) / center(alpha, K_C.max())


def pair_curve(K: npt.ArrayLike, alpha: npt.ArrayLike) -> Floats:
    """Return the optimal pair probability for each alpha and each class, with shape (alphas, classes)."""
    return pair(np.asarray(alpha, np.float64)[:, None], np.asarray(K, np.float64))


# Eqs. 5 to 7, for balanced data: every class has K positives


def extra(P_sup: npt.ArrayLike, alpha_K: npt.ArrayLike) -> Floats:
    """Return L_extra (Eq. 6), the difference of the PaCo loss before scaling and L_sup + alpha·L_supcon (Eq. 5).

    L_supcon is a sum over positives. L_extra has its minimum where the total loss has it, at P_sup = 1 / (1 + alpha·K).
    """
    return -np.log(P_sup) - np.multiply(alpha_K, np.log1p(-np.asarray(P_sup, np.float64)))


def extra_curve(alpha_K: float = 0.41, points: int = 199) -> tuple[Floats, Floats]:
    """Return P_sup and L_extra of Fig. 4 of the paper, which is for full ImageNet and has its minimum at 0.71."""
    P_sup = np.linspace(0, 1, points + 2)[1:-1]
    return P_sup, extra(P_sup, alpha_K)


def supcon_at(P_sup: npt.ArrayLike, alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Return the SupCon loss of Eq. 7, for which pairs have PaCo's optimal probability and the centers have the share P_sup.

    The loss is a sum, not divided by K. It decreases with P_sup to the minimum of SupCon at P_sup = 1 / (1 + alpha·K). Larger
    values of P_sup are impossible, because the samples' share 1 - P_sup is smaller than the share of their positives.

    Args:
        P_sup: Share of the centers.
        alpha: Weight of a positive sample.
        K: Number of positives.
    """
    return -np.multiply(K, np.log(pair(alpha, K) / (1 - np.asarray(P_sup, np.float64))))


# The gradient in the supplement


def center_gradient(p_C: npt.ArrayLike, y: int, alpha: float, K: float, scaled: bool = True) -> Floats:
    """Return g, where dL/dc_k = g_k · x is the gradient of the loss of an anchor x of class y with respect to center k.

    In the supplement, g_k is (1 + alpha·K)·p_k - [k = y], for the loss before scaling. For the implemented loss it is p_k,
    minus 1 / (1 + alpha·K) for the center of class y. That center is attracted until p_y has this value, which is smaller
    for classes with more positives.

    Args:
        p_C: Softmax probabilities of the centers.
        y: The class of the anchor.
        alpha: Weight of a positive sample.
        K: Number of positives.
        scaled: Return the gradient of the implemented loss instead of that in the supplement.
    """
    g_C = np.array(p_C, np.float64)
    g_C[y] -= center(alpha, K)
    return g_C if scaled else g_C * (1 + alpha * K)


def x_log_x(x: npt.ArrayLike) -> Floats:
    """Return x · log x, which is 0 at 0."""
    x = np.asarray(x, np.float64)
    return x * np.log(np.where(x > 0, x, 1))
