"""TensorBoard and Weights & Biases, the real packages (the latter offline): what they heard is what log.jsonl holds, once."""

import json
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from longtail import runs
from longtail.cli import main
from longtail.config import Config, LogConfig
from longtail.engine import listeners
from longtail.engine.listeners import Listeners, scalars
from longtail.engine.log import Log, truncate
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError
from tests.conftest import tiny
from tests.engine.test_train import DATA, StopAt
from tests.processes import start


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
    monkeypatch.chdir(tmp_path)


def told(method: str, *to: str, **train_changes) -> Config:
    config = tiny(method, **train_changes)
    return replace(config, log=replace(config.log, to=to))


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


def write(folder: Path, config: Config, *rows: dict) -> Listeners:
    """A process that writes these lines, and is then gone without a word."""
    folder.mkdir(exist_ok=True)
    heard = Listeners(folder, config, 0)
    with Log(folder / runs.LOG, 90, "none", "", heard.hear) as log:
        for line in rows:
            log.epoch(1, line, 0)
    return heard


# TensorBoard


def events(folder: Path) -> dict[str, dict[int, float]]:
    """By name, values by step; no step comes twice, whoever reads."""
    read = EventAccumulator(str(folder / runs.TENSORBOARD), purge_orphaned_data=False)
    read.Reload()
    found = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert all(len({step for step, _ in values}) == len(values) for values in found.values())
    return {tag: dict(values) for tag, values in found.items()}


def test_event_files_hold_every_row_and_the_final_metrics(tmp_path):
    (folder,) = train(told("supcon", "tensorboard"), tmp_path / "out", data=DATA)
    rows = [json.loads(line) for line in (folder / runs.LOG).read_text().splitlines()]
    found = events(folder)
    assert len(rows) == 5 and {"contrast/loss", "linear/loss", "linear/accuracy", "test/top1"} <= found.keys()
    for number, line in enumerate(rows):
        for name, value in scalars(line, line["stage"]).items():
            assert found[name][number] == pytest.approx(value, rel=1e-6)
    assert sorted(found["contrast/loss"]) == [0, 1, 2] and sorted(found["linear/loss"]) == [3, 4]
    metrics = json.loads((folder / runs.METRICS).read_text())
    assert {name: found[f"test/{name}"] for name in ("top1", "few")} == {
        name: {5: pytest.approx(metrics[name])} for name in ("top1", "few")
    }


def test_what_is_trained_again_is_not_doubled(tmp_path):
    config, folder = told("ce", "tensorboard"), tmp_path / "run"
    write(folder, config, row(0), row(1), row(2, loss=9.0)).tell(lambda listener: listener.close())  # then killed
    truncate(folder / runs.LOG, 2)
    with write(folder, config, row(2), row(3)):
        pass
    assert events(folder)["train/loss"] == {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0}


def test_asked_for_at_a_resume_it_hears_of_all_epochs(tmp_path):
    folder = tmp_path / "run"
    write(folder, told("ce"), row(0), row(1))
    with write(folder, told("ce", "tensorboard"), row(2)):
        pass
    assert events(folder)["train/loss"] == {0: 5.0, 1: 4.0, 2: 3.0} and not (folder / runs.WANDB).exists()


def test_a_stopped_and_resumed_run_tells_each_epoch_once(tmp_path, monkeypatch):
    config = told("ce", "tensorboard", epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr("longtail.engine.train.stop_if_asked", stopping_at(8))
        with pytest.raises(Interrupted):
            train(config, tmp_path, data=DATA)
    train(config, tmp_path, resume=True, data=DATA)
    rows = [json.loads(line) for line in (tmp_path / "seed0" / runs.LOG).read_text().splitlines()]
    wanted = {number: pytest.approx(line["loss"], rel=1e-6) for number, line in enumerate(rows)}
    assert len(rows) == 4 and events(tmp_path / "seed0")["train/loss"] == wanted


def stopping_at(step: int):
    from longtail.engine.train import stop_if_asked

    return lambda group, logs, stop: stop_if_asked(group, logs, StopAt(group[0], step))


# Weights & Biases

BLOCK, HEADER = 32768, 7  # of an offline file, which is a LevelDB log


def records(folder: Path) -> list[list[Record]]:
    """Of each process that wrote, in order."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))  # named by the second in which they began
    return [whole(file) for file in files]


def whole(file: Path, seconds: float = 60) -> list[Record]:
    """wandb's own process writes the last of it when `finish` has returned already."""
    end = time.monotonic() + seconds
    while not (found := [Record.FromString(data) for data in chunks(file.read_bytes())]) or not found[-1].HasField(
        "exit"
    ):
        assert time.monotonic() < end, f"{file} has no end"
        time.sleep(0.05)
    return found


def chunks(data: bytes):
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + HEADER + length > len(data):  # being written
            return
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def sent(part: list[Record]) -> dict[int, dict[str, float]]:
    """Rows by step."""
    rows = [record.history for record in part if record.HasField("history")]
    return {
        history.step.num: {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in rows
    }


def test_a_run_of_wandb_has_config_rows_and_final_metrics(tmp_path):
    (folder,) = train(told("supcon", "wandb"), tmp_path / "mine", data=DATA)
    (part,) = records(folder)
    (about,) = [record.run for record in part if record.HasField("run")]
    assert (about.project, about.display_name, about.run_group) == ("longtail", "mine/seed0", "mine")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["seed"] == 0 and config["method"]["name"] == "supcon"
    rows = [json.loads(line) for line in (folder / runs.LOG).read_text().splitlines()]
    found = sent(part)
    assert sorted(found) == list(range(5))
    for number, line in enumerate(rows):
        assert scalars(line, line["stage"]).items() <= found[number].items() and found[number]["epoch"] == number
    summary = {
        item.key or "/".join(item.nested_key): item.value_json
        for record in part
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert float(summary["test/top1"]) == json.loads((folder / runs.METRICS).read_text())["top1"]


def in_its_own_process(*written) -> None:
    """As each start of a run is."""
    process = start(write_and_close, *written)
    process.join(60)
    assert process.exitcode == 0


def write_and_close(*written) -> None:
    os.environ["WANDB_MODE"] = "offline"
    with write(*written):
        pass


def test_a_resumed_run_is_the_same_there_and_sends_nothing_twice(tmp_path):
    config, folder = told("ce", "wandb"), tmp_path / "run"
    in_its_own_process(folder, config, row(0), row(1), row(2))
    truncate(folder / runs.LOG, 2)
    in_its_own_process(folder, config, row(2), row(3))
    first, second = records(folder)
    assert [sorted(sent(part)) for part in (first, second)] == [[0, 1, 2], [3]]
    (one,), (two,) = ([record.run.run_id for record in part if record.HasField("run")] for part in (first, second))
    assert one == two == json.loads((folder / runs.WANDB).read_text())["id"]


def test_seeds_side_by_side_have_a_run_each(tmp_path):
    config = told("ce", "wandb")
    with write(tmp_path / "seed0", config, row(0)) as a, write(tmp_path / "seed1", config, row(0), row(1)) as b:
        assert a.heard["wandb"].id != b.heard["wandb"].id
    assert [sorted(sent(part)) for seed in (0, 1) for part in records(tmp_path / f"seed{seed}")] == [[0], [0, 1]]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failure_is_said_once_and_the_training_goes_on(where, tmp_path, monkeypatch, capsys):
    import wandb

    def fail(*_, **__):
        raise ConnectionError("no\nnetwork")

    if where == "init":
        monkeypatch.setattr(wandb, "init", fail)
    else:
        monkeypatch.setattr(wandb.Run, where, fail)
    (folder,) = train(told("ce", "wandb", "tensorboard"), tmp_path, data=DATA)
    said = capsys.readouterr().err
    assert said.count("wandb failed") == 1 and "(no network): the run goes on without it" in said
    assert (folder / runs.METRICS).exists() and sorted(events(folder)["train/loss"]) == [0, 1, 2]


# Both


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_done(name, tmp_path, monkeypatch, capsys):
    (tmp_path / name).mkdir()  # a folder of that name is no package
    find = listeners.importlib.util.find_spec
    bare = listeners.importlib.machinery.ModuleSpec(name, None)
    for spec in (None, bare):
        monkeypatch.setattr(listeners.importlib.util, "find_spec", lambda n, spec=spec: spec if n == name else find(n))
        args = ["train", "digits-lt", "--log.to", name, "--train.device", "cpu", "--out", "out"]
        assert main(args) == 2 and "pip install longtail[log]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nobody_listens_unless_asked(tmp_path):
    folder = tmp_path / "run"
    with write(folder, told("ce"), row(0)) as heard:
        assert heard.heard == {}
    assert sorted(f.name for f in folder.iterdir()) == [runs.LOG]


def test_names_are_checked_and_one_may_stand_alone():
    assert LogConfig(to="wandb") == LogConfig(to=("wandb",)) == LogConfig(to=["wandb"])
    for bad in ("tensorbord", ("wandb", "wandb"), 3):
        with pytest.raises(UserError, match=r"--log\.to"):
            LogConfig(to=bad)
    assert told("ce", "wandb").identity() == told("ce").identity()
