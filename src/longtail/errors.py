"""What the user can mend is a UserError: one line that names the value and the fix. The command exits with its code."""

import contextlib
import difflib
import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, the share of it that a user may fill, or a file


class UserError(Exception):
    """Something the caller asked for cannot be done; the message says what to do instead."""

    exit_code = 2


class RunError(UserError):
    """A run that started well cannot go on: non-finite loss, memory, disk."""

    exit_code = 1


class NoRoom(RunError):
    """A disk is full."""


class Alone(RunError):
    """It happened to one process among several, which says so itself; of what happens to all the first speaks."""


class BadFile(Alone):
    """An image that cannot be read, met while a run trains; `found` is what is wrong, without what to do."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"{found}: {fix}")
        self.found = found


class Interrupted(RunError):
    """Ctrl-C, SIGTERM or SIGHUP, after everything was saved; the exit code is the shell's for that signal."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum

    def in_a_verb_that_resumes(self, where: str) -> "Interrupted":
        """The message of `train` speaks of --resume, which other verbs need not."""
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
    return UserError(f"unknown {kind} {str(given)!r}: {meant(given, names) or f'choose one of: {several}'}")


def meant(given: object, known: Iterable[str]) -> str:
    """The nearest of the known names as a suggestion; nothing where none is near."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
