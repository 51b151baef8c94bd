"""Fig. 2 of the paper on CIFAR-100-LT: gradient norms of the classifier weights, from frequent to rare classes.

    python benchmarks/gradients.py --data DATA [--out runs/gradient] [--results results/gradient.json] [--epochs 400]

The linear stage of SupCon, cross-entropy with SupCon, and PaCo are compared at imbalance 100 with the `equal` setting and three
seeds. Runs that are finished under --out are not trained again. The figure is written next to the results.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import format_table, save

import longtail
from longtail import recipes, run_folder
from longtail.config import Config
from longtail.metrics import FloatArray
from longtail.reporting.training_curves import ClassGradientNorms

METHODS = ("supcon", "ce-supcon", "paco")
IMBALANCE, SETTING = 100, "equal"


def prepare_config(method: str, args: argparse.Namespace) -> Config:
    config = recipes.cifar100_lt(method, IMBALANCE, SETTING)
    config = recipes.with_epochs(config, args.epochs or config.train.epochs)
    return replace(
        config,
        data=replace(config.data, root=args.data),
        train=replace(config.train, seeds=(0, 1, 2)),
        log=replace(config.log, gradients=True, progress="plain"),
    )


def read_norms(run: run_folder.FinishedRun) -> dict[str, Any]:
    """Return the gradient norms of a run by class, from frequent to rare: means over all epochs, and over the last tenth."""
    with np.load(run.folder / run_folder.GRADIENTS) as stored:
        norms_EC = stored["norms"][np.isfinite(stored["norms"]).all(1)].astype(float)
    about = {name: run.environment[name] for name in ("seed", "started", "commit", "device", "versions", "model")}
    about["resumed"] = len(run.environment.get("resumed", []))  # times
    last = len(norms_EC) // 10 or 1
    means = {"mean": round_values(norms_EC.mean(0)), "end": round_values(norms_EC[-last:].mean(0))}
    return about | {"epochs": len(norms_EC)} | means


def round_values(mean_C: FloatArray) -> list[float]:
    return [float(f"{x:.4g}") for x in mean_C]


def compute_ratios(found: list[dict[str, Any]], when: str) -> dict[str, float | None]:
    """Return the ratios of gradient norms of frequent to rarer classes; 1 is balanced. The first is that of the figure."""
    norms_SC = np.array([record[when] for record in found])
    mean_C, tenth = norms_SC.mean(0), norms_SC.shape[1] // 10
    within = float(mean_C[:tenth].mean() / mean_C[tenth : 2 * tenth].mean())
    return {"head / tail": ClassGradientNorms("", norms_SC).head_tail_ratio, "within the head": within}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/gradient"))
    parser.add_argument("--results", type=Path, help="default: results/gradient.json, or in --out if --epochs is given")
    parser.add_argument(
        "--epochs", type=int, default=0, help="number of epochs, for a short trial; 0: that of the setting"
    )
    args = parser.parse_args()
    results = args.results or (args.out if args.epochs else Path("results")) / "gradient.json"
    found = {}
    for method in METHODS:
        folders = longtail.train(prepare_config(method, args), args.out / method, resume=True)
        found[method] = [read_norms(run_folder.read(folder)) for folder in folders]
    save(results, {"recipe": "cifar100-lt", "imbalance": IMBALANCE, "setting": SETTING, "methods": found})
    cases = [(method, when) for method in METHODS for when in ("mean", "end")]
    print(
        format_table(
            [{"method": method, "epochs": when} | compute_ratios(found[method], when) for method, when in cases]
        )
    )
    print("written:", results, longtail.figure("gradient", args.out, results.with_suffix(".png")))


if __name__ == "__main__":
    main()
