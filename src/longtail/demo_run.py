"""`longtail demo`: four methods on the embedded digits, a table, a plot, a page, and what to do next."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from longtail import files, recipes
from longtail.config import Config
from longtail.data.sources import load
from longtail.engine.train import train
from longtail.reporting.class_accuracy import Curve
from longtail.reporting.page import report
from longtail.reporting.plots import accuracy_by_frequency
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.significance import group_support
from longtail.reporting.table import table

METHODS = ("ce", "balanced-softmax", "supcon", "paco")


def demo(out: Path | str = "runs/demo", seeds: tuple[int, ...] = (0, 1, 2)) -> list[ResultRow]:
    """Train the four methods (resuming what is there), then write table.md, table.json, accuracy.png and report.html in OUT."""
    out, data = Path(out), load(demo_config("ce", seeds).data)
    print(*data.describe(), sep="\n", flush=True)
    for method in METHODS:
        with one_thread():
            train(demo_config(method, seeds), out / method, resume=True, data=data)
    rows = table([out / m for m in METHODS], out)
    rows.sort(key=lambda row: METHODS.index(row.runs[0].config.method.name))
    curves = [Curve(r.label, r.runs[0].metrics["counts"], [run.metrics["per_class"] for run in r.runs]) for r in rows]
    with files.replace_file(out / "accuracy.png") as picture:
        accuracy_by_frequency({rows[0].data: curves}, picture)
    with files.replace_file(out / "report.html") as page:
        report([out / m for m in METHODS], page)
    return rows


def demo_config(method: str, seeds: tuple[int, ...]) -> Config:
    config = recipes.digits_lt(method)
    return replace(config, train=replace(config.train, seeds=seeds))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The network is so small that a second thread gains nothing, and loses much where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def verdict(rows: list[ResultRow], out: Path) -> list[str]:
    """What the demo showed, in words, and where to go from here."""
    command = "longtail" if shutil.which("longtail") else str(Path(sys.executable).parent / "longtail")
    base = group_support(rows[0].runs[0], "few")
    few = {row.runs[0].config.method.name: sum(row.values("few")) / len(row.runs) for row in rows}
    return [
        "",
        f"On the classes with fewer than 20 images ({base}) PaCo recognizes {few['paco']:.1f} % where cross-entropy recognizes "
        f"{few['ce']:.1f} % (Balanced Softmax {few['balanced-softmax']:.1f} %, SupCon {few['supcon']:.1f} %).",
        f"Accuracy by class frequency is drawn in {out}/accuracy.png; the table is in {out}/table.md and {out}/table.json.",
        f"Full results and their reliability: {out}/report.html",
        "",
        "Next:",
        f"  {command} recipes                                            what else can be run, with published figures",
        f"  {command} train cifar100-lt --method paco --imbalance 100    the paper's benchmark (one GPU)",
        f"  {command} compare PATH/TO/IMAGES                             your own: train/CLASS/*.jpg, val/CLASS/*.jpg",
    ]
