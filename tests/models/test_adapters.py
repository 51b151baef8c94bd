"""Adapters and the last block: trained tensors, unchanged outputs at the start, merging, small files, and runs."""

from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import longtail
from longtail import methods, run_folder
from longtail.engine.loop import train_step
from longtail.engine.optim import split_param_groups
from longtail.engine.train import train
from longtail.engine.trainer import Trainer
from longtail.models import weights
from longtail.models.adapters import AdaptFormer, automatic_width, find_lora_layers, insert_adapters, merge_lora
from longtail.models.backbones import Trunk, make_backbone, wrap_backbone
from tests.engine.test_finetune import all_state, tuned
from tests.engine.test_train import CPU, load_once, log_of, run_until
from tests.raises import raises

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
# Small networks of the classes of current backbones: their timm names, image sizes and options.
NETWORKS = {
    "test_vit": (32, {"img_size": 32}),
    "vit_small_patch14_dinov2": (28, {"img_size": 28, **SMALL}),
    "vit_small_patch16_dinov3": (32, {"img_size": 32, **SMALL}),
    "vit_base_patch16_clip_224": (32, {"img_size": 32, **SMALL}),
    "vit_base_patch16_siglip_224": (32, {"img_size": 32, **SMALL}),
    "beit_base_patch16_224": (32, {"img_size": 32, **SMALL}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, **SMALL}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
    ),
    "test_convnext": (32, {}),
    "test_efficientnet": (32, {}),
    "resnet50": (32, {"layers": (1, 1, 1, 1)}),
}
TRANSFORMERS = [name for name in NETWORKS if name.split("_")[0] in ("test", "vit", "beit", "eva02", "swin")][:-2]


def small(name: str, kind: str = "", rank: int = 0, classes: int = 10) -> tuple[Trunk, torch.Tensor, torch.Tensor]:
    """Return a backbone with adapters, images, and the features of the backbone before."""
    size, options = NETWORKS[name]
    torch.manual_seed(0)
    net = make_backbone(name, **options).eval()
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        before = net(images)
    trunk = wrap_backbone(net, name, size)
    if kind == "lora":
        pytest.importorskip("peft")
    if kind:
        insert_adapters(trunk, kind, rank, size, classes)
    return trunk.requires_grad_(True).train(), images, before


def trained(trunk: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in trunk.named_parameters() if p.requires_grad}


def randomize(trunk: nn.Module) -> None:
    """Give adapters weights as after training."""
    for p in trained(trunk).values():
        nn.init.normal_(p, std=0.1)


@pytest.mark.parametrize(
    "name, kind", [(name, "lora") for name in NETWORKS] + [(name, "adapter") for name in TRANSFORMERS]
)
def test_start_is_the_pretrained_network_and_only_adapters_are_trained(name, kind):
    trunk, images, before = small(name, kind)
    base = dict(make_backbone(name, **NETWORKS[name][1]).named_parameters())
    features = trunk(images)
    torch.testing.assert_close(features, before, rtol=0, atol=0)  # with frozen statistics also in training mode
    found = trained(trunk)
    assert found and sum(p.numel() for p in trunk.parameters()) == sum(
        p.numel() for p in (*base.values(), *found.values())
    )
    randomize(trunk)
    features = trunk(images)
    (features * torch.randn_like(features)).sum().backward()
    assert all(p.grad is not None for p in found.values())
    assert all(p.grad is None for p in trunk.parameters() if not p.requires_grad)
    assert not torch.equal(features, before)


@pytest.mark.parametrize("name", NETWORKS)
def test_merged_network_is_the_same_and_has_the_layers_of_timm(name):
    trunk, images, before = small(name, "lora", rank=2)
    randomize(trunk)
    with torch.no_grad():
        adapted = trunk(images)
        merge_lora(trunk)
        torch.testing.assert_close(trunk(images), adapted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(adapted, before)
    assert trunk.body.state_dict().keys() == make_backbone(name, **NETWORKS[name][1]).state_dict().keys()


def test_low_rank_update_is_the_product_of_two_matrices():
    """The update is checked for a linear layer and a 1x1 convolution, in float64."""
    for name, layer in (("test_vit", "blocks.1.mlp.fc1"), ("resnet50", "layer2.0.conv3")):
        trunk, _, _ = small(name, "lora", rank=3)
        randomize(trunk)
        adapted = trunk.body.get_submodule(layer).double()
        before = adapted.get_base_layer().weight.clone()
        down, up = (getattr(adapted, which)["default"].weight for which in ("lora_A", "lora_B"))
        assert down.shape[0] == up.shape[1] == 3
        wanted = before + (up.flatten(1) @ down.flatten(1)).view_as(before)
        merge_lora(trunk)
        torch.testing.assert_close(trunk.body.get_submodule(layer).weight, wanted, rtol=1e-10, atol=1e-12)


def test_only_layers_that_are_called_get_an_update():
    """SwinV2 uses the weight of `qkv` without calling it."""
    options = NETWORKS["swin_tiny_patch4_window7_224"][1]
    names = find_lora_layers(make_backbone("swinv2_tiny_window8_256", **options), 32)
    assert "layers.0.blocks.0.attn.proj" in names and "layers.0.blocks.0.attn.qkv" not in names


def test_adaptformer_is_its_equation():
    torch.manual_seed(0)
    mlp, x = nn.Linear(6, 6).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    module = AdaptFormer(mlp, 6, 4).double()
    assert torch.equal(module(x), mlp(x))
    randomize(module)
    down, up, s = module.down, module.up, module.scale
    wanted = mlp(x) + s * ((x @ down.weight.T + down.bias).clamp(min=0) @ up.weight.T + up.bias)
    torch.testing.assert_close(module(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("classes, blocks, width", [(1000, 12, 32), (365, 12, 8), (8142, 12, 256), (10, 12, 1)])
def test_automatic_width_is_that_of_the_published_rule(classes, blocks, width):
    assert automatic_width(classes, blocks) == width


def test_rank_sets_the_width():
    for rank, width in ((0, automatic_width(100, 6)), (5, 5)):
        trunk, _, _ = small("test_vit", "adapter", rank, classes=100)
        assert {m.down.out_features for m in trunk.modules() if isinstance(m, AdaptFormer)} == {width}


@pytest.mark.parametrize(
    "name, kind", [("resnet8_cifar", "lora"), ("resnet8_cifar", "adapter"), ("test_convnext", "adapter")]
)
def test_unsupported_networks_are_an_error(name, kind):
    with raises("conflict"):
        methods.make(tuned("ce", name, learns=kind), [3, 2])


@pytest.mark.parametrize("kind", ["lora", "adapter"])
def test_methods_that_divide_the_network_are_an_error(kind):
    with raises("conflict"):
        methods.make(tuned("bbn", "test_resnet", learns=kind), [3, 2])


# The last block

LAST_BLOCKS = {
    "test_vit": ("blocks.5.", "norm."),
    "vit_base_patch16_siglip_224": ("blocks.1.", "norm.", "attn_pool."),
    "vit_small_patch16_dinov3": ("blocks.1.", "norm."),
    "beit_base_patch16_224": ("blocks.1.", "fc_norm."),
    "swin_tiny_patch4_window7_224": ("layers.1.", "norm."),
    "test_convnext": ("stages.3.blocks.1.", "head.norm."),
    "test_efficientnet": ("blocks.4.", "conv_head.", "bn2."),
}


@pytest.mark.parametrize("name", LAST_BLOCKS)
def test_last_block_of_any_network(name, monkeypatch):
    """The layers after the block are trained too: the last norm, and attention pooling."""
    size, options = NETWORKS[name]
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **more: create(name, **more | options))
    config = tuned("ce", name, learns="last-block")
    method = methods.make(replace(config, data=replace(config.data, image_size=size)), [3, 2])
    method.set_stage(method.stages[0])
    body = method.net.trunk.body
    assert trained(body).keys() == {n for n, _ in body.named_parameters() if n.startswith(LAST_BLOCKS[name])}
    before = {n: b.clone() for n, b in body.named_buffers() if "running" in n}
    method.train()(torch.randn(4, 3, size, size))
    moved = {n for n, b in body.named_buffers() if "running" in n and not torch.equal(b, before[n])}
    assert moved == {n for n in before if n.startswith(LAST_BLOCKS[name])}


def test_networks_without_an_order_of_layers_have_no_last_block(monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    with raises("conflict"):
        methods.make(tuned("ce", "test_vit", learns="last-block"), [3, 2])


# Training

KINDS = [
    ("lora", "test_efficientnet", "paco"),
    ("adapter", "test_vit", "balanced-softmax"),
    ("last-block", "test_vit", "ce"),
]
TUNED = [("head", "test_resnet", "ce"), *KINDS]


def config_of(kind: str, model: str, method: str, **optim):
    if kind == "lora":
        pytest.importorskip("peft")
    return tuned(method, model, learns=kind, epochs=2, **optim)


@pytest.mark.parametrize("kind, model, method", TUNED)
def test_optimizer_has_the_trained_parameters_only(kind, model, method, tmp_path):
    config = config_of(kind, model, method, layer_decay=0.5, head_lr=3)
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    groups = split_param_groups(run.method.param_groups(), run.method.net.trunk, config.optim)
    found = [p for group in groups for p in group["params"]]
    assert {id(p) for p in found} == {id(p) for p in run.method.parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in run.method.net.trunk.state_dict().items()}
    for step in range(2):
        run.prepare(step)
        train_step(run)
    moved = {name for name, p in run.method.net.trunk.state_dict().items() if not torch.equal(p, before[name])}
    assert moved <= trained(run.method.net.trunk).keys() and bool(moved) == (kind != "head")


@pytest.mark.parametrize("kind, model, method", KINDS)
def test_resumed_run_equals_the_uninterrupted_one(kind, model, method, tmp_path):
    config = config_of(kind, model, method, layer_decay=0.8)
    whole = run_until(config, tmp_path / "whole")
    run_until(config, tmp_path / "parts", 9)
    parts = run_until(config, tmp_path / "parts")
    one, two = all_state(whole), all_state(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


@pytest.mark.parametrize("kind, model, method", TUNED)
def test_finished_runs_load_export_and_have_a_small_file(kind, model, method, tmp_path, monkeypatch):
    config = config_of(kind, model, method)
    config = replace(config, model=replace(config.model, pretrained=True), train=replace(config.train, epochs=1))
    seed = [5]

    def load_pretrained(name: str, **options) -> nn.Module:
        torch.manual_seed(seed[0])
        return timm.create_model(name, num_classes=0, **options)

    monkeypatch.setattr(weights, "load_pretrained", load_pretrained)
    (folder,) = train(config, tmp_path)
    both = [folder / run_folder.MODEL, folder / run_folder.ADAPTER]
    whole, part = map(load_file, both)
    assert both[1].stat().st_size < both[0].stat().st_size / 3
    assert {"head.weight"} < part.keys() < whole.keys() and all(torch.equal(part[k], whole[k]) for k in part)

    model = longtail.load(folder, "cpu")
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.method(images)
        exported = longtail.load(longtail.export(model, "safetensors").path, "cpu")
        torch.testing.assert_close(exported.method(images), logits, rtol=1e-5, atol=1e-5)
        assert not any("lora" in name for name in exported.method.state_dict())
        if kind == "lora":
            pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
            assert longtail.export(model, "onnx").difference < 1e-4

        # only the small file
        both[0].rename(tmp_path / "elsewhere")
        assert torch.equal(longtail.load(folder, "cpu").method(images), logits)
        seed[0] = 6  # other pretrained weights
        with raises("mismatch"):
            longtail.load(folder, "cpu")
        seed[0] = 5
        save_file(dict(list(part.items())[1:]), both[1])
        with raises("damaged-file"):
            longtail.load(folder, "cpu")


@pytest.mark.parametrize("kind, model, method", [(k, m, "ce") for k, m, _ in KINDS])
@pytest.mark.long
def test_it_learns(kind, model, method, tmp_path):
    config = config_of(kind, model, method, lr=1e-2)
    run_until(replace(config, train=replace(config.train, epochs=6)), tmp_path)
    rows = log_of(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"]
