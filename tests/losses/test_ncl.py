"""The losses of NCL and of consistent views against float64 loops written from their equations; then their properties."""

import pytest
import torch

from longtail.losses import consistency_loss, cross_entropy_loss, ncl_loss
from longtail.losses.ncl import find_hard_classes

E, B, C = 3, 6, 8
LOG_COUNTS = torch.tensor([500, 300, 100, 40, 20, 9, 3, 1]).double().log()
LABELS = torch.tensor([0, 7, 3, 3, 5, 0])


def make_logits(networks: int = E, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(networks, B, C, generator=torch.Generator().manual_seed(seed)).double()


def ncl_loop(logits_EBC, y_B, log_counts_C, hard):
    individual = mutual = 0.0
    for i, y in enumerate(y_B.tolist()):
        first = sorted((c for c in range(C) if c != y), key=lambda c: -logits_EBC[0, i, c])
        selected = {y, *first[: hard - 1]}
        networks = []
        for z_C in logits_EBC[:, i]:
            b_C = z_C + log_counts_C
            h_C = torch.stack([b_C[c] if c in selected else 0 * b_C[c] for c in range(C)])
            networks.append((b_C.softmax(0), h_C.softmax(0)))
        for e, own in enumerate(networks):
            individual = individual - sum(p_C[y].log() for p_C in own)
            for f, other in enumerate(networks):
                if e != f:
                    pairs = zip(own, other, strict=True)
                    mutual = mutual + sum((q_C * (q_C / p_C).log()).sum() for p_C, q_C in pairs) / (len(networks) - 1)
    return individual / len(y_B), mutual / len(y_B)


@pytest.mark.parametrize("hard", [1, 3, C])
@pytest.mark.parametrize("networks", [2, 3])
def test_equals_the_equation(networks, hard):
    logits = make_logits(networks)
    found, wanted = (f(logits, LABELS, LOG_COUNTS, hard) for f in (ncl_loss, ncl_loop))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ncl_loss(z, LABELS, LOG_COUNTS, hard), logits)


def test_more_hard_classes_than_classes_are_all():
    logits = make_logits()
    assert ncl_loss(logits, LABELS, LOG_COUNTS, 30) == ncl_loss(logits, LABELS, LOG_COUNTS, C)
    individual, _ = ncl_loss(logits, LABELS, LOG_COUNTS, 30)
    balanced = sum(cross_entropy_loss(z + LOG_COUNTS, LABELS) for z in logits)
    torch.testing.assert_close(individual, 2 * balanced)


def test_equal_networks_have_no_divergence():
    one = make_logits(1)
    individual, mutual = ncl_loss(one.expand(E, B, C), LABELS, LOG_COUNTS, 3)
    assert abs(mutual) < 1e-12
    torch.testing.assert_close(individual, E * ncl_loss(one, LABELS, LOG_COUNTS, 3)[0])
    assert ncl_loss(make_logits(), LABELS, LOG_COUNTS, 3)[1] > 0.1


def test_hard_classes_contain_the_class_of_the_image():
    logits = make_logits()[0]
    found = find_hard_classes(logits, LABELS, 3)
    assert found[range(B), LABELS].all() and (found.sum(1) == 3).all()
    others = logits.scatter(1, LABELS[:, None], -torch.inf)
    assert found[range(B), others.argmax(1)].all()


def test_a_class_without_images_has_no_share():
    logits = make_logits().float().requires_grad_()
    log_counts = LOG_COUNTS.float().clone()
    log_counts[2] = -torch.inf
    individual, mutual = ncl_loss(logits, LABELS, log_counts, 3)
    (grad,) = torch.autograd.grad(individual + mutual, logits)
    assert individual.isfinite() and mutual.isfinite() and grad.isfinite().all()
    keep = [c for c in range(C) if c != 2]
    names = torch.tensor([0, 1, -1, 2, 3, 4, 5, 6])
    whole = ncl_loss(logits, LABELS, log_counts, C)
    torch.testing.assert_close(whole, ncl_loss(logits[:, :, keep], names[LABELS], log_counts[keep], C - 1))


def consistency_loop(adjusted_VBC):
    views, images, _ = adjusted_VBC.shape
    total = 0.0
    for v in range(views):
        for w in range(views):
            for i in range(images) if v != w else ():
                q_C, p_C = adjusted_VBC[w, i].softmax(0), adjusted_VBC[v, i].softmax(0)
                total = total + (q_C * (q_C / p_C).log()).sum() / (views * (views - 1) * images)
    return total


@pytest.mark.parametrize("views", [2, 3, 4])
def test_consistency_equals_the_equation(views):
    adjusted = make_logits(views) + LOG_COUNTS
    torch.testing.assert_close(consistency_loss(adjusted), consistency_loop(adjusted), rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradcheck(consistency_loss, adjusted.requires_grad_())


def test_equal_views_are_consistent():
    adjusted = make_logits(1).expand(E, B, C) + LOG_COUNTS
    assert abs(consistency_loss(adjusted)) < 1e-12 and consistency_loss(adjusted[:1]) == 0


def test_a_class_without_images_does_not_change_the_consistency():
    adjusted = make_logits(2)
    more = torch.cat([adjusted, torch.full((2, B, 1), -torch.inf)], 2).requires_grad_()
    torch.testing.assert_close(consistency_loss(more), consistency_loss(adjusted))
    consistency_loss(more).backward()
    assert more.grad.isfinite().all() and (more.grad[..., -1] == 0).all()
