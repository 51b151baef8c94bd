"""Guarded access to files that somebody else may have written: regular files only, of a limited size."""

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from longtail.errors import UserError

# NUL, and surrogates except for those by which Python represents the bytes of a file name that is not UTF-8.
UNUSABLE_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


class UnreadableFile(Exception):
    """A reason, in a few words, why a file is not read."""


def open_regular(path: str | Path) -> int:
    """Return a descriptor of a regular file; symbolic links are followed.

    Raises UnreadableFile for a pipe, a device or a directory, without waiting for it, and for a path that no file can have.
    Other failures are OSErrors.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    except ValueError as error:
        raise UnreadableFile("its path has a NUL byte or a character that no file name can have") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFile("it is not a file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises UnreadableFile as `open_regular` does, and for a larger file, of which nothing is read.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise UnreadableFile(f"it has {size:,} bytes, more than the limit of {limit:,}")
        # Few calls: threads that read many files are slowed down by each, since the interpreter runs one at a time.
        found = os.read(descriptor, size)
        while len(found) < size and (more := os.read(descriptor, size - len(found))):
            found += more
        return found
    finally:
        os.close(descriptor)


def open_binary(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, as `open_regular` does."""
    return os.fdopen(open_regular(path), "rb")


def check_regular(path: Path) -> None:
    """Raise UnreadableFile unless `path` is a regular file, for libraries that open files by their paths."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnreadableFile("it is not a file")


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory; raise UserError if that cannot be determined, as without permission."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise UserError(f"cannot access {path} ({error.strerror}): check the permissions of its folder") from error


def list_directory(folder: Path) -> list[Path]:
    """Return the entries of a directory in the order of their names, without hidden ones."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot list {folder} ({error.strerror}): check its permissions") from error


def check_working_directory(paths: Iterable[Path | None]) -> None:
    """Raise UserError if one of the paths is relative and the working directory has been deleted."""
    if all(path is None or path.is_absolute() for path in paths):
        return
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the working directory no longer exists: change to another one, or give full paths") from error


def check_text(text: str, place: object, kind: str) -> str:
    """Return `text`, a path or a class name, unless it has characters that cannot be stored or printed: then a UserError.

    `place` says where the text was found and `kind` what it is, for the message.
    """
    if found := UNUSABLE_TEXT.search(text):
        what = "a NUL character" if found[0] == "\0" else "half of a surrogate pair"
        raise UserError(f"{place}: the {kind} {text[:80]!a} has {what}: write it without")
    return text
