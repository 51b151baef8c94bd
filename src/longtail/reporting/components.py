"""Components of a page: figures with their data, sortable tables, sections, and formatted text."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from longtail.reporting.html import Element, Plot, SeriesStyle, el, swatch
from longtail.text import csv_safe, pluralize

Inline = Element | str
NBSP = "\u00a0"  # keeps a number and its unit on one line
MAX_JOINED_ITEMS = 4  # of an enumeration in a sentence


class TableCell(NamedTuple):
    """A cell of a sortable table."""

    content: Inline
    value: float | None = None
    """Number to sort by; None: sorted by text."""
    mark: str = ""
    """Label next to the content, such as "best" or "tied"."""


def figure(
    plot: Plot,
    name: str,
    data: Mapping[str, Sequence[Any]],
    caption: str,
    legend: Iterable[tuple[SeriesStyle, str]] = (),
) -> Element:
    """Return a plot with a legend, a caption and a link to its data.

    Args:
        plot: The plot.
        name: Name of the CSV file, without extension.
        data: Columns of the CSV file.
        caption: Text below the plot, after its title.
        legend: Styles and labels of the series.
    """
    items = [el("li", swatch(style), " ", label) for style, label in legend]
    below = el("figcaption", el("strong", plot.title + "."), f" {caption} ", data_link(name, data))
    return el("figure", plot.element(), el("ul", *items, class_="legend") if items else None, below)


def data_link(name: str, data: Mapping[str, Sequence[Any]]) -> Element:
    """Return a link that contains the columns as CSV, so that it needs neither a script nor a network."""
    text = io.StringIO()
    rows = [list(data), *itertools.zip_longest(*data.values())]
    safe = ([csv_safe(value) if isinstance(value, str) else value for value in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(safe)
    href = "data:text/csv;charset=utf-8," + quote(text.getvalue(), safe=" ,.:;()/+'", errors="replace")
    return el("a", "data", href=href, download=f"{name}.csv", class_="data", aria_label=f"Data of {name} as CSV")


def table(head: Sequence[str], body: Sequence[Sequence[TableCell]], caption: str, is_tall: bool = False) -> Element:
    """Return a sortable table.

    Args:
        head: Column headings.
        body: Lines of cells. The first cell is the name of the line; columns with values are aligned as numbers.
        caption: Text above the table.
        is_tall: Whether the table has many rows and scrolls vertically.
    """
    kinds = ["n" if any(line[i].value is not None for line in body) else None for i in range(len(head))]
    headings = [el("th", text, scope="col", class_=kind) for text, kind in zip(head, kinds, strict=True)]
    rows = [el("tr", *map(_cell, line, kinds, range(len(head)))) for line in body]
    content = el(
        "table",
        el("caption", el("span", caption)),
        el("thead", el("tr", *headings)),
        el("tbody", *rows),
        class_="sortable",
    )
    kind = "scroll tall" if is_tall else "scroll"
    return el("div", content, class_=kind, tabindex=0, role="region", aria_label=caption)


def _cell(cell: TableCell, kind: str | None, column: int) -> Element:
    mark = el("span", cell.mark, class_=f"mark {cell.mark.split()[0]}") if cell.mark else None
    content = (cell.content, " " if mark else None, mark)
    if column == 0:
        return el("th", *content, scope="row", data_value=cell.value)
    return el("td", *content, class_=kind, data_value=cell.value)


def section(title: str, *content: Element | None) -> Element:
    """Return a section with a heading of level 3."""
    return el("section", el("h3", title), *content)


def subsection(title: str, *content: Element | None) -> Element:
    """Return a section with a heading of level 4."""
    return el("section", el("h4", title), *content)


def grid(figures: Iterable[Element]) -> Element:
    """Return figures side by side if the page is wide enough."""
    return el("div", *figures, class_="grid")


def collapsible(title: str, *content: Element, is_open: bool = False, kind: str | None = None) -> Element:
    """Return content that a click on its title shows or hides."""
    return el("details", el("summary", title), *content, open=is_open, class_=kind)


def missing_note(what: str, reason: str) -> Element:
    """Return a note in place of something that cannot be shown."""
    return el("p", f"No {what}: {reason}.", class_="missing")


def user_text(text: str, max_length: int = 80) -> Element:
    """Return text from the user, isolated so that its writing direction does not affect the text around it.

    Long text is shortened and shown in full as a tooltip.
    """
    is_long = len(text) > max_length
    shown = f"{text[: max_length - 1]}…" if is_long else text
    return el("bdi", shown, class_="name", title=text if is_long else None)


def format_signed(value: float) -> str:
    """Format a number with its sign, using a minus sign instead of a hyphen."""
    return f"{value:+.1f}".replace("-", "−")


def format_difference(difference: float, half_width: float | None) -> str:
    """Format a difference of percentages with its interval."""
    interval = "" if half_width is None else f" ± {half_width:.1f}"
    return f"{difference:.1f}{interval}".replace("-", "−").replace(" ", NBSP)


def format_count(count: int, noun: str) -> str:
    """Format a number with a noun, as "one class" or "1,200 classes"."""
    return f"one {noun}" if count == 1 else pluralize(count, noun)


def join_items(items: Sequence[Sequence[Inline]]) -> list[Inline]:
    """Join items as in "a, b and c"; the last of very many are only counted."""
    most = MAX_JOINED_ITEMS
    shown = [*items] if len(items) <= most else [*items[: most - 1], [f"{len(items) - most + 1} more"]]
    joined: list[Inline] = []
    for i, item in enumerate(shown):
        joined += [*([] if i == 0 else [" and "] if i + 1 == len(shown) else [", "]), *item]
    return joined
