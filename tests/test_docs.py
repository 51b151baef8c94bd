"""What README and docs/ show runs as it stands there: Python in order, page by page; commands on small data, and short."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import recipes
from longtail.cli import VERBS, main, reference
from longtail.config import methods as config_methods
from longtail.report.table import table
from tests.data.test_sources import cifar_entry, write
from tests.test_large import write_imagenet

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
KINDS = {"python", "", "console", "bash", "text", "json"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Python

PYTHON = {named(page): [text for kind, text in blocks(page) if kind == "python"] for page in PAGES}


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if found])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for known in (recipes.METHODS, config_methods.METHODS):  # docs/methods.md adds one, which is gone after the test
        monkeypatch.setitem(known, "cdt", None)
    names: dict = {"__name__": "page"}
    for block in PYTHON[page]:
        exec(compile(block, page, "exec"), names)
    if page == "docs/methods.md":
        (block,) = PYTHON[page]
        assert len(block.splitlines()) < 40
        found = {row.label: row for row in table([tmp_path / "runs/cdt"])}
        assert found.keys() == {"Cross-entropy", "CDT"} and min(found["CDT"].values("top1")) > 40
        assert found["CDT"].values("top1") != found["Cross-entropy"].values("top1")


def test_every_block_is_of_a_kind_that_is_tested():
    assert {kind for page in PAGES for kind, _ in blocks(page)} <= KINDS


# Commands


def commands(page: Path) -> list[list[str]]:
    """The words of each line, without its comment; a line that begins with a blank goes on from the one before."""
    found: list[list[str]] = []
    for kind, text in blocks(page):
        if kind in ("", "console", "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    found.append(words)
    return found


SMALL = "--model.name resnet8_cifar --data.image_size 32 --train.device cpu"
SHORT = {
    "train": f"--train.epochs 1 --train.batch_size 16 --log.gradients {SMALL}",
    "compare": f"--methods ce supcon ride-2 --epochs 1 --seeds 0 {SMALL}",
    "reproduce": "--epochs 1 --seeds 0 --imbalance 100 --methods ce",
    "demo": "--seeds 0",
}


def shortened(words: list[str]) -> list[str]:
    """With other values for what makes it long."""
    verb, rest = words[0], words[1:]
    extra = shlex.split(SHORT.get(verb, ""))
    for flag in (word for word in extra if word.startswith("--")):
        if flag in rest:
            at = rest.index(flag)
            end = next((i for i in range(at + 1, len(rest)) if rest[i].startswith("--")), len(rest))
            rest = rest[:at] + rest[end:]
    return [verb, *rest, *extra]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the commands find what they name."""
    folder = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    for split, counts in {"train": (12, 5, 3), "val": (3, 3, 3)}.items():
        for name, n in zip(("ash", "birch", "cedar"), counts, strict=True):
            there = folder / "PATH/TO/IMAGES" / split / name
            there.mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).save(there / f"{i}.jpg")
    for split in ("train", "test"):
        files = sorted((folder / "PATH/TO/IMAGES" / split.replace("test", "val")).rglob("*.jpg"))
        label = {"ash": 0, "birch": 1, "cedar": 2}
        lines = [f"{f.relative_to(folder / 'PATH/TO/IMAGES')} {label[f.parent.name]}\n" for f in files]
        (folder / f"{split}.txt").write_text("".join(lines))
    entries = {
        "train": cifar_entry(100, 110, "fine_labels"),
        "test": cifar_entry(100, 1, "fine_labels", seed=1),
        "meta": {"fine_label_names": [f"name{c}" for c in range(100)]},
    }
    write(folder / "data", "cifar-100-python", entries)
    (folder / "PATH/TO/IMAGENET").mkdir()
    write_imagenet(folder / "PATH/TO/IMAGENET")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", [named(page) for page in PAGES if commands(page)])
def test_commands_run(page, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for number, words in enumerate(commands(ROOT / page)):
        if "train" in words and "--out" not in words:
            words = [*words, "--out", f"runs/{number}"]  # lines are alternatives, and some have the same name for it
        if words[0] == "torchrun":
            at = words.index("longtail") + 1
            run = [sys.executable, "-m", "torch.distributed.run", *words[1:at], *shortened(words[at:])]
            done = subprocess.run(run, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (words, done.stderr)
        elif words[0] == "longtail":
            code = main(shortened(words[1:]))
            assert code == 0, (words, capsys.readouterr().err)
        else:
            assert words[0] in ("make", "pip", ".", "export"), words  # set-up, which CI itself goes through


def test_every_command_that_is_shown_exists():
    for page in PAGES:
        for words in commands(page):
            assert words[0] != "longtail" or words[1] in {*VERBS, "--version", "--help"}, (page, words)


# What must be there


def test_the_reference_is_current():
    assert (ROOT / "docs/commands.md").read_text() == reference.page(), "run `make docs`"


def test_both_commands_are_shown():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text and "pip install ." in text


def test_every_method_stands_in_the_docs():
    text = (ROOT / "docs/methods.md").read_text()
    assert [
        name for name in recipes.METHODS if f"`{name}`" not in text and f"`{name.split('-')[0]}-*`" not in text
    ] == []


def test_every_public_name_stands_in_the_python_page_and_exists():
    text = (ROOT / "docs/python.md").read_text()
    assert [name for name in longtail.__all__ if not re.search(rf"`(longtail\.)?{name}[`(]", text)] == []
    assert [name for name in longtail.__all__ if not hasattr(longtail, name)] == []
    assert [name for name in longtail.nn.__all__ if name not in text] == []


def test_links_lead_somewhere():
    for page in [*PAGES, *(ROOT / "results").glob("*.md"), ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)
