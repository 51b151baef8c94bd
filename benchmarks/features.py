"""Images per second of a frozen backbone on the CPU, by several ways to run it.

    python benchmarks/features.py [--model tf_efficientnet_lite0] [--size 224] [--batch 32] [--rounds 7] [--compile]

The ways take turns, one batch each per round, so that other work on the machine affects all of them. The ratios are to the
plain loop (timm, NCHW, float32) in the same round; the table has their medians. `cpu` is the ratio of processor time, summed
over all threads, which depends less on other work. `cosine` is the lowest similarity of the features of an image to those of
the plain loop, `setup` the seconds up to the first features. Ways whose package is not installed are left out; `--compile` adds
torch.compile, which takes minutes.
"""

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Row, describe_machine, format_table, save
from torch import Tensor, nn

from longtail.models.backbones import Forward, make_onnx_forward, make_plain_forward, make_trunk

CPU = torch.device("cpu")


def run_plain(net: nn.Module, size: int) -> Forward:
    return torch.no_grad()(net)


def run_channels_last(net: nn.Module, size: int) -> Forward:
    return make_plain_forward(net, CPU)


def run_bf16(net: nn.Module, size: int) -> Forward:
    net = copy.deepcopy(net).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x.contiguous(memory_format=torch.channels_last)).float()

    return forward


def run_compiled(net: nn.Module, size: int) -> Forward:
    from torch._inductor import config

    config.freezing = True  # fold batch norm into convolutions
    return torch.no_grad()(torch.compile(copy.deepcopy(net).to(memory_format=torch.channels_last), dynamic=False))


def run_openvino(net: nn.Module, size: int, precision: str = "f32") -> Forward:
    import openvino

    model = openvino.convert_model(net, example_input=torch.zeros(2, 3, size, size))
    model.reshape({0: [-1, 3, size, size]})
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(model, "CPU", options)
    return lambda x: torch.from_numpy(compiled(x.numpy())[0].copy())


def run_openvino_bf16(net: nn.Module, size: int) -> Forward:
    return run_openvino(net, size, "bf16")


WAYS: dict[str, tuple[Callable[[nn.Module, int], Forward], str]] = {
    "plain": (run_plain, "torch"),
    "channels-last": (run_channels_last, "torch"),
    "channels-last, bf16": (run_bf16, "torch"),
    "ONNX Runtime": (make_onnx_forward, "onnxruntime"),
    "OpenVINO": (run_openvino, "openvino"),
    "OpenVINO, bf16": (run_openvino_bf16, "openvino"),
}
"""How to make a forward function from a network and an image size, and the package that it needs."""


def measure(args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    net = make_trunk(args.model, args.pretrained, args.size).body.eval()
    x = torch.randn(args.batch, 3, args.size, args.size)
    ways = {name: make for name, (make, package) in WAYS.items() if importlib.util.find_spec(package)}
    ways |= {"torch.compile": run_compiled} if args.compile else {}
    forwards, features, setup = dict[str, Forward](), dict[str, Tensor](), dict[str, float]()
    for name, make in ways.items():
        start = time.perf_counter()
        forwards[name] = make(net, args.size)
        features[name] = forwards[name](x)
        setup[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, forward in forwards.items():
            start, start_processor = time.perf_counter(), time.process_time()
            forward(x)
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - start_processor)

    def ratio(times: dict[str, list[float]], name: str) -> float:
        return statistics.median(a / b for a, b in zip(times["plain"], times[name], strict=True))

    return [
        {
            "way": name,
            "images/s": args.batch / statistics.median(seconds[name]),
            "ratio": ratio(seconds, name),
            "cpu": ratio(processor, name),
            "cosine": f"{F.cosine_similarity(features[name].double(), features['plain'].double()).min():.6f}",
            "setup": setup[name],
        }
        for name in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args)
    print(format_table(rows))
    save(
        args.out,
        {"where": describe_machine(CPU), "model": args.model, "size": args.size, "batch": args.batch, "rows": rows},
    )


if __name__ == "__main__":
    main()
