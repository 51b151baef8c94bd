"""Views per second of CIFAR images: on the device, as in training, and with PIL in worker processes.

    python benchmarks/views.py [--out FILE] [--workers 1 8]

Both kinds of PaCo's views are measured, alone and as the pair that a step needs, with 32 x 32 pixels and batches of 128. Our
views are normalized and converted, in the buffers that the network reads. Those of workers are counted before the copy to the
device.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from measure import Row, count_cores, describe_machine, format_table, free_memory, save, seconds_per_call
from reference import BATCH, ViewSet, make_auto_view, make_sim_view, measure_loader
from step import make_random_data, make_runs

from longtail import recipes
from longtail.config import Config
from longtail.data.sources import DataSet
from longtail.engine.device import choose_device

BUDGET = 2.0  # seconds for each measurement
PEERS = {
    "AutoAugment + Cutout": [make_auto_view],
    "SimAugment": [make_sim_view],
    "both": [make_auto_view, make_sim_view],
}


def make_config(kind: str) -> Config:
    """Return the configuration: PaCo needs both views, and a method without a key network only that of the query."""
    config = recipes.cifar100_lt("paco" if kind == "both" else "balanced-softmax", 100, "equal")
    query = recipes.SIM_AUGMENT if kind == "SimAugment" else recipes.AUTO_CUTOUT
    train = replace(config.train, execution="auto")
    return replace(config, views=replace(config.views, query=query), train=train)


def measure_device(kind: str, data: DataSet, device: torch.device, budget: float) -> float:
    """Return the views per second on the device."""
    (run,) = make_runs(make_config(kind), 1, data, device)
    batches, count = run.batches, itertools.count()
    parts = -(
        -batches.steps_per_epoch // batches.steps_ahead
    )  # the number of parts in which the views of an epoch are made

    def once() -> None:
        epoch, part = divmod(next(count), parts)
        batches.prepare(epoch, epoch * batches.steps_per_epoch + part * batches.steps_ahead)

    views = batches.steps_ahead * BATCH * len(PEERS[kind])
    return views / seconds_per_call(once, device, 5 * parts if device.type == "cuda" else 2, budget)


def measure_workers(kind: str, data: DataSet, workers: int, budget: float) -> float:
    """Return the views per second of worker processes."""
    views = ViewSet(data.train, [make() for make in PEERS[kind]])
    return measure_loader(views, BATCH, workers, budget) * len(views.views)


def measure(device: torch.device, workers: Sequence[int] = (), budget: float = BUDGET) -> Row:
    data, rows = make_random_data(), list[Row]()
    workers = workers or sorted({1, min(8, count_cores())})
    for kind in PEERS:
        row: Row = {"views": kind, "ours": measure_device(kind, data, device, budget)}
        free_memory()
        for n in workers:
            row[f"workers_{n}"] = measure_workers(kind, data, n, budget)
        row |= {f"times_workers_{n}": row["ours"] / row[f"workers_{n}"] for n in workers}
        rows.append(row)
        print(f"{kind}: {row['ours']:,.0f} views per second", flush=True)
    return {"what": (__doc__ or "").strip(), **describe_machine(device), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers",
        type=int,
        nargs="*",
        default=(),
        help="numbers of worker processes (default: 1, and 8 or all cores)",
    )
    parser.add_argument("--seconds", type=float, default=BUDGET, help="time for each measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(choose_device(args.device), args.workers, args.seconds)
    print(format_table(found["rows"]))
    save(args.out, found)


if __name__ == "__main__":
    main()
