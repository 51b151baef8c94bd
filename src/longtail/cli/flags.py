"""Descriptions of flags, from the dataclasses that define the command line: names, types, limits, defaults and texts."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from longtail.config.section import Limit, Section

SHORT_FLAGS = {
    "epochs": "train.epochs",
    "lr": "optim.lr",
    "batch_size": "train.batch_size",
    "image_size": "data.image_size",
    "model": "model.name",
    "seeds": "train.seeds",
    "device": "train.device",
}
"""Short names of the most used settings. A command has those whose section it has, unless it has such a flag of its own."""


class Flag(NamedTuple):
    """A flag, or a positional argument, whose name has no dashes."""

    name: str
    values: str
    """The allowed values, in a few words; "switch" for a flag without a value."""
    default: str
    """The default; an empty string if there is none."""
    description: str
    limit: str = ""
    """The range of the values; an empty string if there is none."""
    metavar: str = ""
    """The word for the value in a help text; an empty string if it follows from `values`."""

    @property
    def is_positional(self) -> bool:
        return not self.name.startswith("--")

    def describe_values(self) -> str:
        """Return the allowed values with their limit."""
        return f"{self.values}, {self.limit}" if self.limit else self.values


def list_flags(kind: type, prefix: str = "", values: Mapping[str, Any] | None = None) -> list[Flag]:
    """Return the flags of a dataclass, without those of its sections.

    Args:
        kind: A dataclass.
        prefix: The section and a dot, or an empty string.
        values: Values by field that are used in place of the defaults.
    """
    flags, docs, hints = [], read_field_docs(kind), typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, notes = split_annotation(hints[field.name])
        if is_section(hint):
            continue
        name = next((note.name for note in notes if getattr(note, "name", None)), field.name)
        metavar = next((note.metavar for note in notes if getattr(note, "metavar", None)), "")
        is_positional = any("positional" in repr(note).lower() for note in notes)
        flags.append(
            Flag(
                name=name.upper() if is_positional else f"--{prefix}{name}",
                values=describe_values(hint),
                default=describe_default((values or {}).get(field.name, field.default)),
                description=docs.get(field.name, ""),
                limit=", ".join(note.rule for note in notes if isinstance(note, Limit)),
                metavar=metavar,
            )
        )
    return flags


def list_sections(kind: type) -> dict[str, type[Section]]:
    """Return the sections of the configuration that a dataclass has, by field."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if is_section(hints[field.name])}


def find_short_flags(kind: type) -> dict[str, str]:
    """Return the short names of settings that a command has, such as {"lr": "optim.lr"}.

    Args:
        kind: The dataclass of the command's arguments.
    """
    own, sections = {flag.name.removeprefix("--") for flag in list_flags(kind)}, list_sections(kind)
    return {
        short: setting
        for short, setting in SHORT_FLAGS.items()
        if short not in own and setting.partition(".")[0] in sections
    }


def split_annotation(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and the metadata of an Annotated type; other types have no metadata."""
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


def is_section(hint: Any) -> bool:
    """Return whether a type is a section of the configuration."""
    return isinstance(hint, type) and issubclass(hint, Section)


def describe_values(hint: Any) -> str:
    """Return a short description of the values that a type allows."""
    if get_origin(hint) is Literal:
        return " · ".join(str(a) for a in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe_values(a) for a in get_args(hint) if a is not type(None))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return f"{describe_values(kinds[0])} …" if kinds[-1] is ... else " ".join(describe_values(k) for k in kinds)
    names = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def describe_default(value: Any) -> str:
    """Return the text of a default; an empty string if there is none."""
    if value is dataclasses.MISSING or value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its base classes, by field."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                docs[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs


def first_paragraph(kind: type) -> str:
    """Return the first paragraph of a docstring; an empty string for the default docstring of a dataclass."""
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split("\n\n")[0].split())
