"""Generation of docs/commands.md: all commands and flags, from the dataclasses that define the command line."""

import sys
import typing
from pathlib import Path

from longtail.cli import COMMANDS
from longtail.cli.cache import CACHE_COMMANDS
from longtail.cli.data import DATA_COMMANDS
from longtail.cli.parse import Flag, find_short_flags, first_paragraph, is_section, list_flags
from longtail.config import METHODS, Config, ViewConfig

SUBCOMMANDS: dict[str, dict[str, type]] = {
    "cache": {name: arguments for name, (arguments, _) in CACHE_COMMANDS.items()},
    "data": {name: arguments for name, (arguments, _) in DATA_COMMANDS.items()},
}
INTRODUCTION = """# Every command and flag

This page is generated from the code by `make docs`; a test checks that it is current. `longtail COMMAND --help` shows
the main flags of a command, and `--help-all` all of them. After a recipe or a folder, as in `longtail train photos --help`,
they show the values that would be used for it. The defaults on this page are those of the classes in `longtail.config`;
recipes change them. To turn off a switch that is on, put `no_` before its name: `--model.no_bias`.
"""


def make_page() -> str:
    """Return the text of docs/commands.md."""
    parts = [INTRODUCTION, "## Commands"]
    for command, (arguments, _) in COMMANDS.items():
        for name, kind in SUBCOMMANDS.get(command, {"": arguments}).items():
            parts += describe_command(f"{command} {name}".strip(), kind)
    parts += [
        "## Settings",
        "Settings of `train`, `compare` and `distill`. All commands that read images have `--data.*`.",
    ]
    for name, kind in typing.get_type_hints(Config).items():
        parts += describe_section(name, kind) if is_section(kind) and name != "method" else []
    parts += [
        "## Settings of the methods",
        "Settings of `train` for `--method NAME`, and of `distill` (distillation). Methods that are not listed have no "
        "settings of their own.",
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
    short = [f"`--{name.replace('_', '-')}` for `--{full}`" for name, full in find_short_flags(arguments).items()]
    names = f"Short names: {', '.join(short)}." if short else ""
    return [f"### longtail {command}", first_paragraph(arguments), make_flag_table(list_flags(arguments)), more, names]


def describe_section(name: str, kind: type) -> list[str]:
    """Return the paragraphs about a section of the configuration."""
    parts = [f"### {name}", make_flag_table(list_flags(kind, f"{name}."))]
    if name == "views":
        parts += [
            "Settings of the query view; those of the key view are `--views.key.*`:",
            make_flag_table(list_flags(ViewConfig, "views.query.")),
        ]
    return parts


def make_flag_table(flags: list[Flag]) -> str:
    """Return a Markdown table; an empty string if there are no flags."""
    if not flags:
        return ""
    lines = ["| | values | default | |", "|---|---|---|---|"]
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in (flag.name, flag.letter) if name)
        cells = (names, flag.describe_values(), flag.default, flag.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page(), encoding="utf-8") if sys.argv[1:] else print(make_page(), end="")
