"""`longtail.train` gives the run of the command, and accepts images in memory and networks."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import longtail
from longtail import recipes, run_folder
from longtail.cli import main
from longtail.config import DataConfig, list_settings
from longtail.data.in_memory import read_memory, use_memory
from longtail.data.sources import load
from longtail.training import SHORT_NAMES
from tests.conftest import tiny
from tests.raises import fails, raises

CLASSES = ("ash", "birch", "cedar")
COUNTS = {"train": (12, 6, 4), "test": (5, 5, 5)}
FAST = ["--train.epochs", "1", "--train.device", "cpu", "--log.progress", "none"]
QUICK: dict[str, Any] = {"epochs": 1, "device": "cpu", "log.progress": "none"}
COSTS = ("seconds", "setup_seconds", "peak_memory", "latency_b64")


@pytest.fixture(scope="module", autouse=True)
def no_latency():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An image folder with train/ and test/; the classes differ in their mean color."""
    root, rng = tmp_path_factory.mktemp("images") / "trees", np.random.default_rng(0)
    for split, counts in COUNTS.items():
        for c, (name, n) in enumerate(zip(CLASSES, counts, strict=True)):
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                pixels = rng.normal(60 + 60 * c, 30, (16, 16, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def list_files(folder: Path, split: str) -> list[Path]:
    return sorted((folder / split).glob("*/*.png"))


def read_split(folder: Path, split: str) -> tuple[np.ndarray, list[int], list[str]]:
    """Return the images of a split, and their labels as integers and as names."""
    paths = list_files(folder, split)
    names = [path.parent.name for path in paths]
    return np.stack([np.asarray(Image.open(path)) for path in paths]), [CLASSES.index(name) for name in names], names


class Pairs(Dataset):
    """A torch Dataset of pairs."""

    classes = CLASSES

    def __init__(self, images, labels) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.images[index], self.labels[index]


def read_results(run: Path) -> dict[str, Any]:
    metrics = json.loads((run / run_folder.METRICS).read_text())
    return {key: value for key, value in metrics.items() if key not in COSTS}


def read_logits(run: Path) -> np.ndarray:
    return np.load(run / "predictions.npz")["logits"]


def assert_same_run(first: Path, second: Path) -> None:
    assert (first / run_folder.CONFIG).read_text() == (second / run_folder.CONFIG).read_text()
    assert read_results(first) == read_results(second)
    assert np.array_equal(read_logits(first), read_logits(second))


# Command and function


def test_command_and_function_give_the_same_run_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--method", "balanced-softmax", "--imbalance", "10", "--optim.lr", "0.05", "--train.seeds", "0", "1"]
    assert main(["train", "digits-lt", *flags, *FAST, "--out", "command"]) == 0
    found = longtail.train("digits-lt", method="balanced-softmax", imbalance=10, lr=0.05, seeds=range(2), **QUICK)
    assert found == [Path(f"runs/digits-lt-balanced-softmax-10/seed{seed}") for seed in (0, 1)]
    for run in found:
        assert_same_run(run, Path("command") / run.name)


def test_command_and_function_give_the_same_run_of_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(folder), *FAST, "--views.query.no_flip", "--strategy", "1"]) == 0
    (run,) = longtail.train(folder, "function", strategy=1, **QUICK, **{"views.query.flip": False})
    assert_same_run(run, Path("runs/trees-paco/seed0"))
    config = run_folder.load_config(run)
    assert config.recipe == "folder/chosen" and not config.views.query.flip and config.train.epochs == 1
    assert longtail.choose_config(str(folder), strategy=1, **QUICK, **{"views.query.flip": False}) == config
    # --resume and --from
    assert longtail.train(folder, "function", resume=True) == [run]
    with raises("exists"):
        longtail.train(folder, "function", **QUICK)
    with raises("mismatch", "optim.lr"):
        longtail.train(folder, "function", resume=True, lr=0.5)
    assert main(["train", "--from", "function", "--optim.lr", "0.01", "--train.epochs", "2"]) == 0
    (again,) = longtail.train(from_run=run, out="again", lr=0.01, epochs=2)
    assert_same_run(again, Path("runs/function-again/seed0"))


def test_a_config_and_a_loaded_data_set_are_accepted_as_before(tmp_path):
    config = tiny("ce", epochs=1)
    data = load(config.data)
    (first,) = longtail.train(config, tmp_path / "first", False, data)
    (second,) = longtail.train(config=config, out=tmp_path / "second", resume=False, data=data)
    (third,) = longtail.train(replace(config, train=replace(config.train, epochs=3)), tmp_path / "third", epochs=1)
    for other in (second, third):
        assert_same_run(first, other)


def test_short_names_are_settings():
    assert set(SHORT_NAMES.values()) <= set(list_settings(recipes.digits_lt()))


def test_unknown_and_conflicting_arguments_are_user_errors(folder, tmp_path):
    with raises("unknown-name", "'epoch'", "'epochs'"):
        longtail.train("digits-lt", tmp_path, epoch=3)
    with raises("unknown-name", "optim.lrr", "optim.lr"):
        longtail.choose_config(folder, **{"optim.lrr": 0.1})
    with raises("unknown-name", "method.alpha"):  # cross-entropy has no such setting
        longtail.choose_config(folder, method="ce", **{"method.alpha": 0.1})
    with raises("invalid-value", "optim.lr"):
        longtail.choose_config(folder, lr=-1)
    with raises("conflict", "method"):
        longtail.train(recipes.digits_lt(), tmp_path, method="ce")
    with raises("conflict"):
        longtail.train(folder, tmp_path, test=([], []))
    with raises("conflict"):
        longtail.train(recipes.digits_lt(), tmp_path, test=(X, Y))
    with raises("conflict", "'digits'"):
        longtail.train(recipes.digits_lt(), tmp_path, data=(X, Y))
    for data in (recipes.digits_lt(), "digits-lt"):
        with raises("conflict"):
            longtail.train(data, tmp_path, loaded="digits-lt")
    with raises("conflict"):
        longtail.train(folder, tmp_path, from_run=tmp_path)
    with raises("missing-file"):
        longtail.train(from_run=tmp_path / "nowhere")
    with raises("unknown-name"):
        longtail.train("digits-tl", tmp_path)
    for name, wrong in {"out": 3, "resume": "no"}.items():
        with raises("invalid-value", name, type(wrong).__name__):
            longtail.train("digits-lt", **{"out": tmp_path} | {name: wrong})
    for function in (longtail.load, longtail.compare):
        with raises("invalid-value", "tuple"):
            function((X, Y))
    with raises("unknown-name", "'gpu'"):
        longtail.load(tmp_path, device="gpu")
    for data in (None, ""):
        with raises("invalid-value"):
            longtail.train(data, tmp_path)
    assert not any(tmp_path.iterdir())


# Images in memory


def load_memory(data: Any, test: Any = None, size: int = 16, **settings: Any):
    with use_memory(read_memory(data, test)):
        return load(DataConfig(name="memory", image_size=size, **settings))


def to_pictures(images: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(image) for image in images]


KINDS = {
    "array": lambda x, y, names: (x, y),
    "array of names": lambda x, y, names: (x, np.array(names)),
    "floats": lambda x, y, names: (x / 255, y),
    "tensor": lambda x, y, names: (torch.from_numpy(x).permute(0, 3, 1, 2), torch.tensor(y)),
    "float tensor": lambda x, y, names: (torch.from_numpy(x).permute(0, 3, 1, 2) / 255, y),
    "pictures": lambda x, y, names: (to_pictures(x), names),
    "dataset of pictures": lambda x, y, names: Pairs(to_pictures(x), y),
    "dataset of tensors": lambda x, y, names: Pairs(torch.from_numpy(x).permute(0, 3, 1, 2), torch.tensor(y)),
}


@pytest.mark.parametrize("size", [16, 112])
def test_images_in_memory_are_those_of_the_folder(folder, size):
    """112 pixels are streamed, 16 pixels are resident."""
    expected = load(DataConfig(name="folder", root=folder, image_size=size))
    checksums = set()
    for kind, convert in KINDS.items():
        found = load_memory(convert(*read_split(folder, "train")), convert(*read_split(folder, "test")), size)
        checksums.add(found.checksum)
        for split, other in ((found.train, expected.train), (found.test, expected.test)):
            assert np.array_equal(split.labels, other.labels), kind
            assert type(split.images) is type(other.images)
            if isinstance(split.images, np.ndarray):
                assert np.array_equal(split.images, other.images), kind
        has_names = "names" in kind or "pictures" in kind or "dataset" in kind
        assert found.train.class_names == (CLASSES if has_names else ("0", "1", "2")), kind
    assert len(checksums) == 1


def test_lists_of_files_have_the_checksum_of_the_folder(folder):
    expected = load(DataConfig(name="folder", root=folder, image_size=16))
    train, test = (
        (list_files(folder, split), [path.parent.name for path in list_files(folder, split)]) for split in COUNTS
    )
    for data in (train, ([str(path) for path in train[0]], np.array(train[1]))):
        found = load_memory(data, test)
        assert found.checksum == expected.checksum and found.train.class_names == CLASSES
        assert np.array_equal(found.train.images, expected.train.images)
        assert found.train.ids.tolist() == expected.train.ids.tolist()


def test_a_fifth_of_each_class_is_held_out_as_for_a_folder(folder):
    x, y, _ = read_split(folder, "train")
    found = load_memory((x, y))
    expected = load(DataConfig(name="folder", root=folder / "train", image_size=16))
    assert np.array_equal(found.train.images, expected.train.images)
    assert np.array_equal(found.test.images, expected.test.images) and len(found.test.labels) == 3


def test_the_checksum_identifies_content_and_labels(folder):
    x, y, _ = read_split(folder, "train")
    first = load_memory((x, y)).checksum
    changed = x.copy()
    changed[0, 0, 0, 0] ^= 1
    assert first != load_memory((changed, y)).checksum
    assert first != load_memory((x, [*y[:-1], 0])).checksum
    assert first != load_memory((x, y), (x[:3], y[:3])).checksum
    assert first == load_memory((x.copy(), y)).checksum


def test_grayscale_images_are_recognized():
    gray = np.random.default_rng(0).integers(0, 256, (20, 12, 12), dtype=np.uint8)
    labels = [0, 1] * 10
    config = longtail.choose_config((gray, labels), device="cpu")
    assert not config.views.query.flip and config.data.image_size == 12
    found = [load_memory((kind, labels), size=12) for kind in (gray, gray[..., None], torch.from_numpy(gray)[:, None])]
    for data in found:
        assert data.checksum == found[0].checksum
        assert np.array_equal(data.train.images[..., 0], found[0].train.images[..., 2])


def test_training_on_images_in_memory_gives_the_predictions_of_the_folder(folder, tmp_path, capsys, simple_maps):
    (expected,) = longtail.train(folder, tmp_path / "folder", **QUICK)
    train, test = (read_split(folder, split) for split in COUNTS)
    data, held = (train[0], train[2]), (test[0], test[2])
    (run,) = longtail.train(data, tmp_path / "memory", test=held, **QUICK)
    assert np.array_equal(read_logits(run), read_logits(expected))
    assert run_folder.load_config(run).data == replace(run_folder.load_config(expected).data, name="memory", root=None)
    # Resuming and repeating need the images; results do not.
    assert longtail.train(data, tmp_path / "memory", resume=True, test=held) == [run]
    with raises("mismatch"):
        longtail.train(data, tmp_path / "memory", resume=True)
    fails(capsys, ["eval", str(run)], "missing-file", "longtail.train")
    fails(capsys, ["train", "--from", str(run), "--out", str(tmp_path / "x")], "missing-file", "longtail.train")
    (again,) = longtail.train(data, tmp_path / "again", test=held, from_run=run)
    assert_same_run(again, run)
    (given,) = longtail.train(run_folder.load_config(run), tmp_path / "given", data=data, test=held)
    assert_same_run(given, run)
    assert longtail.table(run)[0].cell("top1") and longtail.report([run], tmp_path / "report.html").exists()
    assert longtail.load(run, "cpu")(test[0][0]).class_names == CLASSES


def test_an_interrupted_run_is_continued_with_the_same_images(folder, tmp_path):
    train = read_split(folder, "train")
    data, settings = (train[0], train[1]), QUICK | {"epochs": 2, "train.checkpoint_every": 1}
    (whole,) = longtail.train(data, tmp_path / "whole", **settings)
    (part,) = longtail.train(data, tmp_path / "part", **settings)
    for name in (run_folder.METRICS, run_folder.MODEL):
        (part / name).unlink()
    assert longtail.train(data, tmp_path / "part", resume=True) == [part]
    assert np.array_equal(read_logits(part), read_logits(whole))


class Changing(Pairs):
    """A Dataset with a random transform."""

    def __getitem__(self, index: int):
        return torch.rand(3, 8, 8), self.labels[index]


class Failing(Pairs):
    """A Dataset whose fourth item cannot be read."""

    def __getitem__(self, index: int):
        if index == 3:
            raise OSError("image file is truncated")
        return self.images[index], self.labels[index]


def open_damaged_image() -> Image.Image:
    """Return an image of a truncated file, which PIL has not decoded yet."""
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:1500]))


X = np.zeros((10, 8, 8, 3), np.uint8)
Y = [0, 1] * 5
UNUSABLE = {
    "number of labels": ((X, Y[1:]), "bad-labels"),
    "label of another type": ((X, [0.5] * 10), "bad-labels"),
    "labels of two types": ((X, [0, "a"] * 5), "bad-labels"),
    "negative label": ((X, [-1, 1] * 5), "bad-labels"),
    "large label": ((X, [0, 10**9] * 5), "bad-labels"),
    "no label": ((X, None), "bad-labels"),
    "one number for all labels": ((X, torch.tensor(1)), "bad-labels"),
    "one text for all labels": ((X, "0101010101"), "bad-labels"),
    "no images": (([], []), "too-few-data"),
    "one class": ((X, [0] * 10), "too-few-data"),
    "class without images": ((X, [0, 2] * 5), "too-few-data"),
    "floats out of range": ((X + 1.5, Y), "bad-image"),
    "NaN": ((X * np.nan, Y), "bad-image"),
    "integers of another type": ((X.astype(np.int64), Y), "bad-image"),
    "channels first": ((X.transpose(0, 3, 1, 2), Y), "bad-image"),
    "vectors": ((X[:, 0, 0], Y), "bad-image"),
    "objects": (([object()] * 10, Y), "bad-image"),
    "paths and pictures": ((["x.png", X[0]], [0, 1]), "invalid-value"),
    "missing files": ((["x.png", "y.png"], [0, 1]), "missing-file"),
    "number": (3, "invalid-value"),
    "list": ([1, 2, 3], "invalid-value"),
    "array without labels": (X, "invalid-value"),
    "images without a length": ((3, Y), "invalid-value"),
    "dataset without labels": (Pairs(X, Y).images, "invalid-value"),
    "random transform": (Changing(X, Y), "conflict"),
    "dataset that raises": (Failing(X, Y), "bad-image"),
    "dataset of length 0": (Failing(X[:0], []), "too-few-data"),
    "damaged PIL image": (([open_damaged_image()] * 10, Y), "bad-image"),
    "sparse tensor": ((torch.ones(10, 3, 8, 8).to_sparse(), Y), "bad-image"),
    "tensor without values": ((torch.zeros(10, 3, 8, 8, device="meta"), Y), "bad-image"),
    "labels without values": ((X, torch.zeros(10, dtype=torch.long, device="meta")), "bad-labels"),
    "very long path": ((["x" * 10_000] * 10, Y), "missing-file"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_images_are_one_line(case, tmp_path):
    data, kind = UNUSABLE[case]
    with raises(kind) as caught:
        longtail.train(data, tmp_path / "run", **QUICK)
    assert "\n" not in str(caught.value) and not any(tmp_path.iterdir())


def test_labels_of_two_types_are_shown_with_their_types():
    with raises("bad-labels", "0, '1'"):
        read_memory((X, [0, "1"] * 5))


@pytest.mark.parametrize("picture", [Image.new("RGB", (0, 4)), np.broadcast_to(np.uint8(0), (9_500, 9_500))])
def test_pictures_have_as_many_pixels_as_files(picture):
    """They are refused before they are encoded."""
    with raises("bad-image", "pixels"):
        read_memory(([picture] * 10, Y))


def test_test_images_must_have_the_same_labels():
    with raises("bad-labels", "7"):
        read_memory((X, Y), (X, [7] * 10))
    with raises("bad-labels", "'a'"):
        read_memory((X, Y), (X, ["a"] * 10))


def test_an_unreadable_file_is_named(folder, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    paths = [*list_files(folder, "train"), tmp_path / "bad.png"]
    labels = [path.parent.name for path in paths[:-1]] + ["ash"]
    with raises("bad-image", "bad.png"):
        load_memory((paths, labels))
    assert len(load_memory((paths, labels), on_error="skip").skipped) == 1


def test_inspect_accepts_recipes_paths_and_images_in_memory(folder):
    x, y, _ = read_split(folder, "train")
    assert longtail.inspect("digits-lt", quick=True).counts == longtail.inspect(recipes.digits_lt()).counts
    assert longtail.inspect(folder).counts == [*COUNTS["train"]]
    found = longtail.inspect((x, y))
    assert found.read == len(y) and found.width == (16.0, 16.0, 16.0) and sum(found.counts) == len(y) - 3


# Data frames and data sets of Hugging Face


def test_data_frames(folder):
    pandas = pytest.importorskip("pandas")
    x, y, names = read_split(folder, "train")
    paths = list_files(folder, "train")
    by_image = load_memory(pandas.DataFrame({"image": to_pictures(x), "label": y}, index=range(5, 5 + len(y))))
    assert by_image.checksum == load_memory((x, y)).checksum
    by_path = load_memory(pandas.DataFrame({"path": map(str, paths), "label": names, "photographer": "x"}))
    assert by_path.checksum == load_memory((paths, names)).checksum and by_path.train.class_names == CLASSES
    by_category = pandas.DataFrame({"path": map(str, paths), "label": pandas.Categorical(names)})
    assert load_memory(by_category).checksum == by_path.checksum
    with raises("bad-list", "path"):
        read_memory(pandas.DataFrame([["x.png", "y.png", 0]], columns=["path", "path", "label"]))
    with raises("bad-list", "species"):
        read_memory(pandas.DataFrame({"path": paths, "species": names}))
    with raises("bad-labels"):
        read_memory(pandas.DataFrame({"path": paths, "label": [None, *names[1:]]}))


def test_data_sets_of_hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    splits = {}
    for split in COUNTS:
        _, y, _ = read_split(folder, split)
        rows = {"image": list(map(str, list_files(folder, split))), "label": y}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    expected = load(DataConfig(name="folder", root=folder, image_size=16))
    together = load_memory(datasets.DatasetDict(splits))
    for found in (together, load_memory(splits["train"], splits["test"])):
        assert found.train.class_names == CLASSES and found.checksum == together.checksum
        assert np.array_equal(found.train.images, expected.train.images)
        assert np.array_equal(found.test.images, expected.test.images)
        assert np.array_equal(found.test.labels, expected.test.labels)
    as_numpy = splits["train"].with_format("numpy")
    assert load_memory(as_numpy, splits["test"]).checksum == together.checksum
    with raises("bad-list", "label"):
        read_memory(splits["train"].rename_column("label", "species"))
    with raises("bad-list", "test"):
        read_memory(datasets.DatasetDict(test=splits["test"]))


# Networks


class Encoder(nn.Module):
    """A network that returns a vector per image."""

    def __init__(self, width: int = 8, flat: bool = True) -> None:
        super().__init__()
        self.conv, self.flat = nn.Conv2d(3, width, 3, stride=4), flat

    def forward(self, x):
        return self.conv(x).relu().mean((2, 3)) if self.flat else self.conv(x)


@pytest.mark.parametrize("method", ["ce", "paco"])
def test_a_module_is_trained_and_loaded_again(method, folder, tmp_path):
    torch.manual_seed(0)
    network = Encoder()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    (run,) = longtail.train(folder, tmp_path, model=network, method=method, **QUICK | {"epochs": 3})
    assert run_folder.load_config(run).model.name == "custom"
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    images = read_split(folder, "test")[0]
    model = longtail.load(run, "cpu", model=Encoder())
    logits = np.stack([prediction.logits for prediction in model(images)])
    assert np.allclose(logits, read_logits(run), atol=1e-5)
    assert not torch.equal(model.method.net.trunk.body.conv.weight, before["conv.weight"])
    with raises("unknown-name", "model="):
        longtail.load(run, "cpu")


def test_the_classifier_of_a_module_is_removed(folder, tmp_path):
    import timm

    network = timm.create_model("resnet8_cifar", num_classes=10)
    (run,) = longtail.train(folder, tmp_path / "x", model=network, method="ce", **QUICK)
    assert longtail.load(run, "cpu", model=network).features(read_split(folder, "test")[0]).shape == (15, 64)


def test_a_module_must_return_vectors(folder, tmp_path):
    with raises("conflict", "(1, 8, 4, 4)"):
        longtail.train(folder, tmp_path, model=Encoder(flat=False), **QUICK)
    with raises("invalid-value", "dict"):
        longtail.train(folder, tmp_path, model={}, **QUICK)


# Features


def test_features_of_a_model_are_those_of_the_evaluation(tmp_path):
    (run,) = longtail.train(tiny("ce", epochs=1), tmp_path)
    model, data = longtail.load(run, "cpu"), load(run_folder.load_config(run).data)
    found = model.features(data.test.images)
    assert found.dtype == np.float32 and found.shape == (len(data.test.labels), model.method.net.trunk.width)
    stored = np.load(run / "features.npz")["features"]
    assert np.allclose(found, stored, atol=1e-2, rtol=1e-2)
    one = data.test.images[0]
    for image in (one, Image.fromarray(one), torch.from_numpy(one).permute(2, 0, 1), [one]):
        assert np.allclose(model.features(image), found[:1], atol=1e-5)
    assert model.features([]).shape == (0, found.shape[1])
    longtail.export(model, "safetensors", tmp_path / "x.safetensors")
    assert np.allclose(longtail.load(tmp_path / "x.safetensors", "cpu").features(data.test.images), found, atol=1e-5)
