"""README.md: it is short, and each of its figures is that of results/."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longtail import metrics
from longtail.metrics import mean_std, paired_difference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAX_LINES, MAX_IMAGE_BYTES = 150, 400 * 1024
TABLE = "cifar100_lt"
METHODS = ("paco", "balanced-softmax", "ce", "supcon")
OWN_IMAGES = "birds-lt, cpu"  # the folder of results/own_images.json that the README describes
PLACEHOLDER = "<!-- own images"
NAMES = [r"CIFAR-100-LT", r"cifar100-lt", r"ResNet-32", r"H200", r"ICCV 2021", r"Python 3\.11 to 3\.13", r"95 %"]


def read_results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"results/{name}.json").read_text())


def find_row(method: str, imbalance: int = 100) -> dict[str, Any]:
    """Return the row of a method in the table of CIFAR-100-LT."""
    (row,) = (r for r in read_results(TABLE)["rows"] if (r["method"], r["imbalance"]) == (method, imbalance))
    return row


def format_mean(row: dict[str, Any], metric: str) -> str:
    mean, std = mean_std(row["metrics"][metric]["values"])
    return f"{mean:.1f} ± {std:.1f}"


def format_row(method: str) -> str:
    """Return the line of the README's table for a method."""
    row = find_row(method)
    published = f" {row['paper']:.1f} |" if row["paper"] else " – |"
    cells = [row["label"], *(format_mean(row, metric) for metric in ("top1", "few", "ece"))]
    return "| " + " | ".join(cells) + " |" + published


def format_lead(method: str, other: str, metric: str) -> str:
    """Return the seed-paired difference of two methods with its interval, without a sign."""
    first, second = (find_row(name)["metrics"][metric]["values"] for name in (method, other))
    difference, half_width = paired_difference(first, second)
    return f"{abs(difference):.1f} ± {half_width:.1f}"


def seconds_of_a_run() -> float:
    """Return the seconds of all epochs, without compilation."""
    (step,) = (r for r in read_results("speed")["step"]["rows"] if (r["step"], r["seeds"]) == ("fused", 1))
    return find_row("paco")["epochs"] * step["s_per_epoch"]


def describe_own_images() -> str | None:
    """Return the sentence about the automatic settings on a folder of photographs; None if they were not measured."""
    path = ROOT / "results/own_images.json"
    folder = json.loads(path.read_text())["folders"].get(OWN_IMAGES) if path.exists() else None
    if folder is None or not folder["rows"].get("default"):
        return None
    rows = folder["rows"]["default"]
    minutes = (sum(row["seconds"] for row in rows) / len(rows) + folder["features_seconds"]) / 60
    top1, few = (mean_std([row[metric] for row in rows]) for metric in ("top1", "few"))
    return (
        f"On {sum(folder['counts'])} photographs of {len(folder['counts'])} species of birds, training takes {minutes:.0f}"
        f" minutes of processor time without a GPU. The accuracy is {top1[0]:.1f} ± {top1[1]:.1f} % over all classes and"
        f" {few[0]:.1f} ± {few[1]:.1f} % on the rare ones ([details](results/own_images.md))."
    )


def test_own_images_are_described():
    sentence = describe_own_images()
    if sentence is None or PLACEHOLDER in README:
        pytest.skip(f"to be written into the README: {sentence}")
    assert " ".join(sentence.split()) in " ".join(README.split())


def list_sentences() -> list[str]:
    """Return every part of the README that has a figure, made from results/, without the sentence on own images."""
    (many_seeds, few_seeds) = sorted({len(find_row(m)["seeds"]) for m in METHODS}, reverse=True)
    epochs = {find_row(method)["epochs"] for method in METHODS}
    assert len(epochs) == 1
    (counts,) = {tuple(run["counts"]) for run in read_results(TABLE)["runs"] if run["imbalance"] == 100}
    return [
        *(format_row(method) for method in METHODS),
        f"at imbalance 100, ResNet-32, {epochs.pop()} epochs",
        f"largest class has {max(counts)} training images, the smallest {min(counts)}.",
        f"{many_seeds} seeds (PaCo, Balanced Softmax) or {few_seeds} seeds",
        f"rare classes (< {metrics.SHOT_GROUPS['few'].high + 1:.0f} images)",
        f"on the rare classes by {format_lead('paco', 'balanced-softmax', 'few')} points",
        f"behind it over all classes by {format_lead('paco', 'balanced-softmax', 'top1')} ",
        f"one run of {find_row('paco')['epochs']} epochs: {seconds_of_a_run():.0f} s on one H200",
        f"{len(read_results('methods')['rows'])} methods, other data",
    ]


@pytest.mark.parametrize("sentence", list_sentences())
def test_figures_are_those_of_results(sentence):
    assert sentence in " ".join(README.split())


def test_there_are_no_other_figures():
    text = " ".join(README.split())
    for sentence in [*list_sentences(), describe_own_images() or ""]:
        text = text.replace(sentence, "")
    text = re.sub("|".join(NAMES), "", text)
    text = re.sub(r"\]\([^)]*\)|<!--.*?-->|epochs=\d+|top\(\d+\)", "", text)  # links, comments, arguments
    assert re.findall(r"\S*\d\S*", text) == []


def test_paco_is_ahead_on_rare_classes_and_behind_over_all():
    """The words of the README, which `format_lead` takes the sign from."""
    values = {m: find_row(m)["metrics"] for m in ("paco", "balanced-softmax")}
    few, top1 = (
        paired_difference(*(values[m][metric]["values"] for m in ("paco", "balanced-softmax")))
        for metric in ("few", "top1")
    )
    assert few[0] > few[1] and -top1[0] > top1[1]


def test_it_is_short_and_has_one_image():
    assert len(README.splitlines()) <= MAX_LINES
    (image,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert (ROOT / image).stat().st_size < MAX_IMAGE_BYTES
