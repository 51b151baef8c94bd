"""The record attempt on a small data set: trials and students, records, stopping, storing teachers, and the test set."""

import importlib
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longtail import methods, run_folder
from longtail.engine.trainer import Trainer
from tests.conftest import tiny

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the time limit needs POSIX signals")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def record() -> ModuleType:
    """The script, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("record")


def make_trials(record: ModuleType) -> dict:
    base = tiny("balanced-softmax", epochs=2)
    taught = record.make_student(base, mixture="both", weight=0.7)
    return {
        "bs": record.Trial(base, (0, 1), is_teacher=True),
        "paco": record.Trial(tiny("paco", epochs=2, ema=0.9), (0, 1)),
        "kd": record.Trial(taught, (0,), ("bs",)),
    }


def run(record: ModuleType, folder: Path, *words: str) -> int:
    """Run the command with small trials, and with results and runs in a folder."""
    places = ["--out", str(folder / "runs"), "--results", str(folder / "record.json"), "--device", "cpu"]
    return record.main([*words, *places], make_trials(record))


def read(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


@pytest.fixture(scope="module")
def finished(record, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert run(record, folder) == 0
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / run_folder.MODEL)


def test_a_trial_is_measured_on_validation_images_only(finished, record):
    book, config = read(finished), tiny().data
    data = record.with_validation(replace(tiny(), data=config))
    metrics = [run_folder.read(finished / f"runs/paco/seed{seed}").metrics for seed in (0, 1)]
    wanted = [np.mean([a for a in found["per_class"] if a is not None]) for found in metrics]
    assert book["paco"]["validation"] == pytest.approx(wanted) and "test" not in book["paco"]
    images = [sum(map(sum, found["confusion"])) for found in metrics]
    assert images == [len(data.val.labels)] * 2 and len(data.val.labels) != len(data.test.labels)
    assert not set(data.val.ids) & set(data.train.ids)
    assert len(book["paco"]["few"]) == 2 and book["paco"]["seeds"] == [0, 1]
    assert book["paco"]["ensemble"]["accuracy"] > 0 and all(s > 0 for s in book["paco"]["seconds"])


def test_a_student_has_its_teachers_and_the_training_divergence(finished):
    book, student = read(finished), run_folder.load_config(finished / "runs/kd/seed0").method
    assert [path.parts[-2:] for path in student.teachers] == [("bs", "seed0"), ("bs", "seed1")]
    assert book["kd"]["teachers"] == ["bs"] and book["kd"]["training"]["distillation"][0] > 0
    assert book["bs"]["training"]["distillation"] == [None, None]


def test_teachers_are_stored_and_measured_in_half_precision(finished):
    kinds = {name: {t.dtype for t in weights(finished / f"runs/{name}/seed0").values()} for name in ("bs", "kd")}
    assert torch.float16 in kinds["bs"] and torch.float32 not in kinds["bs"]
    assert torch.float32 in kinds["kd"] and torch.float16 not in kinds["kd"]


def test_recorded_trials_are_not_trained_again_even_without_their_runs(finished, record, tmp_path, capsys):
    shutil.copy(finished / "record.json", tmp_path)
    assert run(record, tmp_path) == 0 and run(record, tmp_path, "--list") == 0
    assert not (tmp_path / "runs").exists() and read(tmp_path) == read(finished)
    assert "bs" in capsys.readouterr().out
    book = read(finished)
    book["kd"]["identity"]["method"]["weight"] = 0.1
    (tmp_path / "record.json").write_text(json.dumps(book))
    one = record.Record(parse(record, tmp_path), make_trials(record))
    assert [one.is_recorded(name, (0,)) for name in ("bs", "paco", "kd")] == [True, True, False]
    assert not one.is_recorded("paco", (0, 2))


def parse(record: ModuleType, folder: Path):
    """Return the arguments of the command."""
    seen = []

    class Seen(record.Record):
        def __init__(self, args, trials) -> None:
            super().__init__(args, trials)
            seen.append(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "Record", Seen)
        run(record, folder, "--list")
    return seen[0]


def test_a_stopped_trial_continues_with_the_same_result(finished, record, tmp_path, monkeypatch):
    count, stops = Trainer.count_step, [4]

    def count_and_stop(self: Trainer) -> None:
        count(self)
        if self.method.config.name == "paco" and stops and self.step == stops[0]:
            stops.pop()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "count_step", count_and_stop)
    assert run(record, tmp_path, "--only", "paco", "--minutes", "100") == 1
    assert not (tmp_path / "record.json").exists() and (tmp_path / "runs/paco/seed0" / run_folder.CHECKPOINT).exists()
    assert run(record, tmp_path, "--only", "paco") == 0
    one, other = (weights(folder / "runs/paco/seed0") for folder in (finished, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read(tmp_path)["paco"]["validation"] == read(finished)["paco"]["validation"]


def test_the_time_limit_interrupts(record):
    record.stop_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)


def test_packed_teachers_are_the_same_teachers_elsewhere(finished, record, tmp_path):
    assert run(record, finished, "--pack", str(tmp_path / "files"), "--only", "bs", "kd") == 0
    size = (finished / "runs/bs/seed0" / run_folder.MODEL).stat().st_size
    (path,) = (tmp_path / "files").iterdir()
    assert path.stat().st_size > 3 * size
    assert run(record, tmp_path, "--unpack", str(tmp_path / "files")) == 0
    for name in ("bs/seed0", "bs/seed1", "kd/seed0"):
        one, other = (run_folder.read(folder / "runs" / name) for folder in (finished, tmp_path))
        assert run_folder.hash_network(one) == run_folder.hash_network(other) and one.metrics == other.metrics
    shutil.rmtree(tmp_path / "runs/kd")
    assert not (tmp_path / "record.json").exists()
    assert run(record, tmp_path, "--only", "kd") == 0
    assert read(tmp_path)["bs"]["validation"] == read(finished)["bs"]["validation"]
    assert read(tmp_path)["kd"]["identity"] == read(finished)["kd"]["identity"]
    assert read(tmp_path)["kd"]["validation"] == read(finished)["kd"]["validation"]


def test_files_have_at_most_the_limit(finished, record, tmp_path):
    folders = [finished / "runs" / name for name in ("bs/seed0", "bs/seed1", "kd/seed0")]
    sizes = [(folder / run_folder.MODEL).stat().st_size for folder in folders]
    limit = sizes[2] + 100
    assert len(record.pack(folders, tmp_path, finished / "runs", limit)) == (2 if 2 * sizes[0] <= limit else 3)
    assert len(record.pack(folders, tmp_path, finished / "runs", sum(sizes))) == 1
    with pytest.raises(SystemExit):
        record.pack(folders, tmp_path, finished / "runs", sizes[0] - 1)


def test_the_test_set_is_used_on_request(finished, record, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "EIGHT", (0, 1, 2))
    shutil.copytree(finished, tmp_path / "copy")
    assert run(record, tmp_path / "copy", "--test", "paco") == 0
    found, before = read(tmp_path / "copy")["paco"], read(finished)["paco"]
    assert found["seeds"] == [0, 1, 2] and found["validation"][:2] == before["validation"]
    assert len(found["test"]["accuracy"]) == 3 and found["test"]["accuracy"] != found["validation"]
    assert (tmp_path / "copy/runs/paco/seed2").exists()


def test_an_estimate_trains_nothing(finished, record, tmp_path, capsys):
    assert run(record, tmp_path, "--estimate") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and sum("minutes" in line for line in lines) == 2  # the student has no teachers yet
    assert not (tmp_path / "runs").exists()


def test_all_trials_differ_and_students_are_small(record):
    trials = record.make_trials()
    identities = [json.dumps([t.config.identity(), t.teachers], sort_keys=True) for t in trials.values()]
    assert len(set(identities)) == len(trials) > 30
    assert all({*trial.teachers} <= trials.keys() for trial in trials.values())
    assert all(trials[name].is_teacher for trial in trials.values() for name in trial.teachers)
    assert all(t.is_teacher or t.config.model.name == "resnet32_cifar" for t in trials.values())
    small = {repr(t.config.model): t.config for t in trials.values() if not t.is_teacher}
    for config in small.values():
        net = methods.make(config, np.ones(100, np.int64)).net
        assert sum(parameter.numel() for parameter in net.parameters()) == 470_004
    assert {t.config.data.imbalance for t in trials.values()} == {100}
    other = record.make_trials(["bs", "wide-paco"])
    assert other["kd by bs and wide-paco"].teachers == ("bs", "wide-paco")
    own = record.make_trials(own_views=True)["kd with own views"].config.train
    assert own.view_seed == "own" and trials["kd"].config.train == replace(own, view_seed=0)
    assert list(record.choose(other, ["kd"])) == ["kd by bs and wide-paco"]
    with pytest.raises(SystemExit):
        list(record.choose(other, ["nothing"]))
