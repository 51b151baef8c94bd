"""Views per second of CIFAR images: on the device, as in training, and with PIL in worker processes.

    python benchmarks/views.py [--out FILE] [--workers 1 8]

Both kinds of PaCo's views, alone and as the pair that a step needs; 32 x 32 pixels, delivered in batches of 128, in one run.
Ours are normalized and cast, and lie where the network reads them; the workers' are counted before the copy to the device.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from measure import Row, cores, release, save, seconds_per_call, table, where
from reference import BATCH, ViewSet, auto_view, delivered, sim_view
from step import make_runs, random_data

from longtail import recipes
from longtail.config import Config
from longtail.data.sources import DataSet
from longtail.engine.device import choose_device

BUDGET = 2.0  # seconds for each figure
PEERS = {"AutoAugment + Cutout": [auto_view], "SimAugment": [sim_view], "both": [auto_view, sim_view]}


def config_of(kind: str) -> Config:
    """Return the configuration; PaCo makes both views, and a method without a key network only that of the query."""
    config = recipes.cifar100_lt("paco" if kind == "both" else "balanced-softmax", 100, "equal")
    query = recipes.SIM_AUGMENT if kind == "SimAugment" else recipes.AUTO_CUTOUT
    train = replace(config.train, execution="auto")
    return replace(config, views=replace(config.views, query=query), train=train)


def ours(kind: str, data: DataSet, device: torch.device, budget: float) -> float:
    """Views per second."""
    (run,) = make_runs(config_of(kind), 1, data, device)
    batches, count = run.batches, itertools.count()
    parts = -(-batches.steps_per_epoch // batches.ahead)  # that an epoch's views are made in

    def once() -> None:
        epoch, part = divmod(next(count), parts)
        batches.prepare(epoch, epoch * batches.steps_per_epoch + part * batches.ahead)

    views = batches.ahead * BATCH * len(PEERS[kind])
    return views / seconds_per_call(once, device, 5 * parts if device.type == "cuda" else 2, budget)


def peer(kind: str, data: DataSet, workers: int, budget: float) -> float:
    """Views per second."""
    views = ViewSet(data.train, [make() for make in PEERS[kind]])
    return delivered(views, BATCH, workers, budget) * len(views.views)


def measure(device: torch.device, workers: Sequence[int] = (), budget: float = BUDGET) -> Row:
    data, rows = random_data(), list[Row]()
    workers = workers or sorted({1, min(8, cores())})
    for kind in PEERS:
        row: Row = {"views": kind, "ours": ours(kind, data, device, budget)}
        release()
        for n in workers:
            row[f"workers_{n}"] = peer(kind, data, n, budget)
        row |= {f"times_workers_{n}": row["ours"] / row[f"workers_{n}"] for n in workers}
        rows.append(row)
        print(f"{kind}: {row['ours']:,.0f} views a second", flush=True)
    return {"what": (__doc__ or "").strip(), **where(device), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="*", default=(), help="processes of the peer (1, and 8 or all cores)"
    )
    parser.add_argument("--seconds", type=float, default=BUDGET, help="for each figure")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(choose_device(args.device), args.workers, args.seconds)
    print(table(found["rows"]))
    save(args.out, found)


if __name__ == "__main__":
    main()
