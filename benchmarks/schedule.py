"""Tune the learning rate, the weight decay and Nesterov momentum of PaCo on validation images.

    python benchmarks/schedule.py --data DATA [--out runs/schedule] [--results results/schedule.json] [--epochs 400]

CIFAR-100-LT at imbalance 100, ResNet-32, the `equal` setting, four seeds. The search is greedy: each step starts from the
best optimizer so far. It tries the cosine schedule with larger peak rates, then other weight decays, then Nesterov momentum.
At the end Balanced Softmax is trained with the recipe's optimizer and with the best one. All choices are made by the
class-balanced accuracy at the last epoch on validation images (see benchmarks/factors.py), never on the test set.
Runs that are finished under --out or recorded in --results are not repeated.
Each line: the validation accuracy, and the seed-paired difference from the recipe of the same method with its 95 % t interval.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from factors import COSINE, IMBALANCE, format_line, is_recorded, measure, prepare_config, with_validation

from longtail import files, recipes
from longtail.config import Config, OptimConfig
from longtail.data.sources import DataSet
from longtail.metrics import mean_std

SEEDS = (0, 1, 2, 3)
RATES = (0.2, 0.3, 0.4)
DECAYS = (2e-4, 1e-3)
RECIPE = "recipe"
Optimizers = dict[str, OptimConfig]


class Results:
    """Train configurations and keep their records in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.book: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
        self.data: DataSet | None = None

    def measure(self, config: Config, optimizer: str) -> float:
        """Return the mean validation accuracy of a configuration; train it first if it is not recorded."""
        name, base = f"{config.method.label}, {optimizer}", f"{config.method.label}, {RECIPE}"
        seeds = tuple(self.args.seeds)
        config = prepare_config(config, self.args.data, self.args.epochs, seeds)
        if not (is_recorded(self.book, name, config) and tuple(self.book[name]["seeds"]) == seeds):
            self.data = self.data or with_validation(config)
            self.book[name] = measure(config, self.args.out / name.replace(" ", "-").replace(",", ""), self.data)
            self.args.results.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self.args.results, self.book)
        print(format_line(name, self.book[name], self.book[base]), flush=True)
        return mean_std(self.book[name]["validation"])[0]


def search(paco: Config, results: Results) -> tuple[str, OptimConfig]:
    """Return the name and the settings of the optimizer with the highest validation accuracy."""
    name, optim = RECIPE, paco.optim
    highest = results.measure(paco, RECIPE)
    for candidates in (larger_rates, other_decays, nesterov):
        for other_name, other in candidates(name, optim).items():
            accuracy = results.measure(replace(paco, optim=other), other_name)
            if accuracy > highest:
                name, optim, highest = other_name, other, accuracy
    return name, optim


def larger_rates(name: str, optim: OptimConfig) -> Optimizers:
    return {f"cosine from {rate:g}": replace(optim, lr=rate, **COSINE) for rate in RATES}


def other_decays(name: str, optim: OptimConfig) -> Optimizers:
    return {f"{name}, weight decay {decay:g}": replace(optim, weight_decay=decay) for decay in DECAYS}


def nesterov(name: str, optim: OptimConfig) -> Optimizers:
    return {f"{name}, Nesterov": replace(optim, nesterov=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/schedule"))
    parser.add_argument("--results", type=Path, default=Path("results/schedule.json"))
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    results = Results(args)
    paco, balanced = (recipes.cifar100_lt(method, IMBALANCE, "equal") for method in ("paco", "balanced-softmax"))
    name, optim = search(paco, results)
    print(f"best: {name}", flush=True)
    results.measure(balanced, RECIPE)
    if name != RECIPE:
        results.measure(replace(balanced, optim=optim), name)


if __name__ == "__main__":
    main()
