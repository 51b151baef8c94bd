"""Test that the CIFAR ResNets have the published shapes and that any timm model can be a backbone."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from longtail.models import backbones, weights
from longtail.models.backbones import CifarBlock, image_size_options, make_trunk, wrap_backbone
from longtail.models.heads import Classifier, make_linear_head, projection
from tests.raises import raises


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("resnet20_cifar", 10, 269_722),
        ("resnet32_cifar", 10, 464_154),
        ("resnet32_cifar", 100, 470_004),
        ("resnet44_cifar", 10, 658_586),
        ("resnet56_cifar", 10, 853_018),
        ("resnet74_cifar", 10, 1_144_666),
        ("resnet32x4_cifar", 100, 7_409_316),
        ("resnet18_cifar", 100, 11_220_132),
        ("resnet50_cifar", 100, 23_705_252),
    ],
)
def test_parameter_counts(name, classes, count):
    """He et al. give 0.27, 0.46, 0.66 and 0.85 million for CIFAR-10; 464,154 and 470,004 are common in the literature."""
    assert parameters(timm.create_model(name, num_classes=classes)) == count
    trunk = make_trunk(name)
    assert parameters(Classifier(trunk, make_linear_head(trunk.width, classes))) == count


def test_resnet32_has_the_published_shape():
    net = timm.create_model("resnet32_cifar", num_classes=0)
    sizes = [
        tuple(stage(torch.zeros(1, w, s, s)).shape[1:])
        for stage, w, s in zip(net.stages, (16, 16, 32), (32, 32, 16), strict=True)
    ]
    assert sizes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == 31 and net.num_features == 64


def test_shortcut_subsamples_and_pads_with_zeros():
    block = CifarBlock(4, 8, 2).eval()
    nn.init.zeros_(block.bn2.weight)  # the residual branch gives nothing
    x = torch.rand(2, 4, 6, 6)
    out = block(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2]) and not out[:, :2].any() and not out[:, 6:].any()


def test_small_stem_keeps_the_resolution():
    net = timm.create_model("resnet18_cifar", num_classes=0)
    assert net.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "convnext_atto"])
def test_any_timm_name_is_a_trunk(name):
    trunk = make_trunk(name, image_size=32)
    assert trunk(torch.zeros(2, 3, 32, 32)).shape == (2, trunk.width)


def test_low_precision_stays_inside_the_trunk():
    trunk = make_trunk("resnet20_cifar")
    x = torch.rand(2, 3, 8, 8)
    full = trunk(x)
    trunk.precision = torch.bfloat16
    low = trunk(x)
    assert low.dtype == torch.float32 and not torch.equal(low, full)
    torch.testing.assert_close(low, full, rtol=0.1, atol=0.1)


def test_unknown_tags_of_pretrained_weights_are_user_errors():
    for use in (weights.find_weights, weights.find_timm_config, lambda name: image_size_options(name, 32)):
        with raises("unknown-name", "resnet18.nothing"):
            use("resnet18.nothing")


def test_errors_about_models_name_a_fix():
    with raises("unknown-name", "'resnet33_cifar'", "'resnet32_cifar'"):
        make_trunk("resnet33_cifar")
    with raises("download-failed", "'resnet32_cifar'", "--model.pretrained"):
        make_trunk("resnet32_cifar", pretrained=True)


class RaisingNetwork(nn.Module):
    """A network that accepts no image, whatever its size."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


# The kinds of errors that networks raise on images of a size that they do not support. Which sizes those are is up to timm.
SIZE_ERRORS = [RuntimeError, AssertionError, ValueError, ZeroDivisionError]


@pytest.mark.parametrize("kind", SIZE_ERRORS)
def test_image_size_that_network_rejects_is_user_error(kind, monkeypatch):
    reason = "window of 7"
    network = RaisingNetwork(kind(f"{reason}\nof 2 patches"))
    monkeypatch.setattr(backbones.timm, "create_model", lambda name, num_classes: network)
    with raises("conflict", "'resnet18'", "8x8", reason, "--data.image_size") as caught:
        make_trunk("resnet18", image_size=8)
    assert "patches" not in str(caught.value)


@pytest.mark.parametrize("kind", SIZE_ERRORS)
def test_network_that_cannot_be_created_is_user_error(kind, monkeypatch):
    def create_model(name, num_classes):
        raise kind("no patches\nat all")

    monkeypatch.setattr(backbones.timm, "create_model", create_model)
    with raises("conflict", "'resnet18'", "no patches") as caught:
        make_trunk("resnet18")
    assert "at all" not in str(caught.value)


def test_programming_error_in_network_is_not_user_error():
    with pytest.raises(TypeError):
        wrap_backbone(RaisingNetwork(TypeError("an argument is missing")), "net", 8)


def test_only_networks_of_fixed_input_size_are_created_for_an_image_size(monkeypatch):
    for fixed, options in ((True, {"img_size": 48}), (False, {})):
        config = SimpleNamespace(fixed_input_size=fixed)
        monkeypatch.setattr(backbones.timm, "get_pretrained_cfg", lambda name, config=config: config)
        assert image_size_options("resnet18", 48) == options


def test_projection_is_two_layers_with_or_without_norm():
    kinds = lambda norm: [type(m).__name__ for m in projection(64, 64, 32, norm)]  # noqa: E731
    assert kinds(True) == ["Linear", "BatchNorm1d", "ReLU", "Linear"] and kinds(False) == ["Linear", "ReLU", "Linear"]
