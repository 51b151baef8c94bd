"""The loss in chunks against a float64 loop and against the plain loss: values, gradients, values for the log."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.losses import (
    AnchorTerms,
    Samples,
    balanced_softmax_loss,
    chunk_for,
    chunked,
    chunked_terms,
    cross_entropy_loss,
    paco_terms,
)
from tests.losses.test_losses import paco_loop

B, C, K, N, D, W = 6, 11, 5, 13, 4, 8  # anchors, classes, keys, queue, widths of projection and features
M = B + K + N
CHUNKS = [1, 5, 8, 1000]  # that divide the 24 samples or not, and one larger than all


class Case(NamedTuple):
    """The factors, which are leaves with gradients, and the other arguments of the loss."""

    x: Tensor
    c: Tensor
    bias: Tensor | None
    q: Tensor
    z: Tensor  # keys and queue: the samples are these after the queries
    y_B: Tensor
    y_M: Tensor
    log_prior: Tensor | None

    @property
    def samples(self) -> Samples:
        itself = torch.arange(len(self.q), device=self.q.device)
        return Samples(self.q, torch.cat([self.q, self.z]), self.y_M, itself)

    @property
    def drop(self) -> Tensor:
        return torch.eye(len(self.q), len(self.y_M), dtype=torch.bool) | (self.y_M < 0)

    @property
    def products(self) -> tuple[Tensor, Tensor]:
        return F.linear(self.x, self.c, self.bias), self.q @ self.samples.z_MD.T

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.c, self.bias, self.q, self.z, self.log_prior) if t is not None]


def case(seed: int = 0, dtype=torch.float64, anchors: int = B, others: int = K + N, bias=True, prior=True) -> Case:
    """Return random arguments. Anchor 0 has no positive, a third of the queue is empty, and class 9 has no images."""
    g = torch.Generator().manual_seed(seed)
    x, c = (torch.randn(n, W, generator=g, dtype=torch.float64) for n in (anchors, C))
    q, z = (F.normalize(torch.randn(n, D, generator=g, dtype=torch.float64)) for n in (anchors, others))
    y_B = torch.randint(4, (anchors,), generator=g)
    y_M = torch.cat([y_B, torch.randint(4, (others,), generator=g)])
    y_B[0] = y_M[0] = 7
    y_M[len(y_M) - others // 3 :] = -1
    log_prior = torch.rand(C, generator=g, dtype=torch.float64).log_softmax(0)
    log_prior[9] = -math.inf
    some = [x, c, torch.randn(C, generator=g, dtype=torch.float64), q, z, log_prior]
    x, c, b, q, z, log_prior = (t.to(dtype).requires_grad_() for t in some)
    return Case(x, c, b if bias else None, q, z, y_B, y_M, log_prior if prior else None)


def gradients(loss_B: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients of the losses; each anchor has a different weight."""
    weight_B = torch.arange(1, len(loss_B) + 1, device=loss_B.device)
    return list(torch.autograd.grad((loss_B * weight_B).sum(), leaves, materialize_grads=True))


def in_chunks(given: Case, chunk: int, **numbers: float) -> tuple[AnchorTerms, list[Tensor]]:
    factors = given.x, given.c, given.bias, given.y_B, given.samples, given.log_prior
    terms = chunked_terms(*factors, **numbers, chunk=chunk)
    return terms, gradients(terms.loss_B, given.leaves)


def plain(given: Case, **numbers: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    loss_B, share_B = paco_terms(*given.products, given.y_B, given.y_M, given.drop, given.log_prior, **numbers)
    return loss_B, share_B, gradients(loss_B, given.leaves)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("prior", [True, False])
def test_it_equals_the_equation(chunk, prior):
    given = case(1, prior=prior)
    numbers = {"alpha": 0.1, "tau": 0.3, "center_tau": 0.7}
    terms, grads = in_chunks(given, chunk, **numbers)
    wanted_B, wanted_share_B = paco_loop(
        *given.products, given.y_B, given.y_M, given.drop, given.log_prior, *numbers.values()
    )
    torch.testing.assert_close(terms.loss_B, wanted_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.P_sup_B, wanted_share_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, gradients(wanted_B, given.leaves), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("anchors", "others"), [(B, K + N), (1, K + N), (B, 0), (1, 0)])
def test_it_equals_the_plain_loss(chunk, smoothing, bias, anchors, others):
    given = case(2, anchors=anchors, others=others, bias=bias)
    terms, grads = in_chunks(given, chunk, smoothing=smoothing, center_tau=0.5)
    wanted_B, wanted_share_B, wanted = plain(given, smoothing=smoothing, center_tau=0.5)
    torch.testing.assert_close(terms.loss_B, wanted_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.P_sup_B, wanted_share_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-12)
    center, contrast = given.products
    assert torch.equal(terms.guess_B, center.argmax(1))
    torch.testing.assert_close(terms.center_B, center.abs().amax(1))
    torch.testing.assert_close(terms.contrast_B, contrast.abs().amax(1))
    assert [t.requires_grad for t in terms] == [True, False, False, False, False]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_in_float32_it_is_as_near_to_the_truth_as_the_plain_loss(chunk):
    exact = case(3)
    terms, grads = in_chunks(case(3, torch.float32), chunk)
    loss_B, _, wanted = plain(exact)
    torch.testing.assert_close(terms.loss_B.double(), loss_B, rtol=1e-6, atol=1e-6)
    for found, true in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_have_products_and_gradients_of_their_precision(chunk, dtype):
    """The computation is in float32, and the tolerances are those of the plain loss."""
    given = case(1, dtype)
    terms, grads = in_chunks(given, chunk)
    loss_B, _, wanted = plain(given)
    assert terms.loss_B.dtype == torch.float32
    torch.testing.assert_close(terms.loss_B, loss_B, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    for found, other in zip(grads, wanted, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, other, rtol=2 * eps, atol=2 * eps * float(other.detach().abs().max()))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_extreme_logits_are_finite_and_accurate(chunk, scale):
    """A small loss is accurate although logits are near a thousand; a large loss may have a larger error."""
    given = case(0, torch.float32)
    with torch.no_grad():
        given.c.copy_(scale * torch.eye(C, W))
        given.x.copy_(F.one_hot(given.y_B, W))
    terms, grads = in_chunks(given, chunk)
    exact = [t.double() for t in given.products]
    loss_B, share_B = paco_terms(*exact, given.y_B, given.y_M, given.drop, given.log_prior)
    torch.testing.assert_close(terms.loss_B.double(), loss_B, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms.P_sup_B.double(), share_B, rtol=1e-7 * abs(scale), atol=1e-6)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_without_samples_it_is_balanced_softmax_or_cross_entropy(chunk):
    x, c, bias, *_, y_B, _, log_prior = given = case(4)
    logits = given.products[0]
    balanced = chunked_terms(x, c, bias, y_B, None, log_prior, chunk=chunk)
    alone = chunked_terms(x, c, bias, y_B, None, None, chunk=chunk)
    smooth = chunked_terms(x, c, bias, y_B, None, None, smoothing=0.1, chunk=chunk)
    for terms, wanted in (
        (balanced, balanced_softmax_loss(logits, y_B, log_prior)),
        (alone, cross_entropy_loss(logits, y_B)),
        (smooth, F.cross_entropy(logits, y_B, label_smoothing=0.1)),
    ):
        torch.testing.assert_close(terms.loss_B.mean(), wanted)
        found = torch.autograd.grad(terms.loss_B.mean(), [x, c, bias])
        torch.testing.assert_close(found, torch.autograd.grad(wanted, [x, c, bias], retain_graph=True))
        torch.testing.assert_close(terms.P_sup_B, torch.ones_like(terms.P_sup_B))


def test_an_anchor_may_be_any_of_the_samples():
    """If samples of several processes are gathered, the index of an anchor among them is not its index in the batch."""
    given = case(5)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    q, z, y_M, _ = given.samples
    elsewhere = Samples(q, z[order], y_M[order], order.argsort()[:B])
    one, two = (chunked_terms(given.x, given.c, None, given.y_B, s, chunk=4).loss_B for s in (given.samples, elsewhere))
    torch.testing.assert_close(one, two)


def test_a_frozen_trunk_has_no_gradient_and_the_rest_has_its_own():
    given = case(0)
    learns = [given.c, given.bias]
    whole = torch.autograd.grad(chunked_terms(given.x, *learns, given.y_B).loss_B.sum(), learns)
    x = given.x.detach()
    terms = chunked_terms(x, *learns, given.y_B)
    terms.loss_B.sum().backward()
    assert x.grad is None
    torch.testing.assert_close((given.c.grad, given.bias.grad), whole)


def test_code_that_calls_it_can_be_compiled():
    def work(given: Case) -> Tensor:
        return 2 * chunked_terms(2 * given.x, given.c, None, given.y_B, given.samples, chunk=3).loss_B

    given = case(0)
    wanted, compiled = work(given), torch.compile(work, dynamic=False, backend="aot_eager")(given)
    torch.testing.assert_close(compiled, wanted)
    torch.testing.assert_close(gradients(compiled, given.leaves), gradients(wanted, given.leaves))


def test_automatic_chunks_leave_small_matrices_to_the_plain_loss():
    assert chunk_for(0, 512, 8_142 + 65_536) == 0  # all that the paper trains
    assert chunk_for(0, 128, 1_000_000) == chunked.PAIRS_AT_ONCE // 128
    assert chunk_for(0, 2**23, 2**23) == 1
    assert chunk_for(5, 128, 1_000_000) == chunk_for(5, 2, 2) == 5
