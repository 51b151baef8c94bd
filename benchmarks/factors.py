"""The effect of each setting that the paper and the released code of PaCo leave open, on held-out training images.

    python benchmarks/factors.py --data DATA [--out runs/factors] [--results results/paco_factors.json] [--epochs 200]

CIFAR-100-LT at imbalance 100, the `equal` setting, three seeds. The score is the class-balanced accuracy at the last epoch on
validation images: those training images of CIFAR-100 that are in the subset with imbalance 10, but not in the one with
imbalance 100 (8,726 images, of all classes but the first). The test set is not used. Runs that are finished under --out or
recorded in --results are not trained again. Each line has the validation accuracy, and the seed-paired difference from `base`
with its 95 % t interval.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import describe_machine

from longtail import files, recipes, run_folder
from longtail.config import Config, from_dict
from longtail.data.sources import DataSet, Split, load
from longtail.engine.device import choose_device
from longtail.engine.train import train
from longtail.metrics import mean_std, paired_difference

IMBALANCE, SEEDS = 100, (0, 1, 2)
COSINE: dict[str, Any] = {"schedule": "cosine", "warmup_by": "step", "milestones": ()}


def with_changes(config: Config, section: str, **values: Any) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def variants() -> dict[str, Config]:
    """Return the configurations by name: the base, single changes, and the two complete settings that are compared."""
    base = recipes.cifar100_lt("paco", IMBALANCE, "equal")
    balanced = recipes.cifar100_lt("balanced-softmax", IMBALANCE, "equal")
    black = replace(base.views.query, fill=0)
    focal = recipes.cifar100_lt("cb-focal", IMBALANCE, "released")
    betas = {f"CB-Focal, beta {beta}": with_changes(focal, "method", beta=beta) for beta in (0.9, 0.99, 0.999, 0.9999)}
    return {
        "base": base,
        "Balanced Softmax": balanced,
        "Balanced Softmax, cosine": with_changes(balanced, "optim", **COSINE),
        "Balanced Softmax, its own schedule": recipes.cifar100_lt("balanced-softmax", IMBALANCE, "released"),
        "cosine": with_changes(base, "optim", **COSINE),
        "paper setting": recipes.cifar100_lt("paco", IMBALANCE, "paper"),
        "alpha 0.02, as the text": with_changes(base, "method", alpha=0.02),
        "alpha 0.05": with_changes(base, "method", alpha=0.05),
        "alpha auto": with_changes(base, "method", alpha="auto"),
        "key batch norm by averages": with_changes(base, "method", key_norm="ema"),
        "longer queue, 8192": with_changes(base, "method", queue=8192),
        "longer queue, 8192, alpha auto": with_changes(base, "method", queue=8192, alpha="auto"),
        "centers with temperature tau": with_changes(base, "method", center_tau=0.05),
        "G without batch norm": with_changes(base, "method", projection_norm=False),
        "black fill": with_changes(base, "views", query=black),
        "CIFAR-100 statistics": with_changes(base, "views", normalize="cifar100"),
        "centers without bias": with_changes(base, "model", bias=False),
        "cosine from 0.1": with_changes(base, "optim", lr=0.1, **COSINE),
        "Balanced Softmax, cosine from 0.1": with_changes(balanced, "optim", lr=0.1, **COSINE),
        "no rebalance": recipes.cifar100_lt("paco-no-rebalance", IMBALANCE, "equal"),
        "fp32": with_changes(base, "train", precision="fp32"),
        **betas,  # the published figure is that of the best one
    }


def prepare_config(config: Config, data: Path | None, epochs: int, seeds: tuple[int, ...] = SEEDS) -> Config:
    """Return the configuration with a data folder, a length and seeds, and with one evaluation at the end."""
    config = with_changes(config, "data", root=data)
    return with_changes(config, "train", epochs=epochs, seeds=seeds, checkpoint_every=epochs, validate_every=epochs)


def with_validation(config: Config, wider: float = 10) -> DataSet:
    """Return the usual training images, with validation images from a less skewed draw."""
    data, more = load(config.data), load(replace(config.data, imbalance=wider)).train
    assert isinstance(more.images, np.ndarray)
    unused = ~np.isin(more.ids, data.train.ids)
    val = Split(more.images[unused], more.labels[unused], more.class_names, more.ids[unused])
    return replace(data, val=val)


def last_epoch(folder: Path) -> dict[str, Any]:
    """Return the last log line, with the class-balanced accuracy on validation images and, for PaCo, P_sup."""
    return dict(json.loads((folder / run_folder.LOG).read_text().splitlines()[-1]))


def is_recorded(book: dict[str, Any], name: str, config: Config) -> bool:
    """Return whether the results have a record of this name with the same configuration."""
    return name in book and from_dict(Config, book[name]["identity"]).identity() == config.identity()


def measure(config: Config, out: Path, data: DataSet) -> dict[str, Any]:
    start = time.perf_counter()
    folders = train(config, out, resume=True, data=data)
    ends = [last_epoch(folder) for folder in folders]
    found: dict[str, Any] = {
        "validation": [end["val_accuracy"] for end in ends],
        "P_sup": [end.get("P_sup") for end in ends],
    }
    found |= {"seeds": config.train.seeds, "identity": config.identity()}
    seconds = round(time.perf_counter() - start)
    return found | describe_machine(choose_device(config.train.device)) | {"wall_seconds": seconds}


def format_line(name: str, record: dict[str, Any], base: dict[str, Any]) -> str:
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
    parser.add_argument("--only", nargs="+", default=[], help="train only variants whose names begin with one of these")
    args = parser.parse_args()
    book = json.loads(args.results.read_text()) if args.results.exists() else {}
    shared: DataSet | None = None
    for name, config in variants().items():
        config = prepare_config(config, args.data, args.epochs)
        chosen = not args.only or name == "base" or any(name.startswith(start) for start in args.only)
        if chosen and not is_recorded(book, name, config):
            shared = shared or with_validation(config)
            book[name] = measure(config, args.out / name.replace(" ", "-").replace(",", ""), shared)
            args.results.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(args.results, book)
        if name in book:
            print(format_line(name, book[name], book["base"]), flush=True)


if __name__ == "__main__":
    main()
