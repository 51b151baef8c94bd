"""HTML and SVG as a tree of elements. Text and attributes are escaped when it is written out, whoever they come from."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

Value = str | int | float | bool | None

VOID = frozenset({"br", "hr", "img", "link", "meta"})  # have no end tag
# What a page may not hold: controls, halves of surrogate pairs, which file names in a foreign encoding turn into, and marks
# that turn writing round, so that a name shows as another.
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class TrustedText(str):
    """Text of this package, to be written as it is: its style sheet and its script. Nothing of a user's may become one."""


@dataclass(frozen=True)
class Element:
    tag: str
    attributes: dict[str, Value]
    children: "tuple[Element | TrustedText | str, ...]"

    def __str__(self) -> str:
        return "".join(written(self))


def el(tag: str, *children: "Element | str | float | None", **attributes: Value) -> Element:
    """`el("td", "a < b", class_="name", data_value=3)`; None is no child, and None or False no attribute."""
    kept = tuple(c if isinstance(c, Element | str) else str(c) for c in children if c is not None)
    return Element(tag, attributes, kept)


def written(node: "Element | TrustedText | str") -> Iterator[str]:
    """The text of a tree, piece by piece."""
    if isinstance(node, TrustedText):
        yield node
    elif isinstance(node, str):
        yield escaped(node)
    else:
        yield f"<{node.tag}{''.join(map(_attribute, node.attributes, node.attributes.values()))}>"
        for child in node.children:
            yield from written(child)
        if node.tag not in VOID:
            yield f"</{node.tag}>"


def escaped(text: str) -> str:
    return html.escape(UNFIT.sub("\ufffd", text))


def _attribute(name: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
