"""Text for messages, terminals, Markdown and CSV files: escaping, plurals, lists of names."""

import difflib
import re
from collections.abc import Iterable, Sequence


def preview(items: Iterable[object], most: int = 3) -> str:
    """Return the first few items, separated by commas, and an ellipsis if there are more."""
    shown = [str(item) for item in items]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 image" or "2 classes"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def find_closest(given: object, known: Iterable[str]) -> str:
    """Return the closest known name, or an empty string if none is close."""
    return next(iter(difflib.get_close_matches(str(given), list(known), n=1)), "")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a suggestion of the closest known name, or an empty string if none is close."""
    near = find_closest(given, known)
    return f"did you mean {near!r}?" if near else ""


def escape_nonprintable(text: object) -> str:
    """Return text in which characters that are not printable (escape sequences, line ends, bidi controls) are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


MARKUP = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # underscores inside a word are not markup
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escape_markdown(text: object) -> str:
    """Return text that Markdown displays literally, also in a table cell: no markup, no links and no HTML.

    Characters that are not printable are escaped as by `escape_nonprintable`. HTML characters become entities, because not
    every Markdown program accepts a backslash before them.
    """
    escaped = MARKUP.sub(lambda found: f"\\{found[0]}", escape_nonprintable(text))
    return "".join(ENTITIES.get(c, c) for c in escaped)


def quote_markdown(text: object) -> str:
    """Return text as inline code in Markdown; its delimiters are longer than any run of backticks in the text."""
    shown = escape_nonprintable(text)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{shown}{space}{fence}"


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table whose cells are escaped.

    Args:
        head: Column headings.
        body: Lines of cells.
        text_columns: Number of leading columns that are left-aligned; the others are right-aligned numbers.
    """
    lines = [head, ["---"] * text_columns + ["---:"] * (len(head) - text_columns), *body]
    escaped = [[escape_markdown(cell) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def format_percent(value: float | None) -> str:
    """Return a percentage with one decimal, or a dash if there is none."""
    return "–" if value is None else f"{value:.1f}"


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # characters with which a spreadsheet formula begins


def csv_safe(text: str) -> str:
    """Return text that a spreadsheet does not evaluate: an apostrophe is put before formulas. Numbers are not changed."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(FORMULA_STARTS) else text
    return text


def csv_safe_path(path: str) -> str:
    """Return a printable path that a spreadsheet does not evaluate: "./" is put before formulas, so that it stays a path."""
    shown = escape_nonprintable(path)
    return f"./{shown}" if shown.startswith(FORMULA_STARTS) else shown
