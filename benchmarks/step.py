"""Milliseconds of one PaCo training step on CIFAR-100-LT (imbalance 100, ResNet-32, batch 128), including views.

    python benchmarks/step.py [--out FILE] [--steps eager captured compiled fused] [--seeds 2 4 8] [--workers 8 0]

The plain loop of `reference.py`, the ways this package can run a step, and the last of them with several seeds side by side,
all in one run. Ratios are to the faster reference, seed by seed: `ms` is a step of all seeds, `ms_per_seed` a seed's share.
Random images with the counts of imbalance 100: a step's time does not depend on what they show.
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import Row, release, save, seconds_per_call, table, where
from reference import BATCH, Reference, batches

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


def random_data() -> DataSet:
    counts, rng = exponential_counts(500, 100, 100), np.random.default_rng(0)
    labels = np.repeat(np.arange(100), counts)
    images = rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    source = Split(images, labels, tuple(map(str, range(100))), np.arange(len(labels)))
    return DataSet("random", source, None, source, checksum(labels))


def make_runs(config: Config, seeds: int, data: DataSet, device: torch.device) -> list[Trainer]:
    """Side by side, from their start."""
    runs: list[Trainer] = []
    with tempfile.TemporaryDirectory() as folder:  # where they look for a checkpoint
        for seed in range(seeds):
            runs.append(Trainer(config, seed, data, Path(folder), device, runs[0] if runs else None))
    return runs


def row(name: str, seconds: float, seeds: int, made: float, epoch: int, precision: str) -> Row:
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
    """Blocks of a third of an epoch: long against what the workers have made ahead."""
    epoch = len(data.train.labels) // BATCH
    chosen, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    start = time.perf_counter()
    reference, source = Reference(data.train.counts, device), batches(data.train, workers, device.type == "cuda")
    for _ in range(calls or 2 * workers + 2):  # the first batches were made ahead
        reference.step(next(source))
    made = time.perf_counter() - start
    seconds = seconds_per_call(lambda: reference.step(next(source)), device, calls or epoch // 3, BUDGET)
    source.close()
    torch.backends.cudnn.benchmark = chosen
    return row(f"reference, {workers} workers", seconds, 1, made, epoch, "fp32")


def measure_ours(data: DataSet, device: torch.device, step: str, seeds: int, calls: int | None) -> Row:
    """Blocks of an epoch: views are made for many steps at a time."""
    start = time.perf_counter()
    config = recipes.cifar100_lt("paco")
    runs = make_runs(replace(config, train=replace(config.train, step=step)), seeds, data, device)
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
    return row(step, seconds, seeds, made, epoch, resolve_precision(config.train, device))


def measure(
    device: torch.device,
    steps: tuple[str, ...] = STEPS,
    seeds: tuple[int, ...] = SEEDS,
    workers: tuple[int, ...] = WORKERS,
    calls: int | None = None,
) -> Row:
    """Measure all rows and print each when it is done."""
    data, rows = random_data(), list[Row]()
    todo = [partial(measure_reference, data, device, n, calls) for n in workers]
    todo += [partial(measure_ours, data, device, step, 1, calls) for step in steps]
    todo += [partial(measure_ours, data, device, steps[-1], n, calls) for n in seeds]
    for each in todo:
        rows.append(each())
        print(f"{rows[-1]['step']}, seeds: {rows[-1]['seeds']}: {rows[-1]['ms']:.2f} ms a step", flush=True)
        release()
    base = min((r["ms"] for r in rows[: len(workers)]), default=rows[0]["ms"])
    for r in rows:
        r["times_the_reference"] = base / r["ms_per_seed"]
    return {"what": (__doc__ or "").strip(), **where(device), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=STEPS, help="compiled takes half a minute more to make")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="side by side, by the last of --steps")
    parser.add_argument("--workers", type=int, nargs="*", default=WORKERS, help="of the reference")
    parser.add_argument("--calls", type=int, help="steps a block (an epoch; of the reference a third)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(choose_device(args.device), tuple(args.steps), tuple(args.seeds), tuple(args.workers), args.calls)
    print(table(found["rows"]))
    save(args.out, found)


if __name__ == "__main__":
    main()
