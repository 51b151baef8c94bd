"""The environment variables of torchrun: values that it could not have set are one-line errors."""

import os
import subprocess
import sys

import pytest
import torch

from longtail import UserError
from longtail.cli import main
from longtail.data.decode import available_cores, available_memory
from longtail.engine import distributed
from longtail.engine.train import train
from longtail.progress import is_local_main
from longtail.torchrun import World, read_full_world, read_world
from tests.conftest import tiny
from tests.raises import raises

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "5",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
WRONG = ["x", "-1", "1.5", "1e3", "0x2", "1_0", "１", "9" * 5000, "nan", "2 3", "\udcff"]


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    for name in FULL:
        monkeypatch.delenv(name, raising=False)


def test_values():
    assert read_world({}) == read_world(dict.fromkeys(FULL, "")) == World(0, 1, 0, 1, 1, 0)
    assert read_world(FULL) == read_full_world(True, FULL) == World(3, 4, 1, 2, 2, 5)
    assert read_full_world(True, {"WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", WRONG, ids=range(len(WRONG)))
def test_values_that_are_not_numbers_are_named(name, value):
    with pytest.raises(UserError) as caught:
        read_world(FULL | {name: value})
    assert str(caught.value).startswith(f"{name} is ") and "torchrun" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"])
def test_there_is_at_least_one_process(name):
    with raises("invalid-value", name, "'0'"):
        read_world(FULL | {name: "0"})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_is_below_the_number_of_processes(name):
    with raises("invalid-value", name, "4"):
        read_world(FULL | {name: "4"})


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_several_processes_need_the_others(name):
    values = {key: value for key, value in FULL.items() if key != name}
    with raises("invalid-value", "WORLD_SIZE", "4", f" {name} "):
        read_full_world(True, values)
    if name.startswith("LOCAL"):
        assert read_full_world(False, values).size == 4


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_is_a_port(port):
    with raises("invalid-value", "MASTER_PORT", port):
        read_full_world(False, FULL | {"MASTER_PORT": port})


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("verb", [["recipes"], ["table", "x"], ["train", "digits-lt"], ["data", "inspect", "x"]])
def test_a_command_names_the_variable(verb, name, monkeypatch, capsys):
    monkeypatch.setenv(name, "many")
    assert main(verb) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{name} is 'many'" in said


READERS = {
    "cores": available_cores,
    "memory": available_memory,
    "speaks": is_local_main,
    "start": lambda: distributed.start_processes(torch.device("cpu")),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_the_variable(reader, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "-2")
    with raises("invalid-value", "LOCAL_WORLD_SIZE", "'-2'"):
        READERS[reader]()


def test_training_needs_more_than_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises("invalid-value", "WORLD_SIZE", "2", " RANK "):
        train(tiny("ce", epochs=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_real_process_ends_at_once(tmp_path):
    environment = os.environ | {"WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "longtail", "train", "digits-lt", "--train.device", "cpu", "--out", "run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and not list(tmp_path.iterdir())
