"""The pieces a page is made of: figures with their data, tables that can be sorted, sections."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from longtail.reporting.html import Element, el
from longtail.reporting.svg import Plot, SeriesStyle, swatch
from longtail.text import csv_safe, pluralize

Inline = Element | str
NBSP = "\u00a0"  # keeps a number and its unit on one line


class TableCell(NamedTuple):
    """What a cell says, and the number it is sorted by."""

    says: Inline
    value: float | None = None
    words: str = ""
    """Set beside it as a mark: best, tied."""


def figure(
    plot: Plot,
    name: str,
    data: Mapping[str, Sequence[Any]],
    caption: str,
    legend: Iterable[tuple[SeriesStyle, str]] = (),
) -> Element:
    """A plot, what it shows in words, and its data as a file."""
    names = [el("li", swatch(look), " ", label) for look, label in legend]
    below = el("figcaption", el("strong", plot.title + "."), f" {caption} ", download(name, data))
    return el("figure", plot.element(), el("ul", *names, class_="legend") if names else None, below)


def download(name: str, data: Mapping[str, Sequence[Any]]) -> Element:
    """A link that holds the columns as CSV: it needs no script, and no network."""
    text = io.StringIO()
    rows = [list(data), *itertools.zip_longest(*data.values())]
    harmless = ([csv_safe(value) if isinstance(value, str) else value for value in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(harmless)
    href = "data:text/csv;charset=utf-8," + quote(text.getvalue(), safe=" ,.:;()/+'", errors="replace")
    return el("a", "data", href=href, download=f"{name}.csv", class_="data", aria_label=f"Data of {name} as CSV")


def table(head: Sequence[str], body: Sequence[Sequence[TableCell]], caption: str, tall: bool = False) -> Element:
    """The first column names the row; columns that have values are set as numbers. `tall`: rows are many."""
    kinds = ["n" if any(line[i].value is not None for line in body) else None for i in range(len(head))]
    headings = [el("th", text, scope="col", class_=kind) for text, kind in zip(head, kinds, strict=True)]
    rows = [el("tr", *map(_cell, line, kinds, range(len(head)))) for line in body]
    whole = el(
        "table",
        el("caption", el("span", caption)),
        el("thead", el("tr", *headings)),
        el("tbody", *rows),
        class_="sortable",
    )
    return el("div", whole, class_="scroll tall" if tall else "scroll", tabindex=0, role="region", aria_label=caption)


def _cell(cell: TableCell, kind: str | None, column: int) -> Element:
    mark = el("span", cell.words, class_=f"mark {cell.words.split()[0]}") if cell.words else None
    says = (cell.says, " " if mark else None, mark)
    if column == 0:
        return el("th", *says, scope="row", data_value=cell.value)
    return el("td", *says, class_=kind, data_value=cell.value)


def section(title: str, *content: Element | None) -> Element:
    return el("section", el("h3", title), *content)


def subsection(title: str, *content: Element | None) -> Element:
    return el("section", el("h4", title), *content)


def grid(figures: Iterable[Element]) -> Element:
    """Side by side where there is room."""
    return el("div", *figures, class_="grid")


def folded(title: str, *content: Element, is_open: bool = False, kind: str | None = None) -> Element:
    return el("details", el("summary", title), *content, open=is_open, class_=kind)


def absent(what: str, why: str) -> Element:
    """In the place of what cannot be shown."""
    return el("p", f"No {what}: {why}.", class_="absent")


def name(text: str, most: int = 80) -> Element:
    """A user's word among ours: its direction does not turn the rest round, and of a very long one the beginning shows."""
    cut = len(text) > most
    return el("bdi", f"{text[: most - 1]}…" if cut else text, class_="name", title=text if cut else None)


def signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def points(difference: float, half_width: float | None) -> str:
    """A difference of percentages with its interval."""
    interval = "" if half_width is None else f" ± {half_width:.1f}"
    return f"{difference:.1f}{interval}".replace("-", "−").replace(" ", NBSP)


def plural(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else pluralize(count, noun)


def listed(items: Sequence[Sequence[Inline]], most: int = 4) -> list[Inline]:
    """As in "a, b and c"; of very many the first ones."""
    shown = [*items] if len(items) <= most else [*items[: most - 1], [f"{len(items) - most + 1} more"]]
    out: list[Inline] = []
    for i, item in enumerate(shown):
        out += [*([] if i == 0 else [" and "] if i + 1 == len(shown) else [", "]), *item]
    return out
