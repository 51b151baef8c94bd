"""Memory of the loss on a GPU, as its allocator counts it. A similar test for the CPU is in test_memory.py."""

import pytest
import torch

from longtail.losses import chunked_terms, paco_loss, paco_terms
from tests.losses.test_chunked import case, gradients, in_chunks, plain
from tests.losses.test_memory import BOUND, SIZES, factors, inputs, size

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_full_size_the_loss_keeps_its_bound(dtype):
    center, contrast, *rest = inputs("cuda", dtype, **SIZES)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paco_loss(center, contrast, *rest).backward()
    taken = torch.cuda.max_memory_allocated() - before - size(center.grad, contrast.grad)
    share = taken / size(center, contrast)
    print(f"{dtype}: {taken / 2**20:.0f} MiB, {share:.2f} times the products")
    assert share < BOUND


def test_values_and_gradients_are_those_of_the_cpu_in_float64():
    given = [t.detach() for t in inputs("cpu", torch.float32, 32, 1500, 700)]
    exact = [t.double().requires_grad_() if t.is_floating_point() else t for t in given]
    fast = [t.cuda().requires_grad_(t.is_floating_point()) for t in given]
    (loss_B, share_B), (wanted_B, wanted_share_B) = paco_terms(*fast), paco_terms(*exact)
    loss_B.mean().backward(), wanted_B.mean().backward()
    torch.testing.assert_close(loss_B.cpu().double(), wanted_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(share_B.cpu().double(), wanted_share_B, rtol=1e-5, atol=1e-6)
    for a, b in zip(fast, exact, strict=True):
        if b.is_floating_point():
            torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=1e-4, atol=1e-8)


def test_the_loss_can_be_captured_and_never_waits_for_the_host():
    """This includes the computation in blocks. Waiting for the host during a capture would raise an error."""
    center, contrast, *rest = inputs("cuda", torch.float32, 64, 100_000, 5_000)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = torch.autograd.grad(paco_loss(center, contrast, *rest), [center, contrast])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(paco_loss(center, contrast, *rest), [center, contrast])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_in_chunks_the_loss_is_that_of_the_cpu_in_float64():
    exact = case(1)
    there = [t.detach().cuda() if t is not None else None for t in exact]
    fast = exact._replace(**dict(zip(exact._fields, there, strict=True)))
    for leaf in fast.leaves:
        leaf.requires_grad_()
    terms, grads = in_chunks(fast, 5, smoothing=0.1)
    loss_B, share_B, wanted = plain(exact, smoothing=0.1)
    torch.testing.assert_close(terms.loss_B.cpu(), loss_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.P_sup_B.cpu(), share_B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([g.cpu() for g in grads], wanted, rtol=1e-10, atol=1e-12)


def test_a_million_classes_take_chunks_beyond_the_centers_and_their_gradient():
    x, c, bias, y_B, met, log_prior = factors("cuda", 128, 8_192, 1_000_000, 16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunked_terms(x, c, bias, y_B, met, log_prior, chunk=20_000).loss_B.mean().backward()
    grads = size(*(t.grad for t in (x, c, bias, met.q_BD, met.z_MD)))
    taken, chunk = torch.cuda.max_memory_allocated() - before - grads, 4 * 128 * 20_000
    print(f"{taken / chunk:.1f} chunks of {chunk / 2**20:.0f} MiB")
    assert taken < 6 * chunk + 4 * size(log_prior)  # the plain loss: 50 chunks a matrix


def test_in_chunks_the_loss_can_be_captured_and_repeats_to_the_bit():
    x, c, bias, y_B, met, log_prior = factors("cuda", 64, 5_000, 20_000)

    def work():
        loss_B = chunked_terms(x, c, bias, y_B, met, log_prior, smoothing=0.1, chunk=3_000).loss_B
        return gradients(loss_B, [x, c, bias, met.q_BD, met.z_MD])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
