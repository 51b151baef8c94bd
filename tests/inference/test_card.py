"""Model cards: the code in a card gives the predictions of `longtail predict`."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail import run_folder
from longtail.cli import main
from longtail.files import write_json
from longtail.inference.card import CODE, preparation_code, usage_code
from longtail.inference.formats import FORMATS
from longtail.inference.model import Preprocessing
from longtail.views import Views
from tests.conftest import tiny
from tests.inference.made import CPU, finished_run, folder_config, photographs

SHAPES = ((500, 333), (41, 90), (128, 128), (30, 17))
ENDS = {
    "onnx": "print(json.dumps(dict(zip(names, probabilities[0].tolist()))))",
    "torch": "print(json.dumps(dict(zip(names, probabilities[0].tolist()))))",
    "safetensors": "import json; print(json.dumps({g.name: g.probability for g in prediction.top(3)}))",
}


def scene(height: int, width: int) -> Image.Image:
    """Return an image with gradients, edges and noise, which resizing changes most."""
    y, x = np.mgrid[:height, :width] / 20
    rng = np.random.default_rng(height)
    levels = np.stack([np.sin(x), np.cos(y), np.sign(np.sin(x + y))], 2)
    return Image.fromarray((127 + 80 * levels + rng.normal(0, 15, levels.shape)).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Write large, small and EXIF-rotated images, and images with alpha, gray levels and a palette."""
    place = tmp_path_factory.mktemp("photographs")
    turned = Image.Exif()
    turned[0x0112] = 6
    for i, shape in enumerate(SHAPES):
        scene(*shape).save(place / f"{i}.jpg", quality=90)
        scene(*shape).save(place / f"{i}-turned.jpg", exif=turned)
        scene(*shape).save(place / f"{i}.png")
        for mode in ("RGBA", "L", "P"):
            scene(*shape).convert(mode).save(place / f"{i}-{mode}.png")
    return sorted(place.iterdir())


@pytest.mark.parametrize("name", ["model.onnx", 'x"); exit()\n```\n<b>\x85\u202e\udcff\U0001f600\\.pt2'])
@pytest.mark.parametrize("to", CODE)
def test_a_file_name_is_only_a_string_in_the_code(to, name):
    preprocessing = Preprocessing(Views(tiny("ce").views, 32), 0)
    code = usage_code(to, name, preprocessing)
    values = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert values.count(name) == 1
    assert len(code.splitlines()) == len(usage_code(to, "x", preprocessing).splitlines())


@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("side", [0, 64, 200])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_code_prepares_a_file_as_predict_does(files, side, crop, interpolation):
    views = Views(replace(tiny("ce").views, test_crop=crop, interpolation=interpolation), 48)
    preprocessing = Preprocessing(views, side)
    theirs: dict = {"np": np, "Image": Image}
    exec("from PIL import ImageOps\n" + preparation_code(preprocessing), theirs)
    for path in files:
        wanted = preprocessing.squares([preprocessing.pixels(path)], CPU)[0].numpy().astype(int)
        found = theirs["prepared"](path)
        assert found.dtype == np.uint8 and found.shape == wanted.shape
        differs = np.abs(found - wanted)
        assert differs.max() <= 1 and (differs > 0).mean() < 5e-3, path.name  # a half may be rounded either way


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a run on streamed images, which are cropped for evaluation."""
    place = tmp_path_factory.mktemp("made")
    config = folder_config(photographs(place / "data", n=(12, 6, 4)), "ce", load="stream", image_size=32)
    return finished_run(place / "run/seed0", replace(config, views=replace(config.views, test_crop=0.875)))


@pytest.mark.parametrize("to", FORMATS)
def test_code_of_the_card_gives_the_predictions_of_predict(run, files, tmp_path, to, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    assert longtail.load(run).preprocessing.side > 0
    done = longtail.export(run, to, tmp_path / f"x{FORMATS[to].suffix}", "uniform")
    photo = next(path for path in files if path.name == "0-turned.jpg")
    (tmp_path / "photo.jpg").write_bytes(photo.read_bytes())
    (block,) = re.findall(r"```python\n(.*?)```", done.card.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(block + ENDS[to], {})
    told = capsys.readouterr().out
    name, found = told.split()[0], json.loads(told.splitlines()[-1])
    asked = ["--prior", "uniform", "--device", "cpu", "--json", str(tmp_path / "said.json")]
    assert main(["predict", str(run), str(photo), *asked]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    wanted = {guess["class"]: guess["probability"] for guess in said["predictions"]}
    assert found == pytest.approx(wanted, abs=1e-3) and name == max(wanted, key=wanted.get)


def test_a_commit_is_named_where_there_is_one(run, tmp_path):
    path = run / run_folder.ENVIRONMENT
    for commit, words in ((None, "- seed 0\n"), ("abc123", "- seed 0, commit abc123\n")):
        write_json(path, run_folder.read_json(path) | {"commit": commit})
        card = longtail.export(run, "safetensors", tmp_path / "x.safetensors").card.read_text()
        assert words in card and "None" not in card
