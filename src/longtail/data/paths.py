"""Directories, and text from files that somebody else may have written."""

import errno
import os
import re
import stat
from pathlib import Path

from longtail.errors import UserError

# NUL, and surrogates except for those by which Python represents the bytes of a file name that is not UTF-8.
UNUSABLE_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory; raise UserError if that cannot be determined, as without permission."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise UserError(
            f"cannot access {path} ({error.strerror}): check the permissions of its folder", kind="unreadable-file"
        ) from error


def list_directory(folder: Path) -> list[Path]:
    """Return the entries of a directory in the order of their names, without hidden ones."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"cannot list {folder} ({error.strerror}): check its permissions", kind="unreadable-file"
        ) from error


def check_text(text: str, place: object, kind: str) -> str:
    """Return `text`, a path or a class name, unless it has characters that cannot be stored or printed: then a UserError.

    `place` says where the text was found and `kind` what it is, for the message.
    """
    if found := UNUSABLE_TEXT.search(text):
        what = "a NUL character" if found[0] == "\0" else "half of a surrogate pair"
        raise UserError(f"{place}: the {kind} {text[:80]!a} has {what}: write it without", kind="bad-list")
    return text
