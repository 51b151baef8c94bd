"""Microseconds of each kernel of the fused ResNet-32, alone and on a fully used device.

    python benchmarks/kernels.py [--batch 128] [--lines 8]

A step of the two backbones of PaCo is run once to record its launches. Then each kind of launch is captured in a CUDA graph: on
one stream (`alone`, without the overlap of training) and on several streams in parallel (`full`, microseconds per launch).
`step` is the number of launches in a step, `share` the fraction of the time on a fully used GPU.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from measure import Row, format_table

from longtail.kernels import resnet
from longtail.models.backbones import CifarResNet

EACH = 30  # launches per stream
Launch = tuple[tuple[Any, ...], dict[str, Any]]


def record_launches(batch: int) -> list[Launch]:
    """Return the kernel launches of forward and backward of a query network, and of forward of a key network."""
    net = CifarResNet(32, 0).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, resnet.IMAGE_SIZE, resnet.IMAGE_SIZE, device="cuda").bfloat16()
    images = images.to(memory_format=torch.channels_last)
    seen: list[Launch] = []
    launch = resnet.launch

    def noted(*args: Any, **options: Any) -> None:
        seen.append((args, {k: v for k, v in options.items() if k != "early"}))
        launch(*args, **options)

    resnet.launch = noted
    try:
        tape, features = resnet.run_forward(net, images, needs_grad=True)
        resnet.run_backward(tape, torch.randn_like(features))
        resnet.run_forward(net, images, needs_grad=False)
    finally:
        resnet.launch = launch
    torch.cuda.synchronize()
    return seen


def time_launches(work: Callable[[], None], lines: int) -> float:
    """Return the time of one of EACH launches with the given number of parallel streams."""
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(lines)]
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(EACH):
                    work()
        for stream in streams:
            main.wait_stream(stream)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / (EACH * lines))
    return sorted(times)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lines", type=int, default=8)
    args = parser.parse_args()
    seen = record_launches(args.batch)
    count = Counter(call[0][0] for call in seen)
    rows: list[Row] = []
    for name, (given, options) in {call[0][0]: call for call in seen}.items():

        def work(given: Any = given, options: Any = options) -> None:
            resnet.launch(*given, **options)

        alone, full = time_launches(work, 1), time_launches(work, args.lines)
        rows.append({"kernel": name, "step": count[name], "alone": alone, "full": full})
    whole = sum(row["full"] * row["step"] for row in rows)
    for row in rows:
        row["share"] = row["full"] * row["step"] / whole
    print(format_table(sorted(rows, key=lambda row: -row["share"])))
    alone = sum(row["alone"] * row["step"] for row in rows)
    print(f"\na step: {whole:.0f} microseconds of a full device, {alone:.0f} one after the other")


if __name__ == "__main__":
    main()
