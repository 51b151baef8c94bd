"""The examples: short, run as they stand, and good on frequent and rare classes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SAID = re.compile(r"^accuracy: all ([\d.]+), head ([\d.]+), tail ([\d.]+)\n\Z", re.M)
NEEDS = {"lightning_module": "lightning"}


def test_there_are_three_and_each_is_read_on_one_screen():
    assert [example.stem for example in EXAMPLES] == ["lightning_module", "plain_loop", "timm_train"]
    assert all(len(example.read_text().splitlines()) < 80 for example in EXAMPLES)


def needs(example: Path) -> None:
    needed = NEEDS.get(example.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_two_epochs_of_it_run(example, capsys, monkeypatch):
    needs(example)
    spec = importlib.util.spec_from_file_location(example.stem, example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EPOCHS", 2)
    module.main()
    assert SAID.search(capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_as_a_user_runs_it_it_recognizes_head_and_tail(example, tmp_path):
    needs(example)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # small networks: threads cost more than they give
    command = [sys.executable, example]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    said = SAID.search(run.stdout)
    assert said, run.stdout
    everything, head, tail = map(float, said.groups())
    assert everything > 84 and head > 75 and tail > 80  # the head is one class of 40 test images: ± 5 points by chance
    assert not list(tmp_path.iterdir())
