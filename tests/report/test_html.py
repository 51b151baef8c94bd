"""Tests of page components: escaping, scales, styles and colors."""

import itertools
import math
import re
from importlib import resources

import numpy as np
import pytest

from longtail.reporting.html import (
    COLORS,
    NBSP,
    Plot,
    Scale,
    SeriesStyle,
    TableCell,
    TrustedText,
    data_link,
    el,
    format_count,
    format_difference,
    format_number,
    is_numeric,
    join_items,
    make_scale,
)
from tests.expected_text import check_text
from tests.report.made import Page

CSS = resources.files("longtail.reporting").joinpath("page.css").read_text()


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\"quoted' & <b>", "é 漢 😀", "</title></svg>", "&lt;", "]]>"]
)
def test_text_and_attributes_round_trip(text):
    page = Page(str(el("p", el("b", text), title=text, data_value=3)))
    assert page.text == {"b": [text]}
    assert page.elements == [("p", {"title": text, "data-value": "3"}), ("b", {})]


def test_unsafe_characters_are_replaced():
    text = str(el("p", "a\x00b\x1bc\udcffd\ne"))
    assert text == "<p>a\ufffdb\ufffdc\ufffdd\ne</p>" and text.encode()


def test_names_cannot_change_writing_direction():
    assert str(el("p", "a\u202egnp.exe\u2066 שלום")) == "<p>a\ufffdgnp.exe\ufffd שלום</p>"


def test_none_children_and_attributes_are_omitted():
    assert str(el("details", None, 1.5, open=True, id=None, hidden=False)) == "<details open>1.5</details>"
    assert str(el("img", class_="y")) == '<img class="y">'
    assert str(el("script", TrustedText("a<b"))) == "<script>a<b</script>"


def test_data_link_round_trip():
    import csv
    import io
    from urllib.parse import unquote

    data = {"class": ['a,"b"', "100%\nx#?&", "é"], "n": [1, 2]}
    href = str(data_link("counts", data).attributes["href"])
    assert re.fullmatch(r"data:text/csv;charset=utf-8,[^#\"<>\n]*", href)
    rows = list(csv.reader(io.StringIO(unquote(href.split(",", 1)[1]))))
    assert rows == [["class", "n"], ['a,"b"', "1"], ["100%\nx#?&", "2"], ["é", ""]]


def test_columns_with_numbers_or_dashes_only_are_numeric():
    number, dash, text = TableCell("1.0", 1.0), TableCell("–"), TableCell("few")
    columns = ([number, dash], [dash, dash], [text, dash], [text, text])
    assert [is_numeric(column) for column in columns] == [True, True, False, False]


def test_csv_has_no_formulas():
    from urllib.parse import unquote

    href = str(data_link("x", {"class": ["=1+1", "@a", "-b", "a=b"], "n": [-1, 2.5]}).attributes["href"])
    assert unquote(href).splitlines()[1:] == ["'=1+1,-1", "'@a,2.5", "'-b,", "a=b,"]


def test_tick_at_edge_is_not_cut():
    plot = Plot("t", "s", Scale(0, 1000), Scale(0, 1))
    (last,) = [a for a in plot.element().children if getattr(a, "children", ()) == ("1,000",)]
    assert float(last.attributes["x"]) + 7 * len("1,000") / 2 <= 440


@pytest.mark.parametrize("length", [2, 3, 7, 400])
def test_line_has_markers(length):
    for i in range(9):
        plot = Plot("t", "s", Scale(0, length), Scale(0, 1))
        plot.marked_line([(float(x), 0.5) for x in range(length)], SeriesStyle(i), "a")
        line, markers = plot.marks
        shown = str(markers.attributes["d"]).count("M")
        assert 1 <= shown <= min(length, 7) and line.attributes["class_"].split()[1] == SeriesStyle(i).color


def test_epoch_ticks_are_integers():
    assert Scale(0, 1, is_integer=True).ticks() == [0, 1] and Scale(0, 4, is_integer=True).ticks() == [0, 1, 2, 3, 4]
    assert Scale(0, 400, is_integer=True).ticks() == Scale(0, 400).ticks()


@pytest.mark.parametrize(
    ("value", "says"), [(1.5e-4, "1.5e−4"), (5e-4, "5e−4"), (0.0015, "0.0015"), (2e6, "2e6"), (0, "0")]
)
def test_format_number(value, says):
    assert format_number(value) == says


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("low,high", [(1, 134), (0.001, 0.1), (2.85, 3.1), (5, 6), (1, 1e6), (3, 1280), (7, 7)])
def test_number_and_range_of_ticks(low, high, log):
    scale = make_scale([low, high], log)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 10 and all(scale.low <= t <= scale.high * (1 + 1e-9) for t in ticks)
    assert len({format_number(t) for t in ticks}) == len(ticks)
    assert all(0 <= scale(v) <= 1 for v in (low, high)) and (scale(low) < scale(high) or low == high)


def test_linear_logarithmic_and_descending_scales():
    assert Scale(0, 10)(2.5) == 0.25
    assert math.isclose(Scale(1, 100, log=True)(10), 0.5)
    assert math.isclose(Scale(1, 100, log=True, is_descending=True)(100), 0)


def test_plot_has_description_and_marks_are_inside():
    plot = Plot("title", "description", Scale(0, 1), Scale(0, 1), "x", "y")
    plot.line([(0, 0), (1, 1)], SeriesStyle(0), "a line")
    plot.bars([(0, 0.5, 1), (0.5, 1, 0.2)], SeriesStyle(1), ["one", "two"])
    page = Page(str(plot.element()))
    assert page.text["title"] == ["title", "a line", "one", "two"] and page.text["desc"] == ["description"]
    first, second = (a for a in page.of("rect"))
    assert float(first["height"]) == pytest.approx(5 * float(second["height"]), abs=0.5)
    numbers = [float(n) for a in page.of("path") for n in re.findall(r"[\d.]+", a["d"])]
    assert min(numbers) >= 0 and max(numbers) <= 440


def test_twenty_styles_differ():
    styles = [SeriesStyle(i) for i in range(20)]
    assert len({(style.color, style.dashes) for style in styles}) == 20
    assert len({(style.color, style.marker(0, 0)) for style in styles}) == 20


# Colors

THEMES = {"light": CSS[: CSS.index("@media")], "dark": CSS[CSS.index("@media") :]}
# What eyes without one kind of cone see, in linear RGB (Machado et al. 2009, severity 1).
EYES = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(theme: str, name: str) -> np.ndarray:
    (value,) = re.findall(rf"--{name}: #(\w{{6}});", THEMES[theme])
    c = np.array([int(value[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(theme: str, one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    low, high = sorted(float(linear(theme, name) @ [0.2126, 0.7152, 0.0722]) for name in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_of_text_and_marks(theme):
    for text, ground in itertools.product(("text", "muted", "link", "good", "caution"), ("background", "surface")):
        assert contrast(theme, text, ground) >= 4.5, (text, ground)
    for text, ground in itertools.product(("text", "muted"), ("many", "medium", "few")):
        assert contrast(theme, text, ground) >= 4.5, (text, ground)
    for i, ground in itertools.product(range(COLORS), ("background", "many", "medium", "few")):
        assert contrast(theme, f"c{i}", ground) >= 3, (i, ground)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eye", EYES)
def test_colors_differ_for_color_blind_readers(theme, eye):
    seen = [lab(np.clip(np.array(EYES[eye]) @ linear(theme, f"c{i}"), 0, 1)) for i in range(COLORS)]
    nearest = min((float(np.linalg.norm(a - b)), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(seen), 2))
    assert nearest[0] > 20, nearest


def test_formatting():
    check_text("test_html/three", "".join(join_items([["a"], ["b"], ["c"]])))
    check_text("test_html/many", "".join(join_items([[str(i)] for i in range(9)])))
    assert (format_count(1, "class"), format_count(1200, "class"), format_count(2, "seed")) == (
        "one class",
        "1,200 classes",
        "2 seeds",
    )
    assert format_difference(-0.25, 1.04) == f"−0.2{NBSP}±{NBSP}1.0" and format_difference(3.0, None) == "3.0"
