"""Every command and flag as a page (docs/commands.md), from the very classes that the command line is read by."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from longtail.cli import VERBS
from longtail.cli.verbs import DATA_VERBS
from longtail.config import METHODS, Config, ViewConfig
from longtail.config.section import Section

PARTS = {"data": {name: kind for name, (kind, _) in DATA_VERBS.items()}}  # verbs that have verbs of their own
HEAD = """# Every command and flag

Made from the code by `make docs`; a test sees that it is current. Each command explains itself with `--help`, with the
defaults of the recipe that is named; here they are those of the classes in `longtail.config`, which a recipe changes. A switch
that is on is turned off by `no_` before its name: `--model.no_bias`.
"""


def page() -> str:
    """docs/commands.md."""
    parts = [HEAD, "## Commands"]
    for verb, (kind, _) in VERBS.items():
        for name, part in PARTS.get(verb, {"": kind}).items():
            parts += command(f"{verb} {name}".strip(), part)
    parts += ["## Settings", "Of `train` and `compare`, and `--data.*` of whatever reads images."]
    for name, kind in typing.get_type_hints(Config).items():
        parts += settings(name, kind) if is_section(kind) and name != "method" else []
    parts += [
        "## Settings of the methods",
        "Of `train`, with `--method NAME`; a method that is not listed has none of its own.",
    ]
    for name, kind in sorted(METHODS.items()):
        rows = flags(kind, "method.")
        parts += [f"### {name}", f"{kind.title}. {first_paragraph(kind)}".strip(), table(rows)] if rows else []
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def command(verb: str, kind: type) -> list[str]:
    shared = [f"`--{name}.*`" for name, hint in typing.get_type_hints(kind).items() if is_section(hint)]
    more = f"And the settings below: {', '.join(shared)}." if shared else ""
    return [f"### longtail {verb}", first_paragraph(kind), table(flags(kind, "")), more]


def settings(name: str, kind: type) -> list[str]:
    parts = [f"### {name}", table(flags(kind, f"{name}."))]
    if name == "views":
        parts += [
            "Of the query's view; those of the key's are `--views.key.*`:",
            table(flags(ViewConfig, "views.query.")),
        ]
    return parts


class Flag(typing.NamedTuple):
    name: str
    values: str
    default: str
    about: str


def flags(kind: type, prefix: str) -> list[Flag]:
    """Of a class, those that are no sections."""
    found, about = [], field_docs(kind)
    for field in dataclasses.fields(kind):
        hint, notes = unwrapped(typing.get_type_hints(kind, include_extras=True)[field.name])
        if not is_section(hint):
            named = next((note.name for note in notes if getattr(note, "name", None)), field.name)
            positional = any("positional" in repr(note).lower() for note in notes)
            name = named.upper() if positional else f"--{prefix}{named}"
            found.append(Flag(name, values(hint), default(field), about.get(field.name, "")))
    return found


def unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type, and what is noted beside it."""
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def values(hint: Any) -> str:
    """What may be given, in a word."""
    if get_origin(hint) is Literal:
        return " · ".join(str(a) for a in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(values(a) for a in get_args(hint) if a is not type(None))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return f"{values(kinds[0])} …" if kinds[-1] is ... else " ".join(values(k) for k in kinds)
    words = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING or value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a class and of those it comes from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def first_paragraph(kind: type) -> str:
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split("\n\n")[0].split())


def table(rows: list[Flag]) -> str:
    if not rows:
        return ""
    lines = ["| | values | default | |", "|---|---|---|---|"]
    for row in rows:
        name, kinds, usual, about = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| `{name}` | {kinds} | {usual} | {about} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8") if sys.argv[1:] else print(page(), end="")
