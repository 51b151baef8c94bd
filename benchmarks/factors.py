"""What each choice that PaCo's paper and its released code leave open is worth, on a validation split of the training images.

    python benchmarks/factors.py --data DATA [--out runs/factors] [--results results/paco_factors.json] [--epochs 200]

CIFAR-100-LT at imbalance 100, the `equal` setting, three seeds. A tenth of each class is held out and scored class-balanced at
the last epoch; the test set decides nothing here. What is finished under --out or recorded in --results is not trained again.
Each line: the validation accuracy, and the seed-paired difference from `base` with its 95 % t interval.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from longtail import recipes, runs
from longtail.config import Config
from longtail.data.sources import DataSet, load
from longtail.engine.environment import commit
from longtail.engine.train import train
from longtail.metrics import mean_std, paired_difference

IMBALANCE, SEEDS = 100, (0, 1, 2)
COSINE = {"schedule": "cosine", "warmup_by": "step", "milestones": ()}


def changed(config: Config, section: str, **values: Any) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def variants() -> dict[str, Config]:
    """By name: the base, one change each, and the two that are compared with it as a whole."""
    base = recipes.cifar100_lt("paco", IMBALANCE, "equal")
    black = replace(base.views.query, fill=0)
    return {
        "base": base,
        "alpha 0.02, as the text": changed(base, "method", alpha=0.02),
        "alpha 0.05": changed(base, "method", alpha=0.05),
        "centres with temperature tau": changed(base, "method", centre_tau=0.05),
        "centres without bias": changed(base, "model", bias=False),
        "G without batch norm": changed(base, "method", projection_norm=False),
        "key batch norm by averages": changed(base, "method", key_norm="ema"),
        "longer queue, 8192": changed(base, "method", queue=8192),
        "cosine": changed(base, "optim", **COSINE),
        "cosine from 0.1": changed(base, "optim", lr=0.1, **COSINE),
        "black fill": changed(base, "views", query=black),
        "CIFAR-100 statistics": changed(base, "views", normalise="cifar100"),
        "paper setting": recipes.cifar100_lt("paco", IMBALANCE, "paper"),
        "no rebalance": recipes.cifar100_lt("paco-no-rebalance", IMBALANCE, "equal"),
        "Balanced Softmax": recipes.cifar100_lt("balanced-softmax", IMBALANCE, "equal"),
    }


def prepared(config: Config, data: Path | None, epochs: int) -> Config:
    """As it is trained here: with a validation split that is scored once, at the end."""
    config = changed(config, "data", root=data, val_fraction=0.1)
    return changed(config, "train", epochs=epochs, seeds=SEEDS, checkpoint_every=epochs, validate_every=epochs)


def validation(folder: Path) -> float:
    """Class-balanced accuracy on the validation split at the last epoch."""
    last = json.loads((folder / runs.LOG).read_text().splitlines()[-1])
    return float(last["val_accuracy"])


def measure(config: Config, out: Path, data: DataSet) -> dict[str, Any]:
    start = time.perf_counter()
    folders = train(config, out, resume=True, data=data)
    found = {"validation": [validation(folder) for folder in folders], "identity": config.identity()}
    return found | {"commit": commit(), "wall_seconds": round(time.perf_counter() - start)}


def line(name: str, record: dict[str, Any], base: dict[str, Any]) -> str:
    mean, std = mean_std(record["validation"])
    text = f"{name:32} {mean:5.1f} ± {std or 0:.1f}"
    if record is base:
        return text
    difference, half = paired_difference(record["validation"], base["validation"])
    return f"{text}   {difference:+.1f} ± {half:.1f} against base"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/factors"))
    parser.add_argument("--results", type=Path, default=Path("results/paco_factors.json"))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=[], help="variants whose names begin so")
    args = parser.parse_args()
    book = json.loads(args.results.read_text()) if args.results.exists() else {}
    shared: DataSet | None = None
    for name, config in variants().items():
        config = prepared(config, args.data, args.epochs)
        chosen = not args.only or name == "base" or any(name.startswith(start) for start in args.only)
        if chosen and book.get(name, {}).get("identity") != config.identity():
            shared = shared or load(config.data)
            book[name] = measure(config, args.out / name.replace(" ", "-").replace(",", ""), shared)
            args.results.parent.mkdir(parents=True, exist_ok=True)
            runs.write_json(args.results, book)
        if name in book:
            print(line(name, book[name], book["base"]), flush=True)


if __name__ == "__main__":
    main()
