"""Run folders and exported files from other people: regression tests for errors of earlier versions."""

import base64
import io
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import longtail
from longtail import UserError, files, run_folder
from longtail.cli import main
from longtail.engine import checkpoint
from longtail.engine.train import train
from longtail.reporting import embedding, run_artifacts
from longtail.reporting.server import LivePage
from tests.conftest import tiny
from tests.inference.made import finished_run
from tests.odd.harness import within
from tests.raises import fails, raises
from tests.report.made import FEW, make_run

CPU = torch.device("cpu")
EMBEDDING = "t-SNE"
SECRET = "a line of the user's own"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    config = tiny("paco")
    return finished_run(tmp_path_factory.mktemp("made") / "seed0", config)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory) -> Path:
    """Return a run that was stopped after the first of three epochs."""
    out = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtail.engine.loggers.Log.epoch", stop_after_first_epoch)
        with pytest.raises(KeyboardInterrupt):
            train(tiny("paco"), out)
    return out


def stop_after_first_epoch(log, step, row, left):
    if row["epoch"] == 1:
        raise KeyboardInterrupt
    with open(log.path, "a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "home" / ".profile"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, symlinks=True))


# 2: what is written


PLANTED = ("log.tmp", "log.jsonl", "lock", "predictions.tmp.npz", "features.tmp.npz", "checkpoint/state.tmp")


@pytest.mark.parametrize("name", PLANTED)
def test_resuming_writes_through_no_link(unfinished, tmp_path, secret, name):
    out = copied(unfinished, tmp_path / "out")
    link = out / "seed0" / name
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    arguments = ["train", "--from", str(out / "seed0/config.json"), "--out", str(out), "--resume"]
    assert main(arguments) in (0, 1, 2)
    assert secret.read_text() == SECRET and os.listdir(secret.parent) == [secret.name]


@pytest.mark.parametrize("name", ["checkpoint", "examples", "tensorboard", "export"])
def test_a_subfolder_that_is_a_link_is_not_written_to(unfinished, tmp_path, secret, name):
    out = copied(unfinished, tmp_path / "out")
    place = out / "seed0" / name
    if place.exists():
        shutil.copytree(place, secret.parent, dirs_exist_ok=True)
        shutil.rmtree(place)
    place.symlink_to(secret.parent)
    before = sorted(os.listdir(secret.parent))
    assert main(["train", "--from", str(out / "seed0/config.json"), "--out", str(out), "--resume"]) in (0, 1, 2)
    main(["export", str(out), "--to", "safetensors"])
    assert sorted(os.listdir(secret.parent)) == before and secret.read_text() == SECRET


def test_a_seed_folder_that_leads_elsewhere_is_refused(unfinished, tmp_path, secret):
    (secret.parent / "config.json").write_text(SECRET)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/seed0").symlink_to(secret.parent)
    with pytest.raises(UserError):
        train(tiny("paco"), tmp_path / "out", resume=True)
    assert sorted(os.listdir(secret.parent)) == [".profile", "config.json"]
    assert (secret.parent / "config.json").read_text() == SECRET


def test_measuring_and_tables_write_through_no_link(finished, tmp_path, secret):
    run = copied(finished, tmp_path / "run")
    names = ("predictions.tmp.npz", "features.tmp.npz", "metrics.json.tmp", "table.md", "table.json", "examples.tmp")
    for name in names:
        (run / name).symlink_to(secret)
    assert main(["eval", str(run), "--device", "cpu"]) == 0 and main(["table", str(run)]) == 0
    assert secret.read_text() == SECRET and "PaCo" in (run / "table.md").read_text()
    assert not list(run.glob(f"{files.TEMPORARY_PREFIX}*"))


def test_an_export_folder_that_is_a_link_is_refused(finished, tmp_path, secret):
    run = copied(finished, tmp_path / "run")
    (run / "export").symlink_to(secret.parent)
    assert main(["export", str(run), "--to", "safetensors"]) == 2
    assert os.listdir(secret.parent) == [secret.name]


def test_written_files_can_be_read_by_others(finished):
    assert {
        (finished / name).stat().st_mode & 0o777 for name in (run_folder.MODEL, run_folder.METRICS, "features.npz")
    } == {0o644}


# 3: what is read


FILES = (
    run_folder.CONFIG,
    run_folder.ENVIRONMENT,
    run_folder.METRICS,
    run_folder.LOG,
    run_folder.MODEL,
    "features.npz",
    "predictions.npz",
    run_folder.LOCK,
)
COMMANDS = {
    "fifo": (["table", "RUN"], ["predict", "RUN", "IMAGE"], ["eval", "RUN"], ["board"]),
    "device": (["report", "RUN", "-o", "OUT"],),
}
"""The long tests of hostile run folders have all combinations."""


@pytest.mark.parametrize("name", [*FILES, "examples/index.json", "examples/0.png", run_folder.CALIBRATION])
def test_no_command_waits_for_a_fifo_or_reads_a_device(finished, tmp_path, name):
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    for kind, commands in COMMANDS.items():
        run = copied(finished, tmp_path / kind)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name) if kind == "fifo" else (run / name).symlink_to("/dev/zero")
        named = {"RUN": str(run), "OUT": str(tmp_path / f"{kind}.html"), "IMAGE": str(tmp_path / "x.png")}
        for command in commands:
            with within(20):
                if command == ["board"]:
                    assert LivePage([run]).page()
                else:
                    assert main([named.get(word, word) for word in command]) in (0, 1, 2)


def test_a_thumbnail_is_encoded_again(tmp_path, secret):
    """The page contains neither the target of a link, nor a private file of that name, nor metadata of images."""
    run = make_run(tmp_path / "run", tiny("paco"), 0, FEW)
    thumbnail = run / "examples/0.png"
    record = run_folder.read(run)
    with Image.open(thumbnail) as image:
        image.save(thumbnail, pnginfo=None)
        pixels = np.asarray(image.convert("RGB"))
    thumbnail.write_bytes(thumbnail.read_bytes() + SECRET.encode())
    uri = run_artifacts.read_thumbnail(record, 0)
    assert uri is not None and SECRET.encode() not in base64.b64decode(uri.split(",")[1])
    assert len(pixels) == 96
    for content in (SECRET.encode(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", png_header(30_000)):
        thumbnail.write_bytes(content)
        assert run_artifacts.read_thumbnail(record, 0) is None
    thumbnail.unlink()
    shutil.copyfile(tmp_path / "run/examples/index.json", tmp_path / "x.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    thumbnail.symlink_to(tmp_path / "x.png")
    assert run_artifacts.read_thumbnail(record, 0) is None


def png_header(side: int) -> bytes:
    """Return a PNG file that claims to have so many pixels on each side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")


# 4: features, and one bad run among others


FEATURES = {
    "huge": (np.full((40, 8), 1e300), np.zeros(40, int)),
    "huge and small": (np.resize([1e300, -1e300, 0.0], (40, 8)), np.zeros(40, int)),
    "tiny": (np.resize([1e-320, 0.0, 2e-320], (40, 8)), np.zeros(40, int)),
    "NaN": (np.full((40, 8), np.nan), np.zeros(40, int)),
    "infinite": (np.full((40, 8), np.inf), np.zeros(40, int)),
    "labels": (np.random.default_rng(0).normal(size=(40, 8)), np.zeros((40, 2), int)),
    "alike": (np.ones((40, 8)), np.zeros(40, int)),
    "objects": (np.array(["x"] * 40), np.zeros(40, int)),
    "flat": (np.zeros(40), np.zeros(40, int)),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_odd_features_cost_one_figure(tmp_path, kind):
    for method in ("paco", "ce"):
        make_run(tmp_path / "runs" / method, tiny(method), 0, FEW)
    x_NF, y_N = FEATURES[kind]
    np.savez(tmp_path / "runs/paco/features.npz", features=x_NF, labels=y_N)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert len(re.findall(rf"{EMBEDDING} of", page)) == 1
    assert f"{EMBEDDING} of".encode() in LivePage([tmp_path / "runs"]).page()


def test_a_crash_inside_a_library_costs_one_figure(monkeypatch):
    """The process that computes t-SNE is killed by a signal; the next request starts another."""
    worker, x_NF = embedding.EmbeddingWorker(), np.random.default_rng(0).normal(size=(20, 4))
    first = worker.embed(x_NF)
    assert first is not None and first.shape == (20, 2)
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert np.array_equal(worker.embed(x_NF), first)
    process = worker._process
    monkeypatch.setattr(embedding, "write_array", lambda pipe, array: process.kill())
    assert worker.embed(x_NF) is None
    monkeypatch.undo()
    assert np.array_equal(worker.embed(x_NF), first)
    worker.close()


def test_a_run_that_breaks_the_page_is_named_and_the_others_are_shown(tmp_path, monkeypatch, capsys):
    for method in ("paco", "ce"):
        make_run(tmp_path / "runs" / method, tiny(method), 0, FEW)
    counts = run_artifacts.test_counts

    def broken(run):
        if run.folder.name == "ce":
            raise ZeroDivisionError("not foreseen")
        return counts(run)

    monkeypatch.setattr(run_artifacts, "test_counts", broken)
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html")]) == 0
    assert "runs/ce: " in capsys.readouterr().err
    page = LivePage([tmp_path / "runs"]).page().decode()
    assert "runs/ce: " in page and "PaCo" in page and f"{EMBEDDING} of" in page


# 7: metadata and tensors


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "x.safetensors"
    longtail.export(finished, "safetensors", path, prior="train")
    return path


BAD_FACTS = [
    {"class_names": "abc"},
    {"class_names": []},
    {"class_names": ["a"] * 9},
    {"class_names": [1] * 10},
    {"counts": [1] * 9},
    {"counts": [-1] * 10},
    {"counts": [1.5] * 10},
    {"counts": [2**62] * 10},
    {"counts": [0] * 10},
    {"counts": [0] + [1] * 9},
    {"prior": {"name": "x", "shares": [float("nan")] * 10}},
    {"prior": {"name": "x", "shares": [-0.1, 1.1] + [0.0] * 8}},
    {"prior": {"name": "x", "shares": [0.1] * 9}},
    {"prior": {"name": "x", "shares": [0.0] * 10}},
    {"prior": {"name": "x", "shares": [0.5] * 10}},
    {"prior": {"name": 3, "shares": [0.1] * 10}},
    {"prior": {"name": "x" * 1000, "shares": [0.1] * 10}},
    {"prior": [1]},
    {"temperature": float("nan")},
    {"temperature": 0},
    {"temperature": -1},
    {"temperature": True},
    {"temperature": 1e-300},
    {"temperature": "1"},
    {"preprocessing": {"side": -1}},
    {"preprocessing": {"side": 10**9}},
    {"preprocessing": {"side": "8"}},
    {"preprocessing": None},
    {"config": {}, "class_names": ["a"] * 10, "counts": None},
    {"config": []},
]


@pytest.mark.parametrize("change", BAD_FACTS, ids=lambda change: json.dumps(change)[:60])
def test_the_description_of_an_export_is_validated(exported, tmp_path, change):
    from safetensors import safe_open

    with safe_open(exported, "pt") as file:
        facts = json.loads(file.metadata()["longtail"])
    save_file(load_file(exported), tmp_path / "x.safetensors", {"longtail": json.dumps(facts | change)})
    with pytest.raises(UserError) as caught:
        longtail.load(tmp_path / "x.safetensors", "cpu")
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"resolution": 10**9},
        {"counts": [2**62] * 10},
        {"counts": [0] * 10},
        {"images": None, "resolution": None},
        {"counts": None, "resolution": None},
    ],
)
def test_the_environment_of_a_run_is_validated(finished, tmp_path, change):
    run = copied(finished, tmp_path / "run")
    tree = json.loads((run / run_folder.ENVIRONMENT).read_text())
    files.write_json(run / run_folder.ENVIRONMENT, tree | {"data": tree["data"] | change})
    if None in change.values():
        assert longtail.load(run, "cpu").class_names[0] == "0"
    else:
        with pytest.raises(UserError):
            longtail.load(run, "cpu")


@pytest.mark.parametrize("value", [-1, 101, 1e308, float("nan"), "50", True, None])
def test_accuracies_are_percentages(finished, tmp_path, value):
    run = copied(finished, tmp_path / "run")
    tree = json.loads((run / run_folder.METRICS).read_text())
    (run / run_folder.METRICS).write_text(json.dumps(tree | {"top1": value}))
    with pytest.raises(UserError):
        run_folder.read(run)


def test_class_counts_have_training_images(finished, tmp_path):
    """They are weights of means over the classes in the report."""
    shutil.copytree(finished, tmp_path / "run")
    tree = json.loads((finished / run_folder.METRICS).read_text())
    (tmp_path / "run" / run_folder.METRICS).write_text(json.dumps(tree | {"counts": [0] * len(tree["per_class"])}))
    with raises("damaged-file", "counts"):
        run_folder.read(tmp_path / "run")


def test_weights_of_another_shape_are_not_loaded(exported, tmp_path):
    weights = load_file(exported)
    name = "head.weight"
    for change in (
        {name: torch.zeros(2**20, 64)},
        {name: weights[name].long()},
        {name: weights[name][:, :5].contiguous()},
        {"more": torch.zeros(1)},
    ):
        save_file(weights | change, tmp_path / "x.safetensors")
        with pytest.raises(UserError):
            checkpoint.load_weights(tmp_path / "x.safetensors", weights, CPU)
    save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "x.safetensors")
    with pytest.raises(UserError):
        checkpoint.load_weights(tmp_path / "x.safetensors", weights, CPU)
    found = checkpoint.load_weights(exported, weights, CPU)
    assert found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in weights)


def test_a_checkpoint_is_compared_before_it_is_loaded(unfinished, tmp_path):
    path = tmp_path / "checkpoint/state.pt"
    state = checkpoint.load(unfinished / "seed0" / run_folder.CHECKPOINT, CPU)
    expected = state["method"]
    name = "net.head.weight"
    checkpoint.save(path, state)
    assert checkpoint.load(path, CPU, expected)["step"] == state["step"]
    for change in (
        {name: torch.zeros(1, 1).expand(2**20, 2**20)},  # a few bytes on the disk, 4 TiB in memory
        {name: None},
        {name: torch.zeros(3)},
        {"more": torch.zeros(3)},
    ):
        checkpoint.save(path, state | {"method": expected | change})
        with pytest.raises(UserError):
            checkpoint.load(path, CPU, expected)
    checkpoint.save(path, state)
    os.truncate(path, 2**36)
    with within(10), pytest.raises(UserError):
        checkpoint.load(path, CPU, expected)


def test_settings_have_limits():
    config = tiny("paco")
    for section, change in (
        ("data", {"image_size": 2**20}),
        ("data", {"resolution": 2**20}),
        ("data", {"folds": 1}),
        ("method", {"queue": 2**30}),
        ("method", {"queue": 2**22, "projection_dim": 2**12}),
        ("method", {"projection_hidden": 2**20}),
    ):
        with pytest.raises(UserError):
            replace(getattr(config, section), **change)


# What an independent review found


def test_no_module_of_the_working_directory_is_imported(tmp_path):
    """`report` starts a process of its own, whose working directory must not be searched for modules."""
    make_run(tmp_path / "runs" / "x", tiny("paco"), 0, FEW)
    for name in ("numpy.py", "sklearn.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    worker = embedding.EmbeddingWorker()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ.get("PYTHONPATH", "")]))
        assert worker.embed(np.random.default_rng(0).normal(size=(20, 4))) is not None
    worker.close()
    assert not (tmp_path / "imported").exists()


def test_measuring_makes_no_folder_that_a_stored_configuration_names(finished, tmp_path):
    run = copied(finished, tmp_path / "run")
    tree = json.loads((run / run_folder.CONFIG).read_text())
    tree["data"] |= {"name": "cifar100", "root": str(tmp_path / "elsewhere/a/b")}
    files.write_json(run / run_folder.CONFIG, tree)
    assert main(["eval", str(run), "--device", "cpu"]) == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("command", [["compare", "digits-lt", "--methods", "ce"], ["reproduce", "cifar100-lt"]])
def test_a_method_folder_that_leads_elsewhere_is_refused(tmp_path, secret, command):
    (tmp_path / "out").mkdir()
    for name in ("ce", "paco-100-1-epochs", "balanced-softmax-100-1-epochs"):
        (tmp_path / "out" / name).symlink_to(secret.parent)
    more = [] if command[0] == "compare" else ["--results", str(tmp_path / "results"), "--imbalance", "100"]
    assert main([*command, "--out", str(tmp_path / "out"), *more, "--seeds", "0", "--epochs", "1"]) == 2
    assert os.listdir(secret.parent) == [secret.name]


def pickled(instructions: bytes) -> bytes:
    """Return a checkpoint whose structure is this pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + instructions + b".")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


def tensor(numel: int, shape: int) -> bytes:
    """Return the pickle of a float tensor over storage 0, which has four values."""
    identity = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ%btQ"
    identity %= numel.to_bytes(4, "little")
    sizes = b"K\x00J%b\x85K\x01\x85\x89ccollections\nOrderedDict\n)Rt" % shape.to_bytes(4, "little")
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + sizes + b"R"


BOMBS = {
    "hash of a nested tuple": b")q\x01" + 60 * b"h\x01h\x01\x86q\x01" + b"}h\x01K\x01s",
    "bytearray": b"cbuiltins\nbytearray\nJ\x00\x00\x00\x70\x85R",
    "codecs": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R",
    "key that is a tuple": b"}K\x01\x85K\x01s",
    "dictionary from pairs": b"ccollections\nOrderedDict\n]\x85R",
    "set": b"cbuiltins\nset\n]\x85R",
    "code": b"cos\nsystem\nX\x04\x00\x00\x00true\x85R",
    "storage beyond its member": b"}X\x01\x00\x00\x00a" + tensor(2**30, 2**30) + b"s",
    "empty stack": b"s",
    "unknown memo": b"h\x05",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_torch_would_execute_is_refused_first(tmp_path, name):
    path = tmp_path / "checkpoint" / "state.pt"
    path.parent.mkdir()
    path.write_bytes(pickled(BOMBS[name]))
    with within(10), pytest.raises(UserError):
        checkpoint.load(path, CPU)
    with within(10), pytest.raises(UserError):
        longtail.load(path.rename(tmp_path / "x.pth.tar"), "cpu")


@pytest.mark.parametrize("order", [b"big", b"none", b"x" * 100])
def test_a_checkpoint_of_another_byte_order_is_refused(tmp_path, order):
    """torch swaps the bytes of tensors that have no memory, and crashes."""
    path = tmp_path / "checkpoint" / "state.pt"
    checkpoint.save(path, {"a": torch.zeros(3)})
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, order if name.endswith("/byteorder") else content)
    with pytest.raises(UserError):
        checkpoint.load(path, CPU)


def test_a_plain_checkpoint_passes(tmp_path):
    path = tmp_path / "checkpoint" / "state.pt"
    path.parent.mkdir()
    path.write_bytes(pickled(b"}X\x01\x00\x00\x00a" + tensor(4, 4) + b"s"))
    assert torch.equal(checkpoint.load(path, CPU)["a"], torch.zeros(4))
    state = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "numbers": [1, 2.5, None, True, "x", -(2**40)],
        "nested": {0: {"a": torch.arange(6).reshape(2, 3)[:, 1:]}},
        "sizes": (1, (2, 3)),
        "scalar": torch.tensor(True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    checkpoint.save(path, state)
    found = checkpoint.load(path, CPU)
    assert found["numbers"] == state["numbers"] and found["sizes"] == (1, (2, 3))
    assert torch.equal(found["nested"][0]["a"], torch.tensor([[1, 2], [4, 5]]))


@pytest.mark.parametrize("dtype", ["<U0", "|S0", "|V0", "|V8", "<c16", "<M8[s]", "|S3"])
def test_arrays_of_other_kinds_are_refused(tmp_path, dtype):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1500000000,), }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with within(5), pytest.raises(ValueError):
        files.read_arrays(tmp_path / "x.npz")


def test_features_of_gigabytes_are_not_mapped(tmp_path):
    run = make_run(tmp_path / "run", tiny("paco"), 0, FEW)
    record = run_folder.read(run)
    for shape in ((100, 20_000), (300, 2**20)):
        np.savez_compressed(run / "features.npz", features=np.zeros(shape, np.float16), labels=np.zeros(shape[0], int))
        assert run_artifacts.read_features(record, 1000) is None


def test_the_default_export_does_not_wait_for_a_fifo(finished, tmp_path):
    run = copied(finished, tmp_path / "run")
    (run / "export").mkdir()
    os.mkfifo(run / "export/model.safetensors")
    with within(60):
        assert main(["export", str(run), "--to", "safetensors"]) == 0
    assert (run / "export/model.safetensors").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "abc"},
        {"seconds": float("nan")},
        {"step": 1.5},
        {"stage": -1},
        {"stage": True},
        {"optimizer": "shape"},
        {"optimizer": "text"},
        {"optimizer": "expanded"},
        {"optimizer": "number"},
        {"optimizer": "scalar"},
    ],
    ids=str,
)
def test_an_edited_checkpoint_is_one_line(unfinished, tmp_path, change, capsys):
    out = copied(unfinished, tmp_path / "out")
    path = out / "seed0" / run_folder.CHECKPOINT
    state = checkpoint.load(path, CPU)
    if kind := change.get("optimizer"):
        first = next(iter(state["optimizer"]["state"].values()))
        changed = {
            "shape": torch.zeros(3),
            "text": "x",
            "expanded": torch.zeros(1).expand(500_000_000),
            "number": 1.5,
            "scalar": torch.zeros(()),
        }
        first["momentum_buffer"] = changed[kind]
    else:
        state |= change
    checkpoint.save(path, state)
    assert main(["train", "--from", str(out / "seed0/config.json"), "--out", str(out), "--resume"]) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_folders_nested_without_end_are_refused(tmp_path, capsys):
    deep = tmp_path / "deep"
    deep.mkdir()
    place = os.open(deep, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    (tmp_path / "deep/a").mkdir()
    for command in (
        ["table", str(deep)],
        ["data", "inspect", str(deep)],
        ["report", str(deep), "-o", str(tmp_path / "x")],
    ):
        assert main(command) == 2
        assert "nested" in capsys.readouterr().err
    while (deep / "d").exists():  # pytest's own clean-up is recursive
        _shorten(deep)


def _shorten(folder: Path) -> None:
    """Remove the subfolder d of a folder and keep what is in it."""
    if (folder / "d/d").exists():
        (folder / "d/d").rename(folder / "e")
        (folder / "d").rmdir()
        (folder / "e").rename(folder / "d")
    else:
        (folder / "d").rmdir()


def test_a_bad_seed_does_not_hide_the_good_one(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path / f"runs/seed{seed}", tiny("paco"), seed, FEW)
    tree = json.loads((tmp_path / "runs/seed1" / run_folder.METRICS).read_text())
    tree["calibration"] = [b | {"count": 5, "confidence": None} for b in tree["calibration"]]
    (tmp_path / "runs/seed1" / run_folder.METRICS).write_text(json.dumps(tree))
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "x.html")]) == 0
    assert "seed1" in capsys.readouterr().err and "PaCo" in (tmp_path / "x.html").read_text()


def test_an_unexpected_exception_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("LONGTAIL_TRACEBACK")
    monkeypatch.setattr("longtail.cli.overview", lambda: {}["x"])
    assert main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_are_short(finished, tmp_path, capsys):
    run = copied(finished, tmp_path / "run")
    tree = json.loads((run / run_folder.CONFIG).read_text())
    files.write_json(run / run_folder.CONFIG, tree | {"recipe": ["x" * 1_000_000]})
    assert main(["table", str(run)]) == 2
    assert len(capsys.readouterr().err) < 3_000


def test_the_live_page_says_that_folders_are_nested_too_deeply(tmp_path):
    place = tmp_path / "runs"
    for _ in range(70):
        place = place / "d"
    place.mkdir(parents=True)
    assert b"nested" in LivePage([tmp_path / "runs"]).page()


# What a second review found


def archived(*members: tuple[str, bytes]) -> bytes:
    """Return a ZIP archive of these members, without compression."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return content.getvalue()


HARMLESS, ALLOCATING = (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x70\x85R.")
VERSION = ("archive/version", b"3\n")


def two_directories() -> bytes:
    """Return an archive with two directories: zipfile finds the last one, torch the one at the offset that the end names."""
    first, second = (archived(("archive/data.pkl", data.ljust(64, b".")), VERSION) for data in (ALLOCATING, HARMLESS))
    return first[:-22] + second


AMBIGUOUS = {
    "names in capitals": archived(("archive/DATA.PKL", ALLOCATING), ("archive/data.pkl", HARMLESS), VERSION),
    "two folders": archived(("other/version", b"3\n"), ("archive/data.pkl", HARMLESS), ("other/x", ALLOCATING)),
    "two directories": two_directories(),
    "a comment": archived(("archive/data.pkl", HARMLESS), VERSION)[:-2] + b"\x01\x00x",
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_an_archive_that_torch_would_read_in_another_way_is_refused(tmp_path, kind):
    """zipfile, which the check uses, and torch find members of an archive in different ways."""
    path = tmp_path / "x" / "state.pth"
    path.parent.mkdir()
    path.write_bytes(AMBIGUOUS[kind])
    for load in (lambda: checkpoint.load(path, CPU), lambda: longtail.load(path, "cpu")):
        with pytest.raises(UserError):
            load()


@pytest.mark.parametrize(
    "instructions",
    [
        b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb",  # replaces a method of the dictionary
        b"ccollections\nOrderedDict\n)RNb",
        b"}X\x01\x00\x00\x00a" + tensor(4, 4) + b")bs",  # calls Tensor.set_
        b"]K\x00K\x01s",
    ],
)
def test_a_pickle_sets_no_attributes(tmp_path, instructions):
    path = tmp_path / "checkpoint" / "state.pt"
    path.parent.mkdir()
    path.write_bytes(pickled(instructions))
    with pytest.raises(UserError):
        checkpoint.load(path, CPU)


def test_the_metadata_of_a_state_dict_passes(tmp_path):
    path = tmp_path / "checkpoint" / "state.pt"
    state = torch.nn.BatchNorm1d(3).state_dict()
    checkpoint.save(path, {"method": state})
    assert checkpoint.load(path, CPU)["method"].keys() == state.keys()


def test_json_files_are_bounded_by_their_size_and_by_their_values(finished, tmp_path):
    """An empty list takes three bytes of a file, and twenty times as much memory."""
    many = "[" + "[]," * files.MAX_JSON_VALUES + "[]]"
    for name in (run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.METRICS, run_folder.CALIBRATION):
        run = copied(finished, tmp_path / name)
        (run / name).write_text(many)
        with pytest.raises(UserError):
            longtail.load(run, "cpu")
    assert files.parse_json(json.dumps({"per_class": [1.5] * 1000})) == {"per_class": [1.5] * 1000}
    with pytest.raises(ValueError):
        files.parse_json(b"[1, 2, 3, [4]]", max_values=4)


def test_a_log_row_of_very_many_values_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", tiny("paco"), 0, FEW)
    rows = run_artifacts.read_log(run_folder.read(run))
    with open(run / run_folder.LOG, "a") as file:
        file.write(json.dumps({f"key {i}": 1 for i in range(100_000)}) + "\n")
    assert run_artifacts.read_log(run_folder.read(run)) == rows and len(rows) == 5


def test_error_of_a_figure_names_the_unreadable_file(tmp_path, monkeypatch):
    def fail(paths):
        raise PermissionError(13, "Permission denied", "runs/x")

    monkeypatch.setattr(run_folder, "read_finished", fail)
    for name in ("latency", "gradient"):
        with pytest.raises(UserError) as caught:
            longtail.figure(name, tmp_path, tmp_path / "x.svg")
        assert caught.value.kind == "unreadable-file" and "runs/x" in str(caught.value)


def test_class_counts_of_a_file_are_bounded(tmp_path):
    (tmp_path / "counts.txt").write_text("9 " * 2_000_000)
    with within(10):
        assert main(["theory", "--counts", str(tmp_path / "counts.txt")]) == 2


def test_a_special_file_in_place_of_images_is_named(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        fails(capsys, ["train", str(path)], "missing-file", "not a regular file")
