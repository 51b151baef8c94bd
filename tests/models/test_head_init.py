"""Initial classifiers against direct computation, and that a run initializes its classifier once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from longtail import methods
from longtail.config import ModelConfig
from longtail.engine.trainer import Trainer
from longtail.models import head_init
from longtail.models.head_init import SCALE, check_head_init, initialize_head, text_weights
from longtail.models.heads import CosineHead, ScaledHead, make_linear_head
from tests.conftest import tiny
from tests.engine.test_finetune import all_state
from tests.engine.test_train import CPU, load_once, run_until
from tests.raises import raises

NAMES = ("cat", "dog", "great_eel")
WIDTH = 8


def features(classes: int = 3, n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of unequal scales, and long-tailed labels."""
    rng = torch.Generator().manual_seed(0)
    y_N = (torch.arange(n) ** 2 // (n * n // classes)).clamp(max=classes - 1)
    centers_CF = torch.randn(classes, WIDTH, generator=rng)
    x_NF = centers_CF[y_N] + torch.randn(n, WIDTH, generator=rng) + 0.5
    return x_NF * torch.linspace(0.1, 3, WIDTH), y_N


def initialized(head: nn.Module, how: str, classes: int = 3) -> nn.Module:
    initialize_head(head, ModelConfig(head_init=how), lambda: features(classes), NAMES[:classes])
    return head


def test_class_means():
    x_NF, y_N = features()
    mean_CF = torch.stack([x_NF[y_N == c].double().mean(0) for c in range(3)])
    wanted = mean_CF / mean_CF.norm(dim=1, keepdim=True)
    for head in (make_linear_head(WIDTH, 3), make_linear_head(WIDTH, 3, bias=False), ScaledHead(WIDTH, 3)):
        found = initialized(head, "means")
        scale = SCALE / x_NF.double().norm(dim=1).mean()
        torch.testing.assert_close(found.weight.double(), wanted * scale, rtol=1e-5, atol=1e-6)
        assert found.bias is None or not found.bias.any()
    cosine = initialized(CosineHead(WIDTH, 3, 16.0), "means")
    torch.testing.assert_close(cosine.weight.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_class_without_images_has_the_weight_zero():
    head = make_linear_head(WIDTH, 4)
    for how in ("means", "logistic"):
        initialize_head(head, ModelConfig(head_init=how), features, (*NAMES, "none"))
        assert not head.weight[3].any() and head.weight[:3].any(1).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_regression(classes):
    x_NF, y_N = features(classes)
    model = LogisticRegression(class_weight="balanced", max_iter=1000)
    direct = make_pipeline(StandardScaler(), model).fit(x_NF.double().numpy(), y_N.numpy())
    logits = initialized(make_linear_head(WIDTH, classes), "logistic", classes)(x_NF)
    np.testing.assert_allclose(logits.softmax(1).detach(), direct.predict_proba(x_NF.double().numpy()), atol=1e-5)


def test_logistic_regression_without_bias():
    x_NF, y_N = features()
    model = LogisticRegression(class_weight="balanced", max_iter=1000, fit_intercept=False)
    direct = make_pipeline(StandardScaler(with_mean=False), model).fit(x_NF.double().numpy(), y_N.numpy())
    logits = initialized(make_linear_head(WIDTH, 3, bias=False), "logistic")(x_NF)
    np.testing.assert_allclose(logits.softmax(1).detach(), direct.predict_proba(x_NF.double().numpy()), atol=1e-5)
    cosine = initialized(CosineHead(WIDTH, 3, 16.0), "logistic")
    assert (cosine(x_NF).argmax(1) == y_N).float().mean() > 0.8


# Text


def clip_of(**vision):
    """Return a small CLIP of random weights, and its tokenizer."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    text = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    clip = open_clip.CLIP(embed_dim=WIDTH - 2, vision_cfg=vision, text_cfg=text).eval()
    return clip, open_clip.SimpleTokenizer(context_length=20)


@pytest.mark.parametrize(
    "vision",
    [
        {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        {"timm_model_name": "test_vit", "timm_proj": "linear", "timm_pool": "", "image_size": 160},
    ],
    ids=["own", "timm"],
)
def test_text_gives_the_cosines_of_images_and_texts(vision):
    """Up to the length of an embedding, which differs between images; the mean length is exact."""
    clip, tokenizer = clip_of(**vision)
    proj_DF = (clip.visual.proj.T if "width" in vision else clip.visual.head.proj.weight).detach().double()
    x_NF = torch.randn(50, proj_DF.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prompts = ["a photo of a cat.", "a photo of a dog.", "a photo of a great eel."]
        text_CD = F.normalize(clip.encode_text(tokenizer(prompts))).double()
    image_ND = x_NF.double() @ proj_DF.T
    cosine_NC = F.normalize(image_ND) @ text_CD.T
    lengths_N = image_ND.norm(dim=1, keepdim=True)
    weight_CF = text_weights(clip, tokenizer, x_NF, NAMES).double()
    wanted = SCALE * cosine_NC * lengths_N / lengths_N.mean()
    torch.testing.assert_close(x_NF.double() @ weight_CF.T, wanted, rtol=1e-4, atol=1e-4)


def test_text_of_another_image_tower_is_an_error():
    clip, tokenizer = clip_of(image_size=32, layers=1, width=64, patch_size=16)
    with raises("mismatch"):
        text_weights(clip, tokenizer, torch.randn(5, 32), NAMES)
    clip, tokenizer = clip_of(timm_model_name="test_vit", timm_proj="mlp", timm_pool="", image_size=160)
    with raises("unsupported"):
        text_weights(clip, tokenizer, torch.randn(5, 64), NAMES)


@pytest.mark.parametrize(
    "name, pretrained, is_supported",
    [
        ("vit_base_patch16_clip_224.openai", True, True),
        ("vit_base_patch16_clip_224.laion2b", True, True),
        ("convnext_base.clip_laion2b", True, True),
        ("vit_base_patch16_clip_224.openai", False, False),
        ("vit_base_patch16_clip_224.openai_ft_in1k", True, False),
        ("vit_small_patch14_dinov2.lvd142m", True, False),
        ("resnet32_cifar", True, False),
    ],
)
def test_text_needs_a_pretrained_image_tower_of_clip(name, pretrained, is_supported):
    model, head = ModelConfig(name=name, pretrained=pretrained, head_init="text"), make_linear_head(WIDTH, 3)
    if is_supported:
        check_head_init(head, model)
    else:
        with raises("conflict", name):
            check_head_init(head, model)


# Runs


def initialized_config(method: str, how: str):
    config = tiny(method, epochs=2)
    return replace(config, model=replace(config.model, head_init=how))


@pytest.mark.parametrize("method", ["ride-2", "oltr", "causal-norm"])
def test_other_classifiers_are_an_error(method):
    with raises("conflict"):
        methods.make(initialized_config(method, "means"), [3, 2])


@pytest.mark.parametrize("method", ["paco", "ldam-drw", "crt", "lws", "bbn"])
def test_the_first_stage_starts_with_it(method, tmp_path):
    config = initialized_config(method, "means")
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    plain = Trainer(initialized_config(method, "random"), 0, load_once(config.data), tmp_path, CPU)
    x_NF, y_N = run.stage_data().train()
    run.start_stage()
    plain.start_stage()
    wanted = torch.stack([x_NF[y_N == c].mean(0) for c in range(len(run.data.counts))])
    found = run.method.net.head.weight.detach()
    torch.testing.assert_close(F.normalize(found), F.normalize(wanted), rtol=1e-4, atol=1e-5)
    one, two = run.method.state_dict(), plain.method.state_dict()
    assert {k for k in one if not torch.equal(one[k], two[k])} <= {"net.head.weight", "net.head.bias"}


def test_the_classifier_of_supcon_starts_with_it_in_the_second_stage(tmp_path):
    config = initialized_config("supcon", "means")
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    before = run.method.net.head.weight.clone()
    run.start_stage()
    assert torch.equal(run.method.net.head.weight, before)
    run.set_stage(1)
    run.start_stage()
    assert not torch.equal(run.method.net.head.weight, before)


def test_it_happens_once_and_a_resumed_run_continues_bit_for_bit(tmp_path, monkeypatch):
    config, calls = initialized_config("balanced-softmax", "logistic"), []
    monkeypatch.setattr(
        "longtail.engine.trainer.initialize_head", lambda *args: calls.append(1) or head_init.initialize_head(*args)
    )
    whole = run_until(config, tmp_path / "whole")
    assert len(calls) == 1
    run_until(config, tmp_path / "parts", 7)
    parts = run_until(config, tmp_path / "parts")
    assert len(calls) == 2
    one, two = all_state(whole), all_state(parts)
    assert all(torch.equal(one[k], two[k]) for k in one)
