"""The loss of ProCo against float64 loops with scipy's and mpmath's Bessel functions; then its properties."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from scipy.special import ive

from longtail.losses import proco_logits, proco_loss
from longtail.losses.proco import MAX_KAPPA, MIN_ORDER, TERMS, bessel_value_and_ratio, concentration, log_bessel

C = 5
KAPPAS = [10.0 ** (i / 2) for i in range(-6, 11)]  # from 1e-3 to 1e5
LOG_PRIOR = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).double().log()


def exact_bessel(order: float, kappa: float) -> tuple[float, float]:
    """Return log( I_v(k) / k^v ) and I_{v+1}(k) / (k I_v(k)) with 60 digits."""
    with mpmath.workdps(60):
        k = mpmath.mpf(kappa)
        value, following = (mpmath.besseli(v, k) for v in (order, order + 1))
        return float(mpmath.log(value) - order * mpmath.log(k)), float(following / value / k)


@pytest.mark.parametrize(("order", "tolerance"), [(-0.5, 1e-11), (0, 1e-11), (1.5, 1e-11), (7, 1e-11), (15, 1e-12)])
def test_small_orders_are_those_of_mpmath(order, tolerance):
    check_against_mpmath(order, tolerance)


@pytest.mark.parametrize(("order", "tolerance"), [(MIN_ORDER, 1e-12), (31, 1e-13), (63, 2e-15), (511, 2e-15)])
def test_large_orders_are_those_of_mpmath(order, tolerance):
    """The order 63 belongs to 128 features. The error is relative to the value, which is near kappa if kappa is large."""
    check_against_mpmath(order, tolerance)


def check_against_mpmath(order: float, tolerance: float) -> None:
    exact = [exact_bessel(order, kappa) for kappa in KAPPAS]
    value, ratio = bessel_value_and_ratio(torch.tensor(KAPPAS, dtype=torch.float64) ** 2, order)
    wanted = torch.tensor(exact, dtype=torch.float64)
    torch.testing.assert_close(value, wanted[:, 0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ratio, wanted[:, 1], rtol=5e-11, atol=0)


@pytest.mark.parametrize("order", [0, 0.5, 15, 63])
def test_values_are_those_of_scipy(order):
    """`ive` is I_v(k) · exp(-k). Where it underflows, it has no logarithm."""
    kappa = torch.tensor(KAPPAS, dtype=torch.float64)
    scaled = torch.from_numpy(ive(order, kappa.numpy()))
    assert (scaled > 0).sum() >= len(KAPPAS) - 1
    wanted = scaled.log() + kappa - order * kappa.log()
    found = log_bessel(kappa**2, order)
    torch.testing.assert_close(found[scaled > 0], wanted[scaled > 0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", [0, 3.5, 15, 63])
def test_at_zero_it_is_the_first_term_of_the_series(order):
    value, ratio = bessel_value_and_ratio(torch.zeros(1).double(), order)
    assert value.item() == pytest.approx(-order * math.log(2) - math.lgamma(order + 1), rel=1e-11, abs=1e-11)
    assert ratio.item() == pytest.approx(1 / (2 * (order + 1)), rel=1e-11)


@pytest.mark.parametrize("order", [0, 15, 63])
def test_gradient_of_the_bessel_function(order):
    squared = torch.tensor([0.5, 3.0, 90.0, 2e3, 1e5]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: log_bessel(s, order), squared)


def test_the_expansion_has_enough_terms(monkeypatch):
    """Removing one term makes the error at the smallest order larger than the tolerance of the tests."""
    monkeypatch.setattr("longtail.losses.proco.TERMS", TERMS - 2)
    with pytest.raises(AssertionError):
        check_against_mpmath(MIN_ORDER, 1e-12)


# The loss


def make_features(width: int = 128, seed: int = 0, anchors: int = 9):
    """Return anchors, labels and class means of lengths 0, 0.05, 0.5, 0.95 and 1."""
    g = torch.Generator().manual_seed(seed)
    z_BD = F.normalize(torch.randn(anchors, width, generator=g).double())
    length_C1 = torch.tensor([0.95, 0.5, 0.05, 1.0, 0.0]).double()[:, None]
    mean_CD = length_C1 * F.normalize(torch.randn(C, width, generator=g).double())
    return z_BD, torch.randint(C, (anchors,), generator=g), mean_CD


def proco_loop(z_BD, y_B, mean_CD, log_prior_C, tau):
    """Balanced Softmax of log C(kappa) - log C(|kappa · mu + z/tau|), one pair after the other, with 60 digits."""
    D = z_BD.shape[1]

    def log_C(k):
        order = mpmath.mpf(D) / 2 - 1
        if k == 0:
            return order * mpmath.log(2) + mpmath.loggamma(order + 1)
        return order * mpmath.log(k) - mpmath.log(mpmath.besseli(order, k))

    total = mpmath.mpf(0)
    with mpmath.workdps(60):
        for z_D, y in zip(z_BD.tolist(), y_B.tolist(), strict=True):
            logits = []
            for mean_D, log_prior in zip(mean_CD.tolist(), log_prior_C.tolist(), strict=True):
                R = mpmath.sqrt(mpmath.fsum(mpmath.mpf(m) ** 2 for m in mean_D))
                kappa = min(D * R / (1 - R**2), MAX_KAPPA) if R < 1 - 1e-9 else mpmath.mpf(MAX_KAPPA)
                mu_D = [mpmath.mpf(m) / R if R else mpmath.mpf(0) for m in mean_D]
                pairs = zip(mu_D, z_D, strict=True)
                length = mpmath.sqrt(mpmath.fsum((kappa * m + mpmath.mpf(z) / tau) ** 2 for m, z in pairs))
                logits.append(log_C(kappa) - log_C(length) + log_prior)
            total += mpmath.log(mpmath.fsum(map(mpmath.exp, logits))) - logits[y]
    return float(total / len(y_B))


@pytest.mark.parametrize("tau", [0.07, 0.1, 1.0])
@pytest.mark.parametrize("width", [8, 128])
def test_equals_the_equation(width, tau):
    z_BD, y_B, mean_CD = make_features(width)
    wanted = proco_loop(z_BD, y_B, mean_CD, LOG_PRIOR, tau)
    assert proco_loss(z_BD, y_B, mean_CD, LOG_PRIOR, tau).item() == pytest.approx(wanted, rel=1e-9)
    in_float32 = proco_loss(z_BD.float(), y_B, mean_CD, LOG_PRIOR, tau)
    assert in_float32.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("width", [8, 128])
def test_gradient_of_the_loss(width):
    z_BD, y_B, mean_CD = make_features(width, anchors=3)
    z_BD.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: proco_loss(z, y_B, mean_CD, LOG_PRIOR, 0.1), z_BD)


def test_logits_are_expectations_over_samples():
    """exp(l_c) is the mean of exp(z·f/tau) over the distribution: sampled for the uniform one, in 3 dimensions."""
    g = torch.Generator().manual_seed(0)
    z_ND = F.normalize(torch.randn(200_000, 3, generator=g).double())
    f_BD, tau = F.normalize(torch.randn(2, 3, generator=g).double()), 0.5
    wanted_B = (z_ND @ f_BD.T / tau).exp().mean(0).log()
    found_BC = proco_logits(f_BD, torch.zeros(1, 3).double(), tau)
    torch.testing.assert_close(found_BC[:, 0], wanted_B, atol=0.01, rtol=0)
    mu_D, kappa = f_BD[0], concentration(torch.tensor(0.6).double(), 3)
    weight_N = (kappa * (z_ND @ mu_D)).exp()  # importance weights of the concentrated distribution
    wanted_B = ((z_ND @ f_BD.T / tau).exp() * weight_N[:, None]).sum(0).log() - weight_N.sum().log()
    torch.testing.assert_close(proco_logits(f_BD, 0.6 * mu_D[None], tau)[:, 0], wanted_B, atol=0.02, rtol=0)


def test_a_class_without_features_has_no_contrast():
    """Its logit does not depend on the direction of the feature, so that it has no gradient along the sphere."""
    z_BD, _, mean_CD = make_features()
    z_BD.requires_grad_()
    logits_B = proco_logits(z_BD, mean_CD)[:, 4]
    torch.testing.assert_close(logits_B, logits_B[:1].expand(len(logits_B)))
    (grad_BD,) = torch.autograd.grad(logits_B.sum(), z_BD)
    along_BD = (grad_BD * z_BD).sum(1, keepdim=True) * z_BD
    torch.testing.assert_close(grad_BD, along_BD, atol=1e-12, rtol=0)
    (other_BD,) = torch.autograd.grad(proco_logits(z_BD, mean_CD)[:, 0].sum(), z_BD)
    assert (other_BD - (other_BD * z_BD).sum(1, keepdim=True) * z_BD).abs().max() > 1e-2


def test_features_of_equal_directions_give_the_largest_concentration():
    R = torch.tensor([0.0, 0.5, 1 - 1e-12, 1.0, 1 + 1e-7]).double()
    kappa = concentration(R, 128)
    assert kappa[0] == 0 and kappa[1].item() == pytest.approx(128 * 0.5 / 0.75)
    assert (kappa[2:] == MAX_KAPPA).all()


def test_gradient_is_finite_at_the_singularity():
    """kappa · mu + z/tau is zero, or float32 has rounded its square below zero."""
    z_BD = F.normalize(torch.randn(4, 128, generator=torch.Generator().manual_seed(0)))
    R = (-128 + (128**2 + 4 * 100) ** 0.5) / 20  # kappa = 10 = 1/tau
    for z in (z_BD, z_BD.double()):
        z = z.clone().requires_grad_()
        loss = proco_loss(z, torch.arange(4), -R * z.detach(), torch.zeros(4).double())
        (grad,) = torch.autograd.grad(loss, z)
        assert loss.isfinite() and grad.isfinite().all()


def test_does_not_depend_on_the_order_of_classes():
    z_BD, y_B, mean_CD = make_features()
    order_C = torch.tensor([3, 0, 4, 2, 1])
    renamed = proco_loss(z_BD, order_C.argsort()[y_B], mean_CD[order_C], LOG_PRIOR[order_C])
    torch.testing.assert_close(renamed, proco_loss(z_BD, y_B, mean_CD, LOG_PRIOR))


def test_a_class_that_never_occurs_has_no_share():
    z_BD, y_B, mean_CD = make_features()
    prior_C = LOG_PRIOR.exp() * torch.tensor([1, 1, 1, 1, 0])
    y_B = y_B % 4
    whole = proco_loss(z_BD, y_B, mean_CD, prior_C.log())
    torch.testing.assert_close(whole, proco_loss(z_BD, y_B, mean_CD[:4], prior_C[:4].log()))


def test_compiled_it_is_one_graph():
    z_BD, y_B, mean_CD = make_features(width=64)
    compiled = torch.compile(proco_loss, dynamic=False, fullgraph=True, backend="aot_eager")
    values = []
    for loss in (compiled, proco_loss):
        z = z_BD.clone().requires_grad_()
        value = loss(z, y_B, mean_CD, LOG_PRIOR)
        values.append((value, *torch.autograd.grad(value, z)))
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-12)
