"""The losses against float64 loops of Eqs. 2, 3, 4 and 8 of the paper, and their properties."""

import math

import pytest
import torch

from longtail.losses import balanced_softmax_loss, cross_entropy_loss, paco, paco_loss, paco_terms, supcon_loss

B, M, C = 7, 23, 5
CASES = range(4)


def case(seed: int, dtype=torch.float64):
    """Return random products, labels and masks; anchor 0 has no positive, and A(i) of anchor 1 is empty."""
    g = torch.Generator().manual_seed(seed)
    center = torch.randn(B, C, generator=g, dtype=torch.float64)
    contrast = torch.rand(B, M, generator=g, dtype=torch.float64) * 2 - 1
    y_B, y_M = torch.randint(C, (B,), generator=g), torch.randint(C, (M,), generator=g)
    drop = torch.rand(B, M, generator=g) < 0.2
    drop[0] |= y_M == y_B[0]
    drop[1] = True
    log_prior = torch.rand(C, generator=g, dtype=torch.float64).log_softmax(0)
    return center.to(dtype), contrast.to(dtype), y_B, y_M, drop, log_prior.to(dtype)


def paco_loop(center, contrast, y_B, y_M, drop, log_prior, alpha, tau, center_tau):
    """Compute Eq. 8 (Eq. 4 with a prior of one), divided by the sum of the weights, pair by pair."""
    losses, shares = [], []
    for i in range(len(y_B)):
        in_A = [k for k in range(len(y_M)) if not drop[i, k]]
        in_P = [k for k in in_A if y_M[k] == y_B[i]]
        q = [1.0 if log_prior is None else log_prior[c].exp() for c in range(center.shape[1])]
        psi_c = [(center[i, c] / center_tau).exp() * q[c] for c in range(center.shape[1])]
        psi_z = {k: (contrast[i, k] / tau).exp() for k in in_A}
        Z = sum(psi_c) + sum(psi_z.values())
        total = -1.0 * (psi_c[y_B[i]] / Z).log()
        for k in in_P:
            total = total - alpha * (psi_z[k] / Z).log()
        losses.append(total / (1 + alpha * len(in_P)))
        shares.append(sum(psi_c) / Z)
    return torch.stack(losses), torch.stack(shares)


def supcon_loop(contrast, y_B, y_M, drop, tau):
    """Compute Eq. 3, divided by |P(i)|, as a mean over the anchors that have positives."""
    losses = []
    for i in range(len(y_B)):
        in_A = [k for k in range(len(y_M)) if not drop[i, k]]
        in_P = [k for k in in_A if y_M[k] == y_B[i]]
        if in_P:
            Z = sum((contrast[i, k] / tau).exp() for k in in_A)
            losses.append(-sum(((contrast[i, k] / tau).exp() / Z).log() for k in in_P) / len(in_P))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("rebalance", [True, False])
def test_paco_equals_the_equation(seed, rebalance):
    center, contrast, y_B, y_M, drop, log_prior = case(seed)
    prior = log_prior if rebalance else None
    args = (y_B, y_M, drop, prior, 0.05, 0.2, 0.7)
    loss_B, share_B = paco_terms(center, contrast, *args)
    wanted_B, wanted_share_B = paco_loop(center, contrast, *args)
    torch.testing.assert_close(loss_B, wanted_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(share_B, wanted_share_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(paco_loss(center, contrast, *args), wanted_B.mean(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_paco_gradients_equal_those_of_the_equation(seed):
    center, contrast, y_B, y_M, drop, log_prior = case(seed)
    fast = [t.clone().requires_grad_() for t in (center, contrast, log_prior)]
    slow = [t.clone().requires_grad_() for t in (center, contrast, log_prior)]
    paco_loss(fast[0], fast[1], y_B, y_M, drop, fast[2], 0.05, 0.1).backward()
    paco_loop(slow[0], slow[1], y_B, y_M, drop, slow[2], 0.05, 0.1, 1.0)[0].mean().backward()
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(
            a.grad, b.grad if b.grad is not None else torch.zeros_like(a), rtol=1e-10, atol=1e-12
        )


def loss_and_gradients(center, contrast, *args, terms=paco_terms):
    center, contrast = center.clone().requires_grad_(), contrast.clone().requires_grad_()
    loss_B, share_B = terms(center, contrast, *args)
    (loss_B * torch.arange(1, B + 1)).sum().backward()  # every anchor with a gradient of its own
    return loss_B.detach(), share_B, center.grad, contrast.grad


@pytest.mark.parametrize("rows", [1, 3, B])
def test_paco_in_blocks_of_rows_is_the_same(rows, monkeypatch):
    center, contrast, *args = case(0)
    whole = loss_and_gradients(center, contrast, *args)
    monkeypatch.setattr(paco, "PAIRS_AT_ONCE", rows * (C + M) + 1)
    assert len(list(paco.row_blocks(center, contrast))) == math.ceil(B / rows)
    torch.testing.assert_close(loss_and_gradients(center, contrast, *args), whole, rtol=1e-14, atol=1e-14)


def test_paco_can_be_compiled():
    """Loss and gradients compile to one graph, because training compiles what follows the backbones."""
    center, contrast, *args = case(0)
    compiled = torch.compile(paco_terms, dynamic=False, fullgraph=True, backend="aot_eager")
    found = loss_and_gradients(center, contrast, *args, terms=compiled)
    torch.testing.assert_close(found, loss_and_gradients(center, contrast, *args))


@pytest.mark.parametrize("seed", CASES)
def test_supcon_equals_the_equation(seed):
    _, contrast, y_B, y_M, drop, _ = case(seed)
    fast, slow = contrast.clone().requires_grad_(), contrast.clone().requires_grad_()
    loss, wanted = supcon_loss(fast, y_B, y_M, drop, 0.1), supcon_loop(slow, y_B, y_M, drop, 0.1)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    loss.backward(), wanted.backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-10, atol=1e-12)


def test_softmax_losses_equal_their_equations():
    logits, _, y_B, _, _, log_prior = case(0)
    ce = -sum((logits[i].exp() / logits[i].exp().sum())[y].log() for i, y in enumerate(y_B)) / B
    weighted = logits.exp() * log_prior.exp()
    balanced = -sum((weighted[i] / weighted[i].sum())[y].log() for i, y in enumerate(y_B)) / B
    torch.testing.assert_close(cross_entropy_loss(logits, y_B), ce)
    torch.testing.assert_close(balanced_softmax_loss(logits, y_B, log_prior), balanced)


def test_order_of_the_queue_does_not_matter():
    center, contrast, y_B, y_M, drop, log_prior = case(1)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(3))
    one = paco_terms(center, contrast, y_B, y_M, drop, log_prior)
    two = paco_terms(center, contrast[:, order], y_B, y_M[order], drop[:, order], log_prior)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(
        supcon_loss(contrast, y_B, y_M, drop), supcon_loss(contrast[:, order], y_B, y_M[order], drop[:, order])
    )


@pytest.mark.parametrize("rebalance", [True, False])
def test_alpha_zero_is_cross_entropy_with_the_samples_in_the_denominator(rebalance):
    center, contrast, y_B, y_M, drop, log_prior = case(2)
    prior = log_prior if rebalance else torch.zeros(C, dtype=torch.float64)
    everyone = torch.cat([center + prior, (contrast / 0.2).masked_fill(drop, -math.inf)], 1)
    wanted = torch.nn.functional.cross_entropy(everyone, y_B)
    given = prior if rebalance else None
    torch.testing.assert_close(paco_loss(center, contrast, y_B, y_M, drop, given, alpha=0.0), wanted)
    nearly = paco_loss(center, contrast, y_B, y_M, drop, given, alpha=1e-9)
    torch.testing.assert_close(nearly, wanted, rtol=1e-6, atol=0)
    none_left = paco_loss(center, contrast, y_B, y_M, torch.ones_like(drop), given)
    torch.testing.assert_close(none_left, balanced_softmax_loss(center, y_B, prior))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_batch_without_positives_is_finite(dtype):
    center, contrast, y_B, y_M, drop, log_prior = case(3, dtype)
    center.requires_grad_(), contrast.requires_grad_()
    loss = paco_loss(center, contrast, y_B, torch.full_like(y_M, C), drop, log_prior)
    loss.backward()
    assert loss.isfinite() and center.grad.isfinite().all() and contrast.grad.isfinite().all()
    alone = supcon_loss(contrast, y_B, torch.full_like(y_M, C), drop)
    assert alone == 0
    alone.backward()
    assert contrast.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits_are_finite_and_accurate(scale):
    center, contrast, y_B, y_M, drop, log_prior = case(0)
    center, contrast = (scale * t.float() for t in (center, contrast))
    exact = paco_terms(center.double(), contrast.double(), y_B, y_M, drop, log_prior, 0.05, 1.0)[0]
    center.requires_grad_(), contrast.requires_grad_()
    loss_B, share_B = paco_terms(center, contrast, y_B, y_M, drop, log_prior.float(), 0.05, 1.0)
    loss_B.sum().backward()
    torch.testing.assert_close(loss_B.double(), exact, rtol=1e-6, atol=1e-6)
    assert share_B.isfinite().all() and center.grad.isfinite().all() and contrast.grad.isfinite().all()
    torch.testing.assert_close(
        supcon_loss(contrast, y_B, y_M, drop, 1.0).double(),
        supcon_loss(contrast.double(), y_B, y_M, drop, 1.0),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_worked_on_in_float32(dtype):
    """Only the inputs are rounded: the loss is equal to the float64 loss of the rounded inputs to 1e-6."""
    center, contrast, y_B, y_M, drop, log_prior = case(1, dtype)
    wanted = paco_loss(center.double(), contrast.double(), y_B, y_M, drop, log_prior.double(), tau=0.05)
    loss = paco_loss(center, contrast, y_B, y_M, drop, log_prior, tau=0.05)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_have_the_precision_of_the_input_and_no_larger_error(dtype):
    center, contrast, y_B, y_M, drop, log_prior = case(1, dtype)
    *_, center_grad, contrast_grad = loss_and_gradients(center, contrast, y_B, y_M, drop, log_prior)
    *_, a, b = loss_and_gradients(center.double(), contrast.double(), y_B, y_M, drop, log_prior.double())
    assert center_grad.dtype == contrast_grad.dtype == dtype
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    torch.testing.assert_close(center_grad.double(), a, rtol=eps, atol=tiny)
    torch.testing.assert_close(contrast_grad.double(), b, rtol=eps, atol=tiny)


def test_a_class_without_images_has_no_share():
    """With log q = -inf, loss and gradients are those of the other classes alone; the gradient of that center is zero."""
    center, contrast, y_B, y_M, drop, log_prior = case(2)
    y_B, y_M, log_prior[3] = y_B.where(y_B != 3, 0), y_M.where(y_M != 3, 0), -math.inf
    others = torch.tensor([0, 1, 2, 4])
    loss_B, share_B, to_center, to_contrast = loss_and_gradients(center, contrast, y_B, y_M, drop, log_prior)
    wanted = loss_and_gradients(
        center[:, others], contrast, y_B.clamp(max=3), y_M.clamp(max=3), drop, log_prior[others]
    )
    assert (to_center[:, 3] == 0).all()
    torch.testing.assert_close((loss_B, share_B, to_center[:, others], to_contrast), wanted)


def test_without_samples_paco_is_balanced_softmax():
    center, contrast, y_B, y_M, drop, log_prior = case(0)
    loss = paco_loss(center, contrast[:, :0], y_B, y_M[:0], drop[:, :0], log_prior)
    torch.testing.assert_close(loss, balanced_softmax_loss(center, y_B, log_prior))


def test_p_sup_has_no_gradient():
    center, contrast, *args = case(0)
    loss_B, share_B = paco_terms(center.requires_grad_(), contrast, *args)
    assert loss_B.requires_grad and not share_B.requires_grad


@pytest.mark.parametrize(("alpha", "K"), [(0.05, 8), (0.01, 60), (0.2, 3)])
def test_remark_2_descent_reaches_the_optimum(alpha, K):
    """Gradient descent on free logits: positive samples get alpha/(1+alpha K), the center 1/(1+alpha K), others 0."""
    center = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    contrast = torch.zeros(1, K + 5, dtype=torch.float64, requires_grad=True)
    y_B, y_M = torch.tensor([1]), torch.tensor([1] * K + [0] * 5)
    drop = torch.zeros(1, K + 5, dtype=torch.bool)
    optimizer = torch.optim.LBFGS(
        [center, contrast], lr=1, max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = paco_loss(center, contrast, y_B, y_M, drop, None, alpha, tau=1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    p = torch.cat([center, contrast], 1).softmax(1)[0].detach()
    torch.testing.assert_close(
        p[3 : 3 + K], torch.full((K,), alpha / (1 + alpha * K), dtype=torch.float64), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(p[1].item(), 1 / (1 + alpha * K), rtol=1e-3, atol=0)
    assert paco_terms(center, contrast, y_B, y_M, drop, None, alpha, 1.0)[1].item() == pytest.approx(
        1 / (1 + alpha * K), rel=1e-3
    )
    assert p[[0, 2]].max() < 1e-4 and p[3 + K :].max() < 1e-4


def test_equation_5_paco_as_multi_task_minus_the_extra_term():
    """Unscaled L_i = L_sup + alpha L_supcon - (log P_sup + alpha K log(1 - P_sup)), where L_supcon is a sum."""
    center, contrast, y_B, y_M, drop, _ = case(2)
    drop[1] = drop[2]  # P_sup = 1 has no logarithm
    alpha, tau = 0.05, 0.2
    loss_B, share_B = paco_terms(center, contrast, y_B, y_M, drop, None, alpha, tau)
    K_B = ((y_B[:, None] == y_M) & ~drop).sum(1).double()
    sup_B = torch.nn.functional.cross_entropy(center, y_B, reduction="none")
    rows = range(B)
    supcon_B = torch.stack(
        [supcon_loss(contrast[i : i + 1], y_B[i : i + 1], y_M, drop[i : i + 1], tau) * K_B[i] for i in rows]
    )
    right = sup_B + alpha * supcon_B - (share_B.log() + alpha * K_B * (1 - share_B).log())
    torch.testing.assert_close(loss_B * (1 + alpha * K_B), right, rtol=1e-10, atol=1e-10)
