"""Errors that the user can fix. A `UserError` has a one-line message with the value and the fix, a kind, and an exit code."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from longtail.text import did_you_mean

DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exceeded disk quota, and a file that is larger than the file system allows."""

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
    "missing-token",  # no access token for the model hub
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
    "upload-failed",
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
    """Raised for a failure of a single process of a distributed run, which reports it itself.

    Failures that all processes have in common are reported by the main process.
    """


class UnreadableImageError(RankError):
    """Raised when an image cannot be read during training.

    Args:
        found: Description of the damage, also available as an attribute.
        fix: What the user can do.
    """

    kind: Kind = "bad-image"

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"{found}: {fix}")
        self.found = found
        self.fix = fix

    def __reduce__(self) -> tuple[type["UnreadableImageError"], tuple[str, str], dict[str, object]]:
        """Support pickling: processes of a distributed run exchange errors."""
        return type(self), (self.found, self.fix), self.__dict__


class Interrupted(RunError):
    """Raised after Ctrl-C, SIGTERM or SIGHUP, when everything is saved. The exit code is 128 plus the signal number."""

    kind: Kind = "interrupted"

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum

    def with_resume_hint(self, where: str) -> "Interrupted":
        """Return the error for commands that resume without --resume, which the message of `train` mentions."""
        return Interrupted(f"stopped in {where}; run the same command again to continue", self.exit_code - 128)


class RefusedFile(OSError):
    """Raised when a file is not read or written because it could do harm. `strerror` is the reason in a few words."""

    def __init__(self, path: os.PathLike[str] | str, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, os.fspath(path))

    def __reduce__(self) -> tuple[type["RefusedFile"], tuple[str, str]]:
        """Support pickling: processes of a distributed run exchange errors."""
        return type(self), (self.filename, self.strerror or "")


def error_text(error: BaseException) -> str:
    """Return the message of an error in one line, without error number and path.

    All errors that a full disk causes have the same message.
    """
    message = disk_full_text(error) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(message.split())


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or its type; messages of libraries may have hundreds of lines."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def file_error_kind(error: BaseException, writing: bool = False) -> Kind:
    """Return the kind of a UserError that reports a failure to read or write a file.

    Args:
        error: The exception. Exceptions other than OSError and MemoryError mean that the content is damaged.
        writing: Whether the file was written rather than read.
    """
    if isinstance(error, RefusedFile):
        return "unsafe-file"
    if isinstance(error, MemoryError):
        return "out-of-memory"
    if writing:
        return "disk-full" if disk_full_text(error) else "not-writable"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing-file"
    return "unreadable-file" if isinstance(error, OSError) else "damaged-file"


def disk_full_text(error: BaseException | None) -> str:
    """Return the system's message if a full disk caused the error, or an empty string.

    The causes of the error are examined too, because torch raises an error of its own after the system's. Errors of
    safetensors contain the error number in their text only.
    """
    while error is not None:
        in_text = re.search(r"\(os error (\d+)\)", str(error))
        code = getattr(error, "errno", None) or (in_text and int(in_text[1]))
        if code in DISK_FULL_CODES:
            return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def disk_full_as_user_error(path: object) -> Iterator[None]:
    """Raise a DiskFullError in place of any error that a full disk causes in the block, which writes to `path`."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if disk_full_text(error):
            raise DiskFullError(f"no space left to write {path}: free some space, or choose another path") from error
        raise


def check_is_path(value: object, argument: str) -> None:
    """Raise a UserError if an argument is neither a string nor a path.

    Args:
        value: The argument.
        argument: Its name.
    """
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{argument} has the type {type(value).__name__}: give a path")


def list_paths(paths: object, argument: str) -> list[Path]:
    """Return one path, or several, as a list; raise a UserError for other values.

    Args:
        paths: A path, or an iterable of paths.
        argument: The name of the argument, for the error.
    """
    every: list[Any] = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    for path in every:
        check_is_path(path, argument)
    return [Path(path) for path in every]


def unknown_name(kind: str, given: object, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with a suggestion.

    Args:
        kind: A noun for such names, such as "method".
        given: The unknown name.
        known: The known names. The message suggests the closest one, or lists the first 20 if none is close.
    """
    names = sorted(known)
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")
    message = f"unknown {kind} {str(given)!r}: {did_you_mean(given, names) or f'choose one of: {listed}'}"
    return UserError(message, kind="unknown-name")
