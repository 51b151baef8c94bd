"""Errors: their kinds, and how they are sent between processes."""

import errno
import pickle
import zipfile

import pytest

from longtail.errors import (
    DiskFullError,
    Interrupted,
    RankError,
    RefusedFile,
    UnreadableImageError,
    UserError,
    file_error_kind,
)


@pytest.mark.parametrize(
    "error",
    [
        UserError("no"),
        UserError("no", kind="conflict"),
        DiskFullError("full"),
        RankError("no"),
        UnreadableImageError("a.jpg is damaged", "remove it"),
        Interrupted("stopped", 15),
        RefusedFile("a/b", "it is a device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("error", "reading", "writing"),
    [
        (FileNotFoundError(errno.ENOENT, "x"), "missing-file", "not-writable"),
        (NotADirectoryError(errno.ENOTDIR, "x"), "missing-file", "not-writable"),
        (PermissionError(errno.EACCES, "x"), "unreadable-file", "not-writable"),
        (IsADirectoryError(errno.EISDIR, "x"), "unreadable-file", "not-writable"),
        (OSError(errno.ENOSPC, "x"), "unreadable-file", "disk-full"),
        (RefusedFile("x", "y"), "unsafe-file", "unsafe-file"),
        (MemoryError(), "out-of-memory", "out-of-memory"),
        (ValueError("x"), "damaged-file", "not-writable"),
        (zipfile.BadZipFile("x"), "damaged-file", "not-writable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_kinds_of_file_errors(error, reading, writing):
    assert file_error_kind(error) == reading and file_error_kind(error, writing=True) == writing
