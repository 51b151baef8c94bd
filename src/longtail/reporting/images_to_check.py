"""Suspected label errors and near-duplicates, with images."""

from collections.abc import Sequence

from longtail.reporting import run_artifacts
from longtail.reporting.components import (
    TableCell,
    data_link,
    format_count,
    join_items,
    missing_note,
    section,
    table,
    user_text,
)
from longtail.reporting.confusion import class_names
from longtail.reporting.dataset_results import DatasetResults
from longtail.reporting.html import Element, el
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
        "many labels are correct and the network is wrong, the more so the lower its accuracy is "
        f"(here {run.metrics['top1']:.1f} %).",
        class_="small",
    )
    parts = [intro, _label_table(run, suspects.labels, names), _duplicate_table(run, suspects.duplicates, names)]
    rows = suspect_rows(suspects, names)
    if not rows:
        return parts
    columns = {heading: [row[i] for row in rows] for i, heading in enumerate(HEADINGS)}
    listed = f"All {format_count(len(rows), 'image')} as CSV, also in {SUSPECTS} of the run folder: "
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
        "Doubt: 100 % minus the probability of the label"
    )
    return table(["image", "label", "suggested label", "doubt", "split", "file"], body, caption)


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
        "both training and test images make the accuracy too high; copies with different labels have a wrong label"
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
