"""Memory of the loss in addition to inputs and gradients, at the largest documented size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtail.losses import Samples, chunked_terms, paco, paco_loss

BOUND = 1.2  # times the two matrices of products
SIZES = {"anchors": 128, "samples": 65_536 + 2 * 128, "classes": 100_000}


def inputs(device: str, dtype: torch.dtype, anchors: int, samples: int, classes: int) -> tuple[torch.Tensor, ...]:
    """Return arguments of the loss; the products are leaves that require gradients."""
    rng = torch.Generator(device).manual_seed(0)
    center = torch.randn(anchors, classes, generator=rng, device=device, dtype=dtype).requires_grad_()
    contrast = torch.rand(anchors, samples, generator=rng, device=device, dtype=dtype).requires_grad_()
    y_B, y_M = (torch.randint(classes, (n,), generator=rng, device=device) for n in (anchors, samples))
    drop = torch.zeros(anchors, samples, dtype=torch.bool, device=device).fill_diagonal_(True)
    log_prior = torch.rand(classes, generator=rng, device=device).log_softmax(0)
    return center, contrast, y_B, y_M, drop, log_prior


def size(*tensors: torch.Tensor) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


class Memory(TorchDispatchMode):
    """Measures the peak memory of tensors that are created under it; torch does not count it on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in given:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def test_the_measure_counts_what_lives_at_once():
    with Memory() as memory:
        a = torch.zeros(100)  # 400 bytes
        b = (a + 1)[:50].exp().double()  # 400 more, then 200 and 400 with the first gone
        a.add_(1), b.view(5, 10)  # nothing new
    assert memory.peak == 400 + 400 + 200


def test_beyond_inputs_and_gradients_the_loss_takes_little(monkeypatch):
    """The loss needs two matrices of a block, the masks, and vectors, for any number of blocks."""
    few = inputs("cpu", torch.float32, 16, 500, 300)
    monkeypatch.setattr(paco, "PAIRS_AT_ONCE", 2 * 800)
    with Memory() as memory:
        paco_loss(*few).backward()
    block = 2 * 800 * 4
    assert memory.peak - size(few[0].grad, few[1].grad) < 2.5 * block + size(few[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_full_size_the_loss_keeps_its_bound(dtype):
    full = inputs("cpu", dtype, **SIZES)
    with Memory() as memory:
        paco_loss(*full).backward()
    share = (memory.peak - size(full[0].grad, full[1].grad)) / size(full[0], full[1])
    print(f"{share:.2f} times the products")
    assert share < BOUND


def kept_by(work: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the tensors that are kept for the backward pass."""
    kept = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        work()
    return kept


def test_the_loss_keeps_nothing_but_its_inputs():
    given = inputs("cpu", torch.float32, 16, 500, 300)
    kept = kept_by(lambda: paco_loss(*given))
    places = {t.data_ptr() for t in given}
    assert len(kept) >= len(given)
    assert all(t.data_ptr() in places or t.ndim < 2 for t in kept)


def factors(device: str, anchors: int, samples: int, classes: int, width: int = 8) -> tuple[Any, ...]:
    """Return arguments of the loss in chunks; features, centers, bias, queries and samples are leaves."""
    rng = torch.Generator(device).manual_seed(0)
    x, c, q, z = (
        torch.randn(n, width, generator=rng, device=device).requires_grad_()
        for n in (anchors, classes, anchors, samples)
    )
    y_B, y_M = (torch.randint(classes, (n,), generator=rng, device=device) for n in (anchors, samples))
    met = Samples(q, z, y_M, torch.arange(anchors, device=device))
    bias = torch.zeros(classes, device=device).requires_grad_()
    return x, c, bias, y_B, met, torch.rand(classes, generator=rng, device=device).log_softmax(0)


@pytest.mark.parametrize(("anchors", "classes"), [(16, 2_000), (16, 20_000), (64, 20_000)])
def test_in_chunks_the_loss_takes_a_few_chunks_and_vectors(anchors, classes):
    """There is no matrix of all pairs for any number of classes; the largest would have forty chunks."""
    x, c, bias, y_B, met, log_prior = factors("cpu", anchors, 1_000, classes)
    with Memory() as memory:
        terms = chunked_terms(x, c, bias, y_B, met, log_prior, smoothing=0.1, chunk=500)
        terms.loss_B.mean().backward()
    grads = size(*(t.grad for t in (x, c, bias, met.q_BD, met.z_MD)))
    chunk, vectors = 4 * anchors * 500, 4 * size(log_prior)
    assert memory.peak - grads < 3.2 * chunk + vectors


def test_loss_in_chunks_keeps_only_its_inputs():
    given = factors("cpu", 16, 500, 300)
    kept = kept_by(lambda: chunked_terms(*given, chunk=100))
    places = {t.data_ptr() for t in (*given[:4], *given[4], given[5])}
    assert len(kept) >= 8
    assert all(t.data_ptr() in places or t.ndim < 2 for t in kept)
