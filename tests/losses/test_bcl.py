"""The loss of BCL against a float64 loop written from its equation; then its properties."""

import math

import pytest
import torch
import torch.nn.functional as F

from longtail.losses import bcl_loss, supcon_loss
from longtail.losses.contrast_set import ContrastSet

C, D = 5, 6


def make_set(y_B: torch.Tensor, seed: int = 0, classes: int = C) -> ContrastSet:
    """Return anchors of length 1 that are compared with each other and with a center of each class."""
    g = torch.Generator().manual_seed(seed)
    q_BD, center_CD = (F.normalize(torch.randn(n, D, generator=g).double()) for n in (len(y_B), classes))
    return ContrastSet(
        q_BD, torch.cat([q_BD, center_CD]), torch.cat([y_B, torch.arange(classes)]), torch.arange(len(y_B))
    )


def bcl_loop(contrast: ContrastSet, y_B: torch.Tensor, classes: int, tau: float) -> torch.Tensor:
    losses = []
    for i, q_D in enumerate(contrast.q_BD):
        A = [m for m in range(len(contrast.y_M)) if m != contrast.itself_B[i]]
        exp = {m: (contrast.z_MD[m] @ q_D / tau).exp() for m in A}
        Z = 0.0
        for c in range(classes):
            of_class = [m for m in A if contrast.y_M[m] == c]
            Z = Z + sum(exp[m] for m in of_class) / max(len(of_class), 1)
        P = [m for m in A if contrast.y_M[m] == y_B[i]]
        losses.append(-sum((exp[m] / Z).log() for m in P) / len(P))
    return torch.stack(losses).mean()


LABELS = torch.tensor([0, 0, 0, 0, 3, 1, 0, 3, 0])  # classes 2 and 4 have a center only


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tau", [0.05, 0.1, 1.0])
def test_equals_the_equation(seed, tau):
    contrast = make_set(LABELS, seed)
    torch.testing.assert_close(
        bcl_loss(contrast, LABELS, C, tau), bcl_loop(contrast, LABELS, C, tau), rtol=1e-12, atol=1e-12
    )
    q, z = (t.clone().requires_grad_() for t in contrast[:2])
    assert torch.autograd.gradcheck(lambda q, z: bcl_loss(contrast._replace(q_BD=q, z_MD=z), LABELS, C, tau), (q, z))


def test_with_equally_frequent_classes_it_is_supcon():
    """Averages instead of sums divide each Z by the number of samples of a class in A(i), which is 3 for all."""
    y_M = torch.arange(C).repeat(4)
    keep = torch.cat([torch.tensor([0]), torch.arange(len(y_M))[y_M != 0], torch.tensor([C, 2 * C, 3 * C])])
    g = torch.Generator().manual_seed(1)
    z_MD = F.normalize(torch.randn(len(y_M), D, generator=g).double())
    few = [m for m in keep.tolist() if m < 3 * C or y_M[m] == 0]  # four of the anchor's class, three of the others
    contrast = ContrastSet(z_MD[:1], z_MD[few], y_M[few], torch.tensor([0]))
    plain = supcon_loss(contrast.products(), y_M[:1], y_M[few], contrast.drop_mask(), 0.1)
    torch.testing.assert_close(bcl_loss(contrast, y_M[:1], C, 0.1), plain - math.log(3))


def test_frequent_classes_have_no_greater_weight_than_rare_ones():
    """More copies of a sample of another class change nothing; in SupCon they increase the loss."""
    contrast = make_set(LABELS)
    copies = torch.full((20,), 5)
    more = contrast._replace(
        z_MD=torch.cat([contrast.z_MD, contrast.z_MD[copies]]), y_M=torch.cat([contrast.y_M, LABELS[copies]])
    )
    more = more._replace(q_BD=more.q_BD[:5], itself_B=more.itself_B[:5])
    once = contrast._replace(
        q_BD=more.q_BD,
        itself_B=more.itself_B,
        z_MD=torch.cat([contrast.z_MD[:-C], contrast.z_MD[5:6].expand(C, D)]),
        y_M=torch.cat([LABELS, torch.full((C,), 1)]),
    )
    y_B, tau = LABELS[:5], 0.1
    without_center = more._replace(
        z_MD=torch.cat([more.z_MD[: len(LABELS)], more.z_MD[-20:]]), y_M=torch.cat([LABELS, LABELS[copies]])
    )
    torch.testing.assert_close(bcl_loss(without_center, y_B, C, tau), bcl_loss(once, y_B, C, tau))
    many, few = (supcon_loss(s.products(), y_B, s.y_M, s.drop_mask(), tau) for s in (without_center, once))
    assert many > few + 0.1


def test_does_not_depend_on_the_order_of_classes_and_samples():
    contrast, order_C = make_set(LABELS), torch.tensor([3, 0, 4, 2, 1])
    loss = bcl_loss(contrast, LABELS, C)
    renamed = contrast._replace(y_M=order_C[contrast.y_M])
    torch.testing.assert_close(bcl_loss(renamed, order_C[LABELS], C), loss)
    order_M = torch.randperm(len(contrast.y_M), generator=torch.Generator().manual_seed(0))
    shuffled = ContrastSet(
        contrast.q_BD, contrast.z_MD[order_M], contrast.y_M[order_M], order_M.argsort()[: len(LABELS)]
    )
    torch.testing.assert_close(bcl_loss(shuffled, LABELS, C), loss)


def test_an_anchor_without_positives_is_left_out():
    y_B = torch.tensor([0, 1, 1])
    z_MD = F.normalize(torch.randn(3, D, generator=torch.Generator().manual_seed(0)).double()).requires_grad_()
    alone = ContrastSet(z_MD, z_MD, y_B, torch.arange(3))
    pair = ContrastSet(z_MD[1:], z_MD, y_B, torch.tensor([1, 2]))
    loss = bcl_loss(alone, y_B, 2)
    torch.testing.assert_close(loss, bcl_loss(pair, y_B[1:], 2))
    (grad,) = torch.autograd.grad(loss, z_MD)
    assert grad.isfinite().all()
    nobody = ContrastSet(z_MD[:1], z_MD, y_B, torch.tensor([0]))
    assert bcl_loss(nobody, y_B[:1], 2) == 0


def test_half_precision_is_computed_in_float32():
    contrast = make_set(LABELS)
    low = contrast._replace(q_BD=contrast.q_BD.bfloat16(), z_MD=contrast.z_MD.bfloat16())
    loss = bcl_loss(low, LABELS, C)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(bcl_loss(contrast, LABELS, C).item(), rel=0.02)
