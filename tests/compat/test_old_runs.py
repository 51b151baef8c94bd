"""Run folders, exports and shards of the version before the renaming can be read, evaluated, resumed and used as before."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import longtail
from longtail.cli import main
from tests.compat import present
from tests.compat.machine import repeats_exactly
from tests.compat.make_fixtures import FIXTURES, FORMATS, LARGEST_FILE, PHOTOGRAPHS, RUNS, STOP_AFTER, contents_of
from tests.compat.renames import rename

MACHINE = json.loads((FIXTURES / "machine.json").read_text())
PREDICTIONS = json.loads((FIXTURES / "predictions.json").read_text())
LABELS = {"paco": "PaCo", "supcon": "SupCon", "ride": "RIDE, 2 experts", "mislas": "MiSLAS"}
TIMES = {"seconds", "setup_seconds", "together", "peak_memory", "latency_b64"}  # metrics that measure the machine
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def no_timing():
    """Skip the latency measurement of exports, which takes seconds and is not tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(present.export, "MAX_PASSES", 1)
        yield


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """Return a copy of the fixtures, for tests that do not change it."""
    folder = tmp_path_factory.mktemp("old") / "fixtures"
    shutil.copytree(FIXTURES, folder)
    return folder


@pytest.fixture
def copy(tmp_path) -> Callable[[str], Path]:
    """Return a function that copies a part of the fixtures, for tests that change it."""

    def copy_part(part: str) -> Path:
        shutil.copytree(FIXTURES / part, tmp_path / part)
        return tmp_path / part

    return copy_part


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def logits_of(run: Path) -> np.ndarray:
    return np.load(run / "predictions.npz")["logits"]


def numbers_in(text: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", text)


# The fixtures themselves


def test_fixtures_are_small_and_contain_no_absolute_path():
    absolute = re.compile(rb"/(home|root|tmp|usr|opt|var|mnt|srv|workspace|Users)/|site-packages|[A-Z]:\\\\")
    for path in filter(Path.is_file, FIXTURES.rglob("*")):
        assert path.stat().st_size <= LARGEST_FILE, path
        for name, content in contents_of(path):
            assert not absolute.search(content), name


def test_fixtures_were_written_by_the_version_that_the_readme_names():
    commit = MACHINE["commit"]
    assert commit in (FIXTURES / "README.md").read_text()
    environments = list(FIXTURES.rglob("environment.json"))
    assert len(environments) == len(RUNS) + len(STOP_AFTER)
    for path in environments:
        tree = read(path)
        assert tree["commit"] == commit and tree["device"] == "CPU, threads: 1" and tree["precision"] == "fp32"


# Load and evaluate


@pytest.mark.parametrize("name", RUNS)
def test_networks_load_and_give_the_stored_logits(name, old):
    run = old / f"runs/{name}/seed0"
    model = longtail.load(run, device="cpu")
    images = sorted((run / "examples").glob("*.png"))  # named by their places in the test set
    assert len(images) > 10
    stored = logits_of(run)
    for image in images:
        np.testing.assert_allclose(model(image).logits, stored[int(image.stem)], rtol=TOLERANCE, atol=TOLERANCE)
    assert (model.temperature is not None) == (name == "paco")


@pytest.mark.parametrize("name", RUNS)
def test_evaluation_repeats_the_stored_results(name, copy):
    run = copy(f"runs/{name}/seed0")
    before, logits = read(run / "metrics.json"), logits_of(run)
    for file in ("predictions.npz", "features.npz"):
        (run / file).unlink()
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    after = read(run / "metrics.json")
    np.testing.assert_allclose(logits_of(run), logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert (logits_of(run).argmax(1) == logits.argmax(1)).all()
    exact = ("top1", "many", "medium", "few", "macro_f1", "per_class", "confusion", "counts", "class_names")
    for key in exact:
        assert after[rename("metrics", key)] == before[key], key
    for key in ("ece", "knn_top1"):
        assert after[rename("metrics", key)] == pytest.approx(before[key], abs=0.3), key  # a neighbor may change
    for key in ("seconds", "setup_seconds", "together", "peak_memory"):
        assert after[rename("metrics", key)] == before[key], key  # these belong to the training, not to the evaluation


def test_evaluation_repeats_the_stored_calibration(copy):
    run = copy("runs/paco/seed0")
    before = read(run / "calibration.json")
    (run / "calibration.json").unlink()
    longtail.evaluate(run, device="cpu")
    after = read(run / "calibration.json")
    for key, value in before.items():
        assert after[rename("metrics", key)] == pytest.approx(value, rel=TOLERANCE), key


# Resume


@pytest.mark.parametrize("name", STOP_AFTER)
def test_interrupted_runs_resume_to_the_stored_weights(name, copy):
    out, whole = copy(f"interrupted/{name}"), FIXTURES / f"runs/{name}/seed0"
    assert main(["train", *RUNS[name].split(), "--out", str(out), "--resume"]) == 0
    run = out / "seed0"
    check_weights(run, whole)
    check_logs(run, whole)
    metrics, stored = read(run / "metrics.json"), read(whole / "metrics.json")
    few_images = 100 * 4 / len(logits_of(whole))
    allowed = 0 if repeats_exactly(MACHINE) else few_images
    assert metrics[rename("metrics", "top1")] == pytest.approx(stored["top1"], abs=allowed)
    (resumed,) = read(run / "environment.json")[rename("environment", "resumed")]
    assert read(run / "environment.json")["commit"] == MACHINE["commit"] and resumed["started"] > stored_start(whole)


def stored_start(run: Path) -> str:
    return read(run / "environment.json")["started"]


def check_weights(run: Path, stored: Path) -> None:
    """Compare the weights of two runs, bit for bit on a machine of the kind that trained the stored one."""
    found, wanted = (load_file(folder / "model.safetensors") for folder in (run, stored))
    wanted = {
        rename("state", f"net.{key}").removeprefix(rename("state", "net.")): value for key, value in wanted.items()
    }
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if repeats_exactly(MACHINE):
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=TOLERANCE, atol=TOLERANCE)


def check_logs(run: Path, stored: Path) -> None:
    """Compare the rows of two logs without times, and gradient norms if there are any."""
    found, wanted = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in (run, stored)
    )
    assert len(found) == len(wanted)
    tolerance = 0 if repeats_exactly(MACHINE) else 1e-2
    for row, old_row in zip(found, wanted, strict=True):
        for key, value in old_row.items():
            if key not in ("seconds", "images_per_second"):
                expected = value if isinstance(value, str) else pytest.approx(value, rel=tolerance, abs=0.5 * tolerance)
                assert row[rename("log", key)] == expected, key
    if (stored / "gradients.npz").exists():
        norms, old_norms = (np.load(folder / "gradients.npz")["norms"] for folder in (run, stored))
        np.testing.assert_allclose(norms, old_norms, rtol=tolerance, atol=0.1 * tolerance)


def test_a_finished_run_is_not_trained_again(copy):
    out = copy("runs/paco")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", *RUNS["paco"].split(), "--out", str(out), "--resume"]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_another_configuration_is_refused(copy):
    """A setting that differs from the stored one must still be reported."""
    out = copy("interrupted/paco")
    arguments = [*RUNS["paco"].split(), "--method.alpha", "0.1"]
    assert main(["train", *arguments, "--out", str(out), "--resume"]) == 2
    assert not (out / "seed0/metrics.json").exists()


# Table, report and figure


def test_the_table_has_the_stored_figures(old, tmp_path, monkeypatch):
    monkeypatch.chdir(old)
    assert main(["table", "runs", "--out", str(tmp_path)]) == 0
    stored = {row["folders"][0]: row for row in read(FIXTURES / "table/table.json")}
    found = {row["folders"][0]: row for row in read(tmp_path / "table.json")}
    assert stored.keys() == found.keys() == {f"runs/{name}/seed0" for name in RUNS}
    for folder, row in stored.items():
        for key, value in row["metrics"].items():
            assert found[folder]["metrics"][rename("metrics", key)] == value, (folder, key)
        assert value_of(row, "top1") == read(FIXTURES / folder / "metrics.json")["top1"]
    tables = [(folder / "table.md").read_text().splitlines() for folder in (FIXTURES / "table", tmp_path)]
    before, after = ([numbers_in(line) for line in table if line.startswith("|")] for table in tables)
    assert before == after and len(before) == 2 + len(RUNS)


def value_of(row: dict[str, Any], metric: str) -> float:
    (value,) = row["metrics"][metric]["values"]
    return value


def test_one_report_shows_all_runs(old, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(old / "runs"), str(old / "interrupted"), "-o", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    for name, label in LABELS.items():
        assert label in page
        assert f"{read(FIXTURES / f'runs/{name}/seed0/metrics.json')['top1']:.1f}" in page
    assert page.count("data:image/png") >= 10  # examples of every run
    assert "NaN" not in page


def test_the_gradients_are_drawn(old, tmp_path):
    out = tmp_path / "gradient.svg"
    assert longtail.figure("gradient", old / "runs/paco", out) == out
    assert out.read_bytes().startswith(b"<?xml")


# Predict and export


@pytest.mark.parametrize(("kind", "source"), [("run", "runs/paco"), ("exported", "exported/paco.safetensors")])
def test_predictions_are_those_that_were_stored(kind, source, old, tmp_path, monkeypatch):
    monkeypatch.chdir(old)
    flags = ["--json", str(tmp_path / "found.jsonl"), "--csv", str(tmp_path / "found.csv")]
    assert main(["predict", source, "images", "--top", "10", "--device", "cpu", *flags]) == 0
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    stored = PREDICTIONS[kind]["probabilities"]
    assert {line["path"] for line in lines} == stored.keys()
    for line in lines:
        found = {int(guess["class"]): guess["probability"] for guess in line["predictions"]}
        expected = dict(enumerate(stored[line["path"]]))
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert max(found, key=lambda c: found[c]) == max(expected, key=lambda c: expected[c])
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    best = {line["path"]: line["predictions"][0] for line in lines}
    assert {row["path"]: float(row["probability_1"]) for row in rows} == pytest.approx(
        {path: guess["probability"] for path, guess in best.items()}, abs=TOLERANCE
    )


def run_onnx(path: Path, images: np.ndarray) -> list[np.ndarray]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["logits", "probabilities"], {"images": images})


def run_torch(path: Path, images: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        return [part.numpy() for part in torch.export.load(path).module()(torch.from_numpy(images))]


def run_safetensors(path: Path, images: np.ndarray) -> list[np.ndarray]:
    found = longtail.load(path, device="cpu")(list(images.transpose(0, 2, 3, 1)))
    return [np.array([getattr(each, part) for each in found]) for part in ("logits", "probabilities")]


RUNNERS = {"onnx": run_onnx, "torch": run_torch, "safetensors": run_safetensors}


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


WRITTEN_BY = MACHINE["versions"]["torch"]
OLDER_TORCH = version_of(torch.__version__) < version_of(WRITTEN_BY)
NOT_READABLE = f"torch {torch.__version__} need not read a .pt2 archive that the newer torch {WRITTEN_BY} wrote"


def shown_images() -> np.ndarray:
    """Return the stored images as input of a network, uint8 (N, 3, height, width)."""
    return np.stack([np.array(Image.open(FIXTURES / name)).transpose(2, 0, 1) for name in PREDICTIONS["labels"]])


def stored_outputs() -> list[np.ndarray]:
    stored = PREDICTIONS["exported"]
    return [np.array([stored[part][name] for name in PREDICTIONS["labels"]]) for part in ("logits", "probabilities")]


@pytest.mark.parametrize(
    "kind", ["onnx", pytest.param("torch", marks=pytest.mark.skipif(OLDER_TORCH, reason=NOT_READABLE)), "safetensors"]
)
def test_exports_give_the_stored_outputs(kind, old):
    found = RUNNERS[kind](old / f"exported/paco.{FORMATS[kind]}", shown_images())
    for part, stored in zip(found, stored_outputs(), strict=True):
        np.testing.assert_allclose(part, stored, rtol=TOLERANCE, atol=TOLERANCE)
    assert (found[0].argmax(1) == stored_outputs()[0].argmax(1)).all()


AGAIN = [*((kind, "runs/paco") for kind in FORMATS), ("safetensors", "exported/paco.safetensors")]


@pytest.mark.parametrize(("kind", "source"), AGAIN)
def test_networks_are_exported_again(kind, source, old, tmp_path):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    out = tmp_path / f"again.{FORMATS[kind]}"
    assert main(["export", str(old / source), "--to", kind, "--prior", "train", "--out", str(out)]) == 0
    found = RUNNERS[kind](out, shown_images())
    for part, stored in zip(found, stored_outputs(), strict=True):
        np.testing.assert_allclose(part, stored, rtol=TOLERANCE, atol=TOLERANCE)
    assert out.with_name(f"{out.name}.md").stat().st_size > 1000


# Train anew


@pytest.mark.parametrize(
    "folder", [*(f"runs/{name}" for name in RUNS), *(f"interrupted/{name}" for name in STOP_AFTER)]
)
def test_stored_configurations_can_be_trained_again(folder, old):
    config = present.stored_config(old / folder)
    assert config == present.read_config(read(old / folder / "seed0/config.json"))
    assert config == present.stored_config(old / folder / "seed0/config.json")


@pytest.mark.parametrize("name", RUNS)
def test_runs_trained_again_have_the_stored_weights(name, old, tmp_path):
    out = tmp_path / "anew"
    assert main(["train", "--from", str(old / f"runs/{name}"), "--out", str(out)]) == 0
    metrics, stored = read(out / "seed0/metrics.json"), read(FIXTURES / f"runs/{name}/seed0/metrics.json")
    assert metrics.keys() >= {rename("metrics", key) for key in stored}
    if repeats_exactly(MACHINE):
        check_weights(out / "seed0", FIXTURES / f"runs/{name}/seed0")
        check_logs(out / "seed0", FIXTURES / f"runs/{name}/seed0")
        same = {key for key in stored if key not in TIMES}
        assert {key: metrics[rename("metrics", key)] for key in same} == {key: stored[key] for key in same}
    else:
        assert (
            metrics[rename("metrics", "top1")] > 40
        )  # processors differ in rounding, and training amplifies the differences


# Shards


def test_shards_are_inspected(old, tmp_path):
    out = tmp_path / "found.json"
    assert main(["data", "inspect", str(old / "shards"), "--json", str(out)]) == 0
    found = read(out)
    counts = dict(zip(("zero", "one", "two"), PHOTOGRAPHS["train"], strict=True))
    assert dict(zip(found["class_names"], found["counts"], strict=True)) == counts
    assert found["test_counts"] == list(PHOTOGRAPHS["val"]) and found["read"] == sum(map(sum, PHOTOGRAPHS.values()))
    assert found["formats"] == {"PNG": found["read"]} and found["unreadable"] == found["duplicates"] == []


def test_shards_are_trained_on(old, tmp_path):
    out = tmp_path / "run"
    flags = (
        "--method balanced-softmax --data.image_size 16 --model.name resnet8_cifar --model.no_pretrained --train.epochs 1"
        " --train.batch_size 8 --train.device cpu --log.progress none"
    )
    assert main(["train", str(old / "shards"), *flags.split(), "--out", str(out)]) == 0
    metrics = read(out / "seed0/metrics.json")
    counts = dict(zip(("zero", "one", "two"), PHOTOGRAPHS["train"], strict=True))
    assert dict(zip(metrics["class_names"], metrics["counts"], strict=True)) == counts
    assert np.sum(metrics["confusion"]) == sum(PHOTOGRAPHS["val"])
