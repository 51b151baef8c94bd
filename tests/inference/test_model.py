"""A loaded network has the outputs of the evaluation, for all kinds of images and without the data set."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail import run_folder
from longtail.data.sources import load as load_data
from longtail.inference.loading import guess_resolution
from tests.conftest import tiny
from tests.inference.made import finished_run, folder_config, photographs
from tests.raises import raises


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return a run with validation images whose logits assume the training frequencies."""
    config = tiny("ce")
    config = replace(config, data=replace(config.data, val_fraction=0.2))
    return finished_run(tmp_path_factory.mktemp("digits") / "seed0", config)


def stored(folder):
    return np.load(folder / "predictions.npz", allow_pickle=False)


@pytest.mark.parametrize(
    ("data", "views"),
    [
        ({}, {}),
        ({}, {"test_crop": 0.75}),
        ({"load": "stream"}, {}),
        ({"load": "stream", "resolution": 24}, {"test_crop": 0.875, "normalize": "imagenet"}),
    ],
)
def test_predictions_for_files_equal_the_evaluation_without_the_data_set(data, views, tmp_path):
    root = photographs(tmp_path / "data")
    config = folder_config(root, **data)
    config = replace(config, views=replace(config.views, **views))
    folder = finished_run(tmp_path / "run/seed0", config)
    said = stored(folder)
    files = [tmp_path / "elsewhere" / i for i in said["ids"]]
    root.rename(tmp_path / "elsewhere")
    found = longtail.load(tmp_path / "run")(files)
    np.testing.assert_allclose([p.logits for p in found], said["logits"], rtol=1e-4, atol=1e-5)
    assert len(np.unique(said["logits"].argmax(1))) > 1  # otherwise the test could not fail


def test_every_form_of_an_image_is_the_same_image(digits):
    model, test = longtail.load(digits), load_data(tiny("ce").data).test
    array = test.images[7]
    gray, chw = array[..., 0], torch.from_numpy(array).permute(2, 0, 1)
    forms = [array, gray, gray[..., None], Image.fromarray(array), Image.fromarray(gray), chw, chw[:1], chw[0]]
    forms += [
        chw.float() / 255,
        chw.double() / 255,
        array.astype(np.float32) / 255,
        Image.fromarray(array).convert("RGBA"),
    ]
    for form in forms:
        np.testing.assert_allclose(model(form).logits, stored(digits)["logits"][7], rtol=1e-4, atol=1e-5)
    several = model(test.images[:70])
    assert isinstance(several, list) and len(several) == 70 and model([]) == []
    np.testing.assert_allclose([p.logits for p in several], stored(digits)["logits"][:70], rtol=1e-4, atol=1e-5)
    assert len(model(torch.from_numpy(test.images[:3]).permute(0, 3, 1, 2))) == 3


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (np.zeros((8, 8, 2), np.uint8), "shape"),
        (torch.zeros(8, 8, 3), "tensors"),
        (np.zeros((8, 8, 3), np.int64), "int64"),
        (np.full((8, 8, 3), 2.0), "0 to 1"),
        (np.full((8, 8), np.nan), "0 to 1"),
        (np.zeros((0, 8, 3), np.uint8), "shape"),
        (7, "int"),
        ("nowhere.jpg", "nowhere.jpg"),
        ("", "directory"),
    ],
)
def test_errors_of_inputs_that_are_not_images(digits, form, value):
    with raises("bad-image", value):
        longtail.load(digits)(form)


def test_images_that_cannot_be_decoded_or_have_too_many_pixels_are_said(digits, monkeypatch):
    model, content = longtail.load(digits, device="cpu"), io.BytesIO()
    Image.effect_noise((60, 60), 50).save(content, "PNG")
    truncated = Image.open(io.BytesIO(content.getvalue()[:500]))
    for image in (truncated, Image.new("RGB", (0, 5))):
        with raises("bad-image"):
            model(image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for large in (Image.new("RGB", (11, 10)), np.zeros((11, 10), np.uint8), torch.zeros(11, 10)):
        with raises("bad-image"):
            model(large)


def test_a_prediction_and_a_model_tell_about_themselves(digits):
    model = longtail.load(digits)
    one = model(np.zeros((8, 8), np.uint8))
    best = one.top(3)
    assert [g.probability for g in best] == sorted((g.probability for g in best), reverse=True) and len(
        one.top(99)
    ) == 10
    assert best[0].name == one.name == model.class_names[best[0].label] and one.probability == best[0].probability
    assert one.probabilities.sum() == pytest.approx(1) and one.name in repr(one)
    assert model.class_names == tuple("0123456789") and model.image_size == 8 and model.device.type == "cpu"
    assert model.counts.sum() == sum(json.loads((digits / "environment.json").read_text())["data"]["counts"])
    assert "Cross-entropy" in repr(model) and not model.method.training


def test_probabilities_have_the_temperature_and_the_requested_frequencies(digits):
    """Compare with log p = z / T + log new - log assumed + const."""
    model = longtail.load(digits)
    temperature = json.loads((digits / run_folder.CALIBRATION).read_text())["temperature"]
    z = model(np.zeros((8, 8), np.uint8)).logits
    plain = np.exp(z / temperature) / np.exp(z / temperature).sum()
    np.testing.assert_allclose(model(np.zeros((8, 8), np.uint8)).probabilities, plain, rtol=1e-9)
    counts = model.counts / model.counts.sum()
    weights = {str(c): float(c == 3) + 0.5 for c in range(10)}
    expected = {"uniform": 1 / counts, "train": np.ones(10), "given": np.array(list(weights.values())) / counts}
    for prior, factor in expected.items():
        asked = weights if prior == "given" else prior
        found = longtail.load(digits, prior=asked)(np.zeros((8, 8), np.uint8))
        np.testing.assert_allclose(found.probabilities, plain * factor / (plain * factor).sum(), rtol=1e-6)
        np.testing.assert_array_equal(found.logits, z)
    never = model.with_prior(dict.fromkeys("123456789", 1) | {"0": 0})(np.zeros((8, 8), np.uint8))
    assert never.probabilities[0] == 0 and never.probabilities.sum() == pytest.approx(1)


def test_which_run_is_meant(digits, tmp_path, caplog):
    shutil.copytree(digits, tmp_path / "x/seed0")
    shutil.copytree(digits, tmp_path / "x/seed1")
    assert longtail.load(tmp_path / "x").origin == tmp_path / "x/seed0"
    assert "2 seeds" in caplog.text
    assert longtail.load(tmp_path / "x/seed1").origin == tmp_path / "x/seed1"
    assert longtail.load(tmp_path / "x/seed1/model.safetensors").origin == tmp_path / "x/seed1"
    tree = json.loads((tmp_path / "x/seed1/config.json").read_text())
    tree["optim"]["lr"] = 0.7
    (tmp_path / "x/seed1/config.json").write_text(json.dumps(tree))
    with raises("mismatch", tmp_path / "x", "2 runs"):
        longtail.load(tmp_path / "x")


def test_errors_of_files_that_cannot_be_loaded(digits, tmp_path, monkeypatch):
    with raises("missing-file", tmp_path / "nowhere"):
        longtail.load(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("x")
    with raises("missing-file", tmp_path / "x.txt"):
        longtail.load(tmp_path / "x.txt")
    (tmp_path / "x.safetensors").write_text("no")
    with raises("damaged-file", tmp_path / "x.safetensors"):
        longtail.load(tmp_path / "x.safetensors")
    for file, content, kind, value in (
        ("model.safetensors", "broken", "damaged-file", "model.safetensors"),
        ("calibration.json", '{"temperature": -1}', "damaged-file", "-1"),
        ("metrics.json", None, "unfinished-run", tmp_path / "metrics.json"),
    ):
        shutil.copytree(digits, tmp_path / file)
        if content is None:
            (tmp_path / file / file).unlink()
        else:
            (tmp_path / file / file).write_text(content)
        with raises(kind, value):
            longtail.load(tmp_path / file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises("conflict", "CUDA"):
        longtail.load(digits, device="cuda")


def test_resolution_of_older_runs_follows_from_the_configuration(digits, tmp_path):
    """Runs of older versions have no `resolution`; it follows from the configuration."""
    assert guess_resolution(folder_config(tmp_path, image_size=96), 100) == 0
    assert guess_resolution(folder_config(tmp_path, image_size=224), 100) == 512
    assert guess_resolution(folder_config(tmp_path, image_size=224, load="resident"), 100) == 0
    assert guess_resolution(folder_config(tmp_path, image_size=96), 10**9) == 219
    assert guess_resolution(folder_config(tmp_path, image_size=32, load="stream", resolution=50), 100) == 50
    assert guess_resolution(tiny("ce"), 100) == 0
