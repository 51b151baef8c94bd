"""Test learning rates and weight decay of each parameter against the layer order of timm and the definitions."""

import pytest
import torch
from torch import nn

from longtail.config import OptimConfig
from longtail.engine.optim import split_param_groups
from longtail.models.backbones import Trunk, make_trunk
from tests.raises import raises


def method_of(trunk: Trunk) -> nn.Module:
    return nn.ModuleDict({"trunk": trunk, "head": nn.Linear(trunk.width, 3)})


def by_name(network: nn.Module, groups: list[dict]) -> dict[str, tuple[float, float | None]]:
    """Return the learning rate factor and the weight decay of each parameter."""
    names = {p: name for name, p in network.named_parameters()}
    found = [(names[p], (g.get("lr_scale", 1.0), g.get("weight_decay"))) for g in groups for p in g["params"]]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


def test_by_default_the_groups_are_the_methods_own():
    network = method_of(make_trunk("test_vit", image_size=32))
    groups = [{"params": list(network.parameters())}]
    assert split_param_groups(groups, network["trunk"], OptimConfig()) is groups


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "resnet8_cifar"])
def test_norms_and_biases_do_not_decay_and_the_head_is_faster(name):
    network = method_of(make_trunk(name, image_size=32))
    groups = [{"params": list(network.parameters())}]
    found = by_name(network, split_param_groups(groups, network["trunk"], OptimConfig(decay_norms=False, head_lr=7)))
    assert found.keys() == dict(network.named_parameters()).keys()
    for key, p in network.named_parameters():
        scale, decay = found[key]
        assert scale == (7 if key.startswith("head") else 1)
        positions = key.endswith(("pos_embed", "cls_token"))
        assert decay == (0.0 if p.ndim == 1 or positions else None), key


def test_layers_of_a_transformer_slow_down_toward_the_images():
    """The order is patches and positions, then the blocks; the last norm belongs to the last block."""
    network = method_of(make_trunk("test_vit", image_size=32))
    groups = [{"params": list(network.parameters())}]
    found = by_name(network, split_param_groups(groups, network["trunk"], OptimConfig(layer_decay=0.5)))
    depth = len(network["trunk"].body.blocks)
    for block in range(depth):
        assert found[f"trunk.body.blocks.{block}.mlp.fc1.weight"][0] == pytest.approx(0.5 ** (depth - 1 - block))
    assert found["trunk.body.patch_embed.proj.weight"][0] == pytest.approx(0.5**depth)
    assert found["trunk.body.norm.weight"][0] == found["head.weight"][0] == 1


def test_a_small_resnet_has_its_blocks_in_order():
    network = method_of(make_trunk("resnet8_cifar"))
    groups = [{"params": list(network.parameters())}]
    found = by_name(network, split_param_groups(groups, network["trunk"], OptimConfig(layer_decay=0.5)))
    scales = [found[f"trunk.body.{layer}.weight"][0] for layer in ("conv1", *(f"stages.{i}.0.conv2" for i in range(3)))]
    assert scales == [0.125, 0.25, 0.5, 1]


def test_a_group_keeps_its_own_rate_and_decay():
    network = method_of(make_trunk("resnet8_cifar"))
    groups = [
        {"params": list(network["trunk"].parameters()), "lr_scale": 0.1},
        {"params": list(network["head"].parameters()), "weight_decay": 0.3},
    ]
    found = by_name(network, split_param_groups(groups, network["trunk"], OptimConfig(head_lr=10)))
    assert found["trunk.body.conv1.weight"] == (0.1, None) and found["head.weight"] == (10, 0.3)


def test_split_network_has_no_layer_order():
    trunk = Trunk(nn.Sequential(nn.Linear(4, 4)), 4)
    with raises("unsupported", "--optim.layer_decay 0.75"):
        split_param_groups([{"params": list(trunk.parameters())}], trunk, OptimConfig(layer_decay=0.75))


def test_frozen_backbone_does_not_change():
    trunk = make_trunk("test_resnet", image_size=32)
    before = {k: v.clone() for k, v in trunk.state_dict().items()}
    trunk.freeze_module(trunk.body)
    trunk.train().requires_grad_(True)
    x = trunk(torch.rand(4, 3, 32, 32))
    assert not x.requires_grad and not trunk.body.training
    assert all(torch.equal(v, before[k]) for k, v in trunk.state_dict().items())
