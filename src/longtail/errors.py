"""Errors that the user can fix: a `UserError` has one line that names the value and the fix, a kind, and an exit code."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator
from typing import Literal

from longtail.text import did_you_mean

DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, the share of it that a user may fill, or a file


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


class DiskFullError(RunError):
    """Raised when a disk is full."""

    kind: Kind = "disk-full"


class RankError(RunError):
    """Raised for a failure of one process among several. That process reports it; failures of all are reported by the first."""


class UnreadableImageError(RankError):
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


def error_text(error: BaseException) -> str:
    """Return the message of an error in one line, without error number and path; a full disk always gives the same message."""
    said = disk_full_text(error) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(said.split())


def disk_full_text(error: BaseException | None) -> str:
    """Return the system's message if the error was caused by a full disk, or an empty string.

    torch raises errors of its own after the system's, and safetensors has the error number in its text only.
    """
    while error is not None:
        told = re.search(r"\(os error (\d+)\)", str(error))
        code = getattr(error, "errno", None) or (told and int(told[1]))
        if code in DISK_FULL_CODES:
            return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def disk_full_as_user_error(path: object) -> Iterator[None]:
    """Context manager for writing to `path`: every error that a full disk causes becomes a DiskFullError."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if disk_full_text(error):
            raise DiskFullError(f"no space left to write {path}: free some, or name another place") from error
        raise


def unknown_name(kind: str, given: object, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not among the known ones; the closest of these is suggested."""
    names = sorted(known)
    several = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
    message = f"unknown {kind} {str(given)!r}: {did_you_mean(given, names) or f'choose one of: {several}'}"
    return UserError(message, kind="unknown-name")
