"""Fine-tuning: AdamW with layer-wise rates, frozen backbones, gradient clipping, exact resume, and runs that learn."""

from dataclasses import replace

import pytest
import torch

from longtail.engine.cuda_graph import step_state, warm_up_and_restore
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer
from tests.conftest import tiny
from tests.engine.test_train import CPU, load_once, log_of, run_until


def tuned(method: str = "paco", model: str = "test_vit", learns: str = "all", epochs: int = 3, **optim):
    """Return a configuration for the digits at 32 pixels with a network of timm."""
    config = tiny(method, epochs=epochs)
    values = {"name": "adamw", "lr": 2e-3, "weight_decay": 0.05, "decay_norms": False, "warmup_epochs": 1} | optim
    return replace(
        config,
        data=replace(config.data, image_size=32),
        model=replace(config.model, name=model, trainable=learns),
        optim=replace(config.optim, **values),
    )


def all_state(run: Trainer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in step_state(run).items()}


def test_adamw_is_torchs_with_a_rate_for_each_layer(tmp_path):
    """Two steps are compared with a separate AdamW for each parameter, with the rate and decay of its layer."""
    config = tuned("ce", layer_decay=0.5, head_lr=3, warmup_epochs=0, schedule="constant")
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    depth = len(run.method.net.trunk.body.blocks)
    chosen = {
        "net.trunk.body.blocks.0.mlp.fc1.weight": (2e-3 * 0.5 ** (depth - 1), 0.05),
        "net.trunk.body.norm.weight": (2e-3, 0.0),
        "net.head.weight": (6e-3, 0.05),
        "net.head.bias": (6e-3, 0.0),
    }
    copies = {name: torch.nn.Parameter(run.method.get_parameter(name).detach().clone()) for name in chosen}
    alone = {
        name: torch.optim.AdamW([copies[name]], lr=lr, weight_decay=wd, betas=config.optim.betas)
        for name, (lr, wd) in chosen.items()
    }
    for step in range(2):
        run.prepare(step)
        run.method.loss(run.batches.next())["loss"].backward()
        for name in chosen:
            copies[name].grad = run.method.get_parameter(name).grad.clone()
            alone[name].step()
        run.optimizer.step()
        run.optimizer.zero_grad()
        for name in chosen:
            torch.testing.assert_close(run.method.get_parameter(name).data, copies[name].data, rtol=1e-5, atol=1e-7)


def test_a_long_gradient_is_shortened(tmp_path):
    config = tuned("ce", name="sgd", lr=1.0, momentum=0, clip=0.01, weight_decay=0, warmup_epochs=0)
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    before = [p.detach().clone() for p in run.method.parameters()]
    run.prepare(0)
    train_step(run)
    moved = torch.cat([(p - was).flatten() for p, was in zip(run.method.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optim", [{"layer_decay": 0.75, "clip": 1.0}, {"name": "sgd", "lr": 0.05, "head_lr": 10}])
def test_resumed_run_equals_the_uninterrupted_one(optim, tmp_path):
    """The state has the averages and step counts of AdamW; each group has its own rate."""
    config = tuned("paco", epochs=2, **optim)
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, 9):
        run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = all_state(whole), all_state(parts)
    assert one.keys() == two.keys() and len(one) > 100
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


def test_warm_up_restores_adamw(tmp_path):
    """Averages and step counts are restored after the warm-up of a captured step, before the first step and later."""
    config = tuned("paco")
    run = Trainer(config, 0, load_once(config.data), tmp_path, CPU)
    for step in range(2):
        before = all_state(run)
        warm_up_and_restore([run], train_step)
        after = all_state(run)
        kept = [k for k in after if k not in ("meter", "first_bad")]
        assert all(torch.equal(after[k], before.get(k, torch.zeros_like(after[k]))) for k in kept)
        assert any("exp_avg" in k for k in kept) and any(k.endswith("step") for k in kept)
        run.prepare(step)
        train_step(run)
        run.count_step()


@pytest.mark.parametrize("method", ["ce", "paco", "balanced-softmax"])
def test_frozen_backbone_does_not_change_and_the_head_is_trained(method, tmp_path):
    config = tuned(method, "test_resnet", learns="head", lr=1e-2)
    start = Trainer(config, 0, load_once(config.data), tmp_path / "start", CPU).method
    run = run_until(config, tmp_path / "run")
    trunk = run.method.net.trunk
    assert all(torch.equal(v, start.net.trunk.state_dict()[k]) for k, v in trunk.state_dict().items())
    assert not torch.equal(run.method.net.head.weight, start.net.head.weight)
    if method == "paco":
        assert not torch.equal(run.method.G[0].weight, start.G[0].weight)
        key = run.method.key.net[0].state_dict()
        assert all(torch.equal(v, key[k]) for k, v in trunk.state_dict().items())
    rows = log_of(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    "model",
    [
        "test_resnet",
        "test_efficientnet",
        *(pytest.param(m, marks=pytest.mark.long) for m in ("test_vit", "test_convnext")),
    ],
)
def test_paco_learns_with_any_kind_of_network(model, tmp_path):
    """The accuracy of an untrained network is about 10 %."""
    run_until(tuned("paco", model, epochs=6, layer_decay=0.9, clip=1.0), tmp_path)
    rows = log_of(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["accuracy"] > max(rows[0]["accuracy"], 35)
