"""The demo: four methods on embedded digits, with a table, a figure, a report, and suggestions for what to do next."""

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
from longtail.progress import log_info
from longtail.reporting.cells import Curve
from longtail.reporting.document import report
from longtail.reporting.plots import accuracy_by_frequency
from longtail.reporting.table import ResultRow, table
from longtail.reporting.tested import basis

METHODS = ("ce", "balanced-softmax", "supcon", "paco")


def demo(out: Path | str = "runs/demo", seeds: tuple[int, ...] = (0, 1, 2)) -> list[ResultRow]:
    """Train four methods on the embedded digits and return the rows of their table.

    Existing runs are resumed. Writes table.md, table.json, accuracy.png and report.html to `out`. This is the function behind
    `longtail demo`.

    Args:
        out: Output folder.
        seeds: Each method is trained once per seed.
    """
    out, data = Path(out), load(make_config("ce", seeds).data)
    for line in data.describe():
        log_info(line)
    for method in METHODS:
        with use_one_thread():
            train(make_config(method, seeds), out / method, resume=True, data=data)
    rows = table([out / method for method in METHODS], out)
    rows.sort(key=lambda row: METHODS.index(row.runs[0].config.method.name))
    curves = [Curve(r.label, r.runs[0].metrics["counts"], [run.metrics["per_class"] for run in r.runs]) for r in rows]
    with files.replace_file(out / "accuracy.png") as figure:
        accuracy_by_frequency({rows[0].data: curves}, figure)
    with files.replace_file(out / "report.html") as page:
        report([out / method for method in METHODS], page)
    return rows


def make_config(method: str, seeds: tuple[int, ...]) -> Config:
    """Return the recipe `digits-lt` for a method, with some seeds."""
    config = recipes.digits_lt(method)
    return replace(config, train=replace(config.train, seeds=seeds))


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Limit torch to one thread; the network is so small that more threads are not faster, and slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def describe_results(rows: list[ResultRow], out: Path) -> list[str]:
    """Return lines about the results of the demo, and commands to continue with.

    Args:
        rows: The rows that `demo` has returned.
        out: Its output folder.
    """
    command = "longtail" if shutil.which("longtail") else str(Path(sys.executable).parent / "longtail")
    test_set = basis(rows[0].runs[0], "few")
    few = {row.runs[0].config.method.name: sum(row.values("few")) / len(row.runs) for row in rows}
    return [
        "",
        f"Accuracy on classes with fewer than 20 training images ({test_set}): PaCo {few['paco']:.1f} %, cross-entropy "
        f"{few['ce']:.1f} %, Balanced Softmax {few['balanced-softmax']:.1f} %, SupCon {few['supcon']:.1f} %.",
        f"Accuracy by class frequency: {out}/accuracy.png; table: {out}/table.md and {out}/table.json.",
        f"Full report, with the reliability of these results: {out}/report.html",
        "",
        "Next:",
        f"  {command} recipes                                            list recipes, with published results",
        f"  {command} train cifar100-lt --method paco --imbalance 100    train the paper's benchmark (one GPU)",
        f"  {command} compare PATH/TO/IMAGES                             your own data: train/CLASS/*.jpg, val/CLASS/*.jpg",
    ]
