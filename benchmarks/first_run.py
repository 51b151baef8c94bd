"""Twenty epochs of CIFAR-100-LT at imbalance 100 on one GPU: seconds per epoch and last-epoch accuracy, method by method.

    python benchmarks/first_run.py --data DATA --out RUNS --results results/first_run.json

The `equal` setting with its schedule compressed from 400 epochs to 20. Not the paper's table: a first look at speed, and a
check that the whole path learns.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from longtail import recipes
from longtail.config import Config
from longtail.engine.train import train
from longtail.report.table import table, to_markdown
from longtail.runs import LOG, write_json

EPOCHS = 20


def short(method: str, root: Path, seeds: tuple[int, ...]) -> Config:
    config = recipes.cifar100_lt(method, 100, "equal")
    if method == "supcon":
        config = replace(config, method=replace(config.method, linear_epochs=EPOCHS))
    return replace(
        config,
        data=replace(config.data, root=root),
        optim=replace(config.optim, warmup_epochs=1.0, warmup_by="epoch"),
        train=replace(config.train, epochs=EPOCHS, seeds=seeds),
        log=replace(config.log, progress="plain"),
    )


def seconds_per_epoch(folder: Path, stage: str) -> float:
    """Median over the epochs after the first, which chooses kernels."""
    rows = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    times = sorted(row["seconds"] for row in rows[1:] if row["stage"] == stage)
    return times[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["paco", "balanced-softmax", "ce", "supcon"])
    args = parser.parse_args()
    for method in args.methods:
        train(short(method, args.data, tuple(args.seeds)), args.out / method, resume=True)
        rows = table([args.out])
        entries = [row.to_dict() for row in rows]
        for entry, row in zip(entries, rows, strict=True):
            first = row.runs[0].config.method.name
            stage = "contrast" if first == "supcon" else "train"
            entry["seconds_per_epoch"] = [seconds_per_epoch(r.folder, stage) for r in row.runs]
            del entry["folders"]  # where they lay says nothing to others
            entry["started"] = [r.environment["started"] for r in row.runs]
            entry["versions"] = row.runs[0].environment["versions"]
        write_json(args.results, {"what": (__doc__ or "").strip(), "rows": entries})
        print(to_markdown(rows))


if __name__ == "__main__":
    main()
