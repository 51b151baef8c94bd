"""Exported files work without the run and agree with the network; files that do not agree are not written."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail import methods, recipes
from longtail.cli import main
from longtail.config import ModelConfig
from longtail.errors import RunError
from longtail.inference import formats
from longtail.inference.export import EXPORTS, ExportResult
from longtail.inference.formats import FORMATS, ExportModule, eager
from longtail.inference.model import UNCALIBRATED, Model, Preprocessing
from longtail.inference.priors import describe_frequencies
from longtail.views import Views
from tests.conftest import tiny
from tests.inference.made import CPU, finished_run, folder_config, photographs
from tests.raises import raises

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a calibrated run whose logits assume training frequencies; a class name contains Markdown."""
    place = tmp_path_factory.mktemp("made")
    root = photographs(place / "data", ("cat|*x*", "dog", "<b>eel"), n=(40, 20, 10))
    config = folder_config(root, "ce", val_fraction=0.2)
    return finished_run(place / "run/seed0", replace(config, views=replace(config.views, normalize="imagenet")))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> dict[str, ExportResult]:
    """Export in each format with uniform class frequencies."""
    place = tmp_path_factory.mktemp("exported")
    return {to: longtail.export(run, to, place / f"{to}/x{FORMATS[to].suffix}", "uniform") for to in FORMATS}


def untrained(name: str, config=None) -> Model:
    """Return a model with random weights and changed running averages."""
    config, counts = config or tiny(name), np.arange(30, 20, -1)
    torch.manual_seed(0)
    method = methods.make(config, counts)
    method.set_stage(method.stages[-1])
    for module in method.net.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.1)
    with torch.no_grad():
        for name in ("head.drift_F", "head.centroid_CF"):  # state of Causal Norm and OLTR
            if name in method.net.state_dict():
                method.net.state_dict()[name].normal_()
    views = Views(config.views, config.data.image_size)
    names = tuple(f"class {c}" for c in range(10))
    return Model(method.drop_training_modules().eval(), config, Preprocessing(views), names, counts, CPU, 1.5)


def images_of(n: int, size: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, 3, size, size), np.uint8)


def agrees(model: Model, path: Path, to: str) -> None:
    for n in (1, 2, 5):
        images = images_of(n, model.image_size)
        wanted = eager(ExportModule(model))(images)
        for ours, theirs in zip(wanted, FORMATS[to].run(path)(images), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4)
        said = model(images.transpose(0, 2, 3, 1))  # and with what load() says of them
        np.testing.assert_allclose([p.logits for p in said], wanted[0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose([p.probabilities for p in said], wanted[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("to", FORMATS)
def test_a_run_is_exported_with_a_card(run, exported, to):
    path = exported[to].path
    assert sorted(f.name for f in path.parent.iterdir()) == [path.name, f"{path.name}.md"]
    agrees(longtail.load(run, prior="uniform"), path, to)
    card = exported[to].card.read_text()
    for words in ("Cross-entropy", "fewer than 20", "temperature", "validation", "16x16", "uniform", "## Limits"):
        assert words in card, words
    rows = [
        line.split(" | ") for line in card.splitlines() if line.startswith(("| all", "| many", "| medium", "| few"))
    ]
    images = {row[0][2:].split(" ")[0]: row[2].strip(" |") for row in rows}
    every = int(np.sum(json.loads((run / "metrics.json").read_text())["confusion"]))
    assert int(images["all"]) == every == sum(int(n) for group, n in images.items() if group != "all" and n != "–")
    assert r"cat\|\*x\*" in card and "&lt;b&gt;eel" in card and str(run.parent.parent) not in card


def test_the_verb(run, tmp_path, capsys):
    out = tmp_path / "new/x.safetensors"
    assert main(["export", str(run), "--to", "safetensors", "-o", str(out), "--prior", "uniform"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in (" 1 image ", " 7 images ", "logits", f"{out} ", f"{out}.md"))
    assert longtail.load(out).prior.name == "uniform"


def test_a_network_without_a_temperature_is_exported_and_its_card_says_so(tmp_path):
    model = replace(untrained("paco"), temperature=None)
    card = longtail.export(model, "safetensors", tmp_path / "x.safetensors").card.read_text()
    assert UNCALIBRATED in card and longtail.load(tmp_path / "x.safetensors").temperature is None


def test_metadata_of_an_onnx_file(run, exported):
    session = onnxruntime.InferenceSession(str(exported["onnx"].path))
    (given,), out = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["batch", 3, 16, 16])
    assert [(o.name, o.shape) for o in out] == [("logits", ["batch", 3]), ("probabilities", ["batch", 3])]
    told = session.get_modelmeta().custom_metadata_map
    facts = json.loads(told["longtail"])
    assert json.loads(told["class_names"]) == ["<b>eel", "cat|*x*", "dog"] == facts["class_names"]
    assert json.loads(told["temperature"]) == longtail.load(run).temperature == facts["temperature"]
    assert facts["preprocessing"]["mean"] == [0.485, 0.456, 0.406] and facts["prior"]["name"] == "uniform"
    assert facts["logits_stand_for"] == describe_frequencies(
        np.array([0.4, 0.6]), np.array([4, 6])
    )  # those of training


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_holds_the_network_alone_and_no_path(run, exported, to):
    """The file has no key network, projection or queue, and no path of this machine."""
    content = exported[to].path.read_bytes()
    weights = sum(4 * v.numel() for v in longtail.load(run).method.net.state_dict().values())
    assert weights < len(content) < weights + 300_000
    assert str(run.parent.parent).encode() not in content and longtail.__path__[0].encode() not in content


def test_safetensors_are_loaded_again_with_all_they_were(run, tmp_path):
    weights = {"dog": 3, "cat|*x*": 1, "<b>eel": 0}
    done = longtail.export(longtail.load(run), "safetensors", tmp_path / "x.safetensors", prior=weights)
    again, model = longtail.load(done.path), longtail.load(run, prior=weights)
    image = Image.fromarray(images_of(1, 40)[0].transpose(1, 2, 0))
    np.testing.assert_allclose(again(image).probabilities, model(image).probabilities, rtol=1e-6)
    assert again.temperature == model.temperature and again.class_names == model.class_names
    assert again.prior.name == "given" and list(again.counts) == list(model.counts)
    twice = longtail.export(done.path, "torch")
    assert twice.path == tmp_path / "x.pt2" and "macro F1" not in twice.card.read_text()
    said = FORMATS["torch"].run(twice.path)(images_of(2, 16))[1]
    np.testing.assert_allclose(said, eager(ExportModule(model))(images_of(2, 16))[1], atol=1e-5)


def test_several_experts_are_exported(tmp_path):
    """Networks with one head are tested above in each format; long tests export all methods in each format."""
    config = tiny("ride-3")
    model = untrained("ride-3", replace(config, method=replace(config.method, experts=2)))
    agrees(model, longtail.export(model, "torch", tmp_path / "x.pt2").path, "torch")


@pytest.mark.long
@pytest.mark.parametrize("name", {entry.settings_class: name for name, entry in recipes.METHODS.items()}.values())
def test_every_kind_of_method_in_every_format(name, tmp_path):
    model = untrained(name)
    for to in FORMATS:
        agrees(model, longtail.export(model, to, tmp_path / f"x{FORMATS[to].suffix}").path, to)


@pytest.mark.long
@pytest.mark.parametrize("network", ["resnet18", "test_vit", "test_convnext"])
def test_networks_of_timm(network, tmp_path):
    config = tiny("paco")
    size = 64 if network == "resnet18" else 160
    config = replace(config, model=ModelConfig(name=network), data=replace(config.data, image_size=size))
    model = untrained("paco", config)
    agrees(model, longtail.export(model, "onnx", tmp_path / "x.onnx").path, "onnx")


def test_a_file_that_disagrees_is_not_written(run, tmp_path, monkeypatch):
    out, (suffix, write, true) = tmp_path / "x.safetensors", FORMATS["safetensors"]
    out.write_text("old")

    def run_as(runner: formats.Runner) -> None:
        monkeypatch.setitem(EXPORTS, "safetensors", formats.Format(suffix, write, lambda path: runner))

    right = true(longtail.export(run, "safetensors", tmp_path / "y/x.safetensors").path)
    run_as(lambda images: tuple(part + (len(images) > 1) for part in right(images)))  # right at batch 1 alone
    with raises("mismatch", error=RunError):
        longtail.export(run, "safetensors", out)
    run_as(lambda images: (np.full((len(images), 3), np.nan, np.float32),) * 2)
    with raises("mismatch", error=RunError):
        longtail.export(run, "safetensors", out)
    run_as(lambda images: right(images[:1]))
    with raises("mismatch", "7 images", error=RunError):
        longtail.export(run, "safetensors", out)

    def breaks(*_):
        raise ValueError("no such operator\nand more")

    monkeypatch.setitem(EXPORTS, "safetensors", formats.Format(suffix, breaks, true))
    with raises("unsupported", "safetensors (no such operator)", error=RunError):
        longtail.export(run, "safetensors", out)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["x.safetensors", "y"] and out.read_text() == "old"


def test_where_it_goes(run, tmp_path, monkeypatch):
    done = longtail.export(run.parent, "safetensors")
    assert done.path == run / "export/model.safetensors" and done.card == run / "export/model.safetensors.md"
    assert longtail.load(run.parent).origin == run  # still one run
    before = (run / "model.safetensors").read_bytes()
    for to, out, kind, value in (
        ("safetensors", run / "model.safetensors", "exists", run / "model.safetensors"),
        ("onnx", tmp_path / "x.pt2", "invalid-value", ".onnx"),
        ("onnx", Path(__file__) / "x.onnx", "not-writable", Path(__file__) / "x.onnx"),
        ("onx", None, "unknown-name", "'onnx'"),
    ):
        with raises(kind, value):
            longtail.export(run, to, out)
    assert (run / "model.safetensors").read_bytes() == before
    with raises("exists", done.path):
        longtail.export(done.path, "safetensors")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with raises("missing-package", "onnxscript", "pip install onnx onnxruntime onnxscript"):
        longtail.export(run, "onnx", tmp_path / "x.onnx")
