"""Tests of README.md and docs/.

All code blocks run: Python blocks in order, page by page, and commands with small data and short trainings. Links, anchors,
figures and names on the pages are checked.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import config, recipes
from longtail.cli import COMMANDS, main, reference
from longtail.metrics import mean_std, paired_difference
from longtail.reporting.table import table
from longtail.training import SHORT_NAMES
from tests.data.test_sources import cifar_entry, write
from tests.test_large import write_imagenet

ROOT = Path(__file__).parents[1]
digits_lt = recipes.digits_lt
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
KINDS = {"python", "", "console", "bash", "text", "json"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)


def named(page: Path) -> str:
    """Return the path of a page relative to the repository."""
    return str(page.relative_to(ROOT))


# Python

PYTHON = {named(page): [text for kind, text in blocks(page) if kind == "python"] for page in PAGES}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if found])
def test_python_runs(page, whole, tmp_path, monkeypatch, request):
    """Run the Python blocks; only long tests train all epochs, others one."""
    monkeypatch.chdir(tmp_path)
    if not whole:
        request.getfixturevalue("simple_maps")
        monkeypatch.setattr(recipes, "digits_lt", lambda **given: recipes.with_epochs(digits_lt(**given), 1))
    for known in (recipes.METHODS, config.METHODS):  # docs/methods.md adds a method, which is removed after the test
        monkeypatch.setitem(known, "cdt", None)
        del known["cdt"]
    names: dict = {"__name__": "page"}
    for block in PYTHON[page]:
        code = block if whole else re.sub(r"\bepochs=\d+", "epochs=1", block)
        exec(compile(code, page, "exec"), names)
    if page == "docs/methods.md":
        (block,) = PYTHON[page]
        assert len(block.splitlines()) < 40
        found = {row.label: row for row in table([tmp_path / "runs/cdt"])}
        assert found.keys() == {"Cross-entropy", "CDT"}
        assert not whole or min(found["CDT"].values("top1")) > 40
        assert found["CDT"].values("top1") != found["Cross-entropy"].values("top1")


def test_every_block_has_a_known_language():
    assert {kind for page in PAGES for kind, _ in blocks(page)} <= KINDS


# Commands

SMALL = "--model.name resnet8_cifar --data.image_size 32 --train.device cpu"
WITH_LINEAR_LAYERS = "convnext_atto"  # for low-rank updates
SHORT = {
    "train": f"--train.epochs 1 --train.batch_size 256 --train.seeds 0 --log.gradients --data.val_fraction 0.2 {SMALL}",
    "compare": f"--methods ce supcon ride-2 --epochs 1 --seeds 0 {SMALL}",
    "reproduce": "--epochs 1 --seeds 0 --imbalance 100 --methods ce --results found",
    "watch": "--port 0",
}
PLAIN = re.compile(r"longtail [^|;$&<>]*(#.*)?")  # lines that need no shell


def shortened(words: list[str]) -> list[str]:
    """Return the words after `longtail`, with settings for a short run."""
    verb, rest = words[0], [word for word in words[1:] if word != "--model.pretrained"]  # no downloads
    if verb == "train":  # short names, such as --epochs, in full
        full = {f"--{name.replace('_', '-')}": f"--{setting}" for name, setting in SHORT_NAMES.items()}
        rest = [full.get(word, word) for word in rest]
    extra = shlex.split(SHORT.get(verb, ""))
    if "lora" in rest:
        extra = [WITH_LINEAR_LAYERS if word == "resnet8_cifar" else word for word in extra]
    for flag in (word for word in extra if word.startswith("--")):
        if flag in rest:
            at = rest.index(flag)
            end = next((i for i in range(at + 1, len(rest)) if rest[i].startswith("--")), len(rest))
            rest = rest[:at] + rest[end:]
    return [verb, *rest, *extra]


def scripts(page: Path) -> list[str]:
    """Return the shell blocks, without the demo, which tests/test_demo.py runs."""
    found = [text.replace("\\\n", " ") for kind, text in blocks(page) if kind in ("", "console", "bash")]
    return [re.sub(r"^longtail demo\b.*$", "", text, flags=re.M) for text in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    images = folder / "PATH/TO/IMAGES"
    for split, counts in {"train": (12, 5, 5), "val": (3, 3, 3)}.items():
        lines = []
        for label, (name, n) in enumerate(zip(("ash", "birch", "cedar"), counts, strict=True)):
            (images / split / name).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).save(images / split / name / f"{i}.jpg")
                lines.append(f"{split}/{name}/{i}.jpg {label}\n")
        (folder / f"{split.replace('val', 'test')}.txt").write_text("".join(lines))
    shutil.copytree(images / "val/ash", folder / "PATH/TO/PHOTOGRAPHS")
    (folder / "PATH/TO/IMAGENET").mkdir()
    write_imagenet(folder / "PATH/TO/IMAGENET")
    (folder / "field.csv").write_text("class,weight\nash,1\nbirch,2\ncedar,3\n")
    shutil.copytree(ROOT / "results", folder / "results")
    entries = {
        "train": cifar_entry(100, 110, "fine_labels"),
        "test": cifar_entry(100, 1, "fine_labels", seed=1),
        "meta": {"fine_label_names": [f"name{c}" for c in range(100)]},
    }
    write(folder / "data", "cifar-100-python", entries)
    shell = folder / "bin/longtail"
    shell.parent.mkdir()
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    shell.chmod(0o755)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", [named(page) for page in PAGES if scripts(page)])
def test_commands_run(page, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    shutil.rmtree(place / "runs", ignore_errors=True)
    (place / "runs").mkdir()
    if "--out runs/x" not in (ROOT / page).read_text():  # otherwise the page trains it
        for name in ("x", "y"):
            words = shortened(["train", "PATH/TO/IMAGES", "--out", f"runs/{name}"])
            if "--ensemble" in (ROOT / page).read_text():
                words.insert(words.index("--train.seeds") + 1, "1")
            assert main(words) == 0
    for script in scripts(ROOT / page):
        if all(PLAIN.fullmatch(line) for line in script.splitlines() if line.strip(" #")[:1].isalpha()):
            for line in script.splitlines():
                run_line(line, capsys)
        else:
            run_shell(script)


def run_line(line: str, capsys) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words[:1] == ["watch"]:  # runs until it is interrupted
        with subprocess.Popen(["longtail", *words], stdout=subprocess.PIPE, text=True) as server:
            assert "http://127.0.0.1" in server.stdout.readline()
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
    elif words:
        assert main(alone(shortened(words))) == 0, (line, capsys.readouterr().err)


def alone(words: list[str]) -> list[str]:
    """Add an output folder, so that each line of a block trains in its own folder."""
    if words[0] != "train" or "--out" in words:
        return words
    shared = os.environ.get("MASTER_PORT")  # the same in all processes of torchrun
    return [*words, "--out", f"runs/{shared}" if shared else tempfile.mkdtemp(dir="runs")]


def run_shell(script: str) -> None:
    """Run a block with a real shell, in which `longtail` is this file. Lines that install are skipped."""
    lines = [line for line in script.splitlines() if not re.match(r"(make|pip|uv|\.) ", line)]
    script = "\n".join(lines).replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    script = script.replace("-m longtail", f"--no-python {sys.executable} {__file__}")
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (script, done.stderr[-2000:])


def test_every_command_exists():
    for page in PAGES:
        for verb in re.findall(r"^\s*longtail (\S+)", "\n".join(scripts(page)), re.M):
            assert verb in {*COMMANDS, "--version", "--help"}, (page, verb)


# Content


def test_the_reference_is_current():
    assert (ROOT / "docs/commands.md").read_text() == reference.make_page(), "run `make docs`"


def test_readme_shows_demo_test_and_installation():
    text = (ROOT / "README.md").read_text()
    shown = [line.split()[:2] for line in text.splitlines()]
    for command in ("make demo", "make test", "pip install"):
        assert command.split() in shown, command


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "benchmarks", "notebooks", "."])
def test_hints_install_the_package_from_a_checkout(folder):
    """The package is not on an index, so `pip install longtail` would fail or install another package."""
    files = [path for kind in ("py", "md", "ipynb", "toml", "cff") for path in (ROOT / folder).glob(f"*.{kind}")]
    files += [] if folder == "." else (ROOT / folder).rglob("*.py")
    assert files
    wrong = re.compile(r"pip\s+install\s+(-\S+\s+)*[\\'\"]*longtail\b")
    assert [named(path) for path in files if wrong.search(path.read_text())] == []


def test_every_method_is_in_the_docs():
    text = (ROOT / "docs/methods.md").read_text()
    assert [
        name for name in recipes.METHODS if f"`{name}`" not in text and f"`{name.split('-')[0]}-*`" not in text
    ] == []


def test_python_pages_have_every_public_name():
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("python", "loop", "embeddings"))
    assert [name for name in longtail.__all__ if not re.search(rf"`(longtail\.)?{name}[`(]", text)] == []
    assert [name for name in longtail.__all__ if not hasattr(longtail, name)] == []
    assert [name for name in longtail.nn.__all__ if name not in text] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_anchors_exist():
    texts = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in [*PAGES, *(ROOT / "results").glob("*.md"), *texts]:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if not link.startswith("http"):
                target = page.parent / link if link else page
                assert target.exists(), (page, link)
                assert not anchor or anchor in anchors(target), (page, link, anchor)


def test_scale_page_has_the_measured_figures():
    text = (ROOT / "docs/scale.md").read_text()
    scale, stream = (json.loads((ROOT / f"results/{name}.json").read_text()) for name in ("scale", "stream"))
    for row in scale["rows"]:
        shape = {"images_per_second": ",.0f", "GB": ".1f", "s_per_epoch": ",.0f", "epochs": ""}
        shape |= dict.fromkeys(("hours", "hours_on_8", "hours_on_8_larger"), ".0f" if row["hours"] >= 99 else ".1f")
        assert " | ".join(format(row[key], kind) for key, kind in shape.items()) + " |\n" in text, row["row"]
    shown = {row["part"]: row["images_per_second"] for row in stream["rows"]}
    for part in ("step", "views", "read", "read, CPU", "together", "PIL"):
        assert f"{shown[part]:,.0f}" in text, part
    assert f"**{shown['together'] / shown['step']:.3f}**" in text
    assert {scale["commit"][:7], stream["commit"][:7]} <= set(re.findall(r"commit (\w{7})", text))


def test_figures_page_has_the_measured_gradients():
    found = json.loads((ROOT / "results/gradient.json").read_text())
    text = (ROOT / "docs/figures.md").read_text()

    def times(seeds, when, first, second):
        return np.mean([np.mean(seed[when][first]) / np.mean(seed[when][second]) for seed in seeds])

    for method, seeds in found["methods"].items():
        tail = [times(seeds, when, slice(10), slice(-10, None)) for when in ("mean", "end")]
        head = [times(seeds, when, slice(10), slice(10, 20)) for when in ("mean", "end")]
        assert f"| {tail[0]:.1f} | {tail[1]:.1f} | {head[0]:.2f} | {head[1]:.2f} |\n" in text, method
        assert {seed["commit"][:7] for seed in seeds} <= set(re.findall(r"commit\s+(\w{7})", text))


def test_theory_page_has_the_measured_alphas():
    found = {
        name: entry["validation"]
        for name, entry in json.loads((ROOT / "results/paco_factors.json").read_text()).items()
    }
    text, longer = (ROOT / "docs/theory.md").read_text(), "longer queue, 8192"
    pairs = {
        "base": "alpha auto",
        "alpha 0.02, as the text": "alpha auto",
        "alpha 0.05": "alpha auto",
        longer: f"{longer}, alpha auto",
    }
    for fixed, auto in pairs.items():
        ahead, half = paired_difference(found[auto], found[fixed])
        mean, std = mean_std(found[fixed])
        assert f"| {mean:.1f} ± {std:.1f} | {ahead:+.1f} ± {half:.1f} |\n" in text, fixed
        mean, std = mean_std(found[auto])
        assert f"| {mean:.1f} ± {std:.1f} | |\n" in text, auto


if __name__ == "__main__":  # `longtail` in a shell block
    if sys.argv[1:2] == ["watch"]:  # runs until it is interrupted
        threading.Timer(5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    sys.exit(main(alone(shortened(sys.argv[1:]))))
