"""A folder of valid and odd files for commands: runs, images, lists, shards, and files that only look like them."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from longtail import recipes, run_folder
from longtail.data.write_shards import shard
from tests.conftest import tiny
from tests.inference.made import finished_run, photographs
from tests.report.made import FEW, begin_run, make_run

HOSTILE = ['<script>alert("x")</script>', "a|b\\|c", "\x1b[31mred\x07", "line\nbreak\u202e"]
LONG = "n" * 300  # longer than a file system's names


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def build(root: Path) -> Path:
    """Build the folder; a file `exploded` in it would show that code was executed."""
    good_things(root)
    links(root)
    files(root)
    odd_lists(root)
    odd_shards(root)
    odd_weights(root)
    odd_runs(root)
    return root


def good_things(root: Path) -> None:
    network = finished_run(root / "network", tiny("ce"))
    (network / "features.npz").unlink()  # a map of them takes a second
    for seed in (0, 1):
        make_run(root / f"runs/ce/seed{seed}", recipes.digits_lt("ce"), seed, FEW)
    make_run(root / "runs/paco/seed0", recipes.digits_lt("paco"), 0, FEW, HOSTILE)
    begin_run(root / "begun", 3)
    photographs(root / "pets", n=6, low=8)
    photographs(root / "ünï côdé \n pets", n=6, low=8)
    names = sorted(str(f.relative_to(root)) for f in (root / "pets").rglob("*.*"))
    label = {"cat": 0, "dog": 1, "eel": 2}
    (root / "list.txt").write_text("".join(f"{n} {label[Path(n).parent.name]}\n" for n in names))
    (root / "list.csv").write_text("path,label\n" + "".join(f"{n},{Path(n).parent.name}\n" for n in names))
    shard(recipes.make(root / "pets").data, root / "shards")


def links(root: Path) -> None:
    (root / "dangling").symlink_to(root / "gone")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").mkdir()
    (root / "circle").mkdir()
    (root / "circle/again").symlink_to(root / "circle")
    for name in ("full", "full.svg", "null"):  # a command that replaced the device itself would harm the machine
        (root / name).symlink_to(f"/dev/{name.split('.')[0]}")


def files(root: Path) -> None:
    for name in ("empty.txt", "empty.csv", "empty.json", "empty.safetensors", "empty.pth", "empty.jpg"):
        (root / name).touch()
    (root / "bytes.txt").write_bytes(bytes(range(256)))
    (root / "bytes.json").write_bytes(b"\xff\xfe\x00{")
    (root / "deep.json").write_text("[" * 100_000)
    (root / "huge.json").write_text('{"counts": [1' + "0" * 5000 + ", 1e400, NaN]}")
    (root / "numbers.txt").write_text("500, 100 5")


def odd_lists(root: Path) -> None:
    lines = {
        "climbs": "../../../etc/passwd 0\n../etc/hosts 1\n",
        "absolute": "/etc/passwd 0\n/dev/zero 1\n/dev/stdin 1\n",
        "nul": "pets/cat/0.png\0.jpg 0\n",
        "long": f"{LONG}.jpg 0\n{LONG}/a.jpg 1\n",
        "labels": "a.jpg 99999999999999999999\nb.jpg 0\n",
        "devices": "null 0\nfull 1\nloop 2\n",
    }
    for name, text in lines.items():
        (root / f"{name}.txt").write_text(text)
    (root / "field.csv").write_text("path,label\n" + "x" * 200_000 + ",0\n")
    (root / "quotes.csv").write_text('path,label\n"a.jpg,0\n')
    (root / "inat.json").write_text(json.dumps({"images": [{"id": []}], "annotations": {}, "categories": None}))


def odd_shards(root: Path) -> None:
    whole = next((root / "shards").glob("train*")).read_bytes()
    tables = {
        "columns": {"picture": [b"x"], "label": [0]},
        "labels": {"image": [b"x", b"y"], "label": [-1, 2**40]},
        "nothing": {"image": [], "label": []},
        "kinds": {"image": ["x", "y"], "label": [0.5, float("nan")]},
        "rows": {"image": [None, b"no image"] * 5, "label": ["a", "b"] * 5},
    }
    for name, columns in tables.items():
        (root / f"shards-{name}").mkdir()
        pq.write_table(pa.table(columns), root / f"shards-{name}/train-00000.parquet")
    for name, content in (("cut", whole[: len(whole) // 2]), ("footer", whole[:-6] + b"\xff" * 6), ("empty", b"")):
        (root / f"shards-{name}").mkdir()
        (root / f"shards-{name}/train-00000.parquet").write_bytes(content)


def odd_weights(root: Path) -> None:
    bomb = Bomb(root / "exploded")
    (root / "bomb.pth").write_bytes(pickle.dumps({"state_dict": bomb}))
    torch.save({"state_dict": bomb}, root / "bomb.pth.tar")
    torch.save({"state_dict": {"encoder_q.x": torch.ones(1), "linear.weight": torch.ones(())}}, root / "scalar.pth")
    np.savez(root / "bomb.npz", features=np.array([bomb], dtype=object), labels=np.zeros(1))
    good = (root / "network" / run_folder.MODEL).read_bytes()
    (root / "cut.safetensors").write_bytes(good[: len(good) // 2])
    (root / "header.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    described = json.dumps({"__metadata__": {"longtail": '{"config": {}, "class_names": 3}'}}).encode()
    (root / "described.safetensors").write_bytes(len(described).to_bytes(8, "little") + described)


def odd_runs(root: Path) -> None:
    """Write valid runs with one error each."""
    for name, spoil in SPOILT.items():
        folder = root / "spoilt" / name
        shutil.copytree(root / "runs/ce/seed0", folder)
        spoil(folder)
    shutil.copytree(root / "network", root / "spoilt/weights")
    (root / "spoilt/weights" / run_folder.MODEL).write_bytes(b"")


def text(file: str, content: str):
    return lambda folder: (folder / file).write_text(content)


def edit(file: str, **values):
    def spoil(folder: Path) -> None:
        tree = json.loads((folder / file).read_text())
        for key, value in values.items():
            *above, last = key.split("__")
            place = tree
            for step in above:
                place = place[step]
            place[last] = value
        (folder / file).write_text(json.dumps(tree))

    return spoil


SPOILT = {
    "config cut": text(run_folder.CONFIG, '{"data": {'),
    "config list": text(run_folder.CONFIG, "[]"),
    "config deep": text(run_folder.CONFIG, "[" * 100_000),
    "config type": edit(run_folder.CONFIG, train__epochs="many"),
    "config huge": edit(run_folder.CONFIG, train__epochs=10**400),
    "config key": edit(run_folder.CONFIG, train__color="red"),
    "config names": edit(run_folder.CONFIG, method={"name": ["paco"]}),
    "config unhashable": edit(run_folder.CONFIG, data__name=["digits"]),
    "environment": edit(run_folder.ENVIRONMENT, data=3),
    "environment seed": edit(run_folder.ENVIRONMENT, seed="x"),
    "environment started": edit(run_folder.ENVIRONMENT, started=[1]),
    "metrics empty": text(run_folder.METRICS, ""),
    "metrics nan": edit(run_folder.METRICS, top1=float("nan"), few=float("inf"), per_class=[float("nan")] * 4),
    "metrics words": edit(run_folder.METRICS, top1="high", seconds=[], per_class={}),
    "metrics classes": edit(run_folder.METRICS, per_class=[1.0], class_names=[1, None], counts="many"),
    "metrics none": edit(run_folder.METRICS, per_class=None, shifted=None),
    "metrics confusion": edit(run_folder.METRICS, confusion=[[1], [2, 3]]),
    "metrics huge": edit(run_folder.METRICS, top1=10**400, latency_b64=-(10**30)),
    "metrics zeros": edit(run_folder.METRICS, counts=[0] * 4, confusion=[[0] * 4] * 4, per_class=[None] * 4),
    "metrics no class": edit(run_folder.METRICS, per_class=[], counts=[], class_names=[], confusion=[], calibration=[]),
    "metrics shifted": edit(run_folder.METRICS, shifted={"forward": {}, "uniform": None, "backward": {"x": 1}}),
    "markup": edit(run_folder.CONFIG, model__name="[/red]\x1b[31m|"),
    "log": text(
        run_folder.LOG, '{"epoch": "x", "loss": null}\n\x00\n[1]\n{"epoch": NaN, "loss": {}, "epochs": 1e400}\n'
    ),
    "features": text("features.npz", "PK no archive"),
    "pickled": lambda folder: shutil.copy(folder.parents[1] / "bomb.npz", folder / "features.npz"),
    "examples": text("examples/index.json", '{"confusions": [{"truth": 99, "items": "x"}], "best_rare": 3}'),
    "thumbnail": text("examples/0.png", "no image" * 1000),
}
