"""What only a GPU can show: the allocator's own count. Its CPU twin is in test_memory.py."""

import pytest
import torch

from longtail.losses import paco_loss, paco_terms
from tests.losses.test_memory import BOUND, SIZES, inputs, size

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_full_size_the_loss_keeps_its_bound(dtype):
    centre, contrast, *rest = inputs("cuda", dtype, **SIZES)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    paco_loss(centre, contrast, *rest).backward()
    taken = torch.cuda.max_memory_allocated() - before - size(centre.grad, contrast.grad)
    share = taken / size(centre, contrast)
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
    """Also where it works in blocks; a wait during capture would be an error."""
    centre, contrast, *rest = inputs("cuda", torch.float32, 64, 100_000, 5_000)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = torch.autograd.grad(paco_loss(centre, contrast, *rest), [centre, contrast])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(paco_loss(centre, contrast, *rest), [centre, contrast])
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
