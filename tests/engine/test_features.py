"""Test the features of frozen backbones: stored and computed features are equal, and each input of the key changes it."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from longtail.config import Config, ViewConfig
from longtail.data.sources import DataSet, load
from longtail.engine import features
from longtail.engine.features import Extraction, cached_features, estimate_seconds, hash_weights, split_features
from longtail.feature_cache import FeatureCache
from longtail.models import backbones
from longtail.models.backbones import Trunk, make_trunk, wrap_backbone
from longtail.views import Views
from tests.inference.made import folder_config, photographs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "BATCH", 4)
    monkeypatch.setattr(features, "BLOCK", 8)
    return tmp_path / "cache"


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The number of images in each forward pass."""
    found: list[int] = []
    make = features.make_plain_forward

    def counted(body: nn.Module, device: torch.device) -> backbones.Forward:
        forward = make(body, device)
        return lambda x: found.append(len(x)) or forward(x)  # type: ignore[func-returns-value]

    monkeypatch.setattr(features, "make_plain_forward", counted)
    return found


@pytest.fixture(params=["stream", "resident"])
def config(request, tmp_path) -> Config:
    config = folder_config(photographs(tmp_path / "data"), "ce", load=request.param, cached_views=2, val_fraction=0.2)
    view = ViewConfig(crop="resized", crop_scale=(0.5, 1.0), policy="rand")
    return replace(config, views=replace(config.views, query=view))


def trunk_for(config: Config, seed: int = 0) -> Trunk:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return wrap_backbone(body, "small", config.data.image_size)


def extract(config: Config, data: DataSet | None = None, seed: int = 0) -> features.FrozenFeatures:
    return cached_features(config, data or load(config.data), trunk_for(config, seed), CPU, show=False)


def are_equal(one: features.FrozenFeatures, two: features.FrozenFeatures) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_stored_features_are_the_computed_ones(config, passes, cache_root, monkeypatch):
    data = load(config.data)
    fresh = extract(config, data)
    n = [len(split.labels) for split in (data.train, data.val, data.test)]
    assert [tuple(x.shape) for x in fresh] == [(3, n[0], 6), (n[1], 6), (n[2], 6)]
    assert sum(passes) == 3 * n[0] + n[1] + n[2]
    assert are_equal(extract(config, data), fresh) and sum(passes) == 3 * n[0] + n[1] + n[2]
    monkeypatch.setenv("LONGTAIL_CACHE", str(cache_root / "elsewhere"))
    assert are_equal(extract(config, data), fresh)  # the random numbers of views are the same


def test_features_are_those_of_the_backbone_and_its_views(config):
    data, trunk, views = load(config.data), trunk_for(config), Views(config.views, config.data.image_size)
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    found = cached_features(config, data, trunk, CPU, show=False)
    assert trunk.training and all(torch.equal(before[name], tensor) for name, tensor in trunk.state_dict().items())
    frames = list(features.iterate_frames(data.train, np.arange(len(data.train.labels)), 4, CPU))
    with torch.no_grad():
        expected = torch.cat([trunk.eval()(views.plain(*batch)) for batch in frames])
    assert torch.allclose(found.train_VNF[0], expected, atol=1e-5)
    assert found.train_VNF.dtype == torch.float32 and found.train_VNF.device == CPU
    one, two, three = found.train_VNF
    assert not torch.allclose(one, two, atol=1e-3) and not torch.allclose(two, three, atol=1e-3)


def test_more_views_reuse_the_stored_ones(config, passes):
    data = load(config.data)
    few = extract(config, data)
    before = sum(passes)
    more = extract(replace(config, data=replace(config.data, cached_views=3)), data)
    assert sum(passes) - before == len(data.train.labels) and torch.equal(more.train_VNF[:3], few.train_VNF)


def test_methods_and_seeds_share_the_features(config, passes):
    data = load(config.data)
    extract(config, data)
    before = sum(passes)
    other = replace(config, train=replace(config.train, seeds=(7,), epochs=9, batch_size=16))
    extract(replace(other, views=replace(other.views, key=ViewConfig(flip=False))), data)
    assert sum(passes) == before


def count_new_passes(config: Config, passes: list[int], seed: int = 0) -> int:
    before = sum(passes)
    extract(config, seed=seed)
    return sum(passes) - before


def test_every_setting_of_the_key_changes_it(config, passes):
    extract(config)
    total = sum(passes)
    train = len(load(config.data).train.labels)
    assert count_new_passes(config, passes, seed=1) == total  # other weights
    assert count_new_passes(replace(config, views=replace(config.views, normalize="imagenet")), passes) == total
    bicubic = replace(config, views=replace(config.views, interpolation="bicubic"))
    assert count_new_passes(bicubic, passes) == total
    assert count_new_passes(replace(config, model=replace(config.model, name="other")), passes) == total
    query = replace(config.views.query, rand_magnitude=5.0)
    assert count_new_passes(replace(config, views=replace(config.views, query=query)), passes) == 2 * train
    crop = replace(config, views=replace(config.views, test_crop=0.5))
    assert count_new_passes(crop, passes) == total - 2 * train
    assert count_new_passes(replace(config, data=replace(config.data, image_size=20)), passes) == total
    if config.data.load == "stream":
        assert count_new_passes(replace(config, data=replace(config.data, resolution=24)), passes) == total
    assert count_new_passes(config, passes) == 0


def test_changed_code_of_a_network_changes_its_features(config, passes):
    """The weights and the description of the layers are the same, for example in another version of timm."""

    class Pool(nn.Module):
        pool = torch.mean

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return type(self).pool(x.flatten(2), 2)

    def pooled() -> features.FrozenFeatures:
        torch.manual_seed(0)
        trunk = wrap_backbone(nn.Sequential(nn.Conv2d(3, 6, 3), Pool()), "small", config.data.image_size)
        return cached_features(config, data, trunk, CPU, show=False)

    data = load(config.data)
    mean = pooled()
    total = sum(passes)
    assert are_equal(pooled(), mean) and sum(passes) == total
    Pool.pool = torch.amax
    assert not are_equal(pooled(), mean) and sum(passes) == 2 * total


def test_a_changed_file_changes_its_block_only(config, passes):
    data = load(config.data)
    extract(config, data)
    before = sum(passes)
    path = config.data.root / str(data.train.ids[0])
    status, content = path.stat(), path.read_bytes()
    with Image.open(path) as image:
        pixels = np.asarray(image).copy()
    pixels[pixels.shape[0] // 2, pixels.shape[1] // 2] ^= 128
    Image.fromarray(pixels).save(path)
    assert path.read_bytes() != content
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
    extract(config)
    assert sum(passes) - before == 3 * 8  # three views of one block


def test_weights_are_hashed_with_names_shapes_and_settings():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.BatchNorm1d(2))
    first = hash_weights(net)
    assert hash_weights(net) == first
    net[2].running_mean[0] += 1e-3
    second = hash_weights(net)
    net[1] = nn.GELU()
    assert len({first, second, hash_weights(net)}) == 3


def test_an_interrupted_extraction_continues(config, passes, monkeypatch):
    data = load(config.data)
    whole = extract(config, data)
    total, make = sum(passes), features.make_plain_forward
    FeatureCache().clear()
    passes.clear()

    def interrupted(body: nn.Module, device: torch.device) -> backbones.Forward:
        forward = make(body, device)

        def run(x: torch.Tensor) -> torch.Tensor:
            if sum(passes) >= total // 2:
                raise KeyboardInterrupt
            return forward(x)

        return run

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features, "make_plain_forward", interrupted)
        extract(config, data)
    done = sum(passes)
    assert 0 < done < total
    assert are_equal(extract(config, data), whole)
    assert total <= sum(passes) < total + 3 * 8 + 1  # at most one block was computed twice


def test_damaged_files_and_an_unusable_cache_do_not_change_features(config, passes, cache_root, monkeypatch):
    data = load(config.data)
    whole = extract(config, data)
    before = sum(passes)
    damaged = FeatureCache().list_files()[0].path
    damaged.write_bytes(damaged.read_bytes()[:-30])
    assert are_equal(extract(config, data), whole) and 0 < sum(passes) - before <= 8
    (cache_root / "a file").write_text("x")
    monkeypatch.setenv("LONGTAIL_CACHE", str(cache_root / "a file"))
    assert are_equal(extract(config, data), whole)


def _extract_in_child(config: Config, cache: str, out: Path) -> None:
    os.environ["LONGTAIL_CACHE"] = cache
    features.BATCH, features.BLOCK = 4, 8
    torch.set_num_threads(1)
    torch.save(list(extract(config)), out)


def test_two_processes_at_once(config, tmp_path, cache_root):
    if config.data.load == "resident":
        pytest.skip("the same for both")
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_extract_in_child, args=(config, str(cache_root), tmp_path / f"{i}.pt"))
        for i in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    one, two = (torch.load(tmp_path / f"{i}.pt") for i in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert are_equal(extract(config), features.FrozenFeatures(*one))


def test_split_features_is_the_building_block(config, passes):
    data, trunk = load(config.data), trunk_for(config)
    views = Views(config.views, config.data.image_size)
    whole = cached_features(config, data, trunk, CPU, show=False)
    before = sum(passes)
    assert torch.equal(split_features(config, data.train, views, trunk, CPU, 2, show=False), whole.train_VNF)
    assert torch.equal(split_features(config, data.test, views, trunk, CPU, show=False)[0], whole.test_NF)
    assert sum(passes) == before


def test_the_estimate_counts_only_what_is_missing(config, monkeypatch):
    data, trunk = load(config.data), trunk_for(config)
    monkeypatch.setattr(Extraction, "time_batch", lambda *_: (3.0, 2.0))  # seconds per plain image and per other view
    n = {name: len(getattr(data, name).labels) for name in ("train", "val", "test")}
    assert estimate_seconds(config, data, trunk, CPU) == 3 * sum(n.values()) + 2 * 2 * n["train"]
    cached_features(config, data, trunk, CPU, show=False)
    assert estimate_seconds(config, data, trunk, CPU) == 0
    more = replace(config, data=replace(config.data, cached_views=3))
    assert estimate_seconds(more, data, trunk, CPU) > 0


def test_the_estimate_is_timed(config):
    assert 0 < estimate_seconds(config, load(config.data), trunk_for(config), CPU) < 60


# Acceleration


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet18"])
def test_fast_features_match_float32(name):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    body = timm.create_model(name, num_classes=0)
    for module in body.modules():  # statistics that are not trivial
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        expected = body.eval()(x)
    exact = backbones.make_onnx_forward(body, 64)(x)
    for found in (exact, backbones.make_plain_forward(body, CPU)(x)):
        assert found.dtype == torch.float32 and F.cosine_similarity(found.double(), expected.double()).min() >= 0.9999
    fast = backbones.make_fast_forward(body.train(), 64, CPU)
    assert torch.equal(fast(x), exact) and body.training  # ONNX Runtime was chosen


def test_networks_that_cannot_be_exported_run_in_pytorch(monkeypatch):
    trunk = make_trunk("resnet8_cifar", image_size=16)
    x = torch.randn(2, 3, 16, 16)
    expected = backbones.make_plain_forward(trunk.body, CPU)(x)

    def fail(*_, **__):
        raise RuntimeError("unsupported operation")

    for replacement in (fail, lambda *_: lambda x: torch.randn(2, 64)):  # no export, and inexact features
        monkeypatch.setattr(backbones, "make_onnx_forward", replacement)
        assert torch.equal(backbones.make_fast_forward(trunk.body, 16, CPU)(x), expected)


def test_large_amounts_of_work_use_the_fast_network_once(config, monkeypatch):
    made = []
    make = features.make_fast_forward
    monkeypatch.setattr(features, "make_fast_forward", lambda *args: made.append(args) or make(*args))
    data, trunk = load(config.data), trunk_for(config)
    plain = cached_features(config, data, trunk, CPU, show=False)
    assert made == []
    FeatureCache().clear()
    monkeypatch.setattr(features, "MIN_PIXELS", 1)
    estimate_seconds(config, data, trunk, CPU)
    fast = cached_features(config, data, trunk, CPU, show=False)
    assert len(made) == 1
    assert all(F.cosine_similarity(a, b, dim=-1).min() >= 0.9999 for a, b in zip(plain, fast, strict=True))
