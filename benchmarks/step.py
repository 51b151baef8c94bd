"""Milliseconds of one PaCo training step on CIFAR-100-LT's shape, by the ways the package can run it.

    python benchmarks/step.py [--steps eager captured compiled]

Random images with the counts of imbalance 100: a step's time does not depend on what they show.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from longtail import recipes
from longtail.data.imbalance import checksum, exponential_counts
from longtail.data.sources import DataSet, Source
from longtail.engine.capture import CapturedStep
from longtail.engine.device import choose_device
from longtail.engine.run import Run
from longtail.engine.train import advance


def random_data() -> DataSet:
    counts, rng = exponential_counts(500, 100, 100), np.random.default_rng(0)
    labels = np.repeat(np.arange(100), counts)
    images = rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    source = Source(images, labels, tuple(map(str, range(100))), np.arange(len(labels)))
    return DataSet("random", source, None, source, checksum(labels))


def milliseconds(run: Run, repeats: int) -> tuple[float, float]:
    """Median of a step, host included, in blocks of ten; and what making the step cost, in seconds."""
    start = time.perf_counter()
    step_on = partial(advance, run)
    step_on = CapturedStep(run, step_on) if run.captured else step_on
    run.prepare(0)
    step_on()
    torch.cuda.synchronize()
    made = time.perf_counter() - start
    times = []
    for block in range(repeats):
        start = time.perf_counter()
        for step in range(10):
            run.prepare(block * 10 + step)
            step_on()
        torch.cuda.synchronize()
        times.append(100 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2], made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="+", default=["eager", "captured", "compiled"])
    parser.add_argument("--method", default="paco")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device, data, base = choose_device("cuda"), random_data(), None
    for name in args.steps:
        config = recipes.cifar100_lt(args.method)
        config = replace(config, train=replace(config.train, step=name))
        with tempfile.TemporaryDirectory() as folder:
            ms, made = milliseconds(Run(config, 0, data, Path(folder), device), args.repeats)
        base = base or ms
        print(
            f"{name:10} {ms:7.2f} ms a step   {base / ms:5.1f} times {args.steps[0]}   made in {made:.1f} s", flush=True
        )


if __name__ == "__main__":
    main()
