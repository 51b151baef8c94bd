"""The gain from choosing the best epoch on the test set, as some released codes do and this package never does.

    python benchmarks/epochs.py --data DATA [--cells bbn-100 cb-focal-100 ...] [--every 5] [--out runs/epochs]

By default the methods are those whose results are more than a point below the published ones. Each is trained with the
settings of its authors at one imbalance factor of CIFAR-100-LT, with three seeds, and tested every few epochs. Each line has
the accuracy after the last epoch, the accuracy after the best epoch of each seed, and these best epochs. Cells that are
recorded in the results file are not measured again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import describe_machine, save

from longtail import recipes, run_folder
from longtail.config import Config
from longtail.data.sources import load
from longtail.engine.device import choose_device
from longtail.engine.train import train
from longtail.metrics import mean_std

SEEDS = (0, 1, 2)
CELLS = ("bbn-100", "cb-focal-100", "reslt-100", "causal-norm-50", "focal-50")


def prepare_config(cell: str, args: argparse.Namespace) -> Config:
    method, imbalance = cell.rsplit("-", 1)
    config = recipes.cifar100_lt(method, int(imbalance), "released")
    epochs = args.epochs or config.train.epochs
    tested = replace(config.train, seeds=SEEDS, validate_every=args.every, checkpoint_every=epochs, epochs=epochs)
    return replace(config, data=replace(config.data, root=args.data), train=tested)


def read_test_accuracy(folder: Path) -> dict[int, float]:
    """Return the test accuracy in percent by the number of epochs, counted over all stages."""
    rows = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    return {done: row["val_accuracy"] for done, row in enumerate(rows, 1) if "val_accuracy" in row}


def measure(config: Config, out: Path) -> dict[str, Any]:
    """Train, and return the accuracy on the test set, which is used in place of validation images."""
    data = load(config.data)
    curves = [
        read_test_accuracy(folder) for folder in train(config, out, resume=True, data=replace(data, val=data.test))
    ]
    best = [max(curve, key=curve.__getitem__) for curve in curves]
    return {
        "last": [curve[max(curve)] for curve in curves],
        "best": [curve[epoch] for curve, epoch in zip(curves, best, strict=True)],
        "at": best,
        "curves": curves,
        "seeds": SEEDS,
        "identity": config.identity(),
        **describe_machine(choose_device(config.train.device)),
    }


def format_line(name: str, found: dict[str, Any]) -> str:
    (last, spread), (best, best_spread) = mean_std(found["last"]), mean_std(found["best"])
    at = " ".join(str(epoch) for epoch in found["at"])
    return (
        f"{name:16} last {last:5.1f} ± {spread or 0:.1f}   best {best:5.1f} ± {best_spread or 0:.1f} after {at} epochs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="METHOD-IMBALANCE")
    parser.add_argument("--every", type=int, default=5, help="number of epochs between tests")
    parser.add_argument(
        "--epochs", type=int, default=0, help="number of epochs, for a short trial; 0: that of the method"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/epochs"))
    parser.add_argument("--results", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    book: dict[str, Any] = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    for cell in args.cells:
        config = prepare_config(cell, args)
        if book.get(cell, {}).get("identity") != config.identity():
            book[cell] = measure(config, args.out / cell)
            save(args.results, book)
        print(format_line(cell, book[cell]), flush=True)


if __name__ == "__main__":
    main()
