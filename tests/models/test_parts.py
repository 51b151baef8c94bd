"""Test split ResNets against the original network, their published widths, and attention and heads against loops."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from longtail import methods
from longtail.models.backbones import CifarResNet, make_backbone, wrap_backbone
from longtail.models.heads import CosineHead, ScaledHead
from longtail.models.split_resnets import (
    AttentionResNet,
    Experts,
    LightBranches,
    ModulatedAttention,
    TwinBlock,
    global_average_pool,
    make_expert_stages,
    output_channels,
)
from tests.conftest import tiny
from tests.raises import raises

NAMES = ["resnet8_cifar", "resnet32_cifar", "resnet18", "resnet18_cifar"]
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def randomize_norms(body: nn.Module) -> nn.Module:
    """Set batch norms to values as after training; timm initializes one in each block with zero, which would hide the block."""
    torch.manual_seed(1)
    for norm in (m for m in body.modules() if isinstance(m, nn.BatchNorm2d)):
        for t in (norm.weight, norm.running_var):
            nn.init.uniform_(t, 0.5, 1.5)
        for t in (norm.bias, norm.running_mean):
            nn.init.normal_(t, std=0.3)
    return body.eval()


def made(name: str, kind, *more) -> tuple[nn.Module, nn.Module]:
    """Return a network, and the module that is made of a copy of it, because splitting changes a network."""
    torch.manual_seed(0)
    body = randomize_norms(make_backbone(name))
    return body, kind(copy.deepcopy(body), name, *more).eval()


def stages(body: nn.Module) -> list[nn.Sequential]:
    return list(body.stages) if hasattr(body, "stages") else [body.layer1, body.layer2, body.layer3, body.layer4]


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_left_twin_is_the_network_and_right_twin_has_other_weights(name):
    body, twin = made(name, TwinBlock)
    close(twin(IMAGES, "left"), body(IMAGES))
    first, second = (dict(part.named_parameters()) for part in (twin.left, twin.right))
    assert first.keys() == second.keys() and len(first) == len(list(stages(body)[-1][-1].parameters()))
    assert all(not torch.equal(first[k], second[k]) for k in first if "conv" in k)
    assert all(torch.equal(first[k], second[k]) for k in first if "bn" in k)
    assert not {p.data_ptr() for p in first.values()} & {p.data_ptr() for p in second.values()}
    twin.right.load_state_dict(twin.left.state_dict())
    close(twin(IMAGES, "right"), body(IMAGES))  # it sees what the first sees


def test_twin_features_are_concatenated():
    _, twin = made("resnet8_cifar", TwinBlock)
    randomize_norms(twin.right)
    close(twin(IMAGES), torch.cat([twin(IMAGES, "left"), twin(IMAGES, "right")], 1))
    assert not torch.allclose(twin(IMAGES, "left"), twin(IMAGES, "right"))


@pytest.mark.parametrize("name", NAMES)
def test_light_branches_are_separate_layers_on_the_last_map(name):
    """Each branch in float64: a 1x1 convolution, or a batch norm for CIFAR ResNets, then the mean over pixels."""
    body, light = made(name, LightBranches, 3)
    randomize_norms(light.branches)
    map_ = light.shared(IMAGES)
    close(map_, body.forward_features(IMAGES))
    layer, x, width, parts = light.branches, map_.double(), map_.shape[1], []
    assert isinstance(layer, nn.BatchNorm2d) == isinstance(body, CifarResNet)
    for r in range(3):
        mine = slice(r * width, (r + 1) * width)
        if isinstance(layer, nn.Conv2d):
            parts.append(torch.einsum("oi,bihw->bo", layer.weight[mine, :, 0, 0].double(), x) / x[0, 0].numel())
            continue
        mean, var, weight, bias = (
            t[mine].double()[:, None, None] for t in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        )
        parts.append(((x - mean) / (var + layer.eps).sqrt() * weight + bias).mean((2, 3)))
    torch.testing.assert_close(light(IMAGES).double(), torch.cat(parts, 1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_experts_share_all_but_the_last_two_stages(name):
    body, experts = made(name, Experts, 2, 0.75)
    randomize_norms(experts.experts)
    third, fourth = stages(body)[-2:]
    shared = experts(IMAGES, "shared")
    close(fourth(third(shared)), body.forward_features(IMAGES))
    each = [experts(shared, e) for e in range(2)]
    close(experts(IMAGES), torch.cat(each, 1))
    assert not torch.allclose(each[0], each[1]) and each[0].shape[1] == 0.75 * output_channels(fourth)


@pytest.mark.parametrize("name", ["resnet32_cifar", "resnet18"])
def test_expert_of_full_width_with_the_original_weights_is_the_network(name):
    body, experts = made(name, Experts, 2, 1.0)
    for own, theirs in zip(experts.experts[1], stages(body)[-2:], strict=True):
        own.load_state_dict(theirs.state_dict())
    close(experts(IMAGES).chunk(2, 1)[1], body(IMAGES))


def test_resnet32_has_the_published_widths_and_parameters():
    """A block of width w has 18 w² weights and 4 w parameters of batch norm; the first block of a stage 9 v w + 9 w²."""
    plain = count_parameters(make_backbone("resnet32_cifar"))
    assert plain == 463_504
    twin, light, experts = (
        wrap_backbone(kind(make_backbone("resnet32_cifar"), "resnet32_cifar", *more), "resnet32_cifar", 32)
        for kind, more in ((TwinBlock, ()), (LightBranches, (3,)), (Experts, (3, 0.75)))
    )
    assert (twin.width, light.width, experts.width) == (128, 192, 144)
    assert count_parameters(twin) == plain + 2 * 9 * 64 * 64 + 4 * 64
    assert count_parameters(light) == plain + 2 * 3 * 64
    stem_and_first = 27 * 16 + 32 + 5 * (18 * 16**2 + 64)
    second = 9 * 16 * 24 + 9 * 24**2 + 96 + 4 * (18 * 24**2 + 96)
    third = 9 * 24 * 48 + 9 * 48**2 + 192 + 4 * (18 * 48**2 + 192)
    assert count_parameters(experts) == stem_and_first + 3 * (second + third)
    assert [[output_channels(stage) for stage in expert] for expert in experts.body.experts] == [[24, 48]] * 3


def test_bottlenecks_of_an_expert_are_narrower_inside_and_out():
    third, fourth = (stage.eval() for stage in make_expert_stages("resnet50", 0.75))
    assert [stage[0].conv2.out_channels for stage in (third, fourth)] == [192, 384]
    assert fourth(third(torch.zeros(1, 512, 4, 4))).shape == (1, 4 * 384, 1, 1) and output_channels(third) == 4 * 192


def test_experts_may_be_as_narrow_as_the_shared_part():
    assert Experts(make_backbone("resnet8_cifar"), "resnet8_cifar", 2, 0.5)(IMAGES).shape == (2, 64)


def test_experts_of_a_network_with_wide_bottlenecks():
    """ResNeXt-50 has as many channels between the stages as ResNet-50."""
    third, _ = make_expert_stages("resnext50_32x4d", 0.75)
    assert third(torch.zeros(1, 512, 4, 4)).shape[1] == 4 * 192


@pytest.mark.parametrize("method", ["bbn", "causal-norm", "reslt", "oltr", "ride-3"])
def test_other_networks_are_rejected_with_alternatives(method):
    config = tiny(method)
    own = replace(config.method, twin_block=True) if method == "causal-norm" else config.method
    config = replace(config, method=own, model=replace(config.model, name="mobilenetv3_small_050"))
    with raises("unsupported", "mobilenetv3_small_050", "--model.name resnet32_cifar", "resnet50"):
        methods.make(config, [5, 4, 3])


# Attention


def attention_by_hand(layer: ModulatedAttention, x: torch.Tensor) -> torch.Tensor:
    """Compute attention for each image and pixel."""
    out = x.clone()
    for b, image in enumerate(x.flatten(2)):
        query, key, value = (
            conv.weight[:, :, 0, 0] @ image + conv.bias[:, None] for conv in (layer.look, layer.met, layer.told)
        )
        mask = layer.places.weight @ image.flatten() + layer.places.bias
        for i in range(image.shape[1]):
            weights = [math.exp(query[:, i] @ key[:, j]) for j in range(image.shape[1])]
            attended = sum(w * value[:, j] for j, w in enumerate(weights)) / sum(weights)
            share = mask[i].exp() / mask.exp().sum()
            out[b].flatten(1)[:, i] += share * (layer.out.weight[:, :, 0, 0] @ attended + layer.out.bias)
    return out


@torch.no_grad()
def test_attention_is_initially_the_identity_and_equals_a_loop_over_pixels():
    torch.manual_seed(0)
    layer, x = ModulatedAttention(6, 12).double(), torch.randn(2, 6, 3, 4).double()
    assert torch.equal(layer(x), x)
    for p in layer.out.parameters():
        nn.init.normal_(p)
    out = layer(x)
    torch.testing.assert_close(out, attention_by_hand(layer, x), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(out, x)


@torch.no_grad()
def test_attention_is_applied_only_if_enabled():
    body, attended = made("resnet8_cifar", AttentionResNet, 16)
    wanted = body(IMAGES)
    nn.init.normal_(attended.attention.out.weight)
    close(attended(IMAGES), wanted)
    attended.uses_attention = True
    close(attended(IMAGES), global_average_pool(attended.attention(body.forward_features(IMAGES))))
    assert not torch.allclose(attended(IMAGES), wanted)


# Heads


@torch.no_grad()
def test_cosine_head_equals_a_loop_and_ignores_lengths():
    torch.manual_seed(0)
    head, x = CosineHead(5, 3, scale=7.0).double(), torch.randn(4, 5).double()
    out = head(x)
    for b in range(4):
        for c in range(3):
            w = head.weight[c]
            cosine = sum(x[b, k] * w[k] for k in range(5)) / (sum(x[b] ** 2) * sum(w**2)) ** 0.5
            assert out[b, c].item() == pytest.approx(7 * cosine.item(), rel=1e-12)
    head.weight *= torch.tensor([[2.0], [0.1], [30.0]])
    torch.testing.assert_close(head(100 * x), out)
    assert torch.equal(head(torch.zeros(1, 5).double()), torch.zeros(1, 3).double())


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_scaled_head_begins_linear_and_multiplies_weights_and_bias(bias):
    torch.manual_seed(0)
    head, x = ScaledHead(5, 3, bias).double(), torch.randn(4, 5).double()
    assert (head.bias is not None) == bias
    linear = torch.zeros(4, 3).double()
    for b in range(4):
        for c in range(3):
            products = [x[b, k] * head.weight[c, k] for k in range(5)]
            linear[b, c] = sum(products) + (head.bias[c] if bias else 0)
    torch.testing.assert_close(head(x), linear)
    factors = torch.tensor([2.0, -1.0, 0.5]).double()
    head.scale_C.copy_(factors)
    torch.testing.assert_close(head(x), linear * factors)
