"""Sections of a page on the results, the cost, the data and settings, and the images to check of a data set's runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from longtail.config import ProjectionSettings, ThreeViewSettings, ViewConfig
from longtail.metrics import COST_METRICS, METRICS, REPORT_METRICS, SHOT_GROUPS, mean_std
from longtail.reporting import run_artifacts
from longtail.reporting.class_accuracy import NO_COUNTS, shade_by_rank
from longtail.reporting.confusion import class_names
from longtail.reporting.dataset_results import ClassList, DatasetResults
from longtail.reporting.html import (
    Element,
    Plot,
    Scale,
    SeriesStyle,
    TableCell,
    collapsible,
    data_link,
    el,
    figure,
    format_count,
    grid,
    join_items,
    make_scale,
    missing_note,
    section,
    swatch,
    table,
    user_text,
)
from longtail.reporting.result_rows import ResultRow, format_mean_std
from longtail.reporting.significance import explain_labels, rank_rows
from longtail.reporting.table import table_caption
from longtail.run_folder import FinishedRun
from longtail.suspects import (
    HEADINGS,
    MAX_SHOWN,
    SUSPECTS,
    ImageFeatures,
    Suspect,
    find_suspects,
    read_splits,
    suspect_rows,
    thumbnail_name,
)

GROUP_RANGES = ", ".join(f"{name} ({group.description})" for name, group in SHOT_GROUPS.items())

# Results


def describe_images(dataset: DatasetResults) -> str | None:
    """Return a sentence on the numbers of images and classes; None if the runs do not store the class counts."""
    first = dataset.comparable[0].runs[0]
    n_C, images_C = run_artifacts.train_counts(first), run_artifacts.test_counts(first)
    if n_C is None:
        return None
    total = format_image_counts(dataset.comparable) or f"{n_C.sum():,}"
    tested = "" if images_C is None else f", {format_count(int(images_C.sum()), 'test image')}"
    per_class = f"{n_C.max():,} to {n_C.min():,} per class"
    return f"{total} training images of {format_count(len(n_C), 'class')} ({per_class}){tested}."


def results_section(dataset: DatasetResults) -> Element:
    """Return the table of results, with the best and tied methods marked, over all images and on rare classes."""
    marks = {m: rank_rows(dataset.rows, m) for m in ("top1", dataset.rare_group) if m}
    body = []
    for i, row in enumerate(dataset.rows):
        name = el("span", swatch(dataset.style(row)), " ", user_text(row.label))
        cells = [
            TableCell(row.cell(m), _mean_or_none(row, m), marks[m][i] if m in marks else "") for m in REPORT_METRICS
        ]
        body.append([TableCell(name), *cells, TableCell(str(len(row.runs)), len(row.runs))])
    head = ["method", *(METRICS[m].heading for m in REPORT_METRICS), "seeds"]
    labels = {label for column in marks.values() for label in column}
    caption = table_caption(REPORT_METRICS, dataset.comparable) + explain_labels(labels)
    columns = {"method": [row.label for row in dataset.rows]} | {
        m: [_mean_or_none(row, m) for row in dataset.rows] for m in REPORT_METRICS
    }
    below = el("p", caption, " ", data_link("results", columns), class_="small")
    return section("Results", table(head, body, f"Accuracy in percent{_mean_note(dataset.rows)}"), below)


def _mean_note(rows: Sequence[ResultRow]) -> str:
    """Return a note that values are means over seeds; empty if every row has one seed."""
    return ", mean ± standard deviation over seeds" if any(len(row.runs) > 1 for row in rows) else ""


def _mean_or_none(row: ResultRow, metric: str) -> float | None:
    return row.mean(metric) if row.values(metric) else None


# Cost


def cost_section(dataset: DatasetResults) -> Element:
    """Return the costs of each method and plots of accuracy against them; the first plot is like the paper's Fig. 1."""
    head = ["method", *(METRICS[m].description for m in COST_METRICS)]
    body = [[TableCell(user_text(row.label)), *(_cost_cell(row, m) for m in COST_METRICS)] for row in dataset.rows]
    plotted = [m for m in COST_METRICS if m != "parameters"]
    plots = [plot for m in plotted if (plot := _cost_figure(dataset, m)) is not None]
    notes = [el("p", text, class_="small") for text in _cost_notes(dataset.rows)]
    costs = table(head, body, f"Cost{_mean_note(dataset.rows)}")
    return section("Cost", costs, *notes, grid(plots) if len(dataset.rows) > 1 else None)


def _cost_values(row: ResultRow, metric: str) -> list[float]:
    return [value / METRICS[metric].cost_unit for value in row.values(metric)]


def _cost_cell(row: ResultRow, metric: str) -> TableCell:
    values = _cost_values(row, metric)
    shown = values[:1] if metric == "parameters" else values
    return TableCell(format_mean_std(shown, METRICS[metric].digits), mean_std(values)[0] if values else None)


def _cost_notes(rows: Sequence[ResultRow]) -> list[str]:
    notes = []
    if len({tuple(row.values("parameters")[:1]) for row in rows}) == 1 < len(rows):
        notes.append("The deployed networks have the same size: differences in latency are measurement noise.")
    if any(run.metrics.get("together", 1) > 1 for row in rows for run in row.runs):
        notes.append("Some seeds were trained in parallel: seconds and memory are those of all seeds on the device.")
    return notes


def _cost_figure(dataset: DatasetResults, metric: str) -> Element | None:
    rows = [row for row in dataset.rows if _cost_values(row, metric)]
    if len(rows) < 2:
        return None
    label = METRICS[metric].description
    points = [(mean_std(_cost_values(row, metric))[0], *mean_std(row.values("top1"))) for row in rows]
    y = make_scale([edge for _, m, std in points for edge in (m - (std or 0), m + (std or 0))])
    x = Scale(0, 1.08 * max(x for x, _, _ in points))
    description = f"Test accuracy of {format_count(len(rows), 'method')} against {label}; up and to the left is better."
    plot = Plot(f"Accuracy against {label}", description, x, y, label, "test accuracy, %")
    for row, (x_mean, m, std) in zip(rows, points, strict=True):
        if std:
            plot.strokes([(x_mean, m - std, m + std)], dataset.style(row), "")
        plot.dots([(x_mean, m)], dataset.style(row), [f"{row.label}: {m:.1f} % at {x_mean:,.1f}"], radius=5)
    columns: dict[str, list[Any]] = {"method": [row.label for row in rows], label: [x for x, _, _ in points]}
    columns |= {"accuracy": [m for _, m, _ in points]}
    legend = [(dataset.style(row), row.label) for row in rows]
    return figure(plot, f"accuracy_against_{metric}", columns, "Up and to the left is better.", legend)


# Data and settings


def data_section(dataset: DatasetResults) -> Element:
    """Return the class counts, facts about the runs, and the settings of each method."""
    classes = dataset.classes
    counts = counts_figure(dataset.data, classes) if classes else missing_note("plot of the class counts", NO_COUNTS)
    facts = el("div", counts, run_facts(dataset), class_="grid")
    return section("Data and training", facts, settings_table(dataset))


def counts_figure(title: str, classes: ClassList) -> Element:
    """Return a bar plot of the training images of each class."""
    n = classes.counts[classes.order]
    y = Scale(0.7, 1.6 * max(int(n.max()), 1), log=True)
    number = format_count(len(classes.counts), "class")
    description = f"{number}, with {n.max():,} to {n.min():,} training images."
    x, labels = Scale(0, len(n)), ("classes, from frequent to rare", "training images")
    plot = Plot("Training images of each class", description, x, y, *labels, x_ticks=False)
    shade_by_rank(plot, n)
    names = [f"{classes.names[c]}: {classes.counts[c]:,} images" for c in classes.order]
    plot.bars([(i, i + 0.9, max(float(v), 0.7)) for i, v in enumerate(n)], SeriesStyle(0), names, base=0.7)
    columns = {"class": [classes.names[c] for c in classes.order], "training images": n.tolist()}
    caption = f"{title}; shaded by group: {GROUP_RANGES} training images.{classes.subset_note}"
    return figure(plot, "counts", columns, caption)


def run_facts(dataset: DatasetResults) -> Element:
    """Return a list of facts about the data, the network and the runs."""
    first, classes = dataset.comparable[0].runs[0], dataset.classes
    config, environment, images_C = first.config, first.environment, run_artifacts.test_counts(first)
    fractions = {row.held_out for row in dataset.comparable}
    folders = sorted({str(run.folder.parent) for row in dataset.rows for run in row.runs})
    facts = {
        "data": dataset.data,
        "training images": format_image_counts(dataset.comparable),
        "classes": f"{len(classes.counts):,}" if classes else None,
        "test images": f"{int(images_C.sum()):,}" if images_C is not None else None,
        "held out for validation": ", or ".join(f"{100 * f:g} %" if f else "nothing" for f in sorted(fractions)),
        "network": config.model.name + (", pretrained" if config.model.pretrained else ""),
        "training": f"{format_count(config.train.epochs, 'epoch')}, batch size {config.train.batch_size}",
        "device": f"{environment.get('device', '–')}, {environment['precision']}",
        "started": environment["started"],
        "checksum of the images": environment["data"]["checksum"],
        "commit": environment.get("commit"),
        "run folders": ", ".join(folders),
    }
    pairs = [
        el("div", el("dt", key), el("dd", user_text(str(value), max_length=1000)))
        for key, value in facts.items()
        if value is not None
    ]
    return el("dl", *pairs, class_="facts")


def format_image_counts(rows: Sequence[ResultRow]) -> str | None:
    """Return the number of training images, or its range: methods that held some out were trained on fewer."""
    seen = {row.runs[0].environment["data"].get("images") for row in rows} - {None}
    return " to ".join(f"{n:,}" for n in sorted({min(seen), max(seen)})) if seen else None


def settings_table(dataset: DatasetResults) -> Element:
    """Return a collapsible table of the settings of each method."""
    body = [[TableCell(user_text(row.label)), *map(TableCell, _settings_cells(row.runs[0]))] for row in dataset.rows]
    head = ["method", "method settings", "augmentation", "optimizer"]
    return collapsible("Settings of each method", table(head, body, "From config.json of the first seed"))


def _settings_cells(run: FinishedRun) -> Iterator[str]:
    config, chosen = run.config, run.environment.get("chosen") or {}
    settings = {key: value for key, value in config.identity()["method"].items() if key != "name"}
    if settings.get("alpha") == "auto" and "alpha" in chosen:
        settings["alpha"] = f"auto ({chosen['alpha']:.3g})"
    yield ", ".join(f"{key} {_format_setting(value)}" for key, value in settings.items()) or "–"
    query, key = (_format_view(view) for view in (config.views.query, config.views.key))
    others = "second and third view" if isinstance(config.method, ThreeViewSettings) else "second view"
    yield f"{query}; {others}: {key}" if isinstance(config.method, ProjectionSettings) and key != query else query
    optim = config.optim
    name = optim.name.upper()
    text = f"{name}, learning rate {optim.lr:g}, {optim.schedule}, weight decay {optim.weight_decay:g}"
    second_epochs = config.method.second_epochs
    yield text + (f"; then {format_count(second_epochs, 'epoch')} of a second stage" if second_epochs else "")


def _format_view(view: ViewConfig) -> str:
    crop = f"{view.crop} crop" if view.crop != "none" else ""
    extras = {"flip": view.flip, f"{view.policy} policy": view.policy != "none", f"cutout {view.cutout}": view.cutout}
    return ", ".join(filter(None, [crop, *(name for name, is_used in extras.items() if is_used)])) or "none"


def _format_setting(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "–")  # type: ignore[arg-type]
    if isinstance(value, list | tuple):
        return " ".join(map(_format_setting, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Images to check


TITLE = "Images to check"
MAX_PATH = 120  # characters of a path
NO_SPLITS = "features.npz or predictions.npz is missing or cannot be read"


def check_section(dataset: DatasetResults) -> Element:
    """Return the images to check, by the first of the best methods' runs that stores features and predictions."""
    for row in dataset.comparable:
        for run in row.runs:
            if splits := read_splits(run.folder, len(run.metrics["per_class"])):
                return section(TITLE, *_check_parts(run, row.label, splits))
    return section(TITLE, missing_note("search for label errors and duplicates", NO_SPLITS))


def _check_parts(run: FinishedRun, label: str, splits: Sequence[ImageFeatures]) -> list[Element]:
    suspects, names = find_suspects(splits), class_names(run)
    searched = [[format_count(len(images.labels_N), f"{images.split} image")] for images in splits]
    intro = el(
        "p",
        "Searched: ",
        *join_items(searched),
        f", with the features and predictions of {label}, seed {run.seed}. Look at each image before you change anything: "
        "in many cases the network is wrong and the label is correct, more often if the accuracy is low "
        f"(here {run.metrics['top1']:.1f} %).",
        class_="small",
    )
    parts = [intro, _label_table(run, suspects.labels, names), _duplicate_table(run, suspects.duplicates, names)]
    rows = suspect_rows(suspects, names)
    if not rows:
        return parts
    columns = {heading: [row[i] for row in rows] for i, heading in enumerate(HEADINGS)}
    listed = f"The list of {format_count(len(rows), 'image')} is also in {SUSPECTS} of the run folder. "
    return [*parts, el("p", listed, data_link("suspects", columns), class_="small")]


def _label_table(run: FinishedRun, suspects: Sequence[Suspect], names: Sequence[str]) -> Element:
    if not suspects:
        return el("p", "No suspected label errors.")
    body = [
        [
            TableCell(_pictures(run, [suspect], names)),
            TableCell(user_text(names[suspect.label])),
            TableCell(user_text(names[suspect.suggested or 0])),
            TableCell(f"{100 * suspect.score:.0f} %", suspect.score),
            TableCell(suspect.split),
            TableCell(user_text(suspect.id, MAX_PATH)),
        ]
        for suspect in suspects[:MAX_SHOWN]
    ]
    caption = (
        f"Suspected label errors{_subset(suspects)}: another class is probable, and the most similar images belong to it. "
        "Score: 100 % minus the predicted probability of the label."
    )
    return table(["image", "label", "suggested label", "score", "split", "file"], body, caption)


def _duplicate_table(run: FinishedRun, suspects: Sequence[Suspect], names: Sequence[str]) -> Element:
    if not suspects:
        return el("p", "No near-duplicates.")
    body = []
    for suspect in suspects[:MAX_SHOWN]:
        original = suspect.original or suspect
        labels = dict.fromkeys(names[image.label] for image in (suspect, original))
        body.append(
            [
                TableCell(_pictures(run, [suspect, original], names)),
                TableCell(el("span", *join_items([[user_text(name)] for name in labels]))),
                TableCell(f"{suspect.score:.3f}", suspect.score),
                TableCell(suspect.split),
                TableCell(user_text(suspect.id, MAX_PATH)),
                TableCell(original.split),
                TableCell(user_text(original.id, MAX_PATH)),
            ]
        )
    caption = (
        f"Near-duplicates{_subset(suspects)}: their features are much more similar than those of typical neighbors. Copies in "
        "both training and test images make the accuracy too high; if two copies have different labels, at least one is wrong."
    )
    return table(["images", "label", "similarity", "split", "file", "split", "duplicate of"], body, caption)


def _subset(suspects: Sequence[Suspect]) -> str:
    return f", the first {MAX_SHOWN} of {len(suspects):,}" if len(suspects) > MAX_SHOWN else ""


def _pictures(run: FinishedRun, images: Sequence[Suspect], names: Sequence[str]) -> Element:
    each = (_picture(run, image, f"{image.split} image labeled {names[image.label]}") for image in images)
    return el("span", *each, class_="images large")


def _picture(run: FinishedRun, suspect: Suspect, alt: str) -> Element:
    uri = run_artifacts.read_thumbnail_file(run, thumbnail_name(suspect))
    return el("img", src=uri, alt=alt, title=alt) if uri else el("span", "–")
