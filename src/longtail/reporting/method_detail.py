"""Details of one method: training curves, calibration, feature map, confusions, and the best and worst rare classes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.config import GPaCoSettings, PaCoSettings
from longtail.metrics import SHOT_GROUPS, shot_groups
from longtail.reporting import run_artifacts
from longtail.reporting.confusion import MAX_SMALL_CLASSES, class_names, matrix_section
from longtail.reporting.dataset_results import DatasetResults
from longtail.reporting.embedding import WORKER
from longtail.reporting.html import (
    LEFT,
    RIGHT,
    WIDTH,
    Element,
    Plot,
    Scale,
    SeriesStyle,
    TableCell,
    collapsible,
    el,
    figure,
    format_count,
    grid,
    make_scale,
    missing_note,
    section,
    subsection,
    table,
    user_text,
)
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.training_curves import curve_figures
from longtail.run_folder import FinishedRun
from longtail.theory.closed_forms import center, positives

MAX_DETAILED_METHODS = 4  # images and feature maps take space and time
MAX_MAPPED_IMAGES = 1_000
MIN_MAPPED_IMAGES = 10
MAX_CONFUSIONS = 12  # rows of the table if no example images are stored
MAX_MAP_NAME = 18  # characters of a class name in the feature map
NOTE_LETTER, NOTE_HEIGHT = 5.6, 11  # units per letter and line of these names
NO_EXAMPLES = "examples/ is missing or cannot be read"


def method_details(dataset: DatasetResults) -> list[Element]:
    """Return the details of the only method, or collapsible details of the methods that are best on rare classes."""
    metric = dataset.rare_group or "top1"
    known = [row for row in dataset.comparable if row.values(metric)]
    chosen = sorted(known, key=lambda row: -row.mean(metric))[:MAX_DETAILED_METHODS]
    if len(dataset.rows) == 1:
        return list(detail_sections(dataset.rows[0]))
    details = [collapsible(row.label, *detail_sections(row), is_open=i == 0) for i, row in enumerate(chosen)]
    others = len(dataset.rows) - len(chosen)
    more = f" `longtail report RUN` shows the details of the other {format_count(others, 'method')}." if others else ""
    note = f"Curves and calibration: all seeds. Images and features: the first seed that has them.{more}"
    return [section("Details of each method", el("p", note, class_="small"), *details)]


def detail_sections(row: ResultRow) -> Iterable[Element]:
    """Yield the sections on one method."""
    first = row.runs[0]
    mapped = next((run for run in row.runs if (run.folder / run_artifacts.FEATURES).exists()), first)
    yield subsection("Training", training_section(row))
    yield subsection("Calibration and features", grid([calibration_figure(row), feature_map(mapped)]))
    confusions = [
        subsection("Confusion matrix", matrix_section(row)),
        subsection(f"Most frequent confusions (seed {first.seed})", *confusion_section(first)),
    ]
    yield from [grid(confusions)] if len(first.metrics["per_class"]) <= MAX_SMALL_CLASSES else confusions
    yield subsection(f"Best and worst classes of the rarer half (seed {first.seed})", *rare_class_section(first))


# Training curves


def training_section(row: ResultRow) -> Element:
    """Return the training curves of all seeds."""
    logs = {f"seed {run.seed}": run_artifacts.read_log(run) for run in row.runs}
    curves = curve_figures(row.label, logs, optimal_P_sup(row.runs[0]))
    missing = [label for label, log in logs.items() if not log]
    if not missing or len(missing) == len(logs):
        return curves
    note = missing_note(f"curves of {', '.join(missing)}", "log.jsonl is missing or contains no epoch")
    return el("div", note, curves)


def optimal_P_sup(run: FinishedRun) -> float | None:
    """Return the mean over images of P_sup, the probability of the centers, at the minimum of PaCo's loss (Remark 2).

    None for other methods, and for samplers other than the uniform one, for which the expected positives differ.
    """
    config, counts = run.config, run.metrics.get("counts")
    if not isinstance(config.method, PaCoSettings | GPaCoSettings) or config.train.sampler != "uniform" or not counts:
        return None
    alpha = (run.environment.get("chosen") or {}).get("alpha") if config.method.alpha == "auto" else config.method.alpha
    if alpha is None:
        return None
    is_global = config.method.contrast == "global"
    images = config.train.batch_size * (config.train.processes if is_global else 1)  # contrasted in one step
    K_C = positives(counts, config.method.queue, images)
    return float(np.average(center(alpha, K_C), weights=counts))


# Calibration


class CalibrationBin(NamedTuple):
    """Test images whose confidence is in a range; all values but `images` are percentages."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def pool_bins(runs: Sequence[FinishedRun]) -> list[CalibrationBin]:
    """Return the bins that contain images, pooled over seeds."""
    stored = [run.metrics["calibration"] for run in runs if run.metrics.get("calibration")]
    pooled = []
    for bins in zip(*stored, strict=False):
        n = sum(b["count"] for b in bins)
        if n:
            means = [sum(b["count"] * b[key] for b in bins if b["count"]) / n for key in ("confidence", "accuracy")]
            pooled.append(CalibrationBin(bins[0]["low"], bins[0]["high"], n, *means))
    return pooled


def calibration_figure(row: ResultRow) -> Element:
    """Return the reliability diagram of a method."""
    bins = pool_bins(row.runs)
    if not bins:
        return missing_note("calibration diagram", "metrics.json has no calibration (written by an older version)")
    description = "Accuracy of the test images by confidence of the network; on the diagonal the two are equal."
    square = Scale(0, 100)
    plot = Plot(f"{row.label}: calibration", description, square, square, "confidence, %", "accuracy, %")
    names = [
        f"confidence {b.confidence:.1f} %, accuracy {b.accuracy:.1f} %, {format_count(b.images, 'image')}" for b in bins
    ]
    plot.bars([(b.low + 0.4, b.high - 0.4, b.accuracy) for b in bins], SeriesStyle(0), names)
    plot.reference([(0, 0), (100, 100)], "perfect calibration")
    ece = f" Expected calibration error (ECE): {row.cell('ece')} points." if row.values("ece") else ""
    columns = {key: [getattr(b, key) for b in bins] for key in CalibrationBin._fields}
    caption = f"Overconfident below the diagonal, underconfident above it.{ece}"
    return figure(plot, "calibration", columns, caption)


# Features


def feature_map(run: FinishedRun) -> Element:
    """Return a t-SNE map of test features, marked by shot group."""
    features, counts = run_artifacts.read_features(run, MAX_MAPPED_IMAGES), run.metrics.get("counts")
    if features is None or not counts:
        reason = "features.npz is missing (older versions did not write it) or cannot be read"
        return missing_note("feature map", reason)
    x_NF, y_N = features
    position_N2 = WORKER.embed(x_NF) if len(y_N) >= MIN_MAPPED_IMAGES else None
    if position_N2 is None:
        return missing_note("feature map", f"fewer than {MIN_MAPPED_IMAGES} test images, or the features do not vary")
    x, y = (make_scale(position_N2[:, i].tolist()) for i in (0, 1))
    description = "Test images placed so that similar features are close together, marked by the size of their class."
    plot = Plot(f"{run.config.method.label}: feature map", description, x, y, x_ticks=False, y_ticks=False)
    group_N, names = np.array([""] * len(y_N), dtype=object), class_names(run)
    for i, (group, mask) in enumerate(shot_groups(counts).items()):
        group_N[mask[y_N]] = group
        for c in np.unique(y_N[mask[y_N]]).tolist():
            points = [(float(x), float(y)) for x, y in position_N2[y_N == c]]
            plot.cloud(points, SeriesStyle(i), f"{names[c]} ({counts[c]:,} training images)", 2.6)
    add_class_names(plot, position_N2, y_N, names)
    columns = {"x": position_N2[:, 0].round(2).tolist(), "y": position_N2[:, 1].round(2).tolist()}
    columns |= {"class": [names[c] for c in y_N.tolist()], "group": group_N.tolist()}
    present = ((i, group) for i, group in enumerate(shot_groups(counts)) if group in group_N)
    legend = [(SeriesStyle(i), f"{group}: {SHOT_GROUPS[group].description} training images") for i, group in present]
    images = format_count(len(y_N), "test image")
    caption = (
        f"t-SNE of the features of {images}. Hover over a dot to see its class. The names of classes are at their centers if "
        "there is space. The axes, and distances between distant groups, have no meaning."
    )
    return figure(plot, "features", columns, caption, legend)


def add_class_names(plot: Plot, position_N2: np.ndarray, y_N: np.ndarray, names: Sequence[str]) -> None:
    """Write names of classes at the medians of their dots. Names that would overlap others are left out.

    Args:
        plot: The plot.
        position_N2: The positions of the images.
        y_N: Their classes.
        names: The names of all classes.
    """
    occupied: list[tuple[float, float, float]] = []  # center and half of the width
    for c in np.unique(y_N).tolist():
        name = names[c]
        name = name if len(name) <= MAX_MAP_NAME else f"{name[: MAX_MAP_NAME - 1]}…"
        x, y = plot.locate(*np.median(position_N2[y_N == c], axis=0).tolist())
        half = NOTE_LETTER * len(name) / 2
        x = min(max(x, LEFT + half), WIDTH - RIGHT - half)
        if all(abs(x - u) > half + w + 2 or abs(y - v) > NOTE_HEIGHT for u, v, w in occupied):
            occupied.append((x, y, half))
            plot.note(x, y, name)


# Example images


def confusion_section(run: FinishedRun) -> list[Element]:
    """Return the most frequent confusions, with example images if the run has them."""
    entries = run_artifacts.read_examples(run).get("confusions")
    notes = [] if entries is not None else [missing_note("examples of confusions", NO_EXAMPLES)]
    entries = most_confused(run) if entries is None else entries
    if entries is None:
        return notes
    if not entries:
        return [*notes, el("p", "Every test image was classified correctly.")]
    return [*notes, _confusion_table(run, entries)]


def most_confused(run: FinishedRun) -> list[dict[str, Any]] | None:
    """Return the most frequent confusions from the confusion matrix, without images; None if there is no matrix."""
    if not run.metrics.get("confusion"):
        return None
    times_CC = np.array(run.metrics["confusion"], dtype=float)
    share_CC = times_CC / np.maximum(times_CC.sum(1, keepdims=True), 1)
    np.fill_diagonal(share_CC, 0)
    worst = np.argsort(-share_CC, axis=None, kind="stable")[:MAX_CONFUSIONS]
    found = [(*divmod(int(i), len(share_CC)), float(share_CC.flat[i])) for i in worst]
    return [{"truth": t, "predicted": p, "share": share, "items": []} for t, p, share in found if share > 0]


def _confusion_table(run: FinishedRun, entries: list[dict[str, Any]]) -> Element:
    names = class_names(run)
    body = []
    for entry in entries:
        truth, predicted = names[entry["truth"]], names[entry["predicted"]]
        images = thumbnails(run, entry["items"], f"Test image of class {truth}, predicted as {predicted}")
        share = 100 * float(entry["share"])
        cells = [TableCell(user_text(truth)), TableCell(user_text(predicted))]
        body.append([*cells, TableCell(f"{share:.1f} %", share), TableCell(images)])
    head = ["class", "predicted as", "share", "examples"]
    return table(head, body, "Most frequent confusions, as shares of the test images of the class")


def rare_class_section(run: FinishedRun) -> list[Element]:
    """Return the rare classes with the highest and lowest accuracy, with example images."""
    examples = run_artifacts.read_examples(run)
    if not {"best_rare", "worst_rare"} & examples.keys():
        reason = f"{NO_EXAMPLES}; the table of all classes shows their accuracy"
        return [missing_note("examples of rare classes", reason)]
    best = examples.get("best_rare", [])
    listed = {entry["class"] for entry in best}
    # older versions listed some classes twice
    worst = [entry for entry in examples.get("worst_rare", []) if entry["class"] not in listed]
    titles = {
        "Highest accuracy among the rarer half of the classes": best,
        "Lowest accuracy among the rarer half of the classes": worst,
    }
    tables = [_rare_class_table(run, entries, title) for title, entries in titles.items() if entries]
    none_correct = el("p", "No image of the rarer half of the classes was classified correctly.")
    return [*([] if best else [none_correct]), grid(tables)]


def _rare_class_table(run: FinishedRun, entries: list[dict[str, Any]], title: str) -> Element:
    names, counts, body = class_names(run), run.metrics.get("counts"), []
    for entry in entries:
        label, n = names[entry["class"]], counts[entry["class"]] if counts else None
        images = thumbnails(run, entry["items"], f"Test image of class {label}")
        numbers = [
            TableCell("–" if n is None else f"{n:,}", n),
            TableCell(f"{entry['accuracy']:.1f}", entry["accuracy"]),
        ]
        body.append([TableCell(user_text(label)), *numbers, TableCell(images)])
    return table(["class", "training images", "accuracy, %", "examples"], body, title)


def thumbnails(run: FinishedRun, items: Iterable[int], alt: str) -> Element:
    """Return the thumbnails of test images.

    Args:
        run: The run that stores them.
        items: Indices of the test images.
        alt: Text alternative of each image.
    """
    uris = [uri for item in items if (uri := run_artifacts.read_thumbnail(run, item))]
    return el("span", *(el("img", src=uri, alt=alt, title=alt) for uri in uris), class_="images")
