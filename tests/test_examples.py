"""The examples are short, run without changes, and reach a good accuracy on frequent and rare classes."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OUTPUT = re.compile(r"^accuracy: all ([\d.]+), head ([\d.]+), tail ([\d.]+)\n\Z", re.M)
NEEDS = {"lightning_module": "lightning"}


def test_there_are_three_short_examples():
    assert [example.stem for example in EXAMPLES] == ["lightning_module", "plain_loop", "timm_train"]
    assert all(len(example.read_text().splitlines()) < 80 for example in EXAMPLES)


def skip_without_packages(example: Path) -> None:
    needed = NEEDS.get(example.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install {needed}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_two_epochs_run(example, capsys, monkeypatch):
    skip_without_packages(example)
    spec = importlib.util.spec_from_file_location(example.stem, example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EPOCHS", 2)
    module.main()
    assert OUTPUT.search(capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_recognizes_head_and_tail(example, tmp_path):
    skip_without_packages(example)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one thread is faster for small networks
    command = [sys.executable, example]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    output = OUTPUT.search(run.stdout)
    assert output, run.stdout
    everything, head, tail = map(float, output.groups())
    assert everything > 84 and head > 75 and tail > 80  # 40 test images of one head class: ± 5 points
    assert not list(tmp_path.iterdir())
