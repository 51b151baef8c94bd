"""A full disk has the same message and exit code for all outputs. /dev/full is used as a full disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import longtail
from longtail import files, run_folder
from longtail.cli import main
from longtail.engine import checkpoint
from longtail.errors import DiskFullError, RunError, UserError, disk_full_as_user_error, disk_full_text, error_text
from tests.inference.made import finished_run, folder_config, photographs
from tests.raises import raises

ONE_MESSAGE = "no space left to write {}: free some space, or choose another path"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("made")
    return finished_run(place / "run/seed0", folder_config(photographs(place / "data"), "ce"))


def full(path: Path) -> Path:
    """Return a path at which every write fails like on a full disk."""
    path.symlink_to("/dev/full")
    return path


def raised(error: Exception, after: Exception | None = None, because: Exception | None = None) -> Exception:
    """Return an exception with the context and the cause that Python would set."""
    error.__context__, error.__cause__ = after, because
    return error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_recognized_in_wrapped_exceptions(code):
    plain = OSError(code, "x", "/x")
    theirs = SafetensorError(f"Error while serializing: I/O error: x (os error {code})")
    for error in (
        plain,
        theirs,
        raised(RuntimeError("unexpected pos"), after=plain),
        raised(UserError("x"), because=raised(RuntimeError("y"), after=plain)),
    ):
        assert disk_full_text(error) == error_text(error) != ""
        with raises("disk-full", "x", error=DiskFullError), disk_full_as_user_error("x"):
            raise error
    for error in (OSError(errno.EACCES, "x"), ValueError("28"), SafetensorError("(os error 13)"), None):
        assert disk_full_text(error) == ""
    with pytest.raises(PermissionError), disk_full_as_user_error("x"):
        raise PermissionError(errno.EACCES, "x")


def test_of_several_files_the_one_that_has_no_room_is_named():
    with (
        raises("disk-full", "inner", error=DiskFullError),
        disk_full_as_user_error("outer"),
        disk_full_as_user_error("inner"),
    ):
        raise OSError(errno.ENOSPC, "x")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["report", "RUN", "-o"], "x.html"),
        (["predict", "RUN", "IMAGES", "--csv"], "x.csv"),
        (["predict", "RUN", "IMAGES", "--json"], "x.json"),
        (["export", "RUN", "--to", "safetensors", "-o"], "x.safetensors"),
        pytest.param(["export", "RUN", "--to", "onnx", "-o"], "x.onnx", marks=pytest.mark.long),
        (["theory", "--counts", "5", "1", "--json"], "x.json"),
        (["figure", "framework", "-o"], "x.svg"),
        (["data", "inspect", "IMAGES", "--json"], "x.json"),
    ],
)
def test_every_output(run, tmp_path, capsys, words, name):
    if "onnx" in words:
        pytest.importorskip("onnxscript")
    out, named = full(tmp_path / name), {"RUN": str(run), "IMAGES": str(run.parents[1] / "data")}
    assert main([*(named.get(word, word) for word in words), str(out)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "longtail: " + ONE_MESSAGE.format(out)
    assert [path.name for path in tmp_path.iterdir()] == [name] and Path("/dev/full").is_char_device()


def test_torch_s_writer_does_not_end_the_process(run, tmp_path):
    """An exception in torch's writer would end the process, so this runs in a separate one."""
    out = full(tmp_path / "x.pt2")
    command = [sys.executable, "-m", "longtail", "export", str(run), "--to", "torch", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, f"longtail: {ONE_MESSAGE.format(out)}\n")


def test_a_network_is_not_there_without_its_card(run, tmp_path, monkeypatch):
    def write(path, *_):
        with disk_full_as_user_error(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_text", write)
    with raises("disk-full", tmp_path / "x.safetensors.md", error=DiskFullError):
        longtail.export(run, "safetensors", tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_no_room_for_another(run, tmp_path, monkeypatch, capsys):
    def mkdir(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert main(["report", str(run), "-o", str(tmp_path / "new/x.html")]) == 1
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    with pytest.raises(DiskFullError):
        longtail.export(run, "safetensors", tmp_path / "new/x.safetensors")


@pytest.mark.parametrize("numbers", [10, 100_000])
def test_error_of_a_checkpoint_names_the_full_disk(tmp_path, monkeypatch, numbers):
    """Small checkpoints fail when the file is closed, large ones while torch writes."""
    create = files._create_temporary

    def create_full(path: Path) -> tuple[Path, int]:
        fresh, descriptor = create(path)
        fresh.unlink()
        return full(fresh), descriptor

    monkeypatch.setattr(files, "_create_temporary", create_full)
    path = tmp_path / "checkpoint" / "state.pt"
    with raises("disk-full", path, os.strerror(errno.ENOSPC), error=RunError):
        checkpoint.save(path, {"x": torch.zeros(numbers)})
    assert not list(path.parent.iterdir())


def test_a_run_that_is_measured_again(run, monkeypatch, capsys):
    before = (run / run_folder.METRICS).read_bytes()

    def save(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", save)
    assert main(["eval", str(run), "--device", "cpu"]) == 1
    assert (
        ONE_MESSAGE.format(run / "predictions.npz") in capsys.readouterr().err
        and (run / run_folder.METRICS).read_bytes() == before
    )
