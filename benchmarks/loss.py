"""Time and memory of the PaCo loss, forward and backward, against batch, queue and classes.

    python benchmarks/loss.py [--out FILE] [--plot FILE]

One of the three sizes is varied at a time; the others are batch 128, queue 8,192 and 1,000 classes. The last row has the
longest queue and the most classes. `ours` is the loss of this package, `autograd` the same loss with autograd and matrices of
masks (`reference.py`). `ms` is the wall time if operations are launched one by one, `replayed_ms` that of a CUDA graph, as used
in training. `MB` (of 2^20 bytes) is the peak memory in addition to inputs and gradients, `matrices` the same memory as a
multiple of the two matrices of products.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Row, describe_machine, format_table, free_memory, peak_memory, save, seconds_per_call
from reference import plain_paco_loss
from torch import Tensor

from longtail.engine.cuda_graph import warm_up
from longtail.engine.device import choose_device
from longtail.losses import paco_loss

BASE = {"batch": 128, "queue": 8192, "classes": 1000}
RANGES = {
    "batch": (16, 32, 64, 128, 256, 512, 1024),
    "queue": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "classes": (100, 1000, 10_000, 100_000),
}
LARGEST = {"batch": 128, "queue": 65_536, "classes": 100_000}
LOSSES: dict[str, Callable[..., Tensor]] = {"ours": paco_loss, "autograd": plain_paco_loss}
ALPHA, TAU = 0.05, 0.2
BUDGET = 0.2  # seconds for each measurement


def make_inputs(batch: int, queue: int, classes: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the products (leaves), labels, mask and prior; the samples are the queue and two views of the batch."""
    rng, samples = torch.Generator(device).manual_seed(0), queue + 2 * batch
    center = torch.randn(batch, classes, generator=rng, device=device).requires_grad_()
    contrast = (2 * torch.rand(batch, samples, generator=rng, device=device) - 1).requires_grad_()
    y_B, y_M = (torch.randint(classes, (n,), generator=rng, device=device) for n in (batch, samples))
    drop = torch.zeros(batch, samples, dtype=torch.bool, device=device).fill_diagonal_(True)
    return center, contrast, y_B, y_M, drop, torch.rand(classes, generator=rng, device=device).log_softmax(0)


def capture(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work as a CUDA graph, and return the function that replays it."""
    warm_up(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure_size(vary: str, name: str, device: torch.device, **size: int) -> Row:
    given = make_inputs(**size, device=device)
    products = list(given[:2])
    matrices = sum(t.numel() * t.element_size() for t in products)

    def work() -> None:
        torch.autograd.grad(LOSSES[name](*given, ALPHA, TAU), products)

    cuda = device.type == "cuda"
    row: Row = {"vary": vary, **size, "loss": name}
    row["ms"] = 1000 * seconds_per_call(work, device, 10, BUDGET)
    row["replayed_ms"] = 1000 * seconds_per_call(capture(work), device, 10, BUDGET) if cuda else None
    free_memory()
    peak = peak_memory(work, device) if cuda else None
    row["MB"] = None if peak is None else (peak - matrices) / 2**20
    row["matrices"] = None if peak is None else (peak - matrices) / matrices
    return row


def check(device: torch.device) -> None:
    """Check that both losses are equal."""
    given = make_inputs(32, 512, 100, device)
    ours, plain = (loss(*given, ALPHA, TAU) for loss in LOSSES.values())
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def measure(device: torch.device, most: int = 2**31) -> Row:
    """Measure all sizes with at most `most` pairs."""
    check(device)
    sizes = [(vary, BASE | {vary: value}) for vary, values in RANGES.items() for value in values]
    rows = []
    for vary, size in [*sizes, ("all", LARGEST)]:
        if size["batch"] * (size["queue"] + 2 * size["batch"] + size["classes"]) <= most:
            rows += [measure_size(vary, name, device, **size) for name in LOSSES]
    return {"what": (__doc__ or "").strip(), **describe_machine(device), "rows": rows}


def plot(rows: list[Row], path: Path) -> None:
    """Plot time and memory against each of the three sizes, with logarithmic axes; the dashed line is linear growth."""
    import matplotlib.pyplot as plt  # needed only here

    panels = {
        "replayed_ms": "forward and backward,\nreplayed, ms",
        "MB": "memory in addition to\ninputs and gradients, MB",
    }
    if rows[0]["replayed_ms"] is None:
        panels = {"ms": "forward and backward, ms"}
    varied = [vary for vary in RANGES if any(r["vary"] == vary for r in rows)]
    size = (3 * len(varied), 2.6 * len(panels))
    figure, axes = plt.subplots(len(panels), len(varied), figsize=size, layout="constrained", squeeze=False)
    for (key, label), line in zip(panels.items(), axes, strict=True):
        line[0].set_ylabel(label)
        for vary, axis in zip(varied, line, strict=True):
            draw(axis, [r for r in rows if r["vary"] == vary], vary, key)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(axis: Any, rows: list[Row], vary: str, key: str) -> None:
    from matplotlib.ticker import LogLocator

    from longtail.reporting.plots import COLORS, MARKERS

    for name, color, marker in zip(LOSSES, COLORS, MARKERS, strict=False):
        x, y = zip(*((r[vary], r[key]) for r in rows if r["loss"] == name), strict=True)
        axis.loglog(x, y, label=name, color=color, marker=marker, markersize=4)
    shown, far = axis.get_ylim(), rows[-2]  # the largest of ours
    linear = [far[key] * v / far[vary] for v in x]
    axis.loglog(x, linear, label="linear", color="0.6", linestyle="--", linewidth=1)
    axis.set_ylim(shown)
    axis.set_xticks(x, [f"{v:,}" for v in x], fontsize=7, rotation=30)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel(vary)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=2**31, help="leave out sizes with more pairs than this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = measure(choose_device(args.device), args.most)
    print(format_table(found["rows"]))
    save(args.out, found)
    if args.plot:
        plot(found["rows"], args.plot)


if __name__ == "__main__":
    main()
