"""The building blocks of a page: HTML and SVG as a tree of elements, plots as inline SVG, figures, tables and sections.

All text and attributes are escaped when a tree is rendered. Plots are colored by the style sheet of the page, so that they
follow its light and dark themes. A plot is WIDTH by HEIGHT units. Phones show it at about four fifths of this size, large
screens slightly enlarged.
"""

import csv
import html
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from longtail.text import csv_safe, pluralize

Value = str | int | float | bool | None

VOID_TAGS = frozenset({"br", "hr", "img", "link", "meta"})  # have no end tag
# Control characters, surrogates (from file names in another encoding), and marks that change the writing direction, which
# could make a name look like another.
UNSAFE_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class TrustedText(str):
    """Text that is rendered without escaping. Only for the style sheet and the scripts of this package, never for user text."""


@dataclass(frozen=True)
class Element:
    """An HTML or SVG element."""

    tag: str
    attributes: dict[str, Value]
    children: "tuple[Element | TrustedText | str, ...]"

    def __str__(self) -> str:
        return "".join(render(self))


def el(tag: str, *children: "Element | str | float | None", **attributes: Value) -> Element:
    """Create an element, as in `el("td", "a < b", class_="name", data_value=3)`.

    Args:
        tag: Name of the element.
        children: Child elements and text; None is ignored.
        attributes: Attributes; a trailing underscore is removed and other underscores become hyphens. None and False omit
            the attribute.
    """
    kept = tuple(c if isinstance(c, Element | str) else str(c) for c in children if c is not None)
    return Element(tag, attributes, kept)


def render(node: "Element | TrustedText | str") -> Iterator[str]:
    """Yield the text of a tree in pieces."""
    if isinstance(node, TrustedText):
        yield node
    elif isinstance(node, str):
        yield escape(node)
    else:
        yield f"<{node.tag}{''.join(map(_render_attribute, node.attributes, node.attributes.values()))}>"
        for child in node.children:
            yield from render(child)
        if node.tag not in VOID_TAGS:
            yield f"</{node.tag}>"


def escape(text: str) -> str:
    """Escape text, and replace characters that a page must not contain."""
    return html.escape(UNSAFE_CHARACTERS.sub("\ufffd", text))


def _render_attribute(name: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


# Plots


WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 12, 42  # margins for ticks and labels: a tick of six digits does not touch the label
MARKERS_PER_LINE = 6
DIGIT_WIDTH = 7  # units per digit of a tick label, including space
COLORS = 7  # defined in the style sheet as classes c0 to c6
MARKERS = (
    "m-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0z",  # circle
    "m-{r}-{r}h{d}v{d}h-{d}z",  # square
    "m0-{b}l{b} {b}l-{b} {b}l-{b}-{b}z",  # diamond
    "m0-{b}l{b} {d}h-{B}z",  # triangle
    "m0 {b}l{b}-{d}h-{B}z",  # inverted triangle
)
Point = tuple[float, float]


class SeriesStyle(NamedTuple):
    """Color, marker and dashes of a series, from its position in the legend."""

    number: int

    @property
    def color(self) -> str:
        """Class of the style sheet."""
        return f"c{self.number % COLORS}"

    @property
    def dashes(self) -> str | None:
        """Value of stroke-dasharray; None for a solid line."""
        return (None, "6 3", "2 3")[self.number // COLORS % 3]

    def marker(self, x: float, y: float, radius: float = 3.5) -> str:
        """Return the path data of a marker at (x, y)."""
        shape = MARKERS[(self.number + self.number // COLORS) % len(MARKERS)]
        sizes = {"r": radius, "d": 2 * radius, "b": 1.25 * radius, "B": 2.5 * radius}
        lengths = {name: format_coordinate(size) for name, size in sizes.items()}
        return f"M{format_coordinate(x)} {format_coordinate(y)}" + shape.format(**lengths)


@dataclass(frozen=True)
class Scale:
    """A map from data to the unit interval."""

    low: float
    high: float
    log: bool = False
    """Logarithmic."""
    is_descending: bool = False
    """Large values come first."""
    is_integer: bool = False
    """Ticks are integers."""

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return 1 - share if self.is_descending else share

    def ticks(self) -> list[float]:
        """Return the values of the ticks."""
        if self.log and self.high / self.low > 6:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) < 5 else (1,)
            return [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
        step = max(_round_step((self.high - self.low) / 6), 1 if self.is_integer else 0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return power * next(m for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))


def make_scale(values: Iterable[float], log: bool = False, is_descending: bool = False) -> Scale:
    """Return a scale that contains the values, with a margin on both sides.

    Args:
        values: Data; values that are not finite, or not positive on a logarithmic scale, are ignored.
        log: Whether the scale is logarithmic.
        is_descending: Whether large values come first.
    """
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if log:
        return Scale(low / 1.12, high * 1.12, True, is_descending)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - margin, high + margin, is_descending=is_descending)


PERCENT = Scale(0, 112)  # leaves space above 100 for the names of bands


@dataclass
class Plot:
    """Two axes with marks, which are drawn in the order in which they are added."""

    title: str
    description: str
    """Text alternative for screen readers."""
    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    x_ticks: bool = True
    y_ticks: bool = True
    background: list[Element] = field(default_factory=list)
    """Drawn below the grid."""
    marks: list[Element] = field(default_factory=list)
    names: list[Element] = field(default_factory=list)
    """Drawn above the marks."""

    def locate(self, x: float, y: float) -> Point:
        """Return the position of a data point in the plot."""
        return (LEFT + self.x(x) * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - self.y(y) * (HEIGHT - TOP - BOTTOM))

    def line(self, points: Sequence[Point], style: SeriesStyle, name: str, is_faint: bool = False) -> None:
        """Add a line."""
        kind = f"line {style.color}{' faint' * is_faint}"
        self.marks.append(_path(_polyline(self.locate(*p) for p in points), kind, name, stroke_dasharray=style.dashes))

    def marked_line(self, points: Sequence[Point], style: SeriesStyle, name: str) -> None:
        """Add a line with a few markers, so that it can be identified without its color."""
        self.line(points, style, name)
        last, step = len(points) - 1, max(len(points) / MARKERS_PER_LINE, 1)
        first = step * (style.number % COLORS + 1) / (COLORS + 1)  # so that markers of several lines do not overlap
        positions = {
            min(round(first + i * step), last) for i in range(MARKERS_PER_LINE) if first + i * step <= last + 1
        }
        self.cloud([points[i] for i in sorted(positions)], style, name, 3)

    def area(self, lower: Sequence[Point], upper: Sequence[Point], style: SeriesStyle) -> None:
        """Fill the area between two lines."""
        edge = [*lower, *reversed(upper)]
        self.marks.append(_path(_polyline(self.locate(*p) for p in edge) + "z", f"area {style.color}", ""))

    def reference(self, points: Sequence[Point], name: str) -> None:
        """Add a dashed reference line, on a pale line that makes it visible on bars."""
        data = _polyline(self.locate(*p) for p in points)
        self.marks += [_path(data, "under", ""), _path(data, "reference", name)]

    def dots(self, points: Sequence[Point], style: SeriesStyle, names: Sequence[str], radius: float = 3.5) -> None:
        """Add dots, each with its own tooltip."""
        for point, name in zip(points, names, strict=True):
            self.marks.append(_path(style.marker(*self.locate(*point), radius), f"dot {style.color}", name))

    def cloud(self, points: Sequence[Point], style: SeriesStyle, name: str, radius: float = 2) -> None:
        """Add many dots with one tooltip, as one mark."""
        data = "".join(style.marker(*self.locate(*p), radius) for p in points)
        self.marks.append(_path(data, f"cloud {style.color}", name))

    def strokes(self, strokes: Sequence[tuple[float, float, float]], style: SeriesStyle, name: str) -> None:
        """Add vertical strokes (x, from, to) as one mark: error bars of dots, or the bars of very many classes."""
        ends = [(*self.locate(x, low), self.locate(x, high)[1]) for x, low, high in strokes]
        data = "".join(
            f"M{format_coordinate(x)} {format_coordinate(low)}V{format_coordinate(high)}" for x, low, high in ends
        )
        self.marks.append(_path(data, f"span {style.color}", name))

    def bars(
        self, bars: Sequence[tuple[float, float, float]], style: SeriesStyle, names: Sequence[str], base: float = 0
    ) -> None:
        """Add bars.

        Args:
            bars: (left, right, height) of each bar.
            style: Their style.
            names: Their tooltips.
            base: Where the bars start.
        """
        for (left, right, height), name in zip(bars, names, strict=True):
            (x, y), (end, bottom) = self.locate(left, height), self.locate(right, base)
            rectangle = {"x": x, "y": min(y, bottom), "width": max(end - x, 0.5), "height": abs(bottom - y)}
            attributes = {key: format_coordinate(value) for key, value in rectangle.items()}
            self.marks.append(el("rect", el("title", name), **attributes, class_=f"bar {style.color}"))

    def band(self, left: float, right: float, name: str, kind: str) -> None:
        """Shade a range of the x axis, with its name at the top.

        Args:
            left: One end of the range.
            right: The other end.
            name: Name of the range.
            kind: Class of the style sheet.
        """
        (x, _), (end, _) = sorted((self.locate(left, self.y.low), self.locate(right, self.y.low)))
        width, height = format_coordinate(end - x), HEIGHT - TOP - BOTTOM
        band = el("rect", x=format_coordinate(x), y=TOP, width=width, height=height, class_=f"band {kind}")
        self.background.append(band)
        if end - x > 7 * len(name):
            middle = format_coordinate((x + end) / 2)
            self.names.append(el("text", name, x=middle, y=TOP + 11, text_anchor="middle", class_="note"))

    def note(self, x: float, y: float, text: str) -> None:
        """Write text above the marks, centered at a position in the plot."""
        position = {"x": format_coordinate(x), "y": format_coordinate(y + 4)}
        self.names.append(el("text", text, **position, text_anchor="middle", class_="note"))

    def element(self) -> Element:
        """Return the plot as an element."""
        frame = el("path", d=f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}", class_="frame")
        text = el("title", self.title), el("desc", self.description)
        layers = (*text, *self.background, *self._axes(), *self.marks, frame, *self.names)
        return el("svg", *layers, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="plot")

    def _axes(self) -> Iterable[Element]:
        bottom = HEIGHT - BOTTOM
        for value in self.x.ticks() if self.x_ticks else ():
            x, text = self.locate(value, self.y.low)[0], format_number(value)
            yield el("path", d=f"M{format_coordinate(x)} {TOP}V{bottom}", class_="grid")
            inside = min(x, WIDTH - DIGIT_WIDTH * len(text) / 2)  # the last tick may be at the edge
            yield el("text", text, x=format_coordinate(inside), y=bottom + 15, text_anchor="middle")
        for value in self.y.ticks() if self.y_ticks else ():
            y = self.locate(self.x.low, value)[1]
            yield el("path", d=f"M{LEFT} {format_coordinate(y)}H{WIDTH - RIGHT}", class_="grid")
            yield el("text", format_number(value), x=LEFT - 6, y=format_coordinate(y + 4), text_anchor="end")
        center, middle = format_coordinate((LEFT + WIDTH - RIGHT) / 2), format_coordinate((TOP + bottom) / 2)
        yield el("text", self.x_label, x=center, y=HEIGHT - 8, text_anchor="middle", class_="label")
        rotation = f"rotate(-90 11 {middle})"
        yield el("text", self.y_label, x=11, y=middle, text_anchor="middle", class_="label", transform=rotation)


def swatch(style: SeriesStyle) -> Element:
    """Return a sample of a style for legends."""
    stroke = el("path", d="M1 7H25", class_=f"line {style.color}", stroke_dasharray=style.dashes)
    mark = el("path", d=style.marker(13, 7), class_=f"dot {style.color}")
    return el("svg", stroke, mark, viewBox="0 0 26 14", class_="swatch", aria_hidden="true")


def _path(data: str, kind: str, name: str, **more: str | None) -> Element:
    return el("path", el("title", name) if name else None, d=data, class_=kind, **more)


def _polyline(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{format_coordinate(x)} {format_coordinate(y)}" for x, y in points)


def format_coordinate(value: float) -> str:
    """Format a coordinate to a tenth of a unit, which is finer than the pixels of a screen."""
    return f"{value:.1f}".removesuffix(".0")


def format_number(value: float) -> str:
    """Format the number of a tick."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}".replace("-", "−")
    return f"{value:,.4f}".rstrip("0").rstrip(".").replace("-", "−")


# Components


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
        body: Lines of cells. The first cell is the name of the line; numeric columns are aligned to the right.
        caption: Text above the table.
        is_tall: Whether the table has many rows and scrolls vertically.
    """
    kinds = ["n" if is_numeric([line[i] for line in body]) else None for i in range(len(head))]
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


def is_numeric(column: Sequence[TableCell]) -> bool:
    """Return whether a column has numbers, or only dashes in place of missing ones."""
    return any(cell.value is not None for cell in column) or all(cell.content == "–" for cell in column)


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


def grid(parts: Iterable[Element], kind: str = "") -> Element:
    """Return parts of a page side by side if the page is wide enough; `kind` is a further class for the style sheet."""
    return el("div", *parts, class_=f"grid {kind}".rstrip())


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
