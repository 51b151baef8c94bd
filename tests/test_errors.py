"""Errors: their kinds, and how they are sent between processes."""

import errno
import pickle
import zipfile
from pathlib import Path

import pytest

import longtail
from longtail.errors import (
    DiskFullError,
    Interrupted,
    RankError,
    RefusedFile,
    UnreadableImageError,
    UserError,
    file_error_kind,
    list_paths,
)
from tests.raises import raises


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


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        ("report", (3,), "paths"),
        ("report", ([Path("x"), 3],), "paths"),
        ("report", ("x", 3), "out"),
        ("table", (None,), "paths"),
        ("table", ("x", 3), "out"),
        ("evaluate", (3,), "run"),
        ("evaluate", (["x"],), "run"),
        ("watch", (3,), "paths"),
        ("distill", (3,), "teachers"),
        ("demo", (3,), "out"),
        ("export", (3,), "path"),
        ("load", (3,), "path"),
        ("head_config", ("ce", "x"), "images"),
    ],
)
def test_arguments_of_a_wrong_type_are_an_error_that_names_them(function, given, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises("invalid-value", named):
        getattr(longtail, function)(*given)
    assert not list(tmp_path.iterdir())


def test_one_path_and_several_are_lists():
    assert list_paths("a", "paths") == list_paths(Path("a"), "paths") == [Path("a")]
    assert (
        list_paths((path for path in ("a", Path("b"))), "paths") == [Path("a"), Path("b")] and list_paths([], "") == []
    )
