"""HTML and SVG as a tree of elements. All text and attributes are escaped when the tree is rendered."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
