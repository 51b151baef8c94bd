"""Remarks 1 and 2, Eqs. 5 to 7 and the supplement's gradient, of Cui et al., ICCV 2021, as closed forms.

An anchor of class y has K_y positives among the samples. With p_k its softmax over all partners, its loss before the scaling is

    SupCon   L = - sum_{z+ in P} log p+                        least at p+ = 1 / K_y                      (Remark 1)
    PaCo     L = - log p_c - alpha · sum_{z+ in P} log p+      least at p+ = alpha / (1 + alpha·K_y),
                                                                        p_c = 1 / (1 + alpha·K_y)         (Remark 2)

where negatives have no probability left. The losses that are trained are these over K_y, and over 1 + alpha·K_y: the same
optimum, another height. The log q of Eq. 8 shifts the logits of the centers, not their best probabilities: the same again.

Arguments are numbers or arrays that broadcast.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Count = Literal["text", "supplement", "expected"]
COUNTS: tuple[Count, ...] = get_args(Count)

Floats = npt.NDArray[np.float64]


def positives(counts: npt.ArrayLike, queue: int, batch: int, count: Count = "expected") -> Floats:
    """K_y of each class: the positives that an anchor of it meets, where images are drawn independently. Three ways to count:

    text         q(y) · queue                            the paper's approximation;
    supplement   q(y) · (queue + 2·batch - 1)            all of A(i) drawn at random;
    expected     1 + q(y) · (queue + 2·batch - 2)        the true expectation: the anchor's own key is there by design.

    `batch` images have a query and a key each. On a tail of 5 images in 10,847 the three are 0.5, 0.6 and 1.6.
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
    """The share of the steps at which the queue has nothing of a class."""
    return (1 - frequencies(counts)) ** queue


def frequencies(counts: npt.ArrayLike) -> Floats:
    """q(y)."""
    n_C = np.asarray(counts, np.float64)
    return n_C / n_C.sum()


# Remark 1


def supcon_pair(K: npt.ArrayLike) -> Floats:
    """SupCon's optimal probability of a positive pair."""
    return 1 / np.asarray(K, np.float64)


def supcon_minimum(K: npt.ArrayLike) -> Floats:
    """The least SupCon loss of an anchor, as it is trained (over K): it rises with K, so that the head weighs most."""
    return np.log(K)


# Remark 2


def pair(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """PaCo's optimal probability of a positive pair."""
    return np.multiply(alpha, center(alpha, K))


def center(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """PaCo's optimal probability of the own center; as no other center has any, also the optimal P_sup."""
    return 1 / (1 + np.multiply(alpha, K))


def minimum(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """The least PaCo loss of an anchor, as it is trained (over 1 + alpha·K)."""
    return np.log1p(np.multiply(alpha, K)) - np.multiply(K, x_log_x(alpha)) * center(alpha, K)


def range_of(alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """How uneven the optimal pair probability is over classes, largest over smallest: (1/alpha + K_head) / (1/alpha + K_tail).

    It falls to 1 with alpha; SupCon has K_head / K_tail, which is its limit for large alpha.
    """
    known = np.asarray(K, np.float64)
    return center(alpha, known.min()) / center(alpha, known.max())


def pair_curve(K: npt.ArrayLike, alpha: npt.ArrayLike) -> Floats:
    """(alphas, classes), the optimal pair probability of each class as alpha changes."""
    return pair(np.asarray(alpha, np.float64)[:, None], np.asarray(K, np.float64))


# Eqs. 5 to 7: balanced data, where every class has K positives


def extra(P_sup: npt.ArrayLike, alpha_K: npt.ArrayLike) -> Floats:
    """L_extra (Eq. 6), by which PaCo before its scaling exceeds L_sup + alpha·L_supcon (Eq. 5), L_supcon a sum over positives.

    It is least where the whole loss is, at P_sup = 1 / (1 + alpha·K).
    """
    return -np.log(P_sup) - np.multiply(alpha_K, np.log1p(-np.asarray(P_sup, np.float64)))


def extra_curve(alpha_K: float = 0.41, points: int = 199) -> tuple[Floats, Floats]:
    """P_sup and L_extra: the paper's Fig. 4, which is full ImageNet's, with its minimum at 0.71."""
    P_sup = np.linspace(0, 1, points + 2)[1:-1]
    return P_sup, extra(P_sup, alpha_K)


def supcon_at(P_sup: npt.ArrayLike, alpha: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
    """Eq. 7: the SupCon loss (a sum, not over K) at which pairs have PaCo's optimal probability, where centers have P_sup.

    It falls as P_sup rises, to SupCon's own least value at P_sup = 1 / (1 + alpha·K). Beyond, it cannot be had: the samples'
    share, 1 - P_sup, is less than what their positives should have.
    """
    return -np.multiply(K, np.log(pair(alpha, K) / (1 - np.asarray(P_sup, np.float64))))


# The supplement's gradient


def center_gradient(p_C: npt.ArrayLike, y: int, alpha: float, K: float, scaled: bool = True) -> Floats:
    """By how much of x each center moves the loss of an anchor x of class y: dL/dc_k = g_k · x.

    The supplement's (1 + alpha·K)·p_k - [k = y] belongs to the loss before its scaling; that of the trained one is p_k less
    1 / (1 + alpha·K) for the own center, which is pulled until p_y is there, and less the more positives its class has.
    """
    g_C = np.array(p_C, np.float64)
    g_C[y] -= center(alpha, K)
    return g_C if scaled else g_C * (1 + alpha * K)


def x_log_x(x: npt.ArrayLike) -> Floats:
    """0 at 0."""
    x = np.asarray(x, np.float64)
    return x * np.log(np.where(x > 0, x, 1))
