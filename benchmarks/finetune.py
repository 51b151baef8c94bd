"""Fine-tuning on few images: methods with a frozen and a trainable pretrained backbone, and optionally from scratch.

    python benchmarks/finetune.py FOLDER [--out RUNS] [--classes 20] [--most 60] [--others] [--size 96] [--epochs 5]

FOLDER is an image folder with train/ and val/ (Tiny-ImageNet-LT). `--classes` of its classes are used, evenly spaced from the
most frequent to the rarest, with the first `--most` training images of each by name, and with all test images in val/.
`--others` uses the same number of the remaining classes, so that choices made on one set of classes can be tested on the
other. All methods have the same weights, views, optimizer and length; nothing was tuned for one of them. The rows are written
to OUT/finetune.json, next to the runs. Finished runs are not trained again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import Row, describe_machine, format_table, save

from longtail import recipes, run_folder
from longtail.config import Config, DataConfig, ModelConfig, OptimConfig
from longtail.data.sources import load
from longtail.engine.device import choose_device
from longtail.engine.train import train
from longtail.models.weights import pretrained_input
from longtail.reporting.result_rows import make_rows
from longtail.reporting.significance import compare_seeds

METHODS = ("ce", "balanced-softmax", "paco")
RATES = {"head": 0.01, "all": 0.005, "scratch": 0.02}  # learning rates of SGD for batch size 32


def choose_evenly(names: list[str], number: int) -> list[str]:
    """Return the given number of evenly spaced items, or all."""
    return [names[round(i)] for i in np.linspace(0, len(names) - 1, min(number, len(names)))]


def write_lists(folder: Path, classes: int, most: int, others: bool, out: Path) -> DataConfig:
    """Write lists of the selected images, and return the data section that reads them."""
    files = {c.name: sorted(c.iterdir()) for c in sorted((folder / "train").iterdir())}
    by_count = sorted(files, key=lambda c: -len(files[c]))
    chosen = choose_evenly(by_count, classes)
    if others:
        chosen = choose_evenly([c for c in by_count if c not in chosen], classes)
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        found = {c: files[c][:most] if split == "train" else sorted((folder / split / c).iterdir()) for c in chosen}
        lines = [f"{f.relative_to(folder)} {label}\n" for label, c in enumerate(chosen) for f in found[c]]
        (out / f"{split}.txt").write_text("".join(lines))
    return DataConfig(name="list", root=folder, train_list=out / "train.txt", test_list=out / "val.txt")


def configure(method: str, learns: str, data: DataConfig, args: argparse.Namespace) -> Config:
    config = recipes.folder(args.folder, method)
    values = {"queue": 64, "momentum": 0.99, "alpha": "auto"}
    known = {k: v for k, v in values.items() if k in type(config.method).__dataclass_fields__}
    pretrained = learns != "scratch"
    return replace(
        config,
        data=replace(data, image_size=args.size),
        views=replace(config.views, normalize=pretrained_input(args.model).normalize),
        model=ModelConfig(name=args.model, pretrained=pretrained, trainable="head" if learns == "head" else "all"),
        method=replace(config.method, **known),
        optim=OptimConfig(
            lr=RATES[learns] * args.batch / 32,
            head_lr=10 if learns == "all" else 1,
            nesterov=True,
            weight_decay=1e-4,
            warmup_epochs=1,
        ),
        train=replace(config.train, epochs=args.epochs, batch_size=args.batch, seeds=tuple(args.seeds)),
        log=replace(config.log, progress="plain"),
    )


def measure(args: argparse.Namespace) -> list[Row]:
    data = write_lists(args.folder, args.classes, args.most, args.others, args.out)
    loaded = load(replace(data, image_size=args.size))
    print(*loaded.describe(), sep="\n", flush=True)
    found: list[Row] = []
    for learns in args.learns:
        for method in args.methods:
            folders = train(configure(method, learns, data, args), args.out / learns / method, resume=True, data=loaded)
            (row,) = make_rows(run_folder.read_finished(folders))
            cells = {group: row.cell(group) for group in ("top1", "many", "medium", "few")}
            seconds = float(np.mean(row.values("seconds")))
            found.append({"learns": learns, "method": method, **cells, "seconds": round(seconds, 1)})
    return found


def compare_methods(args: argparse.Namespace) -> list[str]:
    """Return the seed-paired differences of the last method to each of the others, with their 95 % intervals."""
    lines = []
    for learns in args.learns:
        rows = {m: make_rows(run_folder.read_finished(args.out / learns / m))[0] for m in args.methods}
        *others, last = args.methods
        for other in others:
            for metric in ("top1", "few"):
                v = compare_seeds(rows[last].by_seed(metric), rows[other].by_seed(metric))
                says = f"{v.difference:+.1f} ± {v.half_width:.1f} ({v.outcome})" if v.outcome else "no verdict"
                lines.append(f"{learns}: {last} against {other}, {metric}: {says}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="output folder (default: runs/finetune, or runs/finetune-others)")
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--learns", nargs="+", choices=list(RATES), default=["head", "all"])
    args = parser.parse_args()
    args.out = args.out or Path("runs/finetune-others" if args.others else "runs/finetune")
    rows = measure(args)
    print(format_table(rows))
    print(*compare_methods(args), sep="\n")
    save(args.out / "finetune.json", {"where": describe_machine(choose_device("auto")), "rows": rows})


if __name__ == "__main__":
    main()
