"""Any command line: the command succeeds, or fails with a one-line error and leaves no incomplete files."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from longtail.cli import run
from longtail.errors import DiskFullError
from tests.odd.harness import STEADY, Zoo, before_the_work, command, ends_well, in_folder
from tests.odd.words import commands, kinds, trainings

GOOD = {
    "recipes": [],
    "train": ["digits-lt", "--train.epochs", "3"],
    "eval": ["ZOO/network"],
    "table": ["ZOO/runs"],
    "report": ["ZOO/runs", "ZOO/begun"],
    "figure": ["latency", "ZOO/runs"],
    "watch": ["ZOO/begun", "--port", "0"],
    "data inspect": ["ZOO/ünï côdé \n pets"],
    "data shard": ["ZOO/list.csv", "--out", "out"],
    "theory": ["--counts", "ZOO/numbers.txt", "--json", "o\nu t.json"],
    "predict": ["ZOO/network", "ZOO/pets", "--csv", "out.csv"],
    "export": ["ZOO/network", "--to", "safetensors", "--out", "out.safetensors"],
}


@pytest.mark.parametrize("verb", GOOD)
def test_valid_commands_succeed(verb, odd):
    """Otherwise the other tests would pass for commands that always fail."""
    found = ends_well(odd, [*verb.split(), *GOOD[verb]])
    if verb == "train":  # stopped before its first step
        assert found.code == 2 and "389 training" in found.out and "seed0" in found.err
    else:
        assert found.code == 0, found.err


def try_commands(odd: Zoo, verb: str, times: int) -> None:
    """Run random command lines of a verb."""

    @settings(STEADY, max_examples=times)
    @given(commands([verb]))
    def each(words):
        ends_well(odd, words)

    each()


@pytest.mark.parametrize("verb", kinds())
def test_every_verb(verb, odd):
    try_commands(odd, verb, 5)


@pytest.mark.long
@pytest.mark.parametrize("verb", kinds())
def test_every_verb_many_times(verb, odd):
    try_commands(odd, verb, 120)


@pytest.mark.long
@settings(STEADY, max_examples=60)
@given(words=trainings())
def test_a_setting_is_rejected_or_used_for_training(words, odd):
    ends_well(odd, words, trains=True)


@pytest.mark.parametrize(
    "words",
    [
        ["report", "ZOO/runs", "-o", "ZOO/full"],
        ["theory", "--counts", "5", "1", "--json", "ZOO/full"],
        ["data", "inspect", "ZOO/pets", "--json", "ZOO/full"],
        ["predict", "ZOO/network", "ZOO/pets", "--csv", "ZOO/full"],
        ["figure", "framework", "-o", "ZOO/full.svg"],
    ],
)
def test_a_full_disk_is_one_line(words, odd):
    found = ends_well(odd, words)
    assert found.code == 1 and odd.named_in(["ZOO/full"])[0] in found.err
    with pytest.raises(DiskFullError), in_folder(odd.place), before_the_work():
        run(odd.named_in(words))


def test_devices_are_not_replaced_by_files(odd):
    with in_folder(odd.place), before_the_work():
        assert command(odd.named_in(["theory", "--counts", "5", "1", "--json", "ZOO/null"])).code == 0
    assert (odd.root / "null").is_symlink() and Path("/dev/null").is_char_device()


def test_an_existing_output_is_kept_if_the_command_fails(odd):
    with in_folder(odd.place) as here, before_the_work():
        (here / "said.json").write_text('{"old": 1}')
        args = odd.named_in(["predict", "ZOO/network", "ZOO/pets/cat/0.png", "ZOO/empty.jpg", "--json", "said.json"])
        assert command(args).code == 2
        assert json.loads((here / "said.json").read_text()) == {"old": 1} and len(list(here.iterdir())) == 1
