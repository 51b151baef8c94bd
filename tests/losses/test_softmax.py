"""Losses on logits against loops over plain Python numbers, gradients against the loops' differences; then properties.
What rebalances SupCon, and GPaCo's smoothing, against the equation in torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from longtail.losses import (
    class_balanced_focal_loss,
    cross_entropy_loss,
    effective_number_weights,
    focal_loss,
    label_aware_smoothing,
    label_aware_smoothing_loss,
    ldam_loss,
    ldam_margins,
    paco_loss,
    paco_terms,
    supcon_loss,
)
from tests.losses.test_losses import CASES, B, C, M, case

COUNTS = [50, 20, 1, 7, 3]
WEIGHT = [0.2, 0.5, 2.2, 0.9, 1.2]
MARGIN = [0.1, 0.15, 0.5, 0.2, 0.3]
SMOOTH = [0.4, 0.3, 0.0, 0.2, 0.1]


def softmax(row: list[float]) -> list[float]:
    psi = [math.exp(v) for v in row]
    return [v / sum(psi) for v in psi]


def cross_entropies(rows, labels) -> list[float]:
    return [-math.log(softmax(row)[y]) for row, y in zip(rows, labels, strict=True)]


def slow_weighted(rows, labels) -> float:
    weight = [WEIGHT[y] for y in labels]
    return sum(w * ce for w, ce in zip(weight, cross_entropies(rows, labels), strict=True)) / sum(weight)


def slow_focal(rows, labels, gamma, weight=(1.0,) * C) -> float:
    p = [softmax(row)[y] for row, y in zip(rows, labels, strict=True)]
    return sum(-weight[y] * (1 - p_y) ** gamma * math.log(p_y) for p_y, y in zip(p, labels, strict=True)) / B


def slow_cb_focal(rows, labels, gamma) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        for c, logit in enumerate(row):
            yes = 1 / (1 + math.exp(-logit))
            q = yes if c == y else 1 - yes
            total += WEIGHT[y] * (1 - q) ** gamma * -math.log(q)
    return total / B


def with_margins(rows, labels, scale) -> list[list[float]]:
    return [
        [scale * (v - (MARGIN[y] if c == y else 0.0)) for c, v in enumerate(row)]
        for row, y in zip(rows, labels, strict=True)
    ]


def slow_smoothed(rows, labels) -> float:
    total = 0.0
    for row, y in zip(rows, labels, strict=True):
        log_p, e = [math.log(p) for p in softmax(row)], SMOOTH[y]
        total -= (1 - e) * log_p[y] + e * sum(log_p) / C
    return total / B


def like(logits: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.promote_types(logits.dtype, torch.float32))


LOSSES = {  # name: (ours, the loop)
    "weighted": (lambda x, y: cross_entropy_loss(x, y, like(x, WEIGHT)), slow_weighted),
    "focal": (lambda x, y: focal_loss(x, y, 2.0), lambda x, y: slow_focal(x, y, 2.0)),
    "focal below 1": (lambda x, y: focal_loss(x, y, 0.5), lambda x, y: slow_focal(x, y, 0.5)),
    "focal weighted": (
        lambda x, y: focal_loss(x, y, 1.0, like(x, WEIGHT)),
        lambda x, y: slow_focal(x, y, 1.0, WEIGHT),
    ),
    "cb focal": (
        lambda x, y: class_balanced_focal_loss(x, y, like(x, WEIGHT), 2.0),
        lambda x, y: slow_cb_focal(x, y, 2.0),
    ),
    "cb focal below 1": (
        lambda x, y: class_balanced_focal_loss(x, y, like(x, WEIGHT), 0.5),
        lambda x, y: slow_cb_focal(x, y, 0.5),
    ),
    "ldam": (
        lambda x, y: ldam_loss(x, y, like(x, MARGIN), 4.0),
        lambda x, y: sum(cross_entropies(with_margins(x, y, 4.0), y)) / B,
    ),
    "ldam weighted": (
        lambda x, y: ldam_loss(x, y, like(x, MARGIN), 4.0, like(x, WEIGHT)),
        lambda x, y: slow_weighted(with_margins(x, y, 4.0), y),
    ),
    "label-aware": (lambda x, y: label_aware_smoothing_loss(x, y, like(x, SMOOTH)), slow_smoothed),
}


def logits_and_labels(seed: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits, _, y_B, *_ = case(seed, dtype)
    return logits, y_B


def differences(slow, rows: list[list[float]], labels: list[int], step: float = 1e-5) -> torch.Tensor:
    """Return central differences of the loop for each logit."""
    slope = torch.zeros(B, C, dtype=torch.float64)
    for i in range(B):
        for c in range(C):
            there, back = ([list(row) for row in rows] for _ in range(2))
            there[i][c] += step
            back[i][c] -= step
            slope[i, c] = (slow(there, labels) - slow(back, labels)) / (2 * step)
    return slope


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", CASES)
def test_a_loss_and_its_gradient_equal_the_equation(name, seed):
    fast, slow = LOSSES[name]
    logits, y_B = logits_and_labels(seed)
    loss = fast(logits.requires_grad_(), y_B)
    loss.backward()
    rows, labels = logits.tolist(), y_B.tolist()
    assert loss.item() == pytest.approx(slow(rows, labels), rel=1e-12)
    torch.testing.assert_close(logits.grad, differences(slow, rows, labels), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_worked_on_in_float32(name, dtype):
    """Only the logits are rounded; gradients have the precision of the logits."""
    fast, slow = LOSSES[name]
    logits, y_B = logits_and_labels(1, dtype)
    exact = logits.double().requires_grad_()
    loss = fast(logits.requires_grad_(), y_B)
    loss.backward(), fast(exact, y_B).backward()
    assert loss.dtype == torch.float32 and logits.grad.dtype == dtype
    assert loss.item() == pytest.approx(slow(logits.tolist(), y_B.tolist()), rel=1e-6)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=eps, atol=tiny)


# Focal


def gradient(loss, logits: torch.Tensor, *args) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(logits, *args), logits)[0]


def test_focal_with_gamma_0_is_cross_entropy():
    logits, y_B = logits_and_labels(0)
    torch.testing.assert_close(focal_loss(logits, y_B, 0.0), cross_entropy_loss(logits, y_B))
    torch.testing.assert_close(gradient(focal_loss, logits, y_B, 0.0), gradient(cross_entropy_loss, logits, y_B))
    weight, truth = like(logits, WEIGHT), F.one_hot(y_B, C).double()
    binary = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(1)
    torch.testing.assert_close(class_balanced_focal_loss(logits, y_B, weight, 0.0), (weight[y_B] * binary).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("sure", [1e3, -1e3], ids=["right", "wrong"])
def test_extreme_probabilities_have_finite_loss_and_gradient(gamma, sure):
    """If p = 1 exactly, a power below 1 has an infinite slope; if p = 0, only the logarithm remains."""
    y_B, weight = torch.tensor([0, 1]), torch.ones(C)
    logits = sure * (2 * F.one_hot(y_B, C).float() - 1)
    for loss, args, wrong in ((focal_loss, (gamma,), 2e3), (class_balanced_focal_loss, (weight, gamma), C * 1e3)):
        value, slope = loss(logits, y_B, *args), gradient(loss, logits, y_B, *args)
        assert value.item() == pytest.approx(0 if sure > 0 else wrong, abs=2)  # log C if all other logits are equal
        assert slope.isfinite().all() and (slope.abs() <= 1).all()
        assert (slope == 0).all() if sure > 0 else (slope.gather(1, y_B[:, None]) < -0.1).all()


def test_how_weights_are_averaged():
    """Cross-entropy and LDAM divide by the sum of weights, so that their scale has no effect; focal by the number of images."""
    logits, y_B = logits_and_labels(2)
    weight, margin = like(logits, WEIGHT), like(logits, MARGIN)
    for loss, args in ((cross_entropy_loss, ()), (ldam_loss, (margin, 4.0))):
        torch.testing.assert_close(loss(logits, y_B, *args, 3 * weight), loss(logits, y_B, *args, weight))
    torch.testing.assert_close(focal_loss(logits, y_B, 1.0, 3 * weight), 3 * focal_loss(logits, y_B, 1.0, weight))


# LDAM


@pytest.mark.parametrize("largest", [0.5, 0.3])
def test_margins(largest):
    wanted = [largest * n**-0.25 / max(m**-0.25 for m in COUNTS) for n in COUNTS]
    margin = ldam_margins(torch.tensor(COUNTS), largest)
    assert margin.dtype == torch.float32 and margin.tolist() == pytest.approx(wanted, rel=1e-6)
    assert margin.argmax() == 2 and margin.max() == torch.tensor(largest)  # the class of one image


def test_margin_lowers_only_the_logit_of_the_true_class():
    """Without margins LDAM is cross-entropy; a common margin lowers the logit of the true class."""
    cosine, y_B = logits_and_labels(3)
    torch.testing.assert_close(ldam_loss(cosine, y_B, torch.zeros(C), 30.0), cross_entropy_loss(30 * cosine, y_B))
    lowered = cosine - 0.2 * F.one_hot(y_B, C)
    torch.testing.assert_close(
        ldam_loss(cosine, y_B, torch.full((C,), 0.2).double(), 30.0), cross_entropy_loss(30 * lowered, y_B)
    )


# Label-aware smoothing


def test_smoothing_rises_along_a_quarter_of_a_sine():
    low, high = min(COUNTS), max(COUNTS)
    wanted = [0.1 + 0.3 * math.sin(math.pi * (n - low) / (2 * (high - low))) for n in COUNTS]
    smooth = label_aware_smoothing(torch.tensor(COUNTS), head=0.4, tail=0.1)
    assert smooth.dtype == torch.float32 and smooth.tolist() == pytest.approx(wanted, rel=1e-6)
    assert smooth[[0, 2]].tolist() == pytest.approx([0.4, 0.1])
    assert label_aware_smoothing(torch.tensor([9, 9, 9]), 0.4, 0.1).tolist() == pytest.approx([0.1] * 3)


def test_equal_smoothing_is_that_of_torch_and_none_is_cross_entropy():
    logits, y_B = logits_and_labels(0)
    for e in (0.0, 0.3):
        alike = label_aware_smoothing_loss(logits, y_B, torch.full((C,), e).double())
        torch.testing.assert_close(alike, F.cross_entropy(logits, y_B, label_smoothing=e))


# The effective number of images


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.9999])
def test_weights_are_inverse_to_the_effective_number(beta):
    """The effective number is 1 + beta + beta² + …, with one term for each image."""
    number = [sum(beta**k for k in range(n)) for n in COUNTS]
    total = sum(1 / e for e in number)
    weight = effective_number_weights(torch.tensor(COUNTS), beta)
    assert weight.dtype == torch.float32
    assert weight.tolist() == pytest.approx([C / e / total for e in number], rel=1e-6)


def test_weights_at_the_ends_of_beta_and_of_a_class_without_images():
    counts = torch.tensor(COUNTS)
    assert effective_number_weights(counts, 0.0).tolist() == [1.0] * C
    inverse = (1 / counts) / (1 / counts).mean()
    torch.testing.assert_close(effective_number_weights(counts, 1 - 1e-9), inverse, rtol=1e-5, atol=0)
    some = effective_number_weights(torch.tensor([0, *COUNTS]), 0.999)
    assert some[0] == 0 and some.isfinite().all() and some.sum().item() == pytest.approx(C + 1, rel=1e-6)


# What rebalances SupCon


def supcon_loop(contrast, y_B, y_M, drop, tau, weight_B, log_prior_M):
    """Compute Eq. 3, divided by |P(i)|; every exp is multiplied by q of its class, every anchor by its weight."""
    losses = []
    for i in range(B):
        in_A = [k for k in range(M) if not drop[i, k]]
        psi = {k: (contrast[i, k] / tau).exp() * (1 if log_prior_M is None else log_prior_M[k].exp()) for k in in_A}
        in_P = [k for k in in_A if y_M[k] == y_B[i]]
        if in_P:
            mean = sum(-(psi[k] / sum(psi.values())).log() for k in in_P) / len(in_P)
            losses.append(mean if weight_B is None else weight_B[i] * mean)
    return sum(losses) / len(losses)


def assert_same_gradients(fast, slow, inputs) -> None:
    """Check that values, and gradients with respect to all inputs, are equal."""
    ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    a, b = fast(*ours), slow(*theirs)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    found, wanted = torch.autograd.grad(a, ours), torch.autograd.grad(b, theirs)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize(("weighted", "balanced"), [(True, False), (False, True), (True, True)])
def test_supcon_rebalanced_equals_the_equation(seed, weighted, balanced):
    _, contrast, y_B, y_M, drop, log_prior = case(seed)
    weight_B = like(contrast, WEIGHT)[y_B] if weighted else None
    args = y_B, y_M, drop, 0.1, weight_B, log_prior[y_M] if balanced else None
    assert_same_gradients(lambda z: supcon_loss(z, *args), lambda z: supcon_loop(z, *args), [contrast])
    assert torch.autograd.gradcheck(lambda z: supcon_loss(z, *args), [contrast.requires_grad_()])


def test_empty_slots_have_no_effect_for_any_prior():
    """Empty slots of the queue have no class; their prior may be that of a class without images."""
    _, contrast, y_B, y_M, drop, log_prior = case(1)
    drop[:, 3] = True
    log_prior_M = log_prior[y_M]
    wanted = gradient(supcon_loss, contrast, y_B, y_M, drop, 0.1, None, log_prior_M)
    log_prior_M[3] = -math.inf
    torch.testing.assert_close(gradient(supcon_loss, contrast, y_B, y_M, drop, 0.1, None, log_prior_M), wanted)


def test_uniform_prior_changes_nothing():
    _, contrast, y_B, y_M, drop, _ = case(2)
    alike = torch.full((M,), -3.0, dtype=torch.float64)
    torch.testing.assert_close(
        supcon_loss(contrast, y_B, y_M, drop, 0.1, None, alike), supcon_loss(contrast, y_B, y_M, drop, 0.1)
    )


# GPaCo's smoothing


def smoothed_paco_loop(center, contrast, log_prior, y_B, y_M, drop, alpha, tau, smoothing):
    """Compute Eq. 8 with label smoothing: all centers share `smoothing`, and the own center also gets the rest of 1."""
    losses = []
    for i in range(B):
        in_A = [k for k in range(M) if not drop[i, k]]
        psi_c = [center[i, c].exp() * log_prior[c].exp() for c in range(C)]
        psi_z = {k: (contrast[i, k] / tau).exp() for k in in_A}
        Z = sum(psi_c) + sum(psi_z.values())
        in_P = [k for k in in_A if y_M[k] == y_B[i]]
        total = -(1 - smoothing) * (psi_c[y_B[i]] / Z).log() - alpha * sum((psi_z[k] / Z).log() for k in in_P)
        for c in range(C):
            total = total - smoothing / C * (psi_c[c] / Z).log()
        losses.append(total / (1 + alpha * len(in_P)))
    return sum(losses) / B


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("smoothing", [0.1, 0.6])
def test_smoothed_paco_equals_the_equation(seed, smoothing):
    center, contrast, y_B, y_M, drop, log_prior = case(seed)

    def fast(center, contrast, log_prior):
        return paco_loss(center, contrast, y_B, y_M, drop, log_prior, 0.05, 0.1, smoothing=smoothing)

    def slow(*inputs):
        return smoothed_paco_loop(*inputs, y_B, y_M, drop, 0.05, 0.1, smoothing)

    inputs = [center, contrast, log_prior]
    assert_same_gradients(fast, slow, inputs)
    assert torch.autograd.gradcheck(fast, [t.requires_grad_() for t in inputs], check_undefined_grad=False)


def test_smoothing_without_samples_is_torchs_and_leaves_the_shares_alone():
    center, contrast, y_B, y_M, drop, log_prior = case(0)
    alone = paco_loss(center, contrast[:, :0], y_B, y_M[:0], drop[:, :0], log_prior, smoothing=0.2)
    torch.testing.assert_close(alone, F.cross_entropy(center + log_prior, y_B, label_smoothing=0.2))
    plain, smoothed = (paco_terms(center, contrast, y_B, y_M, drop, log_prior, smoothing=s) for s in (0.0, 0.2))
    assert torch.equal(plain[1], smoothed[1]) and not torch.allclose(plain[0], smoothed[0])
