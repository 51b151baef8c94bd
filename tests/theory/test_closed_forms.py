"""Closed forms against the implemented losses: minimized numerically, differentiated, and counted."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longtail import theory
from longtail.data.long_tail import exponential_counts
from longtail.data.samplers import epoch_order
from longtail.losses import paco_terms, supcon_loss
from longtail.methods.contrast import gather_contrast_set
from longtail.models.momentum import EMPTY_LABEL
from tests.methods.test_methods import HERE, make

C, NEGATIVES = 4, 6
CASES = [(0.05, 8), (0.01, 60), (0.2, 3), (0.4, 1)]
CIFAR = exponential_counts(500, 100, 100)


def anchors(*positives: int, scale: float = 1.0):
    """Return an anchor of class 1 for each number of positives in A(i), and some negatives; logits are free."""
    M = max(positives) + NEGATIVES
    g = torch.Generator().manual_seed(M)
    center, contrast = (scale * torch.randn(len(positives), n, generator=g, dtype=torch.float64) for n in (C, M))
    y_M = torch.tensor([1] * max(positives) + [0] * NEGATIVES)
    place = torch.arange(M)
    drop = torch.stack([(place >= K) & (y_M == 1) for K in positives])
    return center.requires_grad_(), contrast.requires_grad_(), torch.ones(len(positives), dtype=torch.long), y_M, drop


def least(loss, *logits) -> float:
    """Minimize the loss over the logits, and return the minimum."""
    optimizer = torch.optim.LBFGS(logits, max_iter=1000, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    return loss().item()


# K_y


def test_positives_of_cifar_100_lt_are_those_worked_out_by_hand():
    found = {count: theory.positives(CIFAR, 1024, 128, count) for count in theory.COUNTS}
    assert [round(found["text"][c], 2) for c in (0, -1)] == [47.20, 0.47]
    assert [round(found["supplement"][c], 2) for c in (0, -1)] == [58.96, 0.59]
    assert [round(found["expected"][c], 2) for c in (0, -1)] == [59.91, 1.59]
    assert theory.absent(CIFAR, 1024)[-1] == pytest.approx(0.62, abs=0.005)
    for alpha, head, tail in ((0.01, 0.63, 0.98), (0.02, 0.45, 0.97), (0.05, 0.25, 0.93)):
        P_sup = theory.center(alpha, found["expected"])
        assert (round(P_sup[0], 2), round(P_sup[-1], 2)) == (head, tail)


def mean_positives(name: str, draw, B: int, steps: int) -> np.ndarray:
    """Return mean and standard error of |P(i)| by class, once the queue of 32 is full."""
    method, seen = make(name), [[] for _ in range(10)]
    for step in range(steps):
        y_B = draw(step)
        q_BD = torch.zeros(B, method.config.projection_dim)
        both = name == "gpaco"  # both views go through one network, and are anchors
        given = (torch.cat([q_BD, q_BD]), q_BD[:0], y_B.repeat(2)) if both else (q_BD, q_BD, y_B)
        contrast = gather_contrast_set(*given, method.queue, method.config.contrast)
        y_M, drop_BM = contrast.y_M, contrast.drop_mask()
        if not (y_M == EMPTY_LABEL).any():
            for y, n in zip(given[2].tolist(), ((given[2][:, None] == y_M) & ~drop_BM).sum(1).tolist(), strict=True):
                seen[y].append(n)
        method.queue.waiting.append((q_BD, y_B))
        method.after_backward(HERE)
    return np.array([(np.mean(s), np.std(s) / math.sqrt(len(s) / 16)) for s in seen])  # neighbors share a queue


COUNTS = np.array([50, 20, 10, 5, 5, 5, 2, 1, 1, 1])


@pytest.mark.parametrize("name", ["paco", "gpaco"])
def test_positives_are_the_expected_number_for_random_anchors(name):
    g = torch.Generator().manual_seed(0)
    share_C = torch.tensor(COUNTS / COUNTS.sum())
    met = mean_positives(name, lambda _: torch.multinomial(share_C, 12, replacement=True, generator=g), 12, 3000)
    expected, supplement, text = (theory.positives(COUNTS, 32, 12, c) for c in ("expected", "supplement", "text"))
    assert (abs(met[:, 0] - expected) < 4 * met[:, 1]).all()
    assert (met[1:, 0] - supplement[1:] > 4 * met[1:, 1]).all() and (met[:, 0] - text > 4 * met[:, 1]).all()


def test_sampling_without_replacement_has_slightly_fewer_positives():
    """An image occurs once per epoch, so the share of its class among the others is between q and (n - 1) / (N - 1)."""
    y_N = torch.repeat_interleave(torch.arange(10), torch.tensor(COUNTS))
    steps = len(y_N) // 12
    met = mean_positives(
        "paco", lambda i: y_N[epoch_order("uniform", y_N, 0, i // steps)[i % steps * 12 :][:12]], 12, 3000
    )
    most = theory.positives(COUNTS, 32, 12)
    fewest = 1 + (COUNTS - 1) / (COUNTS.sum() - 1) * (32 + 22)
    assert (met[:, 0] > fewest - 4 * met[:, 1]).all() and (met[:, 0] < most + 4 * met[:, 1]).all()
    assert met[-3:, 0].mean() < most[-3:].mean() - 0.1  # classes of one image


# Remarks 1 and 2


@pytest.mark.parametrize("K", [1, 3, 8, 60])
def test_remark_1(K):
    _, contrast, y_B, y_M, drop = anchors(K)
    found = least(lambda: supcon_loss(contrast, y_B, y_M, drop, tau=0.7), contrast)
    p_M = (contrast / 0.7).softmax(1)[0].detach()
    np.testing.assert_allclose(p_M[:K], theory.supcon_pair(K), rtol=1e-3)
    assert p_M[K:].max() < 1e-4 and found == pytest.approx(theory.supcon_minimum(K), abs=1e-3)


@pytest.mark.parametrize("rebalance", [False, True])
@pytest.mark.parametrize(("alpha", "K"), CASES)
def test_remark_2(alpha, K, rebalance):
    center, contrast, y_B, y_M, drop = anchors(K)
    log_q = torch.tensor([0.7, 0.01, 0.09, 0.2], dtype=torch.float64).log() if rebalance else None
    terms = lambda: paco_terms(center, contrast, y_B, y_M, drop, log_q, alpha, 0.7, 0.3)  # noqa: E731
    found = least(lambda: terms()[0].sum(), center, contrast)
    centers = center / 0.3 + (log_q if rebalance else 0)
    p = torch.cat([centers, contrast / 0.7], 1).softmax(1)[0].detach()
    np.testing.assert_allclose(p[C : C + K], theory.pair(alpha, K), rtol=1e-3)
    np.testing.assert_allclose(p[1], theory.center(alpha, K), rtol=1e-3)
    np.testing.assert_allclose(terms()[1].item(), theory.center(alpha, K), rtol=1e-3)
    assert found == pytest.approx(theory.minimum(alpha, K), abs=1e-3)


def test_alpha_zero_leaves_the_centers_alone():
    assert theory.minimum(0, 60) == 0 and theory.center(0, 60) == 1 and theory.pair(0, 60) == 0


def test_the_range_from_head_to_tail():
    K, alphas = theory.positives(CIFAR, 1024, 128), np.geomspace(1e-7, 1e7, 50)
    curve = theory.pair_curve(K, alphas)
    ranges = np.array([theory.range_of(a, K) for a in alphas])
    np.testing.assert_allclose(curve[:, -1] / curve[:, 0], ranges)
    assert curve.shape == (50, 100) and (np.diff(ranges) > 0).all()
    assert ranges[0] == pytest.approx(1, abs=1e-4) and ranges[-1] == pytest.approx(K[0] / K[-1], rel=1e-4)
    np.testing.assert_allclose(curve[-1], theory.supcon_pair(K), rtol=1e-4)


# Eqs. 5 to 7


@pytest.mark.parametrize(("alpha", "K"), CASES)
def test_equation_5(alpha, K):
    """The unscaled PaCo loss is cross-entropy plus alpha times the SupCon sum plus L_extra."""
    center, contrast, y_B, y_M, drop = (t.detach() for t in anchors(K, scale=2))
    loss, P_sup = (t.item() for t in paco_terms(center, contrast, y_B, y_M, drop, None, alpha, 0.2))
    parts = F.cross_entropy(center, y_B) + alpha * K * supcon_loss(contrast, y_B, y_M, drop, 0.2)
    assert loss * (1 + alpha * K) - parts.item() == pytest.approx(theory.extra(P_sup, alpha * K), rel=1e-10)


@pytest.mark.parametrize("alpha_K", [0.01, 0.41, 1, 33])
def test_l_extra_is_least_where_the_whole_loss_is(alpha_K):
    P_sup, value = theory.extra_curve(alpha_K, points=9999)
    lowest = value.argmin()
    assert P_sup[lowest] == pytest.approx(1 / (1 + alpha_K), abs=1e-4)
    assert (np.diff(value[: lowest + 1]) < 0).all() and (np.diff(value[lowest:]) > 0).all()
    K = 5.0
    whole = (1 + alpha_K) * theory.minimum(alpha_K / K, K)
    assert value[lowest] + alpha_K * theory.supcon_minimum(K) == pytest.approx(whole, rel=1e-6)


def test_figure_4():
    P_sup, value = theory.extra_curve()
    assert P_sup[value.argmin()] == pytest.approx(0.71, abs=0.005)
    assert theory.center(0.05, 8.192) == pytest.approx(0.71, abs=0.001)
    assert theory.pair(0.05, 8.192) == pytest.approx(0.035, abs=0.001)


@pytest.mark.parametrize(("alpha", "K"), CASES)
def test_equation_7(alpha, K):
    """Positives have the optimal probability, and negatives the rest of 1 - P_sup."""
    best = theory.center(alpha, K)
    shares = np.linspace(0.05, 1, 7)[:-1] * best
    for P_sup in shares:
        rest = (1 - P_sup - K * theory.pair(alpha, K)) / NEGATIVES
        p_M = torch.tensor([theory.pair(alpha, K)] * K + [rest] * NEGATIVES, dtype=torch.float64)
        _, _, y_B, y_M, drop = anchors(K)
        found = K * supcon_loss(p_M.log()[None], y_B, y_M, drop, 1.0).item()
        assert found == pytest.approx(theory.supcon_at(P_sup, alpha, K), rel=1e-10)
    assert (np.diff(theory.supcon_at(shares, alpha, K)) < 0).all()
    assert theory.supcon_at(best, alpha, K) == pytest.approx(K * theory.supcon_minimum(K), abs=1e-10)


# The supplement's gradient


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("alpha", "K"), CASES)
def test_gradient_of_the_centers(alpha, K, scaled):
    _, contrast, y_B, y_M, drop = anchors(K)
    g = torch.Generator().manual_seed(7)
    x_D, c_CD = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((5,), (C, 5)))
    c_CD.requires_grad_()
    loss = paco_terms(c_CD.matmul(x_D)[None], contrast, y_B, y_M, drop, None, alpha, 1.0)[0].sum()
    (loss if scaled else loss * (1 + alpha * K)).backward()
    kept = contrast.detach()[0, : K + NEGATIVES]
    p_C = torch.cat([c_CD.detach() @ x_D, kept]).softmax(0)[:C]
    wanted = theory.center_gradient(p_C.numpy(), 1, alpha, K, scaled)
    np.testing.assert_allclose(c_CD.grad, np.outer(wanted, x_D), rtol=1e-10)


def test_own_center_is_attracted_up_to_its_optimal_probability():
    alpha, K = 0.05, 8.192
    for scaled in (True, False):
        pull = [theory.center_gradient([1 - p, p], 1, alpha, K, scaled)[1] for p in (0.0, 0.7, 0.72)]
        assert pull[0] < pull[1] < 0 < pull[2]
