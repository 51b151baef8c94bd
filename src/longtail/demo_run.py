"""The demo: four methods on embedded digits, with a table, a figure, a report, and suggestions for what to do next."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from longtail import files, recipes
from longtail.comparison import compare
from longtail.config import Config, PaCoSettings
from longtail.engine.device import use_threads
from longtail.errors import check_is_path
from longtail.reporting.class_accuracy import Curve
from longtail.reporting.plots import accuracy_by_frequency
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.summary import summary_lines

METHODS = ("ce", "balanced-softmax", "supcon", "paco")
EPOCHS = 80
"""Selected with the learning rate of the recipe on images that neither the training set nor the test set has, for all methods
alike (benchmarks/demo.py)."""


def demo(out: Path | str = "runs/demo", seeds: tuple[int, ...] = (0, 1, 2)) -> list[ResultRow]:
    """Train four methods on the embedded digits and return the rows of their table.

    Existing runs are resumed. Writes table.md, table.json, accuracy.png, comparison.png and report.html to `out`. This is the
    function behind `longtail demo`.

    Args:
        out: Output folder.
        seeds: Each method is trained once per seed.
    """
    check_is_path(out, "out")
    out = Path(out)
    with use_threads(1):  # the network is so small that more threads are not faster, and slower on a busy machine
        rows = compare("digits-lt", METHODS, out, budget=lambda method: make_config(method, seeds))
    rows.sort(key=lambda row: METHODS.index(row.runs[0].config.method.name))
    curves = [Curve(r.label, r.runs[0].metrics["counts"], [run.metrics["per_class"] for run in r.runs]) for r in rows]
    with files.replace_file(out / "accuracy.png") as figure:
        accuracy_by_frequency({rows[0].data: curves}, figure)
    return rows


def make_config(method: str, seeds: tuple[int, ...]) -> Config:
    """Return the configuration of a method: the recipe `digits-lt` with more epochs and, for PaCo, the alpha of the theory."""
    config = recipes.with_epochs(recipes.digits_lt(method), EPOCHS)
    if isinstance(config.method, PaCoSettings):
        config = replace(config, method=replace(config.method, alpha="auto"))
    return replace(config, train=replace(config.train, seeds=seeds))


def describe_results(rows: list[ResultRow], out: Path) -> list[str]:
    """Return lines about the results of the demo: what the seeds show, and where the files are.

    Args:
        rows: The rows that `demo` has returned.
        out: Its output folder.
    """
    return [
        "",
        *summary_lines(rows),
        "",
        f"written to {out}/table.md, {out}/table.json, {out}/accuracy.png and {out}/comparison.png",
        f"full report, with the reliability of these results: {out}/report.html",
    ]


def list_next_commands() -> list[tuple[str, str]]:
    """Return commands to continue with, and their purposes."""
    command = "longtail" if shutil.which("longtail") else str(Path(sys.executable).parent / "longtail")
    return [
        (f"{command} train PATH/TO/IMAGES", "your own images: train/CLASS/*.jpg and test/CLASS/*.jpg"),
        (f"{command} compare PATH/TO/IMAGES", "several methods on your own images"),
        (f"{command} recipes", "recipes, with published results"),
        (f"{command} train cifar100-lt --method paco", "the paper's benchmark, on a GPU"),
    ]
