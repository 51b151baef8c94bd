"""Parsing of command lines into the dataclass of a command, and descriptions of the flags that such a dataclass defines.

Errors of tyro are converted into one-line UserErrors.
"""

import argparse
import ast
import contextlib
import dataclasses
import errno
import functools
import importlib.util
import inspect
import io
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import tyro

from longtail import files
from longtail.config import DataConfig, list_settings
from longtail.config.section import Limit, Section
from longtail.errors import Kind, UserError, error_text, unknown_name
from longtail.text import find_closest
from longtail.training import SHORT_NAMES

T = TypeVar("T")

MODELS_FILE = "models/backbones.py"  # in this package; it registers networks with timm, as the files of timm do


def take_data_argument(command: str, args: list[str]) -> str:
    """Return the first argument: a recipe or a path to images. It comes first because the other defaults depend on it.

    Raise a UserError if there is none.
    """
    if not args or args[0].startswith("-"):
        alternative = ", or --from with a run" if command == "train" else ""
        example = "PATH/TO/IMAGES" if command.startswith("data") else "cifar100-lt"
        advice = f"as in `longtail {command} {example}`; `longtail recipes` lists recipes"
        raise UserError(f"the first argument must be a recipe or a path to images{alternative}, {advice}")
    check_path(args[0])
    return args[0]


def check_path(path: str | Path) -> None:
    """Raise a UserError if no file can have this path, or if the user has no permission to access it.

    A path that does not exist is accepted: it may be a file to write, or the command has a better message for it.
    """
    try:
        if os.path.isdir(path) and not os.access(path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        os.stat(path)
    except PermissionError as error:
        raise UserError(
            f"cannot open {path} ({error_text(error)}): change its permissions, or name another path",
            kind="unreadable-file",
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(f"{str(path)!r} is not a valid file name ({error.reason}): name another path") from error
    except ValueError as error:
        raise UserError(f"{str(path)!r} contains a NUL character, which is not allowed in a path") from error
    except OSError:
        pass


def find_paths(value: Any) -> Iterator[Path]:
    """Yield all paths in a value: the value itself, or the items of a tuple or the fields of a dataclass, recursively."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from find_paths(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from find_paths(getattr(value, field.name))


def reject_both(args: list[str], *pairs: tuple[str, str]) -> None:
    """Raise a UserError if two flags with the same meaning are given."""
    given = {normalize_flag(arg) for arg in args}
    for short, long in pairs:
        if {normalize_flag(short), normalize_flag(long)} <= given:
            raise UserError(f"{short} and {long} have the same meaning: give only one of them", kind="conflict")


def normalize_flag(arg: str) -> str:
    """Return the name of a flag without dashes and value, with underscores; an empty string for other arguments."""
    return arg[2:].split("=")[0].replace("-", "_") if arg.startswith("--") else ""


def expand_short_flags(kind: type, args: list[str]) -> list[str]:
    """Return the arguments with the full names of settings in place of short ones, such as --optim.lr for --lr.

    Args:
        kind: The dataclass of the command's arguments.
        args: The arguments.
    """
    short = find_short_flags(kind)
    reject_both(args, *((f"--{name.replace('_', '-')}", f"--{setting}") for name, setting in short.items()))
    expanded = []
    for arg in args:
        setting = short.get(normalize_flag(arg))
        _, equals, value = arg.partition("=")
        expanded.append(f"--{setting}{equals}{value}" if setting else arg)
    return expanded


def scan_flags(args: list[str], switches: Sequence[str] = (), **types: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values of a few flags, by name, and ignore all other arguments. Flags that are not given are None.

    Args:
        args: The arguments of the command.
        switches: Names of switches; --no_NAME turns them off.
        **types: Types of flags with a value, by the names of the flags.
    """
    scanner = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in switches:
        scanner.add_argument(f"--{flag}", action="store_true", default=None)
        scanner.add_argument(f"--no_{flag}", f"--no-{flag}", dest=flag, action="store_false", default=None)
    for flag, kind in types.items():
        scanner.add_argument(f"--{flag}", type=kind)
    try:
        return vars(scanner.parse_known_args(args)[0])
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(str(error)) from error


def parse_arguments(kind: type[T], command: str, args: list[str], default: T | None = None) -> T:
    """Parse the arguments of a command. Errors are UserErrors.

    Args:
        kind: The dataclass of the command's arguments.
        command: The name of the command, such as "data inspect".
        args: The arguments.
        default: The values of arguments that are not given; None: the defaults of `kind`.
    """
    errors = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed = tyro.cli(kind, prog=f"longtail {command}", args=args, use_underscores=True, **options)
    except SystemExit as stop:
        if stop.code in (None, 0):  # --help, unless `longtail.cli` has handled it
            raise
        message = format_parse_error(errors.getvalue(), suggest_flags(kind, args, default or kind))
        error_kind: Kind = "unknown-name" if message.startswith("Unrecognized") else "invalid-value"
        raise UserError(f"{message} (longtail {command} --help lists the flags)", kind=error_kind) from None
    for path in find_paths(parsed):
        check_path(path)
    return parsed


def check_data_paths(data: DataConfig) -> None:
    """Raise a UserError if a folder or a list of images in the settings does not exist."""
    needs_root = data.name != "digits" and not data.may_download
    for name in ("root", "train_list", "test_list"):
        path: Path | None = getattr(data, name)
        if path is not None and not os.path.lexists(path) and (needs_root or name != "root"):
            similar = files.find_similar_path(path)
            hint = f"did you mean {similar!r}?" if similar else "check the path"
            raise UserError(f"--data.{name} {path} does not exist: {hint}", kind="missing-file")


REGISTERED_MODEL = re.compile(r"^@register_model\s*\n(?:@.*\n)*def (\w+)", re.MULTILINE)


def check_model_name(name: str) -> None:
    """Raise a UserError if no source file of timm or longtail mentions a model, without importing torch.

    `make_backbone` checks the name again. Names with a source, such as hf-hub:OWNER/MODEL, are left to it.

    Args:
        name: The name of a model, with or without a tag.
    """
    model = name.partition(".")[0]
    timm = importlib.util.find_spec("timm")
    if timm is None or not timm.submodule_search_locations or not model.isidentifier():
        return
    paths = [*Path(timm.submodule_search_locations[0], "models").glob("*.py"), Path(__file__).parents[1] / MODELS_FILE]
    sources = [file.read_text(encoding="utf-8", errors="replace") for file in paths if file.is_file()]
    registered = {found for source in sources for found in REGISTERED_MODEL.findall(source)}
    # Deprecated names and that of a custom network are strings in the sources.
    if registered and model not in registered and not any(f"'{model}'" in s or f'"{model}"' in s for s in sources):
        raise unknown_name("model", name, registered)


def get_given_settings(args: list[str], parsed: Any) -> dict[str, Any]:
    """Return the parsed values of the settings that are given on the command line, by flag, such as {"optim.lr": 0.1}."""
    settings = [flag.replace(".no_", ".") for flag in map(normalize_flag, args) if "." in flag]
    return {name: functools.reduce(getattr, name.split("."), parsed) for name in settings}


def format_setting(name: str, value: Any) -> list[str]:
    """Return the arguments that set a value, such as ["--optim.lr", "0.1"] or ["--model.no_bias"]."""
    if isinstance(value, bool):
        section, field = name.rsplit(".", 1)
        return [f"--{section}.{'' if value else 'no_'}{field}"]
    return [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def suggest_flags(kind: type, args: list[str], parsed: Any) -> list[str]:
    """Return flags that the user may have meant by unknown ones without a section, the most likely first.

    These are settings that were given without their section, such as --warmup_epochs for --optim.warmup_epochs, and flags
    with a similar name.

    Args:
        kind: The dataclass of the command's arguments.
        args: The arguments.
        parsed: The dataclass or an instance of it, which has the sections.
    """
    settings = [name for name in list_settings(parsed) if "." in name]
    own = {flag.name.removeprefix("--") for flag in list_flags(kind) if not flag.is_positional} | {
        *find_short_flags(kind)
    }
    given = [name for arg in args if (name := normalize_flag(arg)) and "." not in name and name not in own]
    exact = [name for name in settings if name.rpartition(".")[2] in given]
    similar = [near.replace("_", "-") for name in given if (near := find_closest(name, own))]
    return [f"--{name}" for name in [*exact, *similar]]


def format_parse_error(box: str, full_flags: Sequence[str] = ()) -> str:
    """Return the message in a box that tyro has printed, in one line, with a suggestion for unknown flags.

    Args:
        box: The text of the box, up to whose first blank line the message extends. It may be drawn in ASCII characters.
        full_flags: Flags that the user may have meant; tyro's own suggestions are used if there are none.
    """
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and not line.strip("-─"):
            parts.append([])
        else:
            parts[-1].append(line)
    message = parts[0] if "╭" in box else parts[1]  # an ASCII box has its title first
    message = message[: message.index("")] if "" in message else message
    similar = [part[1].split()[0].rstrip(",") for part in parts if part and part[0].startswith("Perhaps you meant")]
    is_unknown = message[0].startswith("Unrecognized")
    hint = f": did you mean {[*full_flags, *similar][0]}?" if is_unknown and (full_flags or similar) else ""
    if message[0].endswith((" True", " False")):
        hint = ": a switch takes no value, write --x or --no_x"
    text = " ".join(message)
    if is_unknown:  # tyro lists the values of unknown options, too
        title, _, given = text.partition(": ")
        text = f"{title}: {', '.join([word for word in given.split(', ') if word.startswith('-')] or [given])}"
    return simplify_number_error(text) + hint


def simplify_number_error(message: str) -> str:
    """Replace Python's message about a value that is not a number by a shorter one; return other messages unchanged."""
    pattern = (
        r"Error parsing (\S+): (invalid literal for int\(\) with base 10|could not convert string to float): '?(.*?)'?$"
    )
    match = re.match(pattern, message)
    if not match:
        return message
    flag, reason, value = match.groups()
    return f"{flag} {value}: it must be {'an integer' if 'int' in reason else 'a number'}"


# Descriptions of flags


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
    letter: str = ""
    """A short name of one letter, such as "-o"; an empty string if there is none."""
    is_optional: bool = True

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
                letter=next(
                    (name for note in notes for name in getattr(note, "aliases", None) or () if len(name) == 2), ""
                ),
                is_optional=field.default is not dataclasses.MISSING,
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
        for short, setting in getattr(kind, "short_names", SHORT_NAMES).items()
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
