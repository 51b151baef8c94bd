"""Test sharpness-aware minimization against its equation in float64, and in whole trainings."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longtail import methods
from longtail.config import Config
from longtail.engine.device import can_kernels_train
from longtail.engine.fit_head import fit_head, head_config
from longtail.engine.loop import train_step
from longtail.engine.sharpness import perturb
from longtail.engine.trainer import Trainer
from longtail.methods import Batch
from longtail.models.backbones import make_trunk
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.engine.test_train import in_double, load_once, log_of, run_until, state_of

RHO = 0.3


def with_sam(method: str, rho: float = RHO, **changes) -> Config:
    config = tiny(method, batch_size=32, **changes)
    return replace(config, optim=replace(config.optim, sam=rho))


def test_the_perturbation_is_along_the_gradient_of_all_weights():
    weights = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3), (4,), (2, 1, 2))]
    before = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.randn_like(p)
    perturb(weights, RHO)
    g = torch.cat([p.grad.double().flatten() for p in weights])
    found = torch.cat([(p.detach() - b).double().flatten() for p, b in zip(weights, before, strict=True)])
    torch.testing.assert_close(found, RHO * g / g.norm(), rtol=1e-5, atol=1e-6)


def test_a_gradient_of_zero_changes_nothing():
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.zeros(3)
    perturb([p], RHO)
    assert p.tolist() == [1, 1, 1]


@pytest.mark.parametrize("method", ["balanced-softmax", "paco", "gpaco", "causal-norm", "proco"])
def test_a_step_is_the_equation(method, tmp_path):
    """In float64, with two batches per step. What is stored for later comes from the pass with the weights w."""
    config = with_sam(method, accumulate=2)
    trainer, other = (make_trainer(config, tmp_path / name) for name in ("run", "copy"))
    for each in (trainer, other):
        each.prepare(0)
    start = copy.deepcopy(trainer.method)
    batches = [other.batches.next() for _ in range(2)]

    at_w = copy.deepcopy(start)
    e = gradients(at_w, batches)
    norm = torch.cat([g.flatten() for g in e.values()]).norm()
    at_perturbed = copy.deepcopy(start)
    with torch.no_grad():
        for name, p in at_perturbed.named_parameters():
            if name in e:
                p += RHO * e[name] / norm
    g = gradients(at_perturbed, batches)

    train_step(trainer)
    decay = config.optim.weight_decay
    before = dict(start.named_parameters())
    for name, p in trainer.method.named_parameters():
        if name in g:  # the other parameters are those of the key encoder
            step = trainer.rate * (g[name] + decay * before[name])
            torch.testing.assert_close(p, before[name] - step, rtol=1e-9, atol=1e-12, msg=name)
    at_w.after_backward(SideStream(torch.device("cpu")))
    for name, buffer in at_w.named_buffers():
        if not name.startswith("key."):  # which follows the weights after the step
            torch.testing.assert_close(trainer.method.get_buffer(name), buffer, rtol=1e-9, atol=1e-12, msg=name)
    assert not any(trainer.method.waiting_lists())


def make_trainer(config: Config, folder: Path) -> Trainer:
    folder.mkdir()
    trainer = Trainer(config, 0, load_once(config.data), folder, torch.device("cpu"))
    in_double(trainer.method)
    return trainer


def gradients(method: methods.Method, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss by name."""
    sum(method.loss(batch)["loss"] for batch in batches).div(len(batches)).backward()
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


def test_heads_on_features_use_the_second_gradient():
    """A tiny perturbation has nearly no effect, and a larger one has; both are reproducible."""
    generator = torch.Generator().manual_seed(0)
    x_VNF, y_N = torch.randn(1, 40, 6, generator=generator), torch.arange(40) % 4
    config = head_config("ce", 40, epochs=3)
    sharp = replace(config, optim=replace(config.optim, sam=RHO))
    one, again, plain = (fit_head(x_VNF, y_N, c, 4).linear.weight for c in (sharp, sharp, config))
    assert torch.equal(one, again) and not torch.allclose(one, plain, rtol=1e-3)
    tiny_rho = replace(config, optim=replace(config.optim, sam=1e-6))
    torch.testing.assert_close(fit_head(x_VNF, y_N, tiny_rho, 4).linear.weight, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["crt", "paco"])
def test_resume_is_exact(method, tmp_path):
    config = with_sam(method)
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, 3 * whole.steps_per_epoch + 5):
        if stop < whole.total_steps():
            run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


def test_it_learns_and_ends_at_a_flatter_minimum(tmp_path):
    """The loss of the training images rises less in the direction of its gradient than after plain SGD."""
    rises = []
    for rho in (0.0, RHO):
        config = with_sam("ce", rho, epochs=30)
        trainer = run_until(config, tmp_path / str(rho))
        trainer.method.eval()
        batch = next_batch(trainer)
        loss = trainer.method.loss(batch)["loss"]
        loss.backward()
        perturb([p for p in trainer.method.parameters() if p.grad is not None], RHO)
        rises.append(float(trainer.method.loss(batch)["loss"] - loss))
        assert trainer.evaluator.balanced_accuracy(trainer.data.test) > 80
    assert 0 < rises[1] < 0.75 * rises[0]


def next_batch(trainer: Trainer) -> Batch:
    trainer.prepare(0)
    return trainer.batches.next()


def test_our_kernels_are_not_used(tmp_path):
    """They would need to know that the weights change within a step."""
    config = with_sam("ce")
    config = replace(
        config, data=replace(config.data, image_size=32), model=replace(config.model, name="resnet32_cifar")
    )
    body = make_trunk("resnet32_cifar").body
    assert not can_kernels_train(body, config)
    assert can_kernels_train(body, replace(config, optim=replace(config.optim, sam=0.0)))
