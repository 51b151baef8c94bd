"""Write tests/compat/fixtures: run folders, exports and shards made by the code of one fixed commit.

Run it only on the source code of the commit named below, which is the last one before the renaming of the package:

    git worktree add ../before-renaming de8aa34
    cp -r tests/compat ../before-renaming/tests/
    cd ../before-renaming && OMP_NUM_THREADS=1 PYTHONPATH=src:. python -m tests.compat.make_fixtures

The script refuses any other version of src/, because fixtures that newer code has written would say nothing about its
compatibility with older runs. For the same reason it is not adapted when names in the package change.

Everything is trained on the digits inside scikit-learn, in float32, on the CPU, with one thread. No file may contain a
path of the machine that wrote it; the script checks this before it replaces the old fixtures.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.compat.machine import describe_machine

COMMIT = "de8aa3446554"
ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
LARGEST_FILE, LARGEST_SET = 2**20, 6 * 2**20  # bytes

SHORT = "--train.device cpu --train.precision fp32 --train.batch_size 32 --train.checkpoint_every 1 --log.progress none"
PACO = (
    "digits-lt --method paco --method.queue 64 --method.projection_dim 16 --data.val_fraction 0.2 --log.gradients"
    f" --optim.lr 0.05 --optim.warmup_epochs 0.5 --train.epochs 6 {SHORT}"
)
RUNS = {
    "paco": PACO,
    "supcon": f"digits-lt --method supcon --method.linear_epochs 2 --train.epochs 4 {SHORT}",
    "ride": f"digits-lt --method ride-2 --method.router_epochs 2 --train.epochs 4 {SHORT}",
    "mislas": f"digits-lt --method mislas --method.linear_epochs 2 --train.epochs 4 {SHORT}",
}
STOP_AFTER = {"paco": 30, "mislas": 55}  # steps of 54, and of 72 (48 of them in the first stage): in mid-epoch
FORMATS = {"onnx": "onnx", "torch": "pt2", "safetensors": "safetensors"}
PHOTOGRAPHS = {"train": (14, 7, 4), "val": (3, 3, 3)}  # images per class of the folder that is packed as shards
SHOWN = (0, 41, 85, 130, 203, 380)  # test images that predictions are stored for


def main() -> None:
    check_source()
    os.environ["LONGTAIL_COMMIT"] = COMMIT
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # all paths given to the package are relative to it
        write_all()
        fixtures = [path for path in sorted(Path().rglob("*")) if path.is_file()]
        for path in fixtures:
            check_file(path)
        size = sum(path.stat().st_size for path in fixtures)
        if size > LARGEST_SET:
            sys.exit(f"all fixtures together have {size:,} bytes")
        shutil.rmtree(FIXTURES, ignore_errors=True)
        shutil.copytree(".", FIXTURES)
        os.chdir(ROOT)
    print(f"{len(fixtures)} files with {size:,} bytes written to {FIXTURES.relative_to(ROOT)}")


def check_source() -> None:
    """Exit unless src/ is exactly that of COMMIT."""
    changed = subprocess.run(["git", "diff", "--name-only", COMMIT, "--", "src"], cwd=ROOT, stdout=subprocess.PIPE)
    added = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "src"], cwd=ROOT, stdout=subprocess.PIPE
    )
    if changed.returncode or added.returncode or changed.stdout or added.stdout:
        sys.exit(f"src/ is not that of commit {COMMIT}: check out that commit first")


def write_all() -> None:
    for name, arguments in RUNS.items():
        call("train", *arguments.split(), "--out", f"runs/{name}")
    for name, step in STOP_AFTER.items():
        interrupt_training(name, step)
    for run in Path("runs").glob("*/seed0"):
        shutil.rmtree(run / "checkpoint")  # of a finished run nothing reads it, and it is the largest file
    for lock in Path().rglob("lock"):
        lock.unlink()
    call("table", "runs", "--out", "table")
    for kind, suffix in FORMATS.items():
        call("export", "runs/paco", "--to", kind, "--prior", "train", "--out", f"exported/paco.{suffix}")
    write_shards(Path("shards"))
    write_predictions()
    write_json(Path("machine.json"), describe_machine() | {"commit": COMMIT})
    Path("README.md").write_text(README)


def call(*arguments: str, exit_code: int = 0) -> None:
    """Run one command of the package in this process."""
    from longtail.cli import main

    print("longtail", *arguments)
    found = main(arguments)
    if found != exit_code:
        sys.exit(f"exit code {found} instead of {exit_code}")


def interrupt_training(name: str, after: int) -> None:
    """Train the configuration of a finished run again, and send SIGTERM to this process after so many steps."""
    from longtail.engine.run import Run

    count_step = Run.finished

    def count_and_stop(run: Run, step: int) -> None:
        count_step(run, step)
        if run.steps_done() == after:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.finished = count_and_stop  # type: ignore[method-assign]
    try:
        call("train", *RUNS[name].split(), "--out", f"interrupted/{name}", exit_code=128 + signal.SIGTERM)
    finally:
        Run.finished = count_step  # type: ignore[method-assign]


def write_shards(out: Path) -> None:
    """Pack a small image folder of digits, enlarged to 16 pixels, as parquet shards."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    taken = dict.fromkeys(range(3), 0)
    for split, counts in PHOTOGRAPHS.items():
        for digit, (name, count) in enumerate(zip(("zero", "one", "two"), counts, strict=True)):
            folder = Path("photographs", split, name)
            folder.mkdir(parents=True)
            numbers = np.flatnonzero(digits.target == digit)[taken[digit] : taken[digit] + count]
            taken[digit] += count
            for number in numbers:
                pixels = (digits.images[number] * 15.9).astype(np.uint8)
                Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR).save(folder / f"{number}.png")
    call("data", "shard", "photographs", "--out", str(out))
    shutil.rmtree("photographs")


def write_predictions() -> None:
    """Store some test images as files, and the probabilities that the run and its export give them."""
    import longtail
    from longtail import recipes
    from longtail.data.sources import load

    test = load(recipes.digits_lt("paco").data).test
    Path("images").mkdir()
    for item in SHOWN:
        Image.fromarray(test.images[item]).save(f"images/{item}.png")
    files = sorted(Path("images").iterdir())
    expected: dict[str, Any] = {"labels": {str(file): int(test.labels[int(file.stem)]) for file in files}}
    for name, source in {"run": "runs/paco", "exported": "exported/paco.safetensors"}.items():
        model = longtail.load(source, device="cpu")
        found = {str(file): model(file) for file in files}
        expected[name] = {
            "logits": {file: prediction.logits.tolist() for file, prediction in found.items()},
            "probabilities": {file: prediction.probabilities.tolist() for file, prediction in found.items()},
        }
    write_json(Path("predictions.json"), expected)


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=1) + "\n")


# Checks


def check_file(path: Path) -> None:
    """Exit if a file is too large, or contains a path of this machine."""
    if path.stat().st_size > LARGEST_FILE:
        sys.exit(f"{path} has {path.stat().st_size:,} bytes")
    private = [str(ROOT), str(Path.cwd()), str(Path.home()), sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    pattern = re.compile("|".join(re.escape(place) + "/" for place in private if place != "/").encode())
    for name, content in contents_of(path):
        if found := pattern.search(content):
            sys.exit(f"{name} contains the path {found[0]!r}")


def contents_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's bytes, and the decompressed members of an archive (.npz, .pt, .pt2)."""
    yield str(path), path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                yield f"{path}:{member}", archive.read(member)


README = f"""# Runs of an earlier version

These files were written by `longtail` 0.1.0 at commit {COMMIT}, with the script `tests/compat/make_fixtures.py`, which
names every command. They are never written again: `tests/compat/test_old_runs.py` checks that newer code reads them.

- `runs/`: four finished runs on the embedded digits with a ResNet-8: PaCo (with validation images and
  `--log.gradients`), SupCon, RIDE with two experts, and MiSLAS. Their `checkpoint/` folders were removed to save space.
- `interrupted/`: the configurations and seeds of `runs/paco` and `runs/mislas`, stopped by SIGTERM in the middle of an
  epoch: PaCo after {STOP_AFTER["paco"]} of 54 steps, MiSLAS in its second stage, after {STOP_AFTER["mislas"]} of 72.
  Resumed, each must end with the weights of the finished run: bit for bit on the CPU and the torch version of
  `machine.json`, and within 1e-4 elsewhere.
- `exported/`: `runs/paco` in each export format with its model card, for the class frequencies of the training images.
- `shards/`: a small image folder as parquet shards.
- `images/`, `predictions.json`: digits of the test set, and what `runs/paco` and its export say about them.
- `table/`: the table of `runs/`.
- `machine.json`: CPU, number of threads and versions of packages.
"""

if __name__ == "__main__":
    main()
