"""Safe file access: refused files, size limits, and replacement of files."""

import json
import os
import socket
import stat
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from longtail import files
from longtail.files import RefusedFile


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "run"


# Reading


def test_a_regular_file_and_a_link_inside_its_folder_are_read(folder):
    (folder / "a").write_text("content")
    (folder / "b").symlink_to("a")
    assert files.read_bytes(folder / "a", folder=folder) == files.read_bytes(folder / "b", folder=folder) == b"content"
    (folder.parent / "other").symlink_to(folder)  # the folder itself may be reached through a link
    assert files.read_text(folder.parent / "other" / "b", folder=folder.parent / "other") == "content"


def test_paths_that_are_not_regular_files_are_refused_at_once(folder):
    os.mkfifo(folder / "fifo")
    (folder / "directory").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(folder / "socket"))
    for name in ("fifo", "directory", "zero", "loop", "socket", "absent", "a\0b"):
        for inside in (None, folder):
            with pytest.raises(OSError):
                files.read_bytes(folder / name, folder=inside)
    server.close()


@pytest.mark.parametrize("target", ["../secret", "{absolute}", "/etc/hostname"])
def test_a_link_that_leaves_its_folder_is_refused(folder, target):
    (folder / "link").symlink_to(target.format(absolute=folder.parent / "secret"))
    (folder / "sub").symlink_to("..")
    for path in (folder / "link", folder / "sub" / "secret"):
        with pytest.raises(RefusedFile):
            files.read_bytes(path, folder=folder)


def test_a_snapshot_of_the_hugging_face_cache_is_read(tmp_path):
    """snapshots/REVISION/file is a link to blobs/HASH; anything else outside of the snapshot is still refused."""
    cache = tmp_path / "models--owner--name"
    for name in ("blobs", "snapshots/0123abcd/seed0"):
        (cache / name).mkdir(parents=True)
    (cache / "blobs" / "f00").write_text("weights")
    snapshot = cache / "snapshots" / "0123abcd"
    (snapshot / "model").symlink_to("../../blobs/f00")
    (snapshot / "seed0" / "model").symlink_to("../../../blobs/f00")
    assert files.read_text(snapshot / "model", folder=snapshot) == "weights"
    assert files.read_text(snapshot / "seed0" / "model", folder=snapshot / "seed0") == "weights"
    (cache / "secret").write_text("secret")
    (snapshot / "secret").symlink_to("../../secret")
    with pytest.raises(RefusedFile):
        files.read_text(snapshot / "secret", folder=snapshot)


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(folder):
    path = folder / "large"
    path.touch()
    os.truncate(path, 2**40)  # sparse: it takes no room on the disk
    with pytest.raises(RefusedFile):
        files.read_bytes(path)
    os.truncate(path, 10)
    assert files.read_bytes(path, limit=10) == bytes(10)
    with pytest.raises(RefusedFile):
        files.read_bytes(path, limit=9)


# Arrays


ARRAYS = {
    "floats": np.linspace(0, 1, 12, dtype=np.float16).reshape(3, 4),
    "names": np.array(["ä", "bc"]),
    "order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty": np.empty((0, 5)),
    "scalar": np.array(3),
}


def test_arrays_are_those_of_numpy(folder):
    files.write_arrays(folder / "x.npz", ARRAYS)
    with np.load(folder / "x.npz", allow_pickle=False) as stored:
        expected = dict(stored)
    for found in (files.read_arrays(folder / "x.npz", folder), expected):
        assert found.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def archive(path: Path, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr("x.npy", content)
    return path


def header(shape: str, dtype: str = "'<f8'", data: bytes = bytes(80)) -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        header("(10,)", data=bytes(79)),
        header("(10,)", data=bytes(81)),
        header("(1000000000000,)"),
        header("(-10,)"),
        header("(10,)", "'|O'"),
        header("(10,)", "[('a', '|O')]"),
        header("10"),
        header("(10,)", "__import__('os')"),
        header("(3,"),
        b"\x93NUMPY\x09\x00",
        b"",
        b"nothing",
    ],
)
def test_arrays_that_contradict_their_headers_are_refused(folder, content):
    with pytest.raises((ValueError, OSError)):
        files.read_arrays(archive(folder / "x.npz", content))


def test_a_compressed_bomb_is_refused_before_it_is_expanded(folder):
    path = archive(folder / "x.npz", header("(4194304,)", data=bytes(2**25)))
    assert path.stat().st_size < 2**20
    with pytest.raises(RefusedFile):
        files.read_arrays(path, limit=2**20)
    for damaged in (path.read_bytes()[:-50], b"PK\x03\x04" + bytes(100), b""):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, OSError)):
            files.read_arrays(path)


# Writing


def test_file_is_replaced_completely_or_not_at_all(folder):
    path = folder / "x.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(KeyError), files.replace_file(path) as fresh:
        fresh.write_text("half")
        raise KeyError
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(folder) == ["x.json"]


def test_files_have_the_usual_mode(folder):
    before = os.umask(0o027)
    try:
        files.write_text(folder / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o640


def test_links_are_replaced_and_never_followed(folder):
    secret = folder.parent / "secret"
    for name in ("x.json", "x.npz", "x.txt"):
        (folder / name).symlink_to(secret)
    files.write_json(folder / "x.json", [1])
    files.write_arrays(folder / "x.npz", {"a": np.zeros(1)})
    files.write_text(folder / "x.txt", "new")
    assert secret.read_text() == "secret" and not any((folder / name).is_symlink() for name in os.listdir(folder))


def test_predictable_names_are_not_followed(folder):
    """Temporary names of earlier versions, and names with the process id, are links to a file of the user."""
    secret = folder.parent / "secret"
    planted = ["x.tmp", "x.tmp.npz", f".{os.getpid()}.x.json", "x.json.tmp"]
    for name in planted:
        (folder / name).symlink_to(secret)
    files.write_json(folder / "x.json", {})
    assert secret.read_text() == "secret" and {*os.listdir(folder)} == {"x.json", *planted}


def test_links_are_refused_as_logs_and_locks(folder):
    secret = folder.parent / "secret"
    (folder / "log").symlink_to(secret)
    os.mkfifo(folder / "fifo")
    for path in (folder / "log", folder / "fifo"):
        for open_file in (files.open_append, files.open_lock):
            with pytest.raises(RefusedFile):
                open_file(path)
    (folder / "lock").write_text("kept")
    files.open_lock(folder / "lock").close()
    with files.open_append(folder / "lines") as file:
        file.write("line\n")
    assert secret.read_text() == "secret" and (folder / "lock").read_text() == "kept"


def test_a_subfolder_that_leads_elsewhere_is_not_written_to(folder):
    (folder / "checkpoint").symlink_to(folder.parent)
    before = sorted(os.listdir(folder.parent))
    with pytest.raises(RefusedFile), files.replace_file(folder / "checkpoint" / "state.pt", folder):
        pass
    with pytest.raises(RefusedFile), files.replace_folder(folder / "checkpoint" / "examples", folder):
        pass
    assert sorted(os.listdir(folder.parent)) == before


def test_folder_is_replaced_completely(folder):
    (folder / "examples").symlink_to(folder.parent)
    for content in ("old", "new"):
        with files.replace_folder(folder / "examples", folder) as fresh:
            (fresh / "a").write_text(content)
    assert (folder / "examples" / "a").read_text() == "new" and os.listdir(folder) == ["examples"]
    assert (folder.parent / "secret").exists()
    with pytest.raises(KeyError), files.replace_folder(folder / "examples", folder):
        raise KeyError
    assert (folder / "examples" / "a").read_text() == "new" and os.listdir(folder) == ["examples"]


def test_leftovers_of_killed_processes_are_removed_and_files_in_use_are_not(folder):
    names = [f"{files.TEMPORARY_PREFIX}{'0123456789abcdef'[::step]}" for step in (1, -1)]
    (folder / f"{names[0]}.npz").write_text("half")
    (folder / names[1]).mkdir()
    (folder / f"{files.TEMPORARY_PREFIX}0000000000000000.x").symlink_to(folder.parent / "secret")
    with files.replace_file(folder / "slow") as in_use:
        files.write_text(folder / "quick", "x")
        assert in_use.exists()
        in_use.write_text("done")
    assert {*os.listdir(folder)} == {"slow", "quick", f"{files.TEMPORARY_PREFIX}0000000000000000.x"}
    assert (folder / "slow").read_text() == "done"


def test_many_writers_of_one_file(folder):
    """Each write is complete, and no temporary file is removed as a leftover."""
    errors = []

    def write(number: int) -> None:
        try:
            for _ in range(50):
                files.write_json(folder / "x.json", [number] * 1000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(set(json.loads((folder / "x.json").read_text()))) == 1
    assert os.listdir(folder) == ["x.json"]


def test_long_names_have_room_for_a_temporary_one(folder):
    name = "x" * 250 + ".json"
    files.write_json(folder / name, 1)
    assert os.listdir(folder) == [name]


def test_an_output_that_is_not_a_file_is_written_to(folder):
    read, write = os.pipe()
    files.write_output_json(Path(f"/dev/fd/{write}"), [1])
    os.close(write)
    with open(read) as pipe:
        assert json.loads(pipe.read()) == [1]
