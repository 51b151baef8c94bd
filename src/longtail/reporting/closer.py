"""A closer look at one method: training curves, calibration, confusions and rare classes with images, the map of features."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.config import GPaCo, PaCo
from longtail.metrics import shot_groups
from longtail.reporting import reading
from longtail.reporting.chapter import DatasetResults, mean
from longtail.reporting.embedding import WORKER
from longtail.reporting.html import Element, el
from longtail.reporting.parts import TableCell, absent, figure, folded, grid, name, plural, section, subsection, table
from longtail.reporting.svg import Plot, Scale, SeriesStyle, around
from longtail.reporting.table import ResultRow
from longtail.reporting.training import curves
from longtail.run_folder import FinishedRun
from longtail.theory.closed_forms import center, positives

CLOSER = 4  # methods that are looked at, at most: images and maps take room and time
MAPPED = 1_000  # test images on the map
LEAST = 10  # fewer make no map
NO_EXAMPLES = "examples/ is not there, or cannot be read"


def method_details(chapter: DatasetResults) -> list[Element]:
    """Of one method, or folded away, of those that are best on rare classes."""
    metric = chapter.rare or "top1"
    known = [row for row in chapter.peers if row.values(metric)]
    chosen = sorted(known, key=lambda row: -mean(row, metric))[:CLOSER]
    if len(chapter.rows) == 1:
        return list(look_at(chapter.rows[0]))
    looks = [folded(row.label, *look_at(row), is_open=i == 0) for i, row in enumerate(chosen)]
    others = len(chapter.rows) - len(chosen)
    more = f" Of the {others} others `longtail report RUN` shows the same." if others else ""
    words = f"Curves and calibration over all seeds; images and features of the first that has them.{more}"
    return [section("A closer look at each method", el("p", words, class_="small"), *looks)]


def look_at(row: ResultRow) -> Iterable[Element]:
    first = row.runs[0]
    mapped = next((run for run in row.runs if (run.folder / reading.FEATURES).exists()), first)
    yield subsection("Training", training(row))
    yield subsection("Calibration and features", grid([calibration(row), feature_map(mapped)]))
    yield subsection(f"What is taken for what (seed {first.seed})", *confusions(first))
    yield subsection(f"Rare classes, best and worst (seed {first.seed})", *rare_classes(first))


# Training curves


def training(row: ResultRow) -> Element:
    logs = {f"seed {run.seed}": reading.log(run) for run in row.runs}
    drawn = curves(row.label, logs, optimal_P_sup(row.runs[0]))
    without = [label for label, log in logs.items() if not log]
    if not without or len(without) == len(logs):
        return drawn
    return el("div", absent(f"curves of {', '.join(without)}", "log.jsonl is not there, or holds no epoch"), drawn)


def optimal_P_sup(run: FinishedRun) -> float | None:
    """Mean over images of the centers' share where PaCo's loss is least (Remark 2).

    Known for images drawn as they come; another sampler has other shares.
    """
    config, counts = run.config, run.metrics.get("counts")
    if not isinstance(config.method, PaCo | GPaCo) or config.train.sampler != "uniform" or not counts:
        return None
    alpha = (run.environment.get("chosen") or {}).get("alpha") if config.method.alpha == "auto" else config.method.alpha
    if alpha is None:
        return None
    everyone = config.method.contrast == "global"
    images = config.train.batch_size * (config.train.processes if everyone else 1)  # that meet in a step
    K_C = positives(counts, config.method.queue, images)
    return float(np.average(center(alpha, K_C), weights=counts))


# Calibration


class Bin(NamedTuple):
    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def pooled_bins(runs: Sequence[FinishedRun]) -> list[Bin]:
    """The bins of the confidence that hold images, over the seeds together."""
    stored = [run.metrics["calibration"] for run in runs if run.metrics.get("calibration")]
    found = []
    for bins in zip(*stored, strict=False):
        n = sum(b["count"] for b in bins)
        if n:
            sums = [sum(b["count"] * b[key] for b in bins if b["count"]) / n for key in ("confidence", "accuracy")]
            found.append(Bin(bins[0]["low"], bins[0]["high"], n, *sums))
    return found


def calibration(row: ResultRow) -> Element:
    bins = pooled_bins(row.runs)
    if not bins:
        return absent("calibration diagram", "metrics.json has no calibration (an older version wrote it)")
    shows = "Accuracy of the test images in bins of the network's confidence; on the diagonal the two are equal."
    square = Scale(0, 100)
    plot = Plot(f"{row.label}: calibration", shows, square, square, "confidence, %", "accuracy, %")
    names = [f"confidence {b.confidence:.1f} %, right {b.accuracy:.1f} %, {plural(b.images, 'image')}" for b in bins]
    plot.bars([(b.low + 0.4, b.high - 0.4, b.accuracy) for b in bins], SeriesStyle(0), names)
    plot.reference([(0, 0), (100, 100)], "as sure as right")
    ece = f" Mean distance {row.cell('ece')} points (ECE)." if row.values("ece") else ""
    columns = {key: [getattr(b, key) for b in bins] for key in Bin._fields}
    words = f"A bar below the line: surer than right; above it: less sure.{ece}"
    return figure(plot, "calibration", columns, words)


# Features


def feature_map(run: FinishedRun) -> Element:
    """t-SNE of test features, head and tail marked."""
    found, counts = reading.features(run, MAPPED), run.metrics.get("counts")
    if found is None or not counts:
        return absent("feature map", "features.npz is not there (an older version wrote the run) or cannot be read")
    x_NF, y_N = found
    place_N2 = WORKER.embed(x_NF) if len(y_N) >= LEAST else None
    if place_N2 is None:
        return absent("feature map", f"fewer than {LEAST} test images, or features that are all alike")
    x, y = (around(place_N2[:, i].tolist()) for i in (0, 1))
    shows = "Test images placed so that like features lie close, marked by the size of their class."
    plot = Plot(f"{run.config.method.label}: map of features", shows, x, y, x_ticks=False, y_ticks=False)
    group_N = np.array([""] * len(y_N), dtype=object)
    for i, (group, mask) in enumerate(shot_groups(counts).items()):
        here = mask[y_N]
        group_N[here] = group
        plot.cloud(
            [(float(x), float(y)) for x, y in place_N2[here]],
            SeriesStyle(i),
            f"classes with {group} training images",
            2.6,
        )
    columns = {"x": place_N2[:, 0].round(2).tolist(), "y": place_N2[:, 1].round(2).tolist()}
    columns |= {"class": list(map(names_of(run), y_N.tolist())), "group": group_N.tolist()}
    seen = ((i, group) for i, group in enumerate(shot_groups(counts)) if group in group_N)
    legend = [(SeriesStyle(i), f"classes with {group} training images") for i, group in seen]
    words = f"t-SNE of the features of {plural(len(y_N), 'test image')}: axes and distances between far groups mean nothing."
    return figure(plot, "features", columns, words, legend)


# Images


PAIRS = 12  # confusions that are listed where no images were stored


def confusions(run: FinishedRun) -> list[Element]:
    entries = reading.examples(run).get("confusions")
    without = [] if entries is not None else [absent("examples of confusions", NO_EXAMPLES)]
    entries = confused(run) if entries is None else entries
    if entries is None:
        return without
    if not entries:
        return [*without, el("p", "Every test image was recognized.")]
    return [*without, _confusion_table(run, entries)]


def confused(run: FinishedRun) -> list[dict[str, Any]] | None:
    """The most frequent wrong answers by metrics.json, without images; None where it has them not."""
    if not run.metrics.get("confusion"):
        return None
    times_CC = np.array(run.metrics["confusion"], dtype=float)
    share_CC = times_CC / np.maximum(times_CC.sum(1, keepdims=True), 1)
    np.fill_diagonal(share_CC, 0)
    worst = np.argsort(-share_CC, axis=None, kind="stable")[:PAIRS]
    found = [(*divmod(int(i), len(share_CC)), float(share_CC.flat[i])) for i in worst]
    return [{"truth": t, "predicted": p, "share": share, "items": []} for t, p, share in found if share > 0]


def _confusion_table(run: FinishedRun, entries: list[dict[str, Any]]) -> Element:
    names = names_of(run)
    body = []
    for entry in entries:
        truth, taken = names(entry["truth"]), names(entry["predicted"])
        pictures = images(run, entry["items"], f"Test image of class {truth}, taken for {taken}")
        share = 100 * float(entry["share"])
        body.append(
            [TableCell(name(truth)), TableCell(name(taken)), TableCell(f"{share:.1f} %", share), TableCell(pictures)]
        )
    head = ["class", "taken for", "share", "examples"]
    return table(head, body, "The most frequent wrong answers, as shares of the test images of the class")


def rare_classes(run: FinishedRun) -> list[Element]:
    found = reading.examples(run)
    if not {"best_rare", "worst_rare"} & found.keys():
        return [absent("examples of rare classes", f"{NO_EXAMPLES}; the table of every class has their accuracy")]
    best = found.get("best_rare", [])
    known = {entry["class"] for entry in best}
    # older runs list some classes twice
    worst = [entry for entry in found.get("worst_rare", []) if entry["class"] not in known]
    titles = {"Recognized best, of the rarer half of the classes": best, "Recognized worst": worst}
    tables = [_rare_table(run, entries, title) for title, entries in titles.items() if entries]
    return tables if best else [el("p", "Of the rarer half of the classes none is recognized."), *tables]


def _rare_table(run: FinishedRun, entries: list[dict[str, Any]], title: str) -> Element:
    names, counts, body = names_of(run), run.metrics.get("counts"), []
    for entry in entries:
        label, n = names(entry["class"]), counts[entry["class"]] if counts else None
        pictures = images(run, entry["items"], f"Test image of class {label}")
        numbers = [
            TableCell("–" if n is None else f"{n:,}", n),
            TableCell(f"{entry['accuracy']:.1f}", entry["accuracy"]),
        ]
        body.append([TableCell(name(label)), *numbers, TableCell(pictures)])
    return table(["class", "training images", "accuracy, %", "examples"], body, title)


def names_of(run: FinishedRun) -> Any:
    known = run.metrics.get("class_names") or []
    return lambda c: str(known[c]) if 0 <= c < len(known) else f"class {c}"


def images(run: FinishedRun, items: Iterable[int], says: str) -> Element:
    found = [uri for item in items if (uri := reading.thumbnail(run, item))]
    return el("span", *(el("img", src=uri, alt=says, title=says) for uri in found), class_="images")
