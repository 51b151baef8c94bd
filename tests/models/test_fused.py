"""Test the fused CIFAR ResNet kernels against the plain network: on a GPU, and on the CPU with the emulator."""

import copy

import pytest
import torch
from torch import nn

from longtail.kernels import nvrtc, resnet
from longtail.kernels.nvrtc import CudaSource, template_instance
from longtail.models import split_resnets
from longtail.models.backbones import CifarResNet, FeatureMaps, Trunk, has_kernels
from tests.emulator import ORDERS, Emulated, emulate

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)], indirect=True)
SIZES = [(3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 16, 2), (32, 32, 16, 1), (32, 64, 8, 2), (64, 64, 8, 1)]


@pytest.fixture
def cuda_bindings():
    pytest.importorskip("cuda.bindings", reason="comes with torch for CUDA")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Emulated:
    """Compile the kernels of a ResNet-14, which are those of all depths."""
    source = emulate(resnet.cuda_source(), tmp_path_factory.mktemp("resnet"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "cuda_source", lambda: source)
        resnet.compile_kernels(make_network(14, "cpu"), make_images(1, "cpu"))
    return source


@pytest.fixture
def emulated(compiled, monkeypatch) -> Emulated:
    """Let the kernels run on CPU tensors."""
    monkeypatch.setattr(resnet, "cuda_source", lambda: compiled)
    monkeypatch.setattr(compiled, "order", "forward")
    return compiled


@pytest.fixture
def device(request) -> str:
    """Return the device of the test; on the CPU the kernels are emulated."""
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    return request.param


@pytest.mark.usefixtures("cuda_bindings")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile(architecture, tmp_path, monkeypatch):
    """One kernel of each kind and width compiles, and compiled kernels are read from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["pack_weights"]
    names += [
        template_instance("pool", 64, 64, 8),
        template_instance("last_grad", 64, 8, False),
        template_instance("last_grad", 16, 32, True),
    ]
    for into, out, side, stride in SIZES[:: 2 if architecture == "sm_80" else 3]:
        names.append(template_instance("weight_grad", into, out, side, stride, resnet.FINISHED))
        if into == 3:
            names.append(template_instance("convolve", into, out, side, stride, resnet.FINISHED, 0))
        else:
            names.append(template_instance("convolve", into, out, side, stride, resnet.JOINT, into))
            names.append(template_instance("input_grad", into, out, side, stride, True))
    for name in names:
        code, lowered = resnet.cuda_source().cubin(name, architecture)
        assert code[:4] == b"\x7fELF" and name.split("<")[0] in lowered
        monkeypatch.setattr(CudaSource, "compile", None)  # would fail if it were asked again
        assert resnet.cuda_source().cubin(name, architecture) == (code, lowered)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(list((tmp_path / "longtail" / "kernels").iterdir())) == len(set(names))


@pytest.mark.usefixtures("cuda_bindings")
def test_damaged_cache_file_is_replaced(tmp_path, monkeypatch):
    """The driver is replaced by a function that accepts machine code only."""

    def load(code: bytes, name: str) -> str:
        if code[:4] != b"\x7fELF":
            raise RuntimeError("no machine code")
        return name

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "Kernel", load)
    monkeypatch.setattr(nvrtc, "current_architecture", lambda: "sm_90")
    source = CudaSource("nothing.cu", 'extern "C" __global__ void nothing() {}')
    path = source.cache_path("nothing", "sm_90")
    path.parent.mkdir(parents=True)
    for damaged in (b"nothing\0rubbish", b"rubbish"):
        path.write_bytes(damaged)
        assert CudaSource(source.name, source.text).kernel("nothing") == "nothing"
        assert path.read_bytes().startswith(b"nothing\0\x7fELF")


@pytest.mark.usefixtures("cuda_bindings")
def test_compiler_error_names_kernel_and_architecture():
    with pytest.raises(RuntimeError, match=r"convolve<7> .*sm_90"):
        resnet.cuda_source().compile("convolve<7>", "sm_90")


def make_network(depth: int, device: str) -> CifarResNet:
    torch.manual_seed(depth)
    net = CifarResNet(depth, 0)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
        if isinstance(layer, nn.Conv2d):
            layer.weight.data = (
                layer.weight.data.bfloat16().float()
            )  # representable in bf16, so that rounding changes nothing
    return net.to(device, memory_format=torch.channels_last)


def make_images(n: int, device: str) -> torch.Tensor:
    images = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(n))
    return images.bfloat16().float().to(device, memory_format=torch.channels_last)


def make_trunk(net: CifarResNet, how: str) -> Trunk:
    trunk = Trunk(copy.deepcopy(net), 64)
    trunk.precision, trunk.fused = torch.float32 if how == "fp32" else torch.bfloat16, how == "fused"
    return trunk


def compute_all(net: CifarResNet, images: torch.Tensor, how: str) -> dict[str, torch.Tensor]:
    trunk = make_trunk(net, how)
    features = trunk(images)
    (features * torch.linspace(-1, 1, features.numel(), device=images.device).view_as(features)).sum().backward()
    found = {"features": features.detach()}
    found |= {f"grad {name}": p.grad for name, p in trunk.body.named_parameters()}
    return found | {name: b.float() for name, b in trunk.body.named_buffers()}


def relative_errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor."""
    assert found.keys() == wanted.keys()
    return {name: ((found[name] - w).norm() / w.norm().clamp(min=1e-6)).item() for name, w in wanted.items()}


@pytest.mark.parametrize(
    ("device", "depth", "batch"),
    [("cpu", 8, 5), ("cpu", 14, 2), *(pytest.param("cpu", 8, n, marks=pytest.mark.long) for n in (1, 3))]
    + [pytest.param("cuda", *sizes, marks=cuda) for sizes in [(8, 5), (14, 64), (32, 128), (74, 64)]],
    indirect=["device"],
)
def test_features_gradients_and_statistics_are_as_accurate_as_autocast(device, depth, batch):
    """bf16 rounds in every layer, so errors are compared with those of autocast on the same network."""
    torch.backends.cudnn.allow_tf32 = False
    net, images = make_network(depth, device), make_images(batch, device)
    exact, usual, ours = (compute_all(net, images, how) for how in ("fp32", "autocast", "fused"))
    yardstick = relative_errors(usual, exact)
    times = {name: far / (yardstick[name] + 2e-3) for name, far in relative_errors(ours, exact).items()}
    assert sorted(times.values())[len(times) // 2] < 1
    assert max(times.values()) < 2, max(times.items(), key=lambda item: item[1])  # some tensors have only 16 elements


def make_shared_part(depth: int, part: str, device: str) -> CifarResNet:
    """Return the part of a network that the branches of a method share: all blocks, all but the last, or the first stage."""
    net = make_network(depth, device)
    if part == "all but the last":
        split_resnets.pop_blocks(net, 2, len(net.stages[2]) - 1, "")
    if part == "first stage":
        split_resnets.pop_blocks(net, 2, 0, "")
        split_resnets.pop_blocks(net, 1, 0, "")
    return net


def compute_map(net: CifarResNet, images: torch.Tensor, how: str) -> dict[str, torch.Tensor]:
    """Return the last feature map, and the gradients of a weighted sum of it."""
    maps = FeatureMaps(copy.deepcopy(net))
    maps.fused = how == "fused"
    with torch.autocast(images.device.type, torch.bfloat16, enabled=how != "fp32"):
        found = maps(images)
    (found.float() * torch.linspace(-1, 1, found.numel(), device=images.device).view_as(found)).sum().backward()
    grads = {f"grad {name}": p.grad for name, p in maps.net.named_parameters()}
    return {"map": found.detach().float()} | grads | {name: b.float() for name, b in maps.net.named_buffers()}


@pytest.mark.parametrize("part", [pytest.param("all", marks=pytest.mark.long), "all but the last", "first stage"])
@pytest.mark.parametrize(
    ("device", "depth", "batch"),
    [("cpu", 8, 3), *(pytest.param("cuda", *sizes, marks=cuda) for sizes in [(8, 5), (32, 128)])],
    indirect=["device"],
)
def test_last_map_of_a_shared_part_is_as_accurate_as_autocast(device, depth, batch, part):
    torch.backends.cudnn.allow_tf32 = False
    net, images = make_shared_part(depth, part, device), make_images(batch, device)
    exact, usual, ours = (compute_map(net, images, how) for how in ("fp32", "autocast", "fused"))
    assert (
        not torch.equal(ours["map"], usual["map"]) and ours["map"].shape == exact["map"].shape
    )  # the kernels were used
    yardstick = relative_errors(usual, exact)
    times = {name: far / (yardstick[name] + 2e-3) for name, far in relative_errors(ours, exact).items()}
    assert sorted(times.values())[len(times) // 2] < 1
    assert max(times.values()) < 2, max(times.items(), key=lambda item: item[1])


@everywhere
def test_frozen_network_in_training_mode_saves_nothing_for_backward(device):
    """This is the second stage of MiSLAS."""
    net, images = make_network(8, device).requires_grad_(False), make_images(2, device)
    before = net.bn1.running_mean.clone()
    found = make_trunk(net, "fused")
    assert not found(images).requires_grad and not torch.equal(found.body.bn1.running_mean, before)
    torch.testing.assert_close(found.body.bn1.weight, net.bn1.weight)


def test_results_do_not_depend_on_thread_order_and_number_of_blocks(emulated, monkeypatch):
    """Three orders of threads, and few blocks of `weight_grad` with many tiles each, as in large batches.

    The sums of the emulator do not depend on the order, so a difference is a race or a missing barrier. Fewer blocks round
    their sums differently.
    """
    net, images = make_network(8, "cpu"), make_images(2, "cpu")
    many = compute_all(net, images, "fused")
    for width, blocks in ((16, 3), (32, 2), (64, 2)):
        monkeypatch.setitem(resnet.WEIGHT_GRAD_BLOCKS, width, blocks)
    monkeypatch.setattr(resnet, "STEM_GRAD_BLOCKS", 3)
    few = compute_all(net, images, "fused")
    assert all(far < 1e-4 for far in relative_errors(few, many).values())
    for emulated.order in ORDERS[1:]:
        again = relative_errors(compute_all(net, images, "fused"), few)
        assert all(far < 1e-6 for far in again.values()), emulated.order


@everywhere
@pytest.mark.parametrize("where", ["conv1", "stages.1.0.conv2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(device, where, value):
    """Otherwise a diverging run would go on with zeros."""
    net = make_network(8, device)
    net.get_submodule(where).weight.data[0, 0, 0, 0] = value
    with torch.no_grad():
        features = make_trunk(net, "fused")(make_images(1, device))
    assert not features.isfinite().any()


@everywhere
def test_running_statistics_accumulate_over_steps(device):
    trunks = [make_trunk(make_network(8, device), how) for how in ("fp32", "fused")]
    with torch.no_grad():
        for trunk in trunks:
            for batch in (1, 2):
                trunk(make_images(batch, device))
    wanted, found = ({name: b.float() for name, b in trunk.body.named_buffers()} for trunk in trunks)
    for name, far in relative_errors(found, wanted).items():
        assert far == 0 if name.endswith("num_batches_tracked") else far < 1e-2, name


@everywhere
def test_gradients_have_the_memory_format_of_the_weights(device):
    """Otherwise the optimizer would copy each gradient."""
    net = make_network(8, device)
    grads = compute_all(net, make_images(1, device), "fused")
    for name, p in net.named_parameters():
        assert grads[f"grad {name}"].stride() == p.stride()


@everywhere
def test_no_grad_gives_the_same_features_and_evaluation_uses_the_plain_make_network(device):
    net, images = make_network(8, device), make_images(4, device)
    trunk = make_trunk(net, "fused")
    with torch.no_grad():
        torch.testing.assert_close(trunk(images), make_trunk(net, "autocast")(images), rtol=0.1, atol=0.05)
        trunk.eval()
        fresh = make_trunk(net.eval(), "autocast")
        fresh.body.load_state_dict(trunk.body.state_dict())
        assert torch.equal(trunk(images), fresh(images))
        small = torch.randn(4, 3, 16, 16, device=device)  # an unsupported size
        assert trunk.train()(small).shape == (4, 64)


@everywhere
def test_frozen_backbone_uses_running_statistics_and_gives_no_gradients(device):
    """This is a linear stage: the head is trained, and the backbone is in evaluation mode."""
    net, images = make_network(8, device), make_images(2, device)
    compute_all(net, images, "fused")
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    frozen, usual, exact = (make_trunk(net.requires_grad_(False), how).eval() for how in ("fused", "autocast", "fp32"))
    before = {name: b.clone() for name, b in frozen.body.named_buffers()}
    found = frozen(images)
    far, yardstick = ((t - exact(images)).norm() for t in (found, usual(images)))
    assert far < 1.2 * yardstick and not torch.equal(found, usual(images))  # the kernels were used
    assert not found.requires_grad and all(torch.equal(b, before[name]) for name, b in frozen.body.named_buffers())
    with torch.no_grad():
        assert torch.equal(frozen(images), usual(images))  # evaluation uses the plain network
    frozen.requires_grad_(True)
    assert frozen(images).requires_grad  # trainable weights with fixed statistics are not supported by the kernels


@everywhere
@pytest.mark.parametrize(
    ("channels", "in_chans"),
    [((32, 64, 128), 3), ((64, 128, 256), 3), ((16, 32, 48), 3), ((16, 16, 16), 3), ((16, 32, 64), 1)],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_networks_of_other_widths_use_torch(device, channels, in_chans, frozen, monkeypatch):
    """The kernels are written for RGB images and 16, 32 and 64 channels; other networks must not raise an error."""
    monkeypatch.setattr(resnet, "features", lambda *_, **__: pytest.fail("the kernels do not support this network"))
    net = CifarResNet(8, 0, in_chans, channels).requires_grad_(not frozen).train(not frozen)
    net, images = net.to(device, memory_format=torch.channels_last), make_images(2, device)[:, :in_chans]
    assert not has_kernels(net)
    trunk, plain = make_trunk(net, "fused"), make_trunk(net, "autocast")
    torch.testing.assert_close(trunk(images), plain(images))
    maps = FeatureMaps(net)
    maps.fused = True
    assert maps(images).shape == (2, channels[-1], 8, 8)


@pytest.mark.parametrize("part", ["all", "all but the last", "first stage"])
def test_networks_of_the_standard_widths_have_kernels(part):
    assert has_kernels(make_shared_part(14, part, "cpu"))


def test_weights_in_another_memory_format_are_rejected(emulated):
    net = make_network(8, "cpu").to(memory_format=torch.contiguous_format)
    with pytest.raises(ValueError):
        resnet.features(net, make_images(1, "cpu"))


def test_reallocated_running_statistics_are_updated(emulated):
    net, images = make_network(8, "cpu"), make_images(2, "cpu")
    with torch.no_grad():
        resnet.features(net, images)
        net.bn1.running_mean = net.bn1.running_mean.clone()
        before = net.bn1.running_mean.clone()
        resnet.features(net, images)
    assert not torch.equal(net.bn1.running_mean, before)


def test_second_backward_is_rejected(emulated):
    loss = resnet.features(make_network(8, "cpu"), make_images(1, "cpu")).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()
