"""Accuracy of PaCo with fixed alphas and with the alpha of the theory (`auto`), on held-out training images.

    python benchmarks/alpha.py [--recipe digits-lt] [--data DATA] [--wider 1] [--seeds 0 1 2 ...] [--alphas 0.005 ... auto]

PaCo is trained with the setting and the length of the recipe. The validation images are training images of the subset with
imbalance `--wider` that are not in the subset used for training (for CIFAR-100 files that contain only the usual subsets, use
10). Runs that are finished under --out are not trained again. Each row has the class-balanced validation accuracy and P_sup at
the last epoch, and the seed-paired difference of `auto` from this row with its 95 % t interval.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from factors import last_epoch, with_changes, with_validation
from measure import Row, describe_machine, format_table, save

from longtail import recipes, run_folder
from longtail.engine.device import choose_device
from longtail.engine.train import train
from longtail.metrics import mean_std, paired_difference

ALPHAS = ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "auto"]


def measure(args: argparse.Namespace) -> list[Row]:
    base = recipes.make(args.recipe, method="paco")
    base = with_changes(base, "data", root=args.data)
    base = with_changes(base, "train", seeds=tuple(args.seeds), validate_every=base.train.epochs)
    base = replace(base, log=replace(base.log, progress="none"))
    data = with_validation(base, args.wider)
    found = []
    for alpha in args.alphas:
        config = with_changes(base, "method", alpha=alpha if alpha == "auto" else float(alpha))
        folders = train(config, args.out / args.recipe / alpha, resume=True, data=data)
        ends = [last_epoch(folder) for folder in folders]
        chosen = json.loads((folders[0] / run_folder.ENVIRONMENT).read_text())["chosen"]
        found.append(
            {
                "alpha": f"auto = {chosen['alpha']:.3g}" if alpha == "auto" else alpha,
                "validation": [end["val_accuracy"] for end in ends],
                "P_sup": float(np.mean([end["P_sup"] for end in ends])),
            }
        )
        print(found[-1], flush=True)
    return found


def format_rows(rows: list[Row]) -> list[Row]:
    auto = next((row["validation"] for row in rows if row["alpha"].startswith("auto")), None)
    lines = []
    for row in rows:
        mean, std = mean_std(row["validation"])
        line = {"alpha": row["alpha"], "validation": f"{mean:.1f} ± {std or 0:.1f}", "P_sup": f"{row['P_sup']:.2f}"}
        if auto is not None:
            difference, half = paired_difference(auto, row["validation"])
            line["auto is ahead by"] = "" if row["validation"] is auto else f"{difference:+.1f} ± {half:.1f}"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits-lt")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--wider", type=float, default=1)
    parser.add_argument("--alphas", nargs="+", default=ALPHAS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("runs/alpha"))
    parser.add_argument("--results", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    rows = measure(args)
    record = {"what": (__doc__ or "").strip(), "recipe": args.recipe, "seeds": args.seeds, "rows": rows}
    save(args.results, record | {"where": describe_machine(choose_device("auto"))})
    print(format_table(format_rows(rows)))


if __name__ == "__main__":
    main()
