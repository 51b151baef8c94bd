"""Test the losses of distillation against the equations, written out for each image and class."""

import math

import pytest
import torch

from longtail.losses import class_contrast_loss, distillation_loss
from longtail.losses.distillation import log_mean_softmax

B, C, T = 5, 4, 2.5
TARGETS = ["kd", "standardized", "dkd"]


def case(seed: int = 0):
    """Return prior-adjusted logits of a teacher and of a student, and labels."""
    rng = torch.Generator().manual_seed(seed)
    a_BC, b_BC = 3 * torch.randn(2, B, C, generator=rng, dtype=torch.float64)
    return a_BC, b_BC.requires_grad_(), torch.tensor([0, 3, 1, 2, 2])


def softmax(z: list[float], temperature: float) -> list[float]:
    e = [math.exp(v / temperature) for v in z]
    return [v / sum(e) for v in e]


def kl(p: list[float], q: list[float]) -> float:
    return sum(p_c * math.log(p_c / q_c) for p_c, q_c in zip(p, q, strict=True))


def reference(target: str, a: list[float], b: list[float], y: int, alpha: float = 1.0, beta: float = 8.0) -> float:
    """Return the loss of one image."""
    if target == "standardized":
        a, b = (
            [(v - sum(z) / C) / math.sqrt(sum((w - sum(z) / C) ** 2 for w in z) / (C - 1)) for v in z] for z in (a, b)
        )
    p, q = softmax(a, T), softmax(b, T)
    if target != "dkd":
        return T**2 * kl(p, q)
    others_p = softmax([v for c, v in enumerate(a) if c != y], T)
    others_q = softmax([v for c, v in enumerate(b) if c != y], T)
    return T**2 * (alpha * kl([p[y], 1 - p[y]], [q[y], 1 - q[y]]) + beta * kl(others_p, others_q))


@pytest.mark.parametrize("target", TARGETS)
def test_is_the_equation(target):
    a_BC, b_BC, y_B = case()
    rows = zip(a_BC.tolist(), b_BC.tolist(), y_B.tolist(), strict=True)
    wanted = sum(reference(target, a, b, y, 0.7, 3.0) for a, b, y in rows) / B
    found = distillation_loss(a_BC, b_BC, y_B, T, target, 0.7, 3.0)
    assert found.item() == pytest.approx(wanted, rel=1e-6)  # 1e-7 is added to a standard deviation
    assert found.dtype == torch.float64 and torch.autograd.gradcheck(
        lambda b: distillation_loss(a_BC, b, y_B, T, target), b_BC
    )


@pytest.mark.parametrize("target", TARGETS)
def test_is_zero_with_a_zero_gradient_if_and_only_if_the_probabilities_agree(target):
    a_BC, b_BC, y_B = case()
    shift_B1 = torch.randn(B, 1, dtype=torch.float64)
    same_BC = (a_BC + shift_B1).requires_grad_()
    for student, agrees in ((same_BC, True), (b_BC, False)):
        loss = distillation_loss(a_BC, student, y_B, T, target)
        (gradient,) = torch.autograd.grad(loss, student)
        assert (loss.abs().item() < 1e-12) == agrees and (gradient.abs().max().item() < 1e-12) == agrees


def test_standardized_logits_do_not_depend_on_scale():
    a_BC, b_BC, y_B = case()
    one, other = (distillation_loss(a_BC, scale * b_BC, y_B, T, "standardized") for scale in (1, 7))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    assert distillation_loss(a_BC, 7 * b_BC, y_B, T, "kd") != distillation_loss(a_BC, b_BC, y_B, T, "kd")


def test_the_parts_of_dkd_add_up_to_kd():
    """KL(p, q) = KL of the class against the others + (1 - p_y) · KL within the others, for each image."""
    a_BC, b_BC, y_B = case()
    for a, b, y in zip(a_BC, b_BC, y_B, strict=True):
        one = a[None], b[None], y[None]
        other_share = 1 - (a / T).softmax(0)[y].item()
        parts = distillation_loss(*one, T, "dkd", alpha=1.0, beta=other_share)
        torch.testing.assert_close(parts, distillation_loss(*one, T, "kd"))


def test_an_ensemble_has_the_mean_probabilities():
    a_KBC = torch.randn(3, B, C, dtype=torch.float64)
    wanted = sum(a.softmax(1) for a in a_KBC) / 3
    torch.testing.assert_close(log_mean_softmax(a_KBC).exp(), wanted)
    torch.testing.assert_close(log_mean_softmax(a_KBC[:1]), a_KBC[0].log_softmax(1))


def test_the_gradient_does_not_flow_to_the_teacher():
    a_BC, b_BC, y_B = case()
    a_BC.requires_grad_()
    distillation_loss(a_BC, b_BC, y_B).backward()
    assert a_BC.grad is None and b_BC.grad.abs().sum() > 0


@pytest.mark.parametrize("target", TARGETS)
def test_half_precision_is_computed_in_float32(target):
    a_BC, b_BC, y_B = case()
    found = distillation_loss(a_BC.bfloat16(), b_BC.bfloat16(), y_B, T, target)
    wanted = distillation_loss(a_BC.bfloat16().double(), b_BC.bfloat16().double(), y_B, T, target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_large_logits_are_finite():
    a_BC = torch.tensor([[200.0, 0.0, -200.0]])
    for target in TARGETS:
        assert distillation_loss(a_BC, -a_BC, torch.tensor([0]), 1.0, target).isfinite()


@pytest.mark.parametrize("label", [-1, C])
def test_an_invalid_label_is_an_error(label):
    a_BC, b_BC, _ = case()
    with pytest.raises(IndexError):
        distillation_loss(a_BC, b_BC, torch.full((B,), label), T, "dkd")


# The contrast with the features of a teacher


def contrast_case(keys: int = 9, classes: int = 4):
    """Return features of student and teacher, labels with an empty slot, log frequencies, and temperatures."""
    rng = torch.Generator().manual_seed(0)
    q_BD, k_KD = (torch.randn(n, 3, generator=rng, dtype=torch.float64) for n in (3, keys))
    q_BD, k_KD = q_BD / q_BD.norm(dim=1, keepdim=True), k_KD / k_KD.norm(dim=1, keepdim=True)
    labels_K = torch.tensor([0, 1, 1, 3, -1, 3, 0, 0, 1])  # class 2 has no key
    log_prior_C = torch.tensor([0.6, 0.2, 0.15, 0.05], dtype=torch.float64).log()
    temperature_C = torch.tensor([0.1, 0.2, 0.3, 0.07], dtype=torch.float64)
    return q_BD, k_KD, labels_K, torch.tensor([0, 3, 1]), log_prior_C, temperature_C


def contrast_by_equation(q, keys, labels, y, log_prior, temperature) -> float:
    """Return the loss of one image."""
    scores = {}
    for c in set(labels) - {-1}:
        dots = [
            sum(a * b for a, b in zip(q, k, strict=True)) for k, label in zip(keys, labels, strict=True) if label == c
        ]
        scores[c] = math.log(sum(math.exp(dot / temperature[c]) for dot in dots) / len(dots)) + log_prior[c]
    return math.log(sum(math.exp(score) for score in scores.values())) - scores[y]


def test_the_contrast_is_the_equation():
    q_BD, k_KD, labels_K, y_B, log_prior_C, T_C = contrast_case()
    rest = k_KD.tolist(), labels_K.tolist()
    wanted = [
        contrast_by_equation(q, *rest, y, log_prior_C.tolist(), T_C.tolist())
        for q, y in zip(q_BD.tolist(), y_B.tolist(), strict=True)
    ]
    assert class_contrast_loss(*contrast_case()).item() == pytest.approx(sum(wanted) / 3, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda q, T: class_contrast_loss(q, k_KD, labels_K, y_B, log_prior_C, T),
        (q_BD.requires_grad_(), T_C.requires_grad_()),
    )


def test_an_empty_slot_has_no_influence():
    q_BD, k_KD, labels_K, y_B, log_prior_C, T_C = contrast_case()
    kept = labels_K >= 0
    without = class_contrast_loss(q_BD, k_KD[kept], labels_K[kept], y_B, log_prior_C, T_C)
    large = torch.where(kept[:, None], k_KD, 1e4 * torch.ones_like(k_KD))
    assert class_contrast_loss(q_BD, large, labels_K, y_B, log_prior_C, T_C).item() == without.item()


def test_the_contrast_is_finite_for_small_temperatures():
    """Scores of 1 / T = 1,000 do not overflow in float32, and gradients are finite."""
    q_BD, k_KD, labels_K, y_B, log_prior_C, _ = (t.float() if t.is_floating_point() else t for t in contrast_case())
    T_C = torch.full((4,), 1e-3, requires_grad=True)
    loss = class_contrast_loss(q_BD.requires_grad_(), k_KD, labels_K, y_B, log_prior_C, T_C)
    loss.backward()
    assert loss.isfinite() and T_C.grad.isfinite().all() and q_BD.grad.isfinite().all()


def test_the_contrast_is_smallest_at_features_of_the_class():
    _, k_KD, labels_K, y_B, log_prior_C, T_C = contrast_case()
    near = torch.stack([k_KD[labels_K == y].mean(0) for y in y_B.tolist()])
    near = near / near.norm(dim=1, keepdim=True)
    one, other = (class_contrast_loss(sign * near, k_KD, labels_K, y_B, log_prior_C, T_C) for sign in (1, -1))
    assert one < other


def test_a_wrong_label_is_an_error():
    q_BD, k_KD, labels_K, _, log_prior_C, T_C = contrast_case()
    with pytest.raises(IndexError):
        class_contrast_loss(q_BD, k_KD, labels_K, torch.tensor([0, 4, 1]), log_prior_C, T_C)
