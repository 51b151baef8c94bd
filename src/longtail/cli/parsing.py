"""From words to the dataclass of a verb; and how what tyro says about mistakes becomes one line."""

import argparse
import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from longtail.errors import Kind, UserError, error_text

T = TypeVar("T")


def name_first(verb: str, args: list[str]) -> str:
    """What is trained comes first, as the other arguments' defaults are its own."""
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        again = ", or --from with a run" if verb == "train" else ""
        usual = "PATH/TO/IMAGES" if verb.startswith("data") else "cifar100-lt"
        advice = f"as in `longtail {verb} {usual}`; `longtail recipes` lists recipes"
        raise UserError(f"name a recipe or a folder first{again}, {advice}")
    if args[0] in ("-h", "--help"):
        return "cifar100-lt"
    check_path(args[0])
    return args[0]


def check_path(path: str | Path) -> None:
    """Raise a UserError for a path that no file can have, or that the system does not let this user reach.

    A path where there is nothing passes: it may be a file to write, or an error that the command describes better.
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
        raise UserError(f"{str(path)!r} cannot be the name of a file ({error.reason}): name another path") from error
    except ValueError as error:
        raise UserError(f"{str(path)!r} contains a NUL character: no path can have one") from error
    except OSError:
        pass


def paths_of(value: Any) -> Iterator[Path]:
    """Yield every path in a value: a path itself, or those in a tuple or in the fields of a dataclass."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from paths_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from paths_of(getattr(value, field.name))


def not_both(args: list[str], *pairs: tuple[str, str]) -> None:
    """Two flags that mean the same must not both be given."""
    given = {arg.split("=")[0] for arg in args}
    for short, long in pairs:
        if {short, long} <= given:
            raise UserError(f"{short} and {long} say the same thing: give one of them", kind="conflict")


def scanned(args: list[str], **kinds: Callable[[str], Any]) -> dict[str, Any]:
    """The values of some flags, before the rest is understood."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, kind in kinds.items():
        scan.add_argument(f"--{flag}", type=kind)
    try:
        return vars(scan.parse_known_args(args)[0])
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(str(error)) from error


def parse(kind: type[T], verb: str, args: list[str], default: T | None = None) -> T:
    """tyro's reading of the arguments; what it would print in a box becomes one line."""
    errors = io.StringIO()
    given: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            found = tyro.cli(kind, prog=f"longtail {verb}", args=args, use_underscores=True, **given)
    except SystemExit as stop:
        if stop.code in (None, 0):  # --help
            raise
        said = in_one_line(errors.getvalue(), without_section(args, default or kind))
        wrong: Kind = "unknown-name" if said.startswith("Unrecognized") else "invalid-value"
        raise UserError(f"{said} (longtail {verb} --help lists the flags)", kind=wrong) from None
    for path in paths_of(found):
        check_path(path)
    return found


def without_section(args: list[str], verb: Any) -> list[str]:
    """Of settings that were called by their last name alone, such as --epochs, the whole ones."""
    asked = {word[2:].split("=")[0].replace("-", "_") for word in args if word.startswith("--")}
    return [f"--{flag}" for flag in settings_of(verb) if flag.rpartition(".")[2] in asked and "." in flag]


def settings_of(section: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(section):
        value = getattr(section, field.name, None)
        if is_dataclass(value):
            yield from settings_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def in_one_line(box: str, meant: Sequence[str] = ()) -> str:
    """The message of tyro's box, up to its first blank line, with the flag that was meant, or that it suggests; the box may be
    drawn in ASCII."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line and not line.strip("-─"):
            parts.append([])
        else:
            parts[-1].append(line)
    message = parts[0] if "╭" in box else parts[1]  # an ASCII box has its title first
    message = message[: message.index("")] if "" in message else message
    near = [part[1].split()[0] for part in parts if part and part[0].startswith("Perhaps you meant")]
    unknown = message[0].startswith("Unrecognized")
    hint = f": did you mean {[*meant, *near][0]}?" if unknown and (meant or near) else ""
    if message[0].endswith((" True", " False")):
        hint = ": a switch takes no value, write --x or --no_x"
    return spoken(" ".join(message)) + hint


def spoken(message: str) -> str:
    """Python's words for what is no number, as a person would say them."""
    pattern = (
        r"Error parsing (\S+): (invalid literal for int\(\) with base 10|could not convert string to float): '?(.*?)'?$"
    )
    found = re.match(pattern, message)
    if not found:
        return message
    flag, said, given = found.groups()
    return f"{flag} {given}: it must be a {'whole ' if 'int' in said else ''}number"
