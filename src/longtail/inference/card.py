"""A model card: what a person should know before using the network, in Markdown."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from longtail import run_folder
from longtail.inference.deployed import facts
from longtail.inference.model import UNCALIBRATED, Model
from longtail.inference.snippets import snippet
from longtail.metrics import SHOT_GROUPS
from longtail.reporting import run_artifacts
from longtail.reporting.significance import group_support
from longtail.text import escape_markdown

CLASSES = 50  # in the table; of more the ends
GROUPS = {"top1": "all"} | {name: f"{name} ({group.description})" for name, group in SHOT_GROUPS.items()}
EXACTLY = (
    "the probabilities of `longtail predict` need exactly that, as the code above does it: another library's resizing, or one "
    "step where there are two, gives other gray levels; of 16-bit grays, which it does not know, the upper 8 bits are taken"
)
LIMITS = """\
- It knows the classes below and no others: an image of something else gets one of them, perhaps with confidence.
- Figures hold for images like those of the test set. Other cameras, crops or places change them.
- Rare classes were learned from few images: look at their own row, not at the mean.
- A temperature makes confidence honest on average over classes, not for each of them."""


def card(model: Model, to: str, file: str, difference: float, latency: dict[int, tuple[float, float]]) -> str:
    about = facts(model)
    record = run_folder.read(model.origin) if model.origin and (model.origin / run_folder.METRICS).is_file() else None
    parts = [
        f"# {escape_markdown(about['method'])}, {escape_markdown(about['network'])}",
        f"An image classifier of {len(model.class_names):,} classes, trained and exported by longtail {about['longtail']}.",
        "## Use\n\n" + f"```python\n{snippet(to, file, model.preprocessing)}\n```",
        "## Input and output\n\n" + lines(io_words(about)),
        "## Probabilities\n\n" + lines(probability_words(model, about)),
        "## Data and results\n\n"
        + (results(record) if record else "No figures are known to the file it was made from."),
        "## Limits\n\n" + LIMITS,
        "## Checks\n\n" + lines(check_words(difference, latency)),
        "## Classes\n\n" + classes(model, record),
    ]
    return "\n\n".join(parts) + "\n"


def io_words(about: dict[str, Any]) -> list[str]:
    cut = about["preprocessing"]
    inside = f"inside the file: (pixel / 255 - {list(cut['mean'])}) / {list(cut['std'])}"
    put = [f"`{name}`: {words}" for name, words in (about["input"] | about["outputs"]).items()]
    return [*put, f"to cut an image to size: {'; '.join(cut['steps'])} ({cut['resampling']})", EXACTLY, inside]


def probability_words(model: Model, about: dict[str, Any]) -> list[str]:
    found = UNCALIBRATED
    if model.temperature is not None:
        found = f"temperature {model.temperature:.4g}, found on validation images with each class counting alike"
    asked = f"changed to: {escape_markdown(model.prior.name)}" if model.prior else "not changed"
    frequencies = (
        f"class frequencies that the logits stand for: {about['logits_stand_for']}; in the probabilities {asked}"
    )
    return [found, frequencies]


def results(record: run_folder.FinishedRun) -> str:
    metrics, data, commit = record.metrics, record.environment["data"], record.environment.get("commit")
    counts = data.get("counts") or metrics.get("counts") or [0]
    said = [
        f"{data.get('images', sum(counts)):,} training images, {max(counts):,} of the largest class and {min(counts):,} of the "
        f"smallest ({escape_markdown(record.config.data.name)}, checksum {escape_markdown(data['checksum'])})",
        *held_out(metrics, counts),
        "the network of the last epoch, measured once on the test set; percentages, by group the mean over its classes",
        f"seed {record.seed}" + (f", commit {escape_markdown(commit)}" if commit else ""),
    ]
    rows = [(name, figure(metrics.get(key)), base(record, key)) for key, name in GROUPS.items()]
    rows += [
        (name, figure(metrics.get(key)), "")
        for key, name in (("macro_f1", "macro F1"), ("ece", "calibration error (ECE), without temperature"))
    ]
    return lines(said) + "\n\n" + table(("classes, by training images", "accuracy", "test images"), rows)


def held_out(metrics: dict[str, Any], counts: list[int]) -> list[str]:
    more = sum(metrics.get("counts") or counts) - sum(counts)
    return [f"{more:,} more were held out for validation; groups go by both together"] if more > 0 else []


def base(record: run_folder.FinishedRun, group: str) -> str:
    """The test images that a figure rests on."""
    if group == "top1":
        images_C = run_artifacts.test_counts(record)
        images = None if images_C is None else int(images_C.sum())
    else:
        found = group_support(record, group)
        images = found.num_images if found else None
    return "–" if images is None else f"{images:,}"


def check_words(difference: float, latency: dict[int, tuple[float, float]]) -> list[str]:
    sizes = " and ".join(str(n) for n in latency)
    times = [
        f"batch {n}, on the CPU that wrote it: {old:.1f} ms before, {new:.1f} ms exported"
        for n, (old, new) in latency.items()
    ]
    return [f"run after it was written, at batch {sizes}: its logits differ by {difference:.1e} at most", *times]


def classes(model: Model, record: run_folder.FinishedRun | None) -> str:
    """From the most frequent to the rarest."""
    counts = np.zeros(len(model.class_names), int) if model.counts is None else model.counts
    order = np.argsort(-counts, kind="stable").tolist()
    shown = order if len(order) <= CLASSES else [*order[: CLASSES // 2], None, *order[-CLASSES // 2 :]]
    accuracy, tested_C = (
        (record.metrics.get("per_class"), run_artifacts.test_counts(record)) if record else (None, None)
    )
    rows = [("…", "…", "…", "…") if c is None else class_row(model, c, accuracy, tested_C) for c in shown]
    return table(("class", "training images", "accuracy", "test images"), rows)


def class_row(
    model: Model, c: int, accuracy: list[float | None] | None, tested_C: np.ndarray | None
) -> tuple[str, str, str, str]:
    count = "–" if model.counts is None else f"{model.counts[c]:,}"
    tested = "–" if tested_C is None else f"{tested_C[c]:,}"
    return escape_markdown(model.class_names[c]), count, figure(accuracy[c] if accuracy else None), tested


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def lines(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    every = [heading, ("---", *["---:"] * (len(heading) - 1)), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in every)
