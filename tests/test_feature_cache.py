"""Test the feature cache: bounds, damaged and foreign files, folders that cannot be used, and the commands."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from longtail import feature_cache, files
from longtail.cli import main
from longtail.feature_cache import FeatureCache, hash_blocks, make_key
from tests.raises import fails, raises

SHAPE = (4, 8)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(feature_cache, "log_warning", found.append)
    return found


def features(seed: int, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def key(number: int) -> str:
    return make_key({"number": number})


def path(number: int) -> Path:
    return FeatureCache().folder / f"{key(number)}.npz"


def set_age(number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path(number), (then, then))


def test_stored_features_are_read_bit_for_bit(root):
    cache = FeatureCache()
    assert cache.read(key(1), SHAPE) is None and not cache.has(key(1)) and not root.exists()
    cache.write(key(1), features(1))
    found = FeatureCache().read(key(1), SHAPE)
    assert found is not None and found.tobytes() == features(1).tobytes() and cache.has(key(1))
    assert FeatureCache().read(key(1), (4, 9)) is None and FeatureCache().read(key(2), SHAPE) is None


def test_keys_depend_on_every_value_and_not_on_the_order():
    assert make_key({"a": 1, "b": [2, 3]}) == make_key({"b": [2, 3], "a": 1})
    assert len({make_key(parts) for parts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": [1]}, {"a": "1"})}) == 5


def test_hashes_of_blocks_separate_the_strings():
    strings = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [], [b"ab", b"c"]]
    one, two, three, four, five = hash_blocks([iter(block) for block in strings], 2)
    assert one == five and len({one, two, three, four}) == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "pickle", "other key", "not finite", "float64"])
def test_damaged_and_foreign_files_are_ignored_and_replaced(damage):
    cache = FeatureCache()
    cache.write(key(1), features(1))
    whole = path(1).read_bytes()
    if damage == "cut":
        path(1).write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        middle = whole.index(features(1).tobytes()[:16])
        path(1).write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif damage == "empty":
        path(1).write_bytes(b"")
    elif damage == "pickle":
        np.savez(path(1), features=np.array([{}]), key=np.array(key(1)))
    elif damage == "other key":
        cache.write(key(2), features(2))
        path(2).replace(path(1))
    elif damage == "not finite":
        np.savez(path(1), features=np.full(SHAPE, np.nan, np.float32), key=np.array(key(1)))
    else:
        np.savez(path(1), features=features(1).astype(np.float64), key=np.array(key(1)))
    assert cache.read(key(1), SHAPE) is None
    cache.write(key(1), features(1))
    assert np.array_equal(FeatureCache().read(key(1), SHAPE), features(1))


def test_least_recently_used_files_are_removed(monkeypatch):
    for number in range(4):
        FeatureCache().write(key(number), features(number, (64, 64)))
        set_age(number, 1000 - number)
    size = path(0).stat().st_size
    assert FeatureCache().read(key(0), (64, 64)) is not None  # now the most recently used
    monkeypatch.setenv("LONGTAIL_CACHE_SIZE", str(4 * size + size // 2))
    FeatureCache().write(key(4), features(4, (64, 64)))
    assert [number for number in range(5) if path(number).exists()] == [0, 2, 3, 4]
    monkeypatch.setenv("LONGTAIL_CACHE_SIZE", "1KiB")  # too small for one file
    FeatureCache().write(key(5), features(5, (64, 64)))
    assert not path(5).exists()


def test_total_size_stays_within_the_limit(monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE_SIZE", "100KiB")
    cache = FeatureCache()
    for number in range(30):
        cache.write(key(number), features(number, (16, 64)))
        assert sum(file.size for file in cache.list_files()) <= 100 * 1024
    assert cache.read(key(29), (16, 64)) is not None and cache.read(key(0), (16, 64)) is None


def test_size_limits(monkeypatch):
    for text, size in {
        "": 10 * 2**30,
        "2GiB": 2**31,
        "1.5 kib": 1536,
        "3MB": 3_000_000,
        "77": 77,
        "0": 0,
        "9" * 400: 2**62,
    }.items():
        monkeypatch.setenv("LONGTAIL_CACHE_SIZE", text)
        assert FeatureCache().limit == size, text
    for text in ("much", "-1", "1 apple", "nan"):
        monkeypatch.setenv("LONGTAIL_CACHE_SIZE", text)
        with raises("invalid-value", "LONGTAIL_CACHE_SIZE"):
            FeatureCache()


@pytest.mark.parametrize("what", ["link", "FIFO", "file", "root is a file"])
def test_unusable_folders_cause_one_warning_and_nothing_else(what, root, tmp_path, warnings):
    root.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{key(1)}.npz").write_bytes(b"of somebody else")
    if what == "link":
        (root / "features").symlink_to(other)
    elif what == "FIFO":
        os.mkfifo(root / "features")
    elif what == "file":
        (root / "features").write_text("x")
    else:
        root.rmdir()
        root.write_text("x")
    cache = FeatureCache()
    for number in range(2):
        cache.write(key(number), features(number))
        assert cache.read(key(number), SHAPE) is None
    assert len(warnings) == 1 and cache.list_files() == [] and cache.clear() == 0
    assert [file.name for file in other.iterdir()] == [f"{key(1)}.npz"]


def test_a_cache_that_cannot_be_written_is_still_read(monkeypatch, warnings):
    FeatureCache().write(key(1), features(1))
    set_age(1, 1000)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(files, "replace_file", refuse)
    cache = FeatureCache()
    assert np.array_equal(cache.read(key(1), SHAPE), features(1))
    cache.write(key(2), features(2))
    assert len(warnings) == 1 and cache.read(key(2), SHAPE) is None


def test_a_full_disk_is_a_warning(monkeypatch, warnings):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    FeatureCache().write(key(1), features(1))
    assert len(warnings) == 1 and list(FeatureCache().folder.iterdir()) == []


@pytest.mark.parametrize("what", ["link", "FIFO", "folder"])
def test_entries_that_are_not_regular_files_are_ignored(what, tmp_path, warnings):
    cache = FeatureCache()
    cache.write(key(1), features(1))
    stored = path(1).read_bytes()
    path(1).unlink()
    (tmp_path / "target.npz").write_bytes(stored)
    if what == "link":
        path(1).symlink_to(tmp_path / "target.npz")
    elif what == "FIFO":
        os.mkfifo(path(1))
    else:
        path(1).mkdir()
    assert cache.read(key(1), SHAPE) is None and cache.list_files() == []
    cache.write(key(1), features(2))
    assert (tmp_path / "target.npz").read_bytes() == stored
    assert len(warnings) == (what == "folder")


def test_two_writers_at_once(monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE_SIZE", "60KiB")

    def work(errors: list[Exception]) -> None:
        try:
            cache = FeatureCache()
            for number in range(20):
                found = cache.read(key(number), SHAPE)
                assert found is None or np.array_equal(found, features(number))
                cache.write(key(number), features(number))
            assert cache.can_write
        except Exception as error:
            errors.append(error)

    errors: list[Exception] = []
    threads = [threading.Thread(target=work, args=(errors,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and not [f for f in FeatureCache().folder.iterdir() if f.suffix != ".npz"]


def test_clear_removes_only_files_of_the_cache(capsys, root):
    cache = FeatureCache()
    for number in range(3):
        cache.write(key(number), features(number))
    foreign = [cache.folder / "notes.txt", cache.folder / "a.npz", cache.folder / f"{key(7)}.npz.bak", root / "other"]
    for file in foreign:
        file.write_text("mine")
    size = sum(file.size for file in cache.list_files())
    assert main(["cache", "info"]) == 0
    shown = capsys.readouterr().out
    assert str(cache.folder) in shown and "3" in shown.split() and "10.0 GiB" in shown
    assert main(["cache", "clear"]) == 0
    shown = capsys.readouterr().out
    assert "3 files" in shown and f"{size / 1024:.1f} KiB" in shown
    assert all(file.read_text() == "mine" for file in foreign) and cache.list_files() == []
    for file in foreign[:3]:
        file.unlink()
    assert main(["cache", "clear"]) == 0 and not cache.folder.exists()
    assert main(["cache", "info"]) == main(["cache"]) == 0


def test_a_time_that_the_system_cannot_show(capsys, monkeypatch):
    cached = feature_cache.CachedFile(Path("x"), 1, 4.6e18)
    monkeypatch.setattr(FeatureCache, "list_files", lambda self: [cached])
    assert main(["cache", "info"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_unknown_subcommands(capsys):
    fails(capsys, ["cache", "clean"], "unknown-name", "clean")
    fails(capsys, ["cache", "info", "x"], "unknown-name", "x")
