"""The paper's Fig. 2 on CIFAR-100-LT: the gradient of each class's classifier weights, from the frequent classes to the rare.

    python benchmarks/gradients.py --data DATA [--out runs/gradient] [--figure results/gradient.png] [--epochs 400]

Imbalance 100, the `equal` setting, three seeds: the linear stage of SupCon, cross-entropy with SupCon, and PaCo. What has
finished under --out is not trained again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import longtail
from longtail import recipes
from longtail.config import Config

METHODS = ("supcon", "ce-supcon", "paco")


def prepared(method: str, args: argparse.Namespace) -> Config:
    config = recipes.cifar100_lt(method, 100, "equal")
    epochs = args.epochs or config.train.epochs
    return replace(
        config,
        data=replace(config.data, root=args.data),
        train=replace(config.train, seeds=(0, 1, 2), epochs=epochs),
        log=replace(config.log, gradients=True, progress="plain"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/gradient"))
    parser.add_argument("--figure", type=Path, default=Path("results/gradient.png"))
    parser.add_argument("--epochs", type=int, default=0, help="fewer than the setting's, to try it out")
    args = parser.parse_args()
    for method in METHODS:
        longtail.train(prepared(method, args), args.out / method, resume=True)
    print("written:", longtail.figure("gradient", args.out, args.figure))


if __name__ == "__main__":
    main()
