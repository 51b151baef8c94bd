"""Tables for the terminal after training: the accuracy of each class, and the most frequent confusions."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from longtail.reporting import run_artifacts
from longtail.reporting.confusion import class_names, find_confusions
from longtail.reporting.result_rows import ResultRow
from longtail.reporting.table import plain_cell
from longtail.text import escape_nonprintable, pluralize

MAX_CLASSES = 20  # with more classes, only the worst and the best are listed
NUM_WORST, NUM_BEST = 10, 5
MAX_CONFUSIONS = 8
MAX_NAME = 28  # characters of a class name


def class_accuracy_table(row: ResultRow) -> Table:
    """Return a table of the classes with their training images, test images and accuracy, the worst first.

    Of many classes, the worst and the best are listed. Classes without test images are left out.
    """
    accuracy_C, names = row.per_class(), class_names(row.runs[0])
    training_C, test_C = run_artifacts.train_counts(row.runs[0]), run_artifacts.test_counts(row.runs[0])
    tested = np.flatnonzero(np.isfinite(accuracy_C))
    rarity_C = np.zeros(len(accuracy_C)) if training_C is None else training_C
    worst_first = tested[np.lexsort((rarity_C[tested], accuracy_C[tested]))]
    is_short = len(tested) <= MAX_CLASSES
    title = "Accuracy by class" if is_short else f"Accuracy by class: the {NUM_WORST} worst and the {NUM_BEST} best"
    notes = [] if is_short else [f"{pluralize(len(tested), 'class')} in total; `longtail report` lists all."]
    if untested := len(accuracy_C) - len(tested):
        notes.append(f"Without test images: {pluralize(untested, 'class')}.")
    table = Table(
        title=title, caption=Text(" ".join(notes)) if notes else None, title_justify="left", caption_justify="left"
    )
    table.add_column("class")
    for heading in ("training images", "test images", "accuracy"):
        table.add_column(heading, justify="right")
    parts = [worst_first] if is_short else [worst_first[:NUM_WORST], worst_first[-NUM_BEST:]]
    for part in parts:
        for c in part:
            counts = (_format_count(counts_C, c) for counts_C in (training_C, test_C))
            table.add_row(_class_cell(names[c]), *counts, f"{accuracy_C[c]:.1f} %")
        table.add_section()
    return table


def _format_count(counts_C: np.ndarray | None, c: int) -> str:
    return "–" if counts_C is None else f"{counts_C[c]:,}"


def _class_cell(name: str) -> Text:
    shown = escape_nonprintable(name)
    return plain_cell(shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 1]}…")


def confusion_table(row: ResultRow) -> Table | None:
    """Return a table of the most frequent confusions over all seeds; None if there are none, or if they are unknown."""
    confusions = find_confusions(row.runs)
    if not confusions:
        return None
    names, seeds = class_names(row.runs[0]), len(row.runs)
    caption = f"Sums over {seeds} seeds." if seeds > 1 else None
    table = Table(title="Most frequent confusions", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("class")
    table.add_column("predicted as")
    table.add_column("images", justify="right")
    for confusion in confusions[:MAX_CONFUSIONS]:
        cells = (_class_cell(names[c]) for c in (confusion.truth, confusion.predicted))
        table.add_row(*cells, f"{confusion.times:,} of {confusion.images:,}")
    return table


def tables_by_class(rows: Sequence[ResultRow]) -> list[Table]:
    """Return the tables of classes and confusions of a single method; none if there are several methods."""
    if len(rows) != 1:
        return []
    return [table for table in (class_accuracy_table(rows[0]), confusion_table(rows[0])) if table is not None]
