"""Help texts: a short one of at most one screen (`--help`), and one with all flags and their ranges (`--help-all`)."""

import contextlib
import io
import operator
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longtail import recipes
from longtail.cli.compare import resolve_comparison
from longtail.cli.distill import resolve_distillation
from longtail.cli.parse import Flag, find_short_flags, first_paragraph, list_flags, list_sections
from longtail.cli.train import resolve_training
from longtail.config import Config
from longtail.training import ALL_SECTIONS, SHORT_NAMES, default_out, select_sections

HELP_FLAGS = ("-h", "--help")
HELP_ALL_FLAGS = ("--help-all", "--help_all")

WIDTH = 80
FLAG_WIDTH = 26  # columns of the short help for a flag and its value
OPTIONS_SHOWN = 10
SELECTED = "selected by cross-validation"  # shown in place of a value
MAIN_OPTIONS = ("method", "methods", *SHORT_NAMES, "out", "resume")  # shown before the other options of a command

EXAMPLES = {
    "cache": "longtail cache info",
    "cache clear": "longtail cache clear",
    "cache info": "longtail cache info",
    "compare": "longtail compare photos/ --methods ce paco --epochs 20",
    "data": "longtail data inspect photos/",
    "data inspect": "longtail data inspect photos/ --json problems.json",
    "data shard": "longtail data shard photos/ --out shards",
    "demo": "longtail demo --seeds 0",
    "distill": "longtail distill runs/large --model resnet18 --out runs/small",
    "docs": "longtail docs start",
    "eval": "longtail eval runs/photos --device cpu",
    "export": "longtail export runs/photos --to onnx -o photos.onnx",
    "figure": "longtail figure latency runs/ -o latency.png",
    "predict": "longtail predict runs/photos new-photos/ --top 3 --csv out.csv",
    "recipes": "longtail recipes imagenet-lt",
    "report": "longtail report runs/ -o report.html",
    "reproduce": "longtail reproduce cifar100-lt --methods paco --seeds 0",
    "table": "longtail table runs/ --out tables",
    "theory": "longtail theory --recipe cifar100-lt --alpha 0.01 0.05",
    "train": "longtail train photos/ --epochs 20 --out runs/photos",
    "watch": "longtail watch runs/ --port 8700",
}
"""An example of each command."""


def is_help(args: Sequence[str]) -> bool:
    """Return whether the arguments of a command ask for help."""
    return any(arg in HELP_FLAGS + HELP_ALL_FLAGS for arg in args)


def make_help(command: str, kind: type, args: Sequence[str], subcommands: Mapping[str, type] | None = None) -> str:
    """Return the help text that the arguments of a command ask for.

    Args:
        command: The name of the command, such as "data inspect".
        kind: The dataclass of its arguments.
        args: The arguments. If they begin with a recipe or a path to images, the values for these data are shown.
        subcommands: The dataclasses of the subcommands, by their names.
    """
    rest = [arg for arg in args if arg not in HELP_FLAGS + HELP_ALL_FLAGS]
    is_full = any(arg in HELP_ALL_FLAGS for arg in args)
    has_data = bool(rest) and bool(list_sections(kind)) and (rest[0] == "--from" or not rest[0].startswith("-"))
    if is_full and not has_data and command in ("train", "compare"):
        rest, has_data = ["cifar100-lt"], True
    values = find_values(command, rest) if has_data else {}
    data = (" ".join(rest[:2]) if rest[0] == "--from" else rest[0]) if has_data else ""
    lines = [
        *textwrap.wrap(first_paragraph(kind), WIDTH),
        "",
        f"usage:    {describe_usage(command, kind, subcommands)}",
    ]
    lines += [f"example:  {EXAMPLES[command]}"] if command in EXAMPLES else []
    lines += [""]
    if subcommands:
        names = [Flag(f"{command} {name}", "switch", "", first_paragraph(sub)) for name, sub in subcommands.items()]
        lines += ["commands:", *(line for flag in names for line in format_short(flag))]
    elif is_full:
        lines += list_all_flags(kind, values, data)
    else:
        lines += list_main_flags(command, kind, values, data)
    return "\n".join(lines)


def describe_usage(command: str, kind: type, subcommands: Mapping[str, type] | None) -> str:
    """Return the usage line of a command.

    Args:
        command: The name of the command.
        kind: The dataclass of its arguments.
        subcommands: The dataclasses of the subcommands, by their names.
    """
    if subcommands:
        return f"longtail {command} {'|'.join(subcommands)} ..."
    flags = list_flags(kind)
    words = []
    for flag in filter(lambda flag: flag.is_positional, flags):
        word = f"{flag.name}{' ...' * ('…' in flag.values)}"
        words.append(f"[{word}]" if flag.is_optional else word)
    has_options = bool(list_sections(kind)) or not all(flag.is_positional for flag in flags)
    return " ".join(["longtail", command, *words, *(["[options]"] if has_options else [])])


def find_values(command: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command would use for the data that its arguments name, by field of its dataclass.

    Args:
        command: The name of the command.
        args: The arguments, which begin with a recipe, a path to images, or --from.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # the automatic choices are printed
        if command == "train":
            name, given, plan = resolve_training(list(args))
            method = given.method_name or plan.method
            options = (given.setting, given.network, given.augment)
            found = {"method_name": method, "out": given.out or default_out(name, method, plan.config, *options)}
            found |= {"selected": find_selected_settings(plan.candidates)}
            return vars(given) | select_sections(plan.config, ALL_SECTIONS) | found
        if command == "compare":
            comparison = resolve_comparison(list(args))
            training, given_seeds = comparison.sections["train"], comparison.given.seeds
            found = {"epochs": comparison.given.epochs or training.epochs, "seeds": given_seeds or training.seeds}
            return vars(comparison.given) | comparison.sections | found
        if command == "distill":
            lesson = resolve_distillation(list(args))
            return vars(lesson.given) | select_sections(lesson.config, ALL_SECTIONS) | {"out": lesson.out}
    return {"data": recipes.make(args[0]).data} if command.startswith("data ") else {}


def find_selected_settings(candidates: Sequence[Config]) -> frozenset[str]:
    """Return the settings with a short name in which the candidates of cross-validation differ, such as optim.lr."""
    values = {name: {operator.attrgetter(name)(config) for config in candidates} for name in SHORT_NAMES.values()}
    return frozenset(name for name, found in values.items() if len(found) > 1)


# Short help


def list_main_flags(command: str, kind: type, values: Mapping[str, Any], data: str) -> Iterator[str]:
    """Yield the lines of the short help about arguments and options.

    Args:
        command: The name of the command.
        kind: The dataclass of its arguments.
        values: The values by field, if the data are known.
        data: The data to which the values belong.
    """
    flags = [*list_flags(kind, values=values), *list_short_flags(kind, values)]
    positional = [flag._replace(default="") for flag in flags if flag.is_positional]
    order = {f"--{name.replace('_', '-')}": rank for rank, name in enumerate(MAIN_OPTIONS)}
    options = [flag for flag in flags if not flag.is_positional]
    has_more = len(options) > OPTIONS_SHOWN or bool(list_sections(kind))
    shown = OPTIONS_SHOWN + len(getattr(kind, "short_names", SHORT_NAMES)) - len(SHORT_NAMES)
    options = sorted(options, key=lambda flag: order.get(flag.name, len(order)))[:shown]
    for title, listed in (("arguments:", positional), ("options:", options)):
        if listed:
            yield title
            for flag in listed:
                yield from format_short(flag)
    yield ""
    if data:
        yield from textwrap.wrap(f"[...]: the value that would be used for {data} on this machine.", WIDTH)
    elif any(map(format_value, options)):
        yield "[...]: the default."
    further = {"--help-all": "list all options, with their ranges"} if has_more else {}
    if list_sections(kind) and positional and not data:
        further = {f"{positional[0].name} --help": "show the values for these data"} | further
    for words, purpose in further.items():
        yield f"{f'longtail {command} {words}':{FLAG_WIDTH + 2}}  {purpose}"


def list_short_flags(kind: type, values: Mapping[str, Any]) -> list[Flag]:
    """Return the settings of a command that have short names, under these names.

    Args:
        kind: The dataclass of the command's arguments.
        values: The values by field; settings of other sections have no default.
    """
    found = []
    for short, setting in find_short_flags(kind).items():
        section, _, name = setting.partition(".")
        known = {field: vars(values[section]) for field in [section] if section in values}.get(section)
        flags = list_flags(list_sections(kind)[section], f"{section}.", known)
        flag = next(flag for flag in flags if flag.name == f"--{section}.{name}")
        default = flag.default if known else ""
        default = SELECTED if setting in values.get("selected", ()) else default
        found.append(flag._replace(name=f"--{short.replace('_', '-')}", default=default))
    return found


def format_short(flag: Flag) -> list[str]:
    """Return the lines of the short help about a flag: its name and value, and the first sentence of its description."""
    left = f"  {format_name(flag)}"
    right = textwrap.wrap(
        first_sentence(flag.description) + format_value(flag), WIDTH - FLAG_WIDTH - 2, break_on_hyphens=False
    )
    right = ["", *right] if len(left) > FLAG_WIDTH else right or [""]
    return [f"{left if row == 0 else '':{FLAG_WIDTH}}  {text}".rstrip() for row, text in enumerate(right)]


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, without its period."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text)[0].removesuffix(".")


def format_name(flag: Flag) -> str:
    """Return a flag with a word for its value, such as "--lr NUMBER"; a positional argument has its name only."""
    name = f"{flag.name}, {flag.letter}" if flag.letter else flag.name
    if flag.is_positional or flag.values == "switch":
        return name
    words = flag.values
    if " · " not in words:  # types and not choices, one of which may be called "text"
        words = re.sub(r"\b(integer|number|text|path)\b", lambda word: word[0].upper(), words)
    return f"{name} {flag.metavar or words.replace(' · ', '|').replace(' or ', '|').replace('…', '...')}"


def format_value(flag: Flag) -> str:
    """Return the default of a flag in brackets; an empty string if it has none, or is a switch that is off."""
    is_off = flag.values == "switch" and flag.default == "off"
    return "" if is_off or not flag.default else f" [{flag.default}]"


# All flags


def list_all_flags(kind: type, values: Mapping[str, Any], data: str) -> Iterator[str]:
    """Yield the lines of the long help about all arguments and options, by section.

    Args:
        kind: The dataclass of the command's arguments.
        values: The values by field, if the data are known.
        data: The data to which the values belong.
    """
    note = f"[...]: the value that would be used for {data} on this machine." if data else "[...]: the default."
    if list_sections(kind):
        note += " To turn off a switch, put no_ before its name: --model.no_bias."
    yield from textwrap.wrap(note, WIDTH)
    short = {setting: name.replace("_", "-") for name, setting in find_short_flags(kind).items()}
    yield from ("", "arguments and options:")
    for flag in list_flags(kind, values=values):
        yield from format_long(flag)
    for name, section in list_sections(kind).items():
        yield from list_section(name, section, values.get(name), short)


def list_section(name: str, kind: type, value: Any, short: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the long help about a section and the sections inside it.

    Args:
        name: The name of the section, such as "views.query".
        kind: The class of the section.
        value: The section with the values that would be used; None: the defaults of the class.
        short: The short names by setting.
    """
    kind = kind if value is None else type(value)
    flags = list_flags(kind, f"{name}.", None if value is None else vars(value))
    if flags:
        yield ""
        yield from textwrap.wrap(f"{name}: {first_paragraph(kind)}", WIDTH)
    for flag in flags:
        yield from format_long(flag, short.get(flag.name.removeprefix("--"), ""))
    for inner, inner_kind in list_sections(kind).items():
        yield from list_section(f"{name}.{inner}", inner_kind, value and getattr(value, inner), short)


def format_long(flag: Flag, short: str = "") -> list[str]:
    """Return the lines of the long help about a flag: name, value, range, default, short name and description.

    Args:
        flag: The flag.
        short: Its short name, without dashes; an empty string if it has none.
    """
    heading = f"{f'--{short}, ' if short else ''}{format_name(flag)}{f', {flag.limit}' if flag.limit else ''}"
    indent: dict[str, Any] = {"width": WIDTH, "break_on_hyphens": False}
    return [
        *textwrap.wrap(heading + format_value(flag), initial_indent="  ", subsequent_indent="      ", **indent),
        *textwrap.wrap(flag.description, initial_indent="      ", subsequent_indent="      ", **indent),
    ]
