"""Generation of docs/commands.md: all commands and flags, from the dataclasses that define the command line."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from longtail.cli import COMMANDS
from longtail.cli.cache import CACHE_COMMANDS
from longtail.cli.data import DATA_COMMANDS
from longtail.config import METHODS, Config, ViewConfig
from longtail.config.section import Section

SUBCOMMANDS: dict[str, dict[str, type]] = {
    "cache": {name: arguments for name, (arguments, _) in CACHE_COMMANDS.items()},
    "data": {name: arguments for name, (arguments, _) in DATA_COMMANDS.items()},
}
INTRODUCTION = """# Every command and flag

This page is generated from the code by `make docs`; a test checks that it is current. `longtail COMMAND --help` shows the
defaults of the given recipe. The defaults on this page are those of the classes in `longtail.config`; recipes change them. To
turn off a switch that is on, put `no_` before its name: `--model.no_bias`.
"""


def make_page() -> str:
    """Return the text of docs/commands.md."""
    parts = [INTRODUCTION, "## Commands"]
    for command, (arguments, _) in COMMANDS.items():
        for name, kind in SUBCOMMANDS.get(command, {"": arguments}).items():
            parts += describe_command(f"{command} {name}".strip(), kind)
    parts += ["## Settings", "Settings of `train` and `compare`. All commands that read images have `--data.*`."]
    for name, kind in typing.get_type_hints(Config).items():
        parts += describe_section(name, kind) if is_section(kind) and name != "method" else []
    parts += [
        "## Settings of the methods",
        "Settings of `train` for `--method NAME`. Methods that are not listed have no settings of their own.",
    ]
    for name, kind in sorted(METHODS.items()):
        flags = list_flags(kind, "method.")
        description = f"{kind.title}. {first_paragraph(kind)}".strip()
        parts += [f"### {name}", description, make_flag_table(flags)] if flags else []
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def describe_command(command: str, arguments: type) -> list[str]:
    """Return the paragraphs about a command."""
    sections = [f"`--{name}.*`" for name, hint in typing.get_type_hints(arguments).items() if is_section(hint)]
    more = f"And the settings below: {', '.join(sections)}." if sections else ""
    return [f"### longtail {command}", first_paragraph(arguments), make_flag_table(list_flags(arguments, "")), more]


def describe_section(name: str, kind: type) -> list[str]:
    """Return the paragraphs about a section of the configuration."""
    parts = [f"### {name}", make_flag_table(list_flags(kind, f"{name}."))]
    if name == "views":
        parts += [
            "Settings of the query view; those of the key view are `--views.key.*`:",
            make_flag_table(list_flags(ViewConfig, "views.query.")),
        ]
    return parts


class Flag(typing.NamedTuple):
    """A row in a table of flags."""

    name: str
    values: str
    default: str
    description: str


def list_flags(kind: type, prefix: str) -> list[Flag]:
    """Return the flags of a dataclass, without those of its sections.

    Args:
        kind: A dataclass.
        prefix: The section and a dot, or an empty string.
    """
    flags, docs = [], read_field_docs(kind)
    for field in dataclasses.fields(kind):
        hint, notes = split_annotation(typing.get_type_hints(kind, include_extras=True)[field.name])
        if not is_section(hint):
            name = next((note.name for note in notes if getattr(note, "name", None)), field.name)
            is_positional = any("positional" in repr(note).lower() for note in notes)
            flag = name.upper() if is_positional else f"--{prefix}{name}"
            flags.append(Flag(flag, describe_values(hint), describe_default(field), docs.get(field.name, "")))
    return flags


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


def describe_default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field; an empty string if it has none."""
    value = field.default
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


def make_flag_table(flags: list[Flag]) -> str:
    """Return a Markdown table; an empty string if there are no flags."""
    if not flags:
        return ""
    lines = ["| | values | default | |", "|---|---|---|---|"]
    for flag in flags:
        name, values, default, description = (cell.replace("|", "\\|") for cell in flag)
        lines.append(f"| `{name}` | {values} | {default} | {description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page(), encoding="utf-8") if sys.argv[1:] else print(make_page(), end="")
