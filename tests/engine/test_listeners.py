"""Event files of TensorBoard and calls of Weights & Biases have each line of log.jsonl once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtail import run_folder
from longtail.cli import main
from longtail.config import Config, LogConfig
from longtail.engine import loggers
from longtail.engine.loggers import Log, Loggers, scalars, truncate_log
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError
from tests.conftest import tiny
from tests.engine.test_train import DATA, StopAt


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)


def told(method: str, *to: str, **train_changes) -> Config:
    config = tiny(method, **train_changes)
    return replace(config, log=replace(config.log, loggers=to))


def row(epoch: int, **more) -> dict:
    return {
        "stage": "train",
        "epoch": epoch,
        "epochs": 9,
        "loss": 5.0 - epoch,
        "lr": 0.1,
        "images_per_second": 1.0,
        **more,
    }


def write(folder: Path, config: Config, *rows: dict) -> Loggers:
    """Write these lines as a process that ends without closing its loggers."""
    folder.mkdir(exist_ok=True)
    heard = Loggers(folder, config, 0)
    with Log(folder / run_folder.LOG, 90, "none", "", heard.send_rows) as log:
        for line in rows:
            log.epoch(1, line, 0)
    return heard


# TensorBoard


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by step, by name; check that no step occurs twice."""
    read = EventAccumulator(str(folder / run_folder.TENSORBOARD), purge_orphaned_data=False)
    read.Reload()
    found = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert all(len({step for step, _ in values}) == len(values) for values in found.values())
    return {tag: dict(values) for tag, values in found.items()}


def test_event_files_hold_every_row_and_the_final_metrics(tmp_path):
    (folder,) = train(told("supcon", "tensorboard"), tmp_path / "out", data=DATA)
    rows = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    found = events(folder)
    assert len(rows) == 5 and {"contrast/loss", "linear/loss", "linear/accuracy", "test/top1"} <= found.keys()
    for number, line in enumerate(rows):
        for name, value in scalars(line, line["stage"]).items():
            assert found[name][number] == pytest.approx(value, rel=1e-6)
    assert sorted(found["contrast/loss"]) == [0, 1, 2] and sorted(found["linear/loss"]) == [3, 4]
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    assert {name: found[f"test/{name}"] for name in ("top1", "few")} == {
        name: {5: pytest.approx(metrics[name])} for name in ("top1", "few")
    }


def test_rerun_does_not_duplicate_records(tmp_path):
    config, folder = told("ce", "tensorboard"), tmp_path / "run"
    write(folder, config, row(0), row(1), row(2, loss=9.0)).call_each(lambda logger: logger.close())  # then killed
    truncate_log(folder / run_folder.LOG, 2)
    with write(folder, config, row(2), row(3)):
        pass
    assert events(folder)["train/loss"] == {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}


def test_logger_that_is_added_at_a_resume_gets_all_epochs(tmp_path):
    folder = tmp_path / "run"
    write(folder, told("ce"), row(0), row(1))
    with write(folder, told("ce", "tensorboard"), row(2)):
        pass
    assert events(folder)["train/loss"] == {0: 5.0, 1: 4.0, 2: 3.0} and not (folder / run_folder.WANDB).exists()


def test_a_stopped_and_resumed_run_tells_each_epoch_once(tmp_path, monkeypatch):
    config = told("ce", "tensorboard", epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr("longtail.engine.loop.stop_if_requested", stopping_at(8))
        with pytest.raises(Interrupted):
            train(config, tmp_path, data=DATA)
    train(config, tmp_path, resume=True, data=DATA)
    rows = [json.loads(line) for line in (tmp_path / "seed0" / run_folder.LOG).read_text().splitlines()]
    wanted = {number: pytest.approx(line["loss"], rel=1e-6) for number, line in enumerate(rows)}
    assert len(rows) == 4 and events(tmp_path / "seed0")["train/loss"] == wanted


def stopping_at(step: int):
    from longtail.engine.loop import stop_if_requested

    return lambda group, logs, stop: stop_if_requested(group, logs, StopAt(group[0], step))


# Weights & Biases


class RecordedRun:
    """A replacement for a run of Weights & Biases, which records what it gets."""

    def __init__(self, **settings) -> None:
        self.settings, self.rows, self.summary, self.finished = settings, {}, {}, False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "epoch")

    def log(self, row: dict[str, float], step: int, commit: bool) -> None:
        assert commit and not self.finished and step not in self.rows
        self.rows[step] = row

    def finish(self) -> None:
        assert not self.finished
        self.finished = True


@pytest.fixture
def recorded(monkeypatch) -> list[RecordedRun]:
    """Return a list to which all runs that are started with Weights & Biases are appended."""
    begun: list[RecordedRun] = []

    def init(**settings) -> RecordedRun:
        begun.append(RecordedRun(**settings))
        return begun[-1]

    monkeypatch.setattr(wandb, "init", init)
    return begun


def test_wandb_run_has_config_rows_and_final_metrics(tmp_path, recorded):
    (folder,) = train(told("supcon", "wandb"), tmp_path / "mine", data=DATA)
    (run,) = recorded
    assert [run.settings[key] for key in ("project", "name", "group")] == ["longtail", "mine/seed0", "mine"]
    assert run.settings["config"]["seed"] == 0 and run.settings["config"]["method"]["name"] == "supcon"
    assert run.settings["dir"] == str(folder) and run.settings["reinit"] == "create_new"
    rows = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    wanted = {number: scalars(line, line["stage"]) | {"epoch": number} for number, line in enumerate(rows)}
    assert len(rows) == 5 and run.rows == wanted and run.finished
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    assert run.summary["test/top1"] == metrics["top1"] and run.summary == scalars(metrics, "test")


def test_resumed_wandb_run_keeps_its_id_and_sends_nothing_twice(tmp_path, recorded):
    config, folder = told("ce", "wandb"), tmp_path / "run"
    for rows in ([row(0), row(1), row(2)], [row(2), row(3)]):
        with write(folder, config, *rows):
            pass
        truncate_log(folder / run_folder.LOG, 2)
    first, second = recorded
    assert [sorted(run.rows) for run in recorded] == [[0, 1, 2], [3]]
    assert first.settings["id"] == second.settings["id"] == json.loads((folder / run_folder.WANDB).read_text())["id"]
    assert first.settings["resume"] == second.settings["resume"] == "allow"


def test_seeds_side_by_side_have_a_run_each(tmp_path, recorded):
    config = told("ce", "wandb")
    with write(tmp_path / "seed0", config, row(0)) as a, write(tmp_path / "seed1", config, row(0), row(1)) as b:
        assert a.loggers["wandb"].id != b.loggers["wandb"].id
    assert [sorted(run.rows) for run in recorded] == [[0], [0, 1]]
    assert [run.settings["id"] for run in recorded] == [a.loggers["wandb"].id, b.loggers["wandb"].id]


@pytest.mark.usefixtures("printed_messages")
def test_installed_wandb_accepts_our_calls(tmp_path, capsys):
    """The real package is used offline. Its output is not checked, but a call that it rejects would be reported."""
    (folder,) = train(told("ce", "wandb"), tmp_path, data=DATA)
    assert "wandb failed" not in capsys.readouterr().err
    assert json.loads((folder / run_folder.WANDB).read_text())["epochs"] == 3


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_failure_is_reported_once_and_training_continues(
    where, tmp_path, recorded, monkeypatch, capsys, printed_messages
):
    def fail(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(wandb if where == "init" else RecordedRun, where, fail)
    (folder,) = train(told("ce", "wandb", "tensorboard"), tmp_path, data=DATA)
    said = capsys.readouterr().err
    assert said.count("wandb failed") == 1 and "(no network)" in said
    assert (folder / run_folder.METRICS).exists() and sorted(events(folder)["train/loss"]) == [0, 1, 2]


# Both


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_done(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).mkdir()  # a folder of that name is not a package
    find = loggers.importlib.util.find_spec
    bare = loggers.importlib.machinery.ModuleSpec(name, None)
    for spec in (None, bare):
        monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda n, spec=spec: spec if n == name else find(n))
        args = ["train", "digits-lt", "--log.loggers", name, "--train.device", "cpu", "--out", "out"]
        assert main(args) == 2 and f"pip install {name}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_loggers_by_default(tmp_path):
    folder = tmp_path / "run"
    with write(folder, told("ce"), row(0)) as heard:
        assert heard.loggers == {}
    assert sorted(f.name for f in folder.iterdir()) == [run_folder.LOG]


def test_names_are_checked_and_one_may_stand_alone():
    assert LogConfig(loggers="wandb") == LogConfig(loggers=("wandb",)) == LogConfig(loggers=["wandb"])
    for bad in ("tensorbord", ("wandb", "wandb"), 3):
        with pytest.raises(UserError, match=r"--log\.loggers"):
            LogConfig(loggers=bad)
    assert told("ce", "wandb").identity() == told("ce").identity()
