"""Test ghost and synchronized batch norm against torch's batch norm on each group and on the whole batch."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from longtail.distributed import rank_and_world_size
from longtail.models.backbones import make_backbone
from longtail.models.norms import CustomStatsBatchNorm, GhostBatchNorm, convert_batch_norms, count_groups
from tests.processes import together

N = 24


def layers() -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Return batch norms of several kinds, and the shape of their input for one image."""
    torch.manual_seed(0)
    found: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.BatchNorm2d(5), (5, 3, 2)),
        (nn.BatchNorm1d(5, momentum=None), (5,)),
        (nn.BatchNorm1d(5, affine=False), (5, 4)),
        (BatchNormAct2d(5, act_layer=nn.SiLU, momentum=0.3), (5, 2, 2)),
    ]
    for layer, _ in found:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    return [(layer.double(), shape) for layer, shape in found]


def images(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return images of different means and scales, so that the result depends on the groups."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, *shape, generator=g, dtype=torch.float64)
    return x * torch.arange(1, N + 1).view(-1, *[1] * len(shape)) + torch.arange(N).view(-1, *[1] * len(shape))


def compute_all(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output, the gradients of a loss that weights all outputs differently, and the running statistics."""
    x = x.clone().requires_grad_()
    out = layer(x)
    (out**2 * x.detach().roll(1, -1)).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads, **dict(layer.named_buffers())}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("G", [1, 3, 4])
@pytest.mark.parametrize("compiling", [False, True])
def test_ghost_norm_equals_torch_on_each_group(which, G, layout, compiling, monkeypatch):
    """Every G-th image belongs to a group; the running statistics are the mean over separate norms of the groups."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer, shape = layers()[which]
    alone, x = [copy.deepcopy(layer) for _ in range(G)], images(shape)
    convert_batch_norms(layer, "ghost", N // G)
    if x.dim() == 4:
        x = x.to(memory_format=layout)
    wanted = [compute_all(one, x[g::G].contiguous()) for g, one in enumerate(alone)]
    found = compute_all(layer, x)
    for name in found:
        parts = [w[name] for w in wanted]
        if name in ("out", "x"):
            both = torch.stack(parts, 1).flatten(0, 1)
        elif name.startswith("running"):
            both = torch.stack(parts).mean(0)
        else:
            both = sum(parts) if name in ("weight", "bias") else parts[0]
        torch.testing.assert_close(found[name], both, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_ghost_norm_keeps_the_memory_format_forward_and_backward(layout, monkeypatch):
    """This holds for the batch, and for each group as torch's kernels get it."""
    layer, came = nn.BatchNorm2d(5), []
    convert_batch_norms(layer, "ghost", N // 3)
    plain = torch.nn.functional.batch_norm

    def watched(x, *args):
        assert x.is_contiguous(memory_format=layout) or layout == torch.contiguous_format
        out = plain(x, *args)
        seen.append(out)
        return out

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "batch_norm", watched)
    x = torch.randn(N, 5, 3, 2, requires_grad=True).to(memory_format=layout) * 1
    x.register_hook(lambda grad: came.append(grad.is_contiguous(memory_format=layout)))
    out = layer(x)
    if layout == torch.channels_last:
        for each in seen:
            each.register_hook(lambda grad: came.append(grad.is_contiguous(memory_format=layout)))
    out.square().sum().backward()
    assert out.is_contiguous(memory_format=layout) and len(seen) == 3
    assert came == [True] * (4 if layout == torch.channels_last else 1)


def test_count_groups():
    assert [count_groups(n, 32) for n in (128, 64, 63, 31, 100, 96, 1)] == [4, 2, 1, 1, 2, 3, 1]


@pytest.mark.parametrize("norm", ["ghost", "sync"])
@pytest.mark.parametrize("which", range(4))
def test_converted_norm_keeps_names_and_evaluation_mode(which, norm):
    layer, shape = layers()[which]
    plain = copy.deepcopy(layer)
    convert_batch_norms(layer, norm, 8)
    layer(images(shape)), plain(images(shape))
    assert layer.state_dict().keys() == plain.state_dict().keys() and isinstance(layer, type(plain))
    plain.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer).eval()
    assert torch.equal(twin(images(shape, 1)), plain.eval()(images(shape, 1)))


def test_sync_norm_of_one_process_equals_torch():
    for layer, shape in layers():
        plain, x = copy.deepcopy(layer), images(shape)
        convert_batch_norms(layer, "sync", 8)
        found, wanted = compute_all(layer, x), compute_all(plain, x)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("norm", ["ghost", "sync"])
def test_half_precision_is_normalized_in_float32(norm, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer = nn.BatchNorm2d(5)
    convert_batch_norms(layer, norm, N)
    x = 1000 + torch.randn(N, 5, 3, 2)
    out = layer(x.bfloat16())
    wanted = nn.functional.batch_norm(x.bfloat16().float(), None, None, training=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["resnet8_cifar", "resnet18", "regnetx_002", "efficientnet_b0"])
def test_every_batch_norm_of_a_network_is_converted(name):
    body = make_backbone(name) if name.endswith("_cifar") else timm.create_model(name, num_classes=0)
    before = {n for n, m in body.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    state = body.state_dict().keys()
    convert_batch_norms(body, "ghost", 2)
    after = {n for n, m in body.named_modules() if isinstance(m, CustomStatsBatchNorm)}
    assert before == after and body.state_dict().keys() == state
    assert all(isinstance(m, GhostBatchNorm) and m.ghost == 2 for n, m in body.named_modules() if n in after)


def compute_own_part() -> list[dict[str, torch.Tensor]]:
    """Apply synchronized norms to this process's part of the images."""
    rank, world = rank_and_world_size()
    found = []
    for layer, shape in layers():
        convert_batch_norms(layer, "sync", 8)
        found.append(compute_all(layer, images(shape)[rank::world]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sync_norm_of_several_processes_equals_torch_on_the_whole_batch(world, tmp_path: Path):
    found = together(world, tmp_path, compute_own_part)
    for which, (layer, shape) in enumerate(layers()):
        wanted, ranks = compute_all(layer, images(shape)), [rank[which] for rank in found]
        for name in wanted:
            parts = [rank[name] for rank in ranks]
            if name in ("out", "x"):
                whole = torch.stack(parts, 1).flatten(0, 1)
            else:
                whole = sum(parts) if name in ("weight", "bias") else parts[0]
            torch.testing.assert_close(whole, wanted[name], rtol=1e-9, atol=1e-9, msg=name)
            if name.startswith("running"):
                assert all(torch.equal(part, parts[0]) for part in parts)
