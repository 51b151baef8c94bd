"""What the user can mend is a UserError: one line that names the value and the fix. The command exits with its code."""

import contextlib
import difflib
import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator
from typing import Literal

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, the share of it that a user may fill, or a file


Kind = Literal[
    "bad-image",  # an image that cannot be decoded, or has an unsupported format
    "bad-labels",  # labels that are missing, malformed or out of range
    "bad-list",  # an image list, annotation file or shard with invalid content
    "conflict",  # settings that cannot be combined with each other, with the data or with the device
    "damaged-file",  # a file of the right type with invalid or damaged content
    "disk-full",
    "download-failed",
    "exists",  # an output path that is in use already, or holds something else
    "interrupted",
    "invalid-value",  # a setting or argument with a wrong type or out of range
    "missing-file",  # a path that does not exist, or holds nothing of the kind asked for
    "missing-package",
    "mismatch",  # a run, checkpoint or export that does not belong to the data, the settings or the other runs
    "non-finite",  # a loss or a feature that is NaN or infinite
    "not-writable",  # an output path that cannot be written, other than for lack of space
    "out-of-memory",
    "peer-failure",  # another process of a distributed run failed
    "too-few-data",  # too few images, classes, seeds or runs for what was asked
    "unfinished-run",
    "unknown-name",  # a recipe, method, class, flag or other name that does not exist
    "unreadable-file",  # a path that cannot be read: permissions, or a directory in place of a file
    "unsafe-file",  # a file that was refused: a link that leaves its folder, a device, a FIFO, or too large
    "unsupported",  # a combination that this package does not implement
]


class UserError(Exception):
    """Raised when something that the caller asked for cannot be done; the message says what to do instead.

    `kind` classifies the error for programs and tests, which should not depend on the wording of the message. The default of
    a class can be replaced for one error: `UserError(message, kind="missing-file")`.
    """

    exit_code = 2
    kind: Kind = "invalid-value"

    def __init__(self, message: str = "", *, kind: Kind | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind


class RunError(UserError):
    """Raised when a run that was started correctly cannot continue, for example because of a non-finite loss or a full disk."""

    exit_code = 1


class NoRoom(RunError):
    """Raised when a disk is full."""

    kind: Kind = "disk-full"


class Alone(RunError):
    """Raised for a failure of one process among several. That process reports it; failures of all are reported by the first."""


class BadFile(Alone):
    """Raised when an image cannot be read during training. `found` describes the damage, without the advice."""

    kind: Kind = "bad-image"

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"{found}: {fix}")
        self.found = found


class Interrupted(RunError):
    """Raised after Ctrl-C, SIGTERM or SIGHUP, once everything is saved; the exit code is the shell's code for that signal."""

    kind: Kind = "interrupted"

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum

    def in_a_verb_that_resumes(self, where: str) -> "Interrupted":
        """Return the error for commands that resume without --resume, which the message of `train` mentions."""
        return Interrupted(f"stopped in {where}: the same command continues", self.exit_code - 128)


def some(items: Iterable[object], most: int = 3) -> str:
    """The first few, for a message."""
    shown = [str(item) for item in items]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")


def why(error: BaseException) -> str:
    """What the system says, without its number and the path; of a full disk always the same."""
    said = full_disk(error) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(said.split())


def full_disk(error: BaseException | None) -> str:
    """The system's words for a full disk, where that is behind the error.

    torch's own errors come after the system's, and safetensors has its number in its text alone.
    """
    while error is not None:
        told = re.search(r"\(os error (\d+)\)", str(error))
        code = getattr(error, "errno", None) or (told and int(told[1]))
        if code in FULL:
            return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def room_for(path: object) -> Iterator[None]:
    """While something is written there: whatever a full disk makes of it is one error, with one exit code."""
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        if full_disk(error):
            raise NoRoom(f"no space left to write {path}: free some, or name another place") from error
        raise


def visible(text: object) -> str:
    """Text that a terminal can only show: what is not printable (escapes, line ends, reversed writing) is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


MARKUP = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # an underscore inside of a word is only itself
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escape_markdown(text: object) -> str:
    """Return text that Markdown displays as it is, also in a cell of a table: no markup, no link and no HTML.

    Characters that are not printable are spelled out, as by `visible`. The characters of HTML become entities, because not
    every Markdown program lets a backslash protect them.
    """
    escaped = MARKUP.sub(lambda found: f"\\{found[0]}", visible(text))
    return "".join(ENTITIES.get(c, c) for c in escaped)


def quote_markdown(text: object) -> str:
    """Return text as inline code in Markdown; its delimiters are longer than every run of backticks in the text."""
    shown = visible(text)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{shown}{space}{fence}"


FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes a cell for a formula by


def no_formula(text: str) -> str:
    """An apostrophe before what a spreadsheet would compute; numbers stay as they are."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(FORMULA) else text
    return text


def counted(number: int, noun: str) -> str:
    """As in "1 image", "2 classes"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def unknown(kind: str, given: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not among the known ones, with the nearest as a suggestion."""
    names = sorted(known)
    several = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
    message = f"unknown {kind} {str(given)!r}: {meant(given, names) or f'choose one of: {several}'}"
    return UserError(message, kind="unknown-name")


def meant(given: object, known: Iterable[str]) -> str:
    """The nearest of the known names as a suggestion; nothing where none is near."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
