"""The CIFAR ResNets by our own kernels, against the plain network. They need a GPU; that they compile can be seen anywhere."""

import copy

import pytest
import torch
from torch import nn

from longtail.kernels import Source, expression
from longtail.models import fused
from longtail.models.backbones import CifarResNet, Trunk

pytest.importorskip("cuda.bindings", reason="comes with torch for CUDA")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [(3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 16, 2), (32, 32, 16, 1), (32, 64, 8, 2), (64, 64, 8, 1)]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernels_compile(architecture, tmp_path, monkeypatch):
    """One of each kind and of each width; what has been compiled is read back from the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["pack_weights", "update_averages"]
    names += [expression("join", 32, 16, 16, 2), expression("pooled_grad", 64, 8)]
    for into, out, side, stride in SIZES[:: 2 if architecture == "sm_80" else 3]:
        names += [expression(kind, into, out, side, stride, False) for kind in ("convolve", "weight_grad")]
        if into != 3:
            names.append(expression("input_grad", into, out, side * stride, stride, True))
    for name in names:
        code, lowered = fused.source().cubin(name, architecture)
        assert code[:4] == b"\x7fELF" and name.split("<")[0] in lowered
        monkeypatch.setattr(Source, "compile", None)  # would fail if it were asked again
        assert fused.source().cubin(name, architecture) == (code, lowered)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(list((tmp_path / "longtail" / "kernels").iterdir())) == len(set(names))


def test_what_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match=r"convolve<7> does not compile for sm_90"):
        fused.source().compile("convolve<7>", "sm_90")


def network(depth: int) -> CifarResNet:
    torch.manual_seed(depth)
    net = CifarResNet(depth, 0)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.bfloat16().float()  # so that rounding the weights is no error
    return net.to("cuda", memory_format=torch.channels_last)


def pass_through(net: CifarResNet, images: torch.Tensor, how: str) -> dict[str, torch.Tensor]:
    trunk = Trunk(copy.deepcopy(net), 64)
    trunk.precision, trunk.fused = torch.float32 if how == "fp32" else torch.bfloat16, how == "fused"
    features = trunk(images)
    (features * torch.linspace(-1, 1, features.numel(), device="cuda").view_as(features)).sum().backward()
    found = {"features": features.detach()}
    found |= {f"grad {name}": p.grad for name, p in trunk.body.named_parameters()}
    return found | {name: b.float() for name, b in trunk.body.named_buffers()}


@cuda
@pytest.mark.parametrize(("depth", "batch"), [(8, 5), (14, 64), (32, 128)])
def test_features_gradients_and_averages_are_as_near_to_fp32_as_autocasts(depth, batch):
    """bf16 rounds at every layer, so the yardstick is the error of torch's own bf16 on the same network."""
    torch.backends.cudnn.allow_tf32 = False
    net = network(depth)
    images = torch.randn(batch, 3, 32, 32, device="cuda").bfloat16().float().to(memory_format=torch.channels_last)
    exact, usual, ours = (pass_through(net, images, how) for how in ("fp32", "autocast", "fused"))
    assert exact.keys() == ours.keys()
    for name, wanted in exact.items():
        far = [((got[name] - wanted).norm() / wanted.norm().clamp(min=1e-6)).item() for got in (usual, ours)]
        assert far[1] <= 1.6 * far[0] + 2e-3, (name, far)


@cuda
def test_gradients_have_the_layout_of_their_weights():
    """Or the optimiser would copy each of them."""
    net = network(8)
    images = torch.randn(4, 3, 32, 32, device="cuda")
    grads = pass_through(net, images, "fused")
    for name, p in net.named_parameters():
        assert grads[f"grad {name}"].stride() == p.stride()


@cuda
def test_without_gradients_and_in_evaluation_the_plain_network_answers():
    net = network(8)
    trunk = Trunk(copy.deepcopy(net), 64)
    trunk.precision, trunk.fused = torch.bfloat16, True
    images = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(
            trunk(images), pass_through(net, images, "autocast")["features"], rtol=0.1, atol=0.05
        )
        trunk.eval()
        plain = Trunk(net.eval(), 64)
        plain.precision = torch.bfloat16
        fresh = copy.deepcopy(plain)
        fresh.body.load_state_dict(trunk.body.state_dict())
        assert torch.equal(trunk(images), fresh(images))
        small = torch.randn(4, 3, 16, 16, device="cuda")  # a size the kernels do not know
        assert trunk.train()(small).shape == (4, 64)
