"""Time and memory of the PaCo loss, forward and backward, against the number of classes: all pairs at once, and in chunks.

    python benchmarks/classes.py [--device cpu] [--classes N …] [--out FILE]

The loss is computed from features, centers, queries and samples, with the gradients of all of them: batch 128, queue 8,192,
features of width 2,048 (64 on a CPU), float32 with products in TF32 on CUDA, as in training. `ms` is the wall time if
operations are launched one by one, `replayed_ms` that of a CUDA graph. `MB` (of 2^20 bytes) is the peak memory in addition to
inputs and gradients: from the allocator on CUDA, and from the process on Linux, with a precision of some megabytes. `time` and
`memory` are ratios to the plain loss of the same size, from `replayed_ms` (or `ms`, without CUDA) and `MB`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loss import capture
from measure import Row, describe_machine, format_table, free_memory, peak_memory, save, seconds_per_call
from torch import Tensor

from longtail.engine.device import choose_device, matmul_precision
from longtail.engine.failures import is_out_of_memory
from longtail.losses import AnchorTerms, ContrastSet, chunked_terms, paco_terms
from longtail.losses.numerics import row_max_abs

CLASSES = (1_000, 8_142, 100_000, 1_000_000)
BATCH, QUEUE, PROJECTION = 128, 8192, 128
ALPHA, TAU = 0.05, 0.2
BUDGET = 0.2  # seconds for each time
Given = tuple[Tensor, Tensor, Tensor, Tensor, ContrastSet, Tensor]


def make_inputs(classes: int, features: int, device: torch.device, batch: int = BATCH, queue: int = QUEUE) -> Given:
    """Return features, centers and bias (leaves), labels, samples (leaves) and the prior; half of the queue is filled."""
    rng = torch.Generator(device).manual_seed(0)

    def leaf(rows: int, width: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, width, generator=rng, device=device).mul_(scale)).requires_grad_()

    x, c = leaf(batch, features), leaf(classes, features, features**-0.5)
    q, z = leaf(batch, PROJECTION, PROJECTION**-0.5), leaf(batch + queue, PROJECTION, PROJECTION**-0.5)
    y_B, y_M = (torch.randint(classes, (n,), generator=rng, device=device) for n in (batch, 2 * batch + queue))
    y_M[-(queue // 2) :] = -1
    samples = ContrastSet(q, z, y_M, torch.arange(batch, device=device))  # the queries join the keys in `gradients`
    bias = torch.zeros(classes, device=device).requires_grad_()
    return x, c, bias, y_B, samples, torch.rand(classes, generator=rng, device=device).log_softmax(0)


def plain_terms(
    x_BF: Tensor, c_CF: Tensor, bias_C: Tensor, y_B: Tensor, samples: ContrastSet, log_prior_C: Tensor, *numbers: float
) -> AnchorTerms:
    """Return the terms computed from all pairs at once, as in `losses/paco.py`."""
    q_BD, z_MD, y_M, _ = samples
    center_BC, contrast_BM = F.linear(x_BF, c_CF, bias_C), q_BD @ z_MD.T
    drop_BM = torch.eye(len(q_BD), len(z_MD), dtype=torch.bool, device=y_B.device) | (y_M < 0)
    terms = paco_terms(center_BC, contrast_BM, y_B, y_M, drop_BM, log_prior_C, *numbers)
    return AnchorTerms(*terms, center_BC.detach().argmax(1), row_max_abs(center_BC), row_max_abs(contrast_BM))


LOSSES: dict[str, Callable[..., AnchorTerms]] = {"plain": plain_terms, "chunks": chunked_terms}


def gradients(name: str, given: Given) -> tuple[Tensor, ...]:
    """Return the gradients of features, centers, bias, queries and keys. No work is left outside, so it can be captured."""
    x, c, bias, y_B, samples, log_prior_C = given
    q, z = samples.q_BD, samples.z_MD
    all_samples = samples._replace(z_MD=torch.cat([q, z]))
    loss = LOSSES[name](x, c, bias, y_B, all_samples, log_prior_C, ALPHA, TAU).loss_B.mean()
    return torch.autograd.grad(loss, [x, c, bias, q, z])


def measure_size(name: str, classes: int, features: int, device: torch.device) -> Row:
    given, cuda = make_inputs(classes, features, device), device.type == "cuda"
    results = 4 * (given[0].numel() + given[1].numel() + classes + given[4].q_BD.numel() + given[4].z_MD.numel())

    def work() -> None:
        gradients(name, given)

    with matmul_precision("bf16", device):
        calls = 3 if cuda else 1
        ms = 1000 * seconds_per_call(work, device, calls, BUDGET)
        replayed_ms = 1000 * seconds_per_call(capture(work), device, calls, BUDGET) if cuda else None
        free_memory()
        peak = peak_memory(work, device)
    return {"ms": ms, "replayed_ms": replayed_ms, "MB": None if peak is None else (peak - results) / 2**20}


def try_size(name: str, classes: int, features: int, device: torch.device) -> Row:
    """Measure a size; out of memory is a result."""
    row: Row = {"classes": classes, "features": features, "loss": name}
    found: Row = {"ms": "out of memory", "replayed_ms": None, "MB": None}
    try:
        found = measure_size(name, classes, features, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    free_memory()
    return row | found


def ratios(row: Row, plain: Row) -> Row:
    """Return the ratios of a loss to the plain one of the same size, or nothing if one of them did not fit."""

    def ratio(key: str) -> float | None:
        ours, theirs = row[key], plain[key]
        return (
            ours / theirs if isinstance(ours, float) and isinstance(theirs, float) and min(ours, theirs) > 0 else None
        )

    return {"time": ratio("ms" if row["replayed_ms"] is None else "replayed_ms"), "memory": ratio("MB")}


def check(device: torch.device) -> None:
    """Check that both losses and their gradients are equal."""
    given = make_inputs(500, 16, device, 32, 64)
    torch.testing.assert_close(gradients("chunks", given), gradients("plain", given), rtol=1e-3, atol=1e-5)


def measure(device: torch.device, classes: tuple[int, ...] = CLASSES, features: int = 0) -> Row:
    check(device)
    width, rows = features or (2048 if device.type == "cuda" else 64), []
    for number in classes:
        pair = [try_size(name, number, width, device) for name in LOSSES]
        rows += [row | ratios(row, pair[0]) for row in pair]
    return {"what": (__doc__ or "").strip(), **describe_machine(device), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--features", type=int, default=0, help="width; by default 2,048 on CUDA and 64 elsewhere")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = measure(choose_device(args.device), tuple(args.classes), args.features)
    print(format_table(found["rows"]))
    save(args.out, found)


if __name__ == "__main__":
    main()
