"""Plots as inline SVG: sharp at any size, and colored by the page's style sheet, so that they follow its light and dark.

A plot is WIDE by TALL units, which a phone shows at four fifths of their size and a desk at a little more than it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longtail.reporting.html import Element, el

WIDE, TALL = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 12, 42  # margins for ticks and labels: a tick of six digits clears the label
MARKED = 6  # markers on a line
LETTER = 7  # units that a digit of a tick takes, with room
COLORS = 7  # that the style sheet has, as classes c0 to c6
MARKERS = (
    "m-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0z",  # circle
    "m-{r}-{r}h{d}v{d}h-{d}z",  # square
    "m0-{b}l{b} {b}l-{b} {b}l-{b}-{b}z",  # diamond
    "m0-{b}l{b} {d}h-{B}z",  # triangle
    "m0 {b}l{b}-{d}h-{B}z",  # triangle on its head
)
Point = tuple[float, float]


class SeriesStyle(NamedTuple):
    """How a series is told from others: by color, and by marker and dashes where colors do not reach."""

    number: int

    @property
    def color(self) -> str:
        return f"c{self.number % COLORS}"

    @property
    def dashes(self) -> str | None:
        return (None, "6 3", "2 3")[self.number // COLORS % 3]

    def marker(self, x: float, y: float, radius: float = 3.5) -> str:
        """As path data."""
        shape = MARKERS[(self.number + self.number // COLORS) % len(MARKERS)]
        r, b = radius, 1.25 * radius
        return f"M{short(x)} {short(y)}" + shape.format(r=short(r), d=short(2 * r), b=short(b), B=short(2 * b))


@dataclass(frozen=True)
class Scale:
    """From data to the unit interval; logarithmic, turned round so that large values come first, or of whole numbers."""

    low: float
    high: float
    log: bool = False
    falling: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return 1 - share if self.falling else share

    def ticks(self) -> list[float]:
        if self.log and self.high / self.low > 6:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) < 5 else (1,)
            return [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
        step = max(_round_step((self.high - self.low) / 6), 1 if self.whole else 0)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return power * next(m for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def around(values: Iterable[float], log: bool = False, falling: bool = False) -> Scale:
    """A scale that holds these values, with a little room on both sides."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(known), max(known)
    if log:
        return Scale(low / 1.12, high * 1.12, True, falling)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room, high + room, falling=falling)


PERCENT = Scale(0, 112)  # above 100 there is room for the names of bands


@dataclass
class Plot:
    """Two axes, and marks between them, in the order in which they are added."""

    title: str
    shows: str
    """What a reader who cannot see it would be told."""
    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    x_ticks: bool = True
    y_ticks: bool = True
    marks: list[Element] = field(default_factory=list)
    ground: list[Element] = field(default_factory=list)
    """What lies below the grid."""
    names: list[Element] = field(default_factory=list)
    """What lies above all marks."""

    def at(self, x: float, y: float) -> Point:
        return LEFT + self.x(x) * (WIDE - LEFT - RIGHT), TALL - BOTTOM - self.y(y) * (TALL - TOP - BOTTOM)

    def line(self, points: Sequence[Point], look: SeriesStyle, name: str, faint: bool = False) -> None:
        kind = f"line {look.color}{' faint' * faint}"
        self.marks.append(_path(_through(self.at(*p) for p in points), kind, name, stroke_dasharray=look.dashes))

    def marked_line(self, points: Sequence[Point], look: SeriesStyle, name: str) -> None:
        """With a few markers on it, so that color is not all that tells it from others."""
        self.line(points, look, name)
        last, step = len(points) - 1, max(len(points) / MARKED, 1)
        first = step * (look.number % COLORS + 1) / (COLORS + 1)  # those of several lines lie apart
        at = sorted({min(round(first + i * step), last) for i in range(MARKED) if first + i * step <= last + 1})
        self.cloud([points[i] for i in at], look, name, 3)

    def area(self, lower: Sequence[Point], upper: Sequence[Point], look: SeriesStyle) -> None:
        """What lies between two lines: how far the seeds of one are apart."""
        edge = [*lower, *reversed(upper)]
        self.marks.append(_path(_through(self.at(*p) for p in edge) + "z", f"area {look.color}", ""))

    def reference(self, points: Sequence[Point], name: str) -> None:
        """A dashed line that is no data (an optimum, a diagonal), on a pale one, so that it shows on bars too."""
        data = _through(self.at(*p) for p in points)
        self.marks += [_path(data, "under", ""), _path(data, "reference", name)]

    def dots(self, points: Sequence[Point], look: SeriesStyle, names: Sequence[str], radius: float = 3.5) -> None:
        """Each with its own words, which show where the pointer rests."""
        for point, name in zip(points, names, strict=True):
            self.marks.append(_path(look.marker(*self.at(*point), radius), f"dot {look.color}", name))

    def cloud(self, points: Sequence[Point], look: SeriesStyle, name: str, radius: float = 2) -> None:
        """Many dots of one name, as one mark."""
        data = "".join(look.marker(*self.at(*p), radius) for p in points)
        self.marks.append(_path(data, f"cloud {look.color}", name))

    def spans(self, spans: Sequence[tuple[float, float, float]], look: SeriesStyle, name: str) -> None:
        """Vertical strokes (x, from, to), as one mark: the deviations of dots, or the bars of very many classes."""
        ends = [(*self.at(x, low), self.at(x, high)[1]) for x, low, high in spans]
        data = "".join(f"M{short(x)} {short(low)}V{short(high)}" for x, low, high in ends)
        self.marks.append(_path(data, f"span {look.color}", name))

    def bars(
        self, bars: Sequence[tuple[float, float, float]], look: SeriesStyle, names: Sequence[str], base: float = 0
    ) -> None:
        """(from, to, height), each from the base."""
        for (left, right, height), name in zip(bars, names, strict=True):
            (x, y), (end, bottom) = self.at(left, height), self.at(right, base)
            place = {"x": short(x), "y": short(min(y, bottom)), "width": short(max(end - x, 0.5))}
            size = {"height": short(abs(bottom - y)), "class_": f"bar {look.color}"}
            self.marks.append(el("rect", el("title", name), **place, **size))

    def band(self, left: float, right: float, name: str, kind: str) -> None:
        """A shaded stretch of the x axis, with its name on top."""
        (x, _), (end, _) = sorted((self.at(left, self.y.low), self.at(right, self.y.low)))
        high = TALL - TOP - BOTTOM
        self.ground.append(el("rect", x=short(x), y=TOP, width=short(end - x), height=high, class_=f"band {kind}"))
        if end - x > 7 * len(name):
            middle = short((x + end) / 2)
            self.names.append(el("text", name, x=middle, y=TOP + 11, text_anchor="middle", class_="note"))

    def element(self) -> Element:
        frame = el("path", d=f"M{LEFT} {TOP}V{TALL - BOTTOM}H{WIDE - RIGHT}", class_="frame")
        words = el("title", self.title), el("desc", self.shows)
        size = f"0 0 {WIDE} {TALL}"
        layers = (*words, *self.ground, *self._axes(), *self.marks, frame, *self.names)
        return el("svg", *layers, viewBox=size, role="img", class_="plot")

    def _axes(self) -> Iterable[Element]:
        bottom = TALL - BOTTOM
        for value in self.x.ticks() if self.x_ticks else ():
            x, says = self.at(value, self.y.low)[0], number(value)
            yield el("path", d=f"M{short(x)} {TOP}V{bottom}", class_="grid")
            inside = min(x, WIDE - LETTER * len(says) / 2)  # the last one may stand at the very edge
            yield el("text", says, x=short(inside), y=bottom + 15, text_anchor="middle")
        for value in self.y.ticks() if self.y_ticks else ():
            y = self.at(self.x.low, value)[1]
            yield el("path", d=f"M{LEFT} {short(y)}H{WIDE - RIGHT}", class_="grid")
            yield el("text", number(value), x=LEFT - 6, y=short(y + 4), text_anchor="end")
        middle, side = (LEFT + WIDE - RIGHT) / 2, (TOP + bottom) / 2
        yield el("text", self.x_label, x=short(middle), y=TALL - 8, text_anchor="middle", class_="label")
        turned = f"rotate(-90 11 {short(side)})"
        yield el("text", self.y_label, x=11, y=short(side), text_anchor="middle", class_="label", transform=turned)


def swatch(look: SeriesStyle) -> Element:
    """How a series looks, beside its name in a legend."""
    stroke = el("path", d="M1 7H25", class_=f"line {look.color}", stroke_dasharray=look.dashes)
    mark = el("path", d=look.marker(13, 7), class_=f"dot {look.color}")
    return el("svg", stroke, mark, viewBox="0 0 26 14", class_="swatch", aria_hidden="true")


def _path(data: str, kind: str, name: str, **more: str | None) -> Element:
    return el("path", el("title", name) if name else None, d=data, class_=kind, **more)


def _through(places: Iterable[Point]) -> str:
    return "M" + "L".join(f"{short(x)} {short(y)}" for x, y in places)


def short(value: float) -> str:
    """A coordinate: a tenth of a unit is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")


def number(value: float) -> str:
    """As an axis prints it."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}".replace("-", "−")
    return f"{value:,.4f}".rstrip("0").rstrip(".").replace("-", "−")
