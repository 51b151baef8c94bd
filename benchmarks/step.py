"""Milliseconds of one PaCo training step on CIFAR-100-LT (imbalance 100, ResNet-32, batch 128), including views.

    python benchmarks/step.py [--out FILE] [--steps eager captured compiled fused] [--seeds 2 4 8] [--workers 8 0]

The plain loop of `reference.py`, the execution modes of this package, and the last of these modes with several seeds in
parallel are measured in one run. `ms` is the time of a step of all seeds, `ms_per_seed` this time divided by the seeds, and
`times_the_reference` the ratio of the faster reference to `ms_per_seed`. The images are random, with the counts of imbalance
100: the time of a step does not depend on their content.
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Row, describe_machine, format_table, free_memory, save, seconds_per_call
from reference import BATCH, Reference, iterate_batches

from longtail import recipes
from longtail.config import Config
from longtail.data.long_tail import checksum, exponential_counts
from longtail.data.sources import DataSet, Split
from longtail.engine.cuda_graph import make_step
from longtail.engine.device import choose_device, resolve_precision
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer

STEPS, SEEDS, WORKERS = ("eager", "captured", "fused"), (2, 4, 8), (8, 0)
BUDGET = 2.5  # seconds for each row, or three blocks


def make_random_data() -> DataSet:
    counts, rng = exponential_counts(500, 100, 100), np.random.default_rng(0)
    labels = np.repeat(np.arange(100), counts)
    images = rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    source = Split(images, labels, tuple(map(str, range(100))), np.arange(len(labels)))
    return DataSet("random", source, None, source, checksum(labels))


def make_runs(config: Config, seeds: int, data: DataSet, device: torch.device) -> list[Trainer]:
    """Return trainers of seeds that train in parallel, at their first step."""
    runs: list[Trainer] = []
    with tempfile.TemporaryDirectory() as folder:  # has no checkpoint
        for seed in range(seeds):
            runs.append(Trainer(config, seed, data, Path(folder), device, runs[0] if runs else None))
    return runs


def make_row(name: str, seconds: float, seeds: int, made: float, epoch: int, precision: str) -> Row:
    """Return a result row from the `seconds` of a step of all seeds; `epoch` is in steps."""
    ms = 1000 * seconds / seeds
    return {
        "step": name,
        "precision": precision,
        "seeds": seeds,
        "ms": 1000 * seconds,
        "ms_per_seed": ms,
        "s_per_epoch": ms * epoch / 1000,
        "made_in_s": made,
    }


def measure_reference(data: DataSet, device: torch.device, workers: int, calls: int | None) -> Row:
    """Measure the plain loop in blocks of a third of an epoch, which is long compared with what workers make in advance."""
    epoch = len(data.train.labels) // BATCH
    chosen, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    start = time.perf_counter()
    reference, source = (
        Reference(data.train.counts, device),
        iterate_batches(data.train, workers, device.type == "cuda"),
    )
    for _ in range(calls or 2 * workers + 2):  # the first batches were made in advance
        reference.step(next(source))
    made = time.perf_counter() - start
    seconds = seconds_per_call(lambda: reference.step(next(source)), device, calls or epoch // 3, BUDGET)
    source.close()
    torch.backends.cudnn.benchmark = chosen
    return make_row(f"reference, {workers} workers", seconds, 1, made, epoch, "fp32")


def measure_ours(data: DataSet, device: torch.device, step: Any, seeds: int, calls: int | None) -> Row:
    """Measure an execution mode of this package in blocks of an epoch, because views are made for many steps at a time."""
    start = time.perf_counter()
    config = recipes.cifar100_lt("paco")
    runs = make_runs(replace(config, train=replace(config.train, execution=step)), seeds, data, device)
    step_on, count = make_step(runs, train_step), itertools.count()

    def once() -> None:
        at = next(count)
        for run in runs:
            run.prepare(at)
        step_on()
        for run in runs:
            run.count_step()

    once()
    made = time.perf_counter() - start
    epoch = runs[0].steps_per_epoch
    seconds = seconds_per_call(once, device, calls or epoch, BUDGET)
    if device.type == "cuda" and step == "fused" and not all(run.method.net.trunk.fused for run in runs):
        step = "captured (fused kernels are not available)"
    return make_row(step, seconds, seeds, made, epoch, resolve_precision(config.train, device))


def measure(
    device: torch.device,
    steps: tuple[str, ...] = STEPS,
    seeds: tuple[int, ...] = SEEDS,
    workers: tuple[int, ...] = WORKERS,
    calls: int | None = None,
) -> Row:
    """Measure all rows and print each when it is done."""
    data, rows = make_random_data(), list[Row]()
    todo = [partial(measure_reference, data, device, n, calls) for n in workers]
    todo += [partial(measure_ours, data, device, step, 1, calls) for step in steps]
    todo += [partial(measure_ours, data, device, steps[-1], n, calls) for n in seeds]
    for each in todo:
        rows.append(each())
        print(f"{rows[-1]['step']}, seeds: {rows[-1]['seeds']}: {rows[-1]['ms']:.2f} ms per step", flush=True)
        free_memory()
    base = min((r["ms"] for r in rows[: len(workers)]), default=rows[0]["ms"])
    for r in rows:
        r["times_the_reference"] = base / r["ms_per_seed"]
    return {"what": (__doc__ or "").strip(), **describe_machine(device), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", nargs="+", default=STEPS, help="execution modes; compiled takes half a minute longer"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="*",
        default=SEEDS,
        help="numbers of parallel seeds, in the last of --steps",
    )
    parser.add_argument(
        "--workers", type=int, nargs="*", default=WORKERS, help="numbers of worker processes of the reference"
    )
    parser.add_argument(
        "--calls", type=int, help="steps per block (default: an epoch; for the reference a third of one)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(choose_device(args.device), tuple(args.steps), tuple(args.seeds), tuple(args.workers), args.calls)
    print(format_table(found["rows"]))
    save(args.out, found)


if __name__ == "__main__":
    main()
