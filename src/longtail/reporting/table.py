"""Result tables with one row per configuration, as Markdown, JSON and terminal output, and tables by class for the terminal."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from longtail import files, run_folder
from longtail.errors import UserError, check_is_path, error_text
from longtail.metrics import METRICS, REPORT_METRICS, SHOT_GROUPS, TABLE_METRICS, mean_std
from longtail.reporting import run_artifacts
from longtail.reporting.confusion import class_names, find_confusions
from longtail.reporting.result_rows import ResultRow, make_rows
from longtail.reporting.significance import describe_few_support, explain_labels, rank_rows
from longtail.text import escape_markdown, escape_nonprintable, markdown_table, pluralize

MIN_WIDTH_FOR_SECONDS = 92  # columns of a terminal that shows the seconds of several methods
MIN_TABLE_WIDTH = 64  # columns; the caption is as wide as the table
MAX_WORD = 20  # columns that a word in a table may widen a column to


def compact_metrics(width: int) -> list[str]:
    """Return the metrics of the table for a terminal of this width, unless it is verbose."""
    return ["top1", *reversed(SHOT_GROUPS), *(["seconds"] if width >= MIN_WIDTH_FOR_SECONDS else [])]


def table(paths: Iterable[Path | str] | Path | str, out: Path | str | None = None) -> list[ResultRow]:
    """Return the finished runs at or below `paths` as rows.

    Args:
        paths: Run folders, or folders that contain runs.
        out: Folder to write table.md and table.json to; None writes nothing.
    """
    if out is not None:
        check_is_path(out, "out")
    rows = make_rows(run_folder.read_finished(paths))
    if out is not None:
        write_table(rows, Path(out))
    return rows


def write_table(rows: Sequence[ResultRow], out: Path) -> None:
    """Write OUT/table.md and OUT/table.json."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.write_text(out / "table.md", to_markdown(rows))
        files.write_json(out / "table.json", [row.to_dict() for row in rows])
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write the table to {out} ({error_text(error)}): choose another --out", kind="not-writable"
        ) from error


def table_caption(
    shown: Collection[str], rows: Sequence[ResultRow] = (), escape: Callable[[object], str] = escape_nonprintable
) -> str:
    """Return a caption that explains the columns and the test images behind `few`.

    Args:
        shown: Metrics of the table. Without "top1", the table is a continuation, and only its columns are explained.
        rows: Rows of the table.
        escape: Applied to the names of data sets.
    """
    # the heading "parameters" needs no explanation
    explained = "; ".join(
        METRICS[m].description for m in shown if METRICS[m].description not in ("", METRICS[m].heading)
    )
    if "top1" not in shown:
        return f"{explained.capitalize()}."
    opening = f"Last epoch, test set, in percent: {explained}. {_describe_seeds(rows)}"
    opening += "" if all(row.values(m) for row in rows for m in shown) else " –: no value."
    return opening + describe_few_support(((row.data, row.runs[0]) for row in rows), escape)


def _describe_seeds(rows: Sequence[ResultRow]) -> str:
    """Return a sentence on the seeds behind each value of a table."""
    seeds = {len(row.runs) for row in rows}
    if seeds == {1}:
        return "One seed."
    return f"Mean ± standard deviation over {f'{min(seeds)} seeds' if len(seeds) == 1 else 'seeds'}."


class MethodPoint(NamedTuple):
    """Values of a method for plots."""

    label: str
    rank: str
    """Rank label, such as "best" or "tied"."""
    values: Mapping[str, Sequence[float]]
    """For each metric, one value per seed."""
    published: float | None = None
    """Published accuracy."""


def points_by_dataset(rows: Sequence[ResultRow]) -> dict[str, list[MethodPoint]]:
    """Return the points of each data set, in the order of the rows."""
    panels: dict[str, list[MethodPoint]] = {}
    for row, rank in zip(rows, rank_rows(rows), strict=True):
        panels.setdefault(row.data, []).append(MethodPoint(row.label, rank, {m: row.values(m) for m in TABLE_METRICS}))
    return panels


def to_markdown(rows: Sequence[ResultRow]) -> str:
    """Return the table in Markdown, with all columns and a caption."""
    head = ["data", "method", "seeds", *(METRICS[m].heading for m in TABLE_METRICS)]
    body = [[row.data, row.label, str(len(row.runs)), *map(row.cell, TABLE_METRICS)] for row in rows]
    ranks, caption = rank_rows(rows), table_caption(TABLE_METRICS, rows, escape_markdown)
    if not any(ranks):
        return markdown_table(head, body, 2) + f"\n\n{caption}\n"
    head.insert(2, "")
    for line, rank in zip(body, ranks, strict=True):
        line.insert(2, rank)
    return markdown_table(head, body, 3) + f"\n\n{caption}{explain_labels(ranks)}\n"


def to_rich(rows: Sequence[ResultRow], width: int = 150, is_verbose: bool = False) -> Table:
    """Return the table for a terminal.

    Args:
        rows: The rows.
        width: Columns of the terminal; narrow terminals show fewer metrics.
        is_verbose: Whether all metrics are shown that fit, and not only those of `compact_metrics` that have a value.
    """
    every = [*REPORT_METRICS, *(m for m in TABLE_METRICS if m not in REPORT_METRICS)]  # ordered as in the report
    shown = [m for m in every if width >= METRICS[m].min_width] if is_verbose else compact_metrics(width)
    if not is_verbose:
        # Heads train in seconds: the time goes into features and cross-validation.
        are_heads = all(run.config.model.trainable == "head" for row in rows for run in row.runs)
        shown = [m for m in shown if any(row.values(m) for row in rows) and not (are_heads and m == "seconds")]
    cells = [[row.cell(m) if width >= 100 else row.cell(m).replace(" ", "") for m in shown] for row in rows]
    is_single = len({row.data for row in rows}) == 1  # then the data set is the title, which saves a column
    has_seeds = is_verbose or len({len(row.runs) for row in rows}) > 1  # the caption has the number of all rows
    ranks = rank_rows(rows)
    has_ranks = any(ranks)
    more = (
        ""
        if len(shown) == len(TABLE_METRICS) or not is_verbose
        else " `longtail table` writes all columns to table.md."
    )
    below = table_caption(shown, rows) + (" rank: by `all`." if has_ranks else "") + explain_labels(ranks) + more
    table = Table(
        title=plain_cell(rows[0].data) if is_single else None,
        caption=Text(below),
        title_justify="left",
        caption_justify="left",
        min_width=min(width, MIN_TABLE_WIDTH),
    )
    for heading in [*([] if is_single else ["data"]), "method", *(["rank"] if has_ranks else [])]:
        texts = [row.data if heading == "data" else row.label for row in rows]
        words = [4] if heading == "rank" else [5, *(len(word) for text in texts for word in text.split())]
        table.add_column(heading, min_width=min(max(words), MAX_WORD))  # words are not broken
    for metric in shown:
        table.add_column(METRICS[metric].heading, justify="right", no_wrap=True)
    if has_seeds:
        table.add_column("seeds", justify="right")
    for row, rank, values in zip(rows, ranks, cells, strict=True):
        labels: list[Text] = [plain_cell(row.label)] if is_single else [plain_cell(row.data), plain_cell(row.label)]
        table.add_row(*labels, *([rank] if has_ranks else []), *values, *([str(len(row.runs))] if has_seeds else []))
    return table


def plain_cell(text: str) -> Text:
    """Return a name as a cell: brackets are not markup, and control characters are escaped."""
    return Text(escape_nonprintable(text))


def shifted_table(rows: Sequence[ResultRow], width: int = 150) -> Table:
    """Return a table of the accuracy under shifted test priors, for a terminal of `width` columns."""
    caption = (
        "Accuracy if the test set were skewed like the training set (forward) or the opposite way (backward), "
        "by imbalance factor."
    )
    table = Table(caption=caption, caption_justify="left")
    table.add_column("method")
    first = rows[0].runs[0].metrics["shifted"]
    forward, backward = reversed(first["forward"]), first["backward"]
    keys = [("forward", f) for f in forward] + [("uniform", "")] + [("backward", f) for f in backward]
    if width < 130:
        keys = [keys[0], keys[len(keys) // 2], keys[-1]]
    for direction, factor in keys:
        table.add_column(f"{direction[:3]}. {factor}" if factor else direction, justify="right")
    for row in rows:
        shifts = [r.metrics["shifted"] for r in row.runs]
        values = [[v for s in shifts if (v := s[d].get(f) if f else s[d]) is not None] for d, f in keys]
        table.add_row(plain_cell(row.label), *(f"{mean_std(v)[0]:.1f}" if v else "–" for v in values))
    return table


# Tables of a single method for the terminal


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
            counts = ("–" if counts_C is None else f"{counts_C[c]:,}" for counts_C in (training_C, test_C))
            table.add_row(_class_cell(names[c]), *counts, f"{accuracy_C[c]:.1f} %")
        table.add_section()
    return table


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
