"""Learning rate and number of epochs of the demo, selected on held-out training images, the same for all of its methods.

    python benchmarks/demo.py [--epochs 40 80] [--rates 0.05 0.1 0.2] [--seeds 10 11 ...] [--results FILE]

The validation images are the 1,008 digits that are neither in the long-tailed training set nor in the test set, and the seeds
are not those of the demo. PaCo's alpha is that of the theory (`auto`). Each row has the class-balanced validation accuracy of
every method at the last epoch. The selected settings have the highest mean over the methods. Finished runs under --out are not
trained again.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

from factors import last_epoch, with_changes, with_validation
from measure import Row, describe_machine, format_table, save

from longtail import demo_run, recipes
from longtail.config import Config, PaCoSettings
from longtail.engine.device import choose_device, use_threads
from longtail.engine.train import train
from longtail.metrics import mean_std


def make_config(method: str, epochs: int, rate: float, seeds: list[int]) -> Config:
    base = recipes.digits_lt(method)
    if isinstance(base.method, PaCoSettings):
        base = with_changes(base, "method", alpha="auto")
    config = with_changes(recipes.with_epochs(base, epochs), "optim", lr=rate)  # second stages are scaled, too
    config = with_changes(config, "train", seeds=tuple(seeds), validate_every=epochs)
    return replace(config, log=replace(config.log, progress="none"))


def measure(args: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    for epochs, rate in itertools.product(args.epochs, args.rates):
        row: Row = {"epochs": epochs, "lr": rate, "validation": {}}
        for method in demo_run.METHODS:
            config = make_config(method, epochs, rate, args.seeds)
            data = with_validation(config, 1)
            with use_threads(1):
                folders = train(config, args.out / f"{epochs}-{rate}" / method, resume=True, data=data)
            row["validation"][method] = [last_epoch(folder)["val_accuracy"] for folder in folders]
        found.append(row)
        print(row, flush=True)
    return found


def format_rows(rows: list[Row]) -> list[Row]:
    lines = []
    for row in rows:
        line: Row = {"epochs": row["epochs"], "lr": row["lr"]}
        for method, values in row["validation"].items():
            mean, std = mean_std(values)
            line[method] = f"{mean:.1f} ± {std or 0:.1f}"
        line["mean"] = f"{mean_over_methods(row):.2f}"
        lines.append(line)
    return lines


def mean_over_methods(row: Row) -> float:
    means = [sum(values) / len(values) for values in row["validation"].values()]
    return sum(means) / len(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[40, 80])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 16)))
    parser.add_argument("--out", type=Path, default=Path("runs/demo-settings"))
    parser.add_argument("--results", type=Path, help="a JSON file")
    args = parser.parse_args()
    rows = measure(args)
    best = max(rows, key=mean_over_methods)
    record = {"what": (__doc__ or "").strip(), "seeds": args.seeds, "rows": rows}
    save(args.results, record | {"where": describe_machine(choose_device("auto"))})
    print(format_table(format_rows(rows)))
    print(f"selected: {best['epochs']} epochs, learning rate {best['lr']}")


if __name__ == "__main__":
    main()
