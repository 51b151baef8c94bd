"""Closed or failing standard streams, deleted working directories and inaccessible paths give one-line errors."""

import csv
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import longtail
from longtail import run_folder
from longtail.cli import COMMANDS, main, report
from longtail.engine import evaluate
from longtail.errors import RunError
from tests.conftest import tiny
from tests.inference.made import finished_run
from tests.odd.harness import before_the_work, command
from tests.raises import raises

LONGTAIL = [sys.executable, "-m", "longtail"]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Make a finished run, and images of two classes."""
    root = tmp_path_factory.mktemp("work")
    finished_run(root / "run/seed0", tiny("ce"))
    for c in ("cat", "dog"):
        (root / "pets" / c).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (8, 8), (40 * i, 0, len(c))).save(root / "pets" / c / f"{i}.png")
    return root


def redirected(how: str, *args: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command in a process whose streams are redirected by the shell."""
    command = ["sh", "-c", f'exec "$@" {how}', "sh", *LONGTAIL, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)


# Closed streams


@pytest.mark.parametrize("args", [["recipes"], ["docs", "start"], ["train", "--help"]])
def test_output_to_a_closed_stream_is_an_error(args):
    done = redirected(">&-", *args)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "standard output" in done.stderr
    assert redirected(">&- 2>&-", *args).returncode == 1
    assert redirected("<&- 2>&-", *args).returncode == 0


def test_a_closed_standard_error_does_not_move_errors_to_standard_output():
    done = redirected("2>&-", "trian")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.long  # a test below does the same in this process
def test_paths_cannot_come_from_a_closed_standard_input(work):
    done = redirected("<&-", "predict", str(work / "run"), "-")
    assert done.returncode == 2 and "standard input" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--csv", "--json"])
def test_predictions_need_an_open_standard_output(flag, work):
    done = redirected(">&-", "predict", str(work / "run"), str(work / "pets"), flag, "-")
    assert done.returncode == 1 and "standard output" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("streams", [pytest.param("<&-", marks=pytest.mark.long), "<&- >&- 2>&-"])
def test_output_for_a_closed_stream_is_not_written_into_files(streams, work, tmp_path):
    """The first file that a process opens would otherwise get the number of the closed stream."""
    args = ["predict", str(work / "run"), str(work / "pets"), "--device", "cpu", "--json", "said.json"]
    done = redirected(streams, *args, cwd=tmp_path)
    assert done.returncode == (1 if ">&-" in streams.replace("2>&-", "") else 0) and "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "said.json").read_text().splitlines()]
    assert len(lines) == 12 and all(len(line["predictions"]) == 5 for line in lines)


def test_training_continues_without_loggers(tmp_path):
    args = ["train", "digits-lt", "--method", "ce", "--train.epochs", "1", "--train.device", "cpu", "--out", "run"]
    args += ["--model.name", "resnet8_cifar", "--data.image_size", "8", "--train.batch_size", "128"]
    done = redirected(">&- 2>&- <&-", *args, "--log.progress", "bar", cwd=tmp_path)
    assert done.returncode == 1 and (tmp_path / "run/seed0" / run_folder.METRICS).exists()
    assert len((tmp_path / "run/seed0" / run_folder.LOG).read_text().splitlines()) == 1


def test_messages_that_cannot_be_written_are_dropped(work, tmp_path):
    """A full disk behind standard error does not stop the command."""
    args = ["predict", str(work / "run"), str(work / "pets"), "--csv", "said.csv", "--device", "cpu"]
    done = redirected("2>/dev/full", *args, cwd=tmp_path)
    assert done.returncode == 0 and len((tmp_path / "said.csv").read_text().splitlines()) == 13
    assert redirected("2>/dev/full", "trian").returncode == 2


def test_help_on_a_full_disk_is_one_line():
    done = redirected(">/dev/full", "train", "--help")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and os.strerror(errno.ENOSPC) in done.stderr


# Standard input


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\0"])
def test_paths_are_separated_by_lines_or_nul(separator, work, tmp_path):
    names = [str(work / "pets/cat/0.png"), str(work / "pets/dog/3.png")]
    if separator == "\0":
        shutil.copy(names[0], tmp_path / "a\nb.png")
        names.append(str(tmp_path / "a\nb.png"))
    args = ["predict", str(work / "run"), "-", "--json", str(tmp_path / "said.json"), "--device", "cpu"]
    assert command(args, typed=separator.join([*names, ""]).encode()).code == 0
    assert [json.loads(line)["path"] for line in (tmp_path / "said.json").read_text().splitlines()] == names


def test_endless_standard_input_is_refused(work, monkeypatch):
    monkeypatch.setattr("longtail.inference.predict.MAX_LIST_BYTES", 100)
    found = command(["predict", str(work / "run"), "-"], typed=b"x" * 101)
    assert found.code == 2 and "100 bytes" in found.err and "standard input" in found.err


# Names that are not valid text


@pytest.fixture
def strange(work, tmp_path) -> Path:
    """Write images of classes whose names are not UTF-8."""
    for i, name in enumerate((b"c\xffat", b"d\xfeog")):
        (tmp_path / "pets" / os.fsdecode(name)).mkdir(parents=True)
        for image in (work / "pets/cat").iterdir():
            Image.open(image).rotate(90 * i).save(tmp_path / "pets" / os.fsdecode(name) / f"\udcff{image.name}")
    return tmp_path


def test_strange_names_are_written_in_every_format(strange, work):
    args = ["predict", str(work / "run"), str(strange / "pets"), "--device", "cpu"]
    shown = subprocess.run([*LONGTAIL, *args], capture_output=True, timeout=100, env=os.environ | {"LC_ALL": "C"})
    assert shown.returncode == 0 and b"c\\udcffat" in shown.stdout
    assert main([*args, "--csv", str(strange / "said.csv"), "--json", str(strange / "said.json")]) == 0
    with open(strange / "said.csv", encoding="utf-8") as file:
        assert len([row for row in csv.DictReader(file) if "\\udcff" in row["path"]]) == 12
    paths = [json.loads(line)["path"] for line in (strange / "said.json").read_text(encoding="utf-8").splitlines()]
    assert len(paths) == 12 and all(os.path.exists(path) for path in paths)


def test_strange_names_can_be_trained_on_and_packed(strange):
    data, out = str(strange / "pets"), str(strange / "out")
    assert main(["data", "inspect", data, "--json", str(strange / "found.json")]) == 0
    assert main(["data", "shard", data, "--out", str(strange / "shards")]) == 0
    args = ["--method", "ce", "--train.epochs", "1", "--train.device", "cpu", "--log.progress", "none", "--out", out]
    assert main(["train", data, *args, "--data.image_size", "8", "--model.name", "resnet8_cifar"]) == 0
    assert main(["table", out]) == 0 and main(["report", out, "-o", f"{out}/page.html"]) == 0
    assert main(["export", out, "--to", "safetensors"]) == 0


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"], ids=["NUL", "surrogate"])
@pytest.mark.parametrize(
    "args",
    [
        ["train", "X"],
        ["train", "--from", "X"],
        ["train", "digits-lt", "--out", "X"],
        ["train", "cifar100-lt", "--data.root", "X"],
        ["train", "digits-lt", "--data.train_list", "X"],
        ["eval", "X"],
        ["table", "X"],
        ["report", "X"],
        ["report", "RUN", "-o", "X"],
        ["figure", "latency", "X"],
        ["figure", "extra", "-o", "X.svg"],
        ["watch", "X"],
        ["data", "inspect", "X"],
        ["data", "shard", "PETS", "--out", "X"],
        ["compare", "X"],
        ["reproduce", "methods", "--results", "X"],
        ["theory", "--recipe", "X"],
        ["theory", "--counts", "X"],
        ["predict", "X", "PETS"],
        ["predict", "RUN", "X"],
        ["predict", "RUN", "PETS", "--csv", "X"],
        ["predict", "RUN", "PETS", "--prior", "X"],
        ["export", "X"],
        ["demo", "--out", "X"],
    ],
    ids=lambda args: "-".join(args).replace("-X", ""),
)
def test_no_path_has_such_a_name(args, name, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = {"RUN": str(work / "run"), "PETS": str(work / "pets")}
    with before_the_work():
        found = command([words.get(word, word.replace("X", name)) for word in args])
    *_, said = found.err.splitlines()
    assert found.code == 2 and said.startswith("longtail: ") and said.isprintable() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError("embedded null byte"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no")])
def test_a_bad_name_from_anywhere_is_one_line(error, monkeypatch):
    monkeypatch.setitem(COMMANDS, "recipes", (COMMANDS["recipes"][0], failing(error)))
    found = command(["recipes"])
    assert found.code == 2 and found.err.startswith("longtail: ") and found.err.count("\n") == 1


def test_other_exceptions_keep_their_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "recipes", (COMMANDS["recipes"][0], failing(ValueError("a bug"))))
    with pytest.raises(ValueError, match="a bug"):
        command(["recipes"])


def test_a_folder_that_looks_like_an_address_is_a_folder(work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = command(["data", "shard", str(work / "pets"), "--out", "http:/x"])
    assert found.code == 0 and len(list((tmp_path / "http:/x").glob("*.parquet"))) == 2


# Directories


@pytest.mark.parametrize(
    "verb", [[verb] for verb in COMMANDS if verb != "data"] + [["data", "inspect"], ["data", "shard"]]
)
def test_a_deleted_working_directory(verb, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = command([*verb, "x"])
    assert found.code == 2 and "working directory" in found.err and found.err.count("\n") == 1


def test_a_real_process_in_a_deleted_working_directory(tmp_path):
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    (tmp_path / "gone").mkdir()
    words = ["sh", "-c", script, "sh", str(tmp_path / "gone"), *LONGTAIL, "train", "digits-lt"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("longtail: ") and done.stderr.count("\n") == 1


def obey_permissions() -> None:
    """Drop root's privilege to ignore permissions, in a process that is about to be replaced."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def without_rights(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LONGTAIL, *args], preexec_fn=obey_permissions, capture_output=True, text=True, timeout=100, **options
    )


@pytest.fixture
def locked(work, tmp_path):
    """Return a folder whose names can be listed, but whose files cannot be opened."""
    folder = tmp_path / "locked"
    shutil.copytree(work, folder)
    folder.chmod(0o644)
    probe = ["cat", str(folder / "run/seed0" / run_folder.CONFIG)]
    if subprocess.run(probe, preexec_fn=obey_permissions, capture_output=True).returncode == 0:
        pytest.skip("this user may open everything")
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize(
    "args",
    [
        ["report", "LOCKED"],
        ["table", "LOCKED/run", "--out", "table"],
        ["eval", "LOCKED/run"],
        ["train", "LOCKED/pets"],
        ["train", "LOCKED"],
        ["train", "--from", "LOCKED/run"],
        ["train", "digits-lt", "--out", "LOCKED/new"],
        ["theory", "--recipe", "LOCKED"],
        ["data", "inspect", "digits-lt", "--json", "LOCKED/found.json"],
    ],
    ids=" ".join,
)
def test_a_folder_that_may_not_be_entered(args, locked, tmp_path):
    done = without_rights(*(word.replace("LOCKED", str(locked)) for word in args), cwd=tmp_path)
    assert done.returncode == 2 and "Permission denied" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_run_deep_below_that_may_not_be_entered(work, locked, tmp_path):
    shutil.copytree(work / "run", tmp_path / "runs/one")
    (tmp_path / "runs/one/seed0").chmod(0o644)
    done = without_rights("report", "runs", cwd=tmp_path)
    (tmp_path / "runs/one/seed0").chmod(0o755)
    assert done.returncode in (1, 2) and "Permission denied" in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )


# Errors of the system


def failing(error: BaseException):
    def fail(*_, **__):
        raise error

    return fail


CODES = [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EMFILE]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [None, "/x/y", b"/x/y", 7], ids=str)
def test_a_system_error_is_one_line(name, code, monkeypatch):
    monkeypatch.setattr(report, "parse_arguments", failing(OSError(code, os.strerror(code), name)))
    found = command(["table", "x"])
    assert found.code == 1 and found.err.startswith("longtail: ") and found.err.count("\n") == 1
    assert os.strerror(code) in found.err and "standard output" not in found.err
    assert name in (None, 7) or "/x/y" in found.err


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("owner", "step"), [(evaluate.Evaluator, "measure"), (evaluate, "write_results"), (evaluate, "load")]
)
def test_eval_that_cannot_write_is_one_line(owner, step, code, work, tmp_path, monkeypatch):
    shutil.copytree(work / "run", tmp_path / "run")
    monkeypatch.setattr(owner, step, failing(OSError(code, os.strerror(code), "/x/y")))
    found = command(["eval", str(tmp_path / "run"), "--device", "cpu"])
    assert found.code == 1 and found.err.startswith("longtail: ") and found.err.count("\n") == 1
    with pytest.raises(RunError):
        longtail.evaluate(tmp_path / "run", device="cpu")


def test_python_raises_a_user_error_for_a_closed_standard_input(work, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with raises("unreadable-file", "standard input"):
        longtail.predict(work / "run", "-")
