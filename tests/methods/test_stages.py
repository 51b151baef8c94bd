"""Stages: trained parameters, the state at the start, and weights, priors, rates and shares of methods."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from longtail import methods
from longtail.config import Config
from longtail.data.sources import load
from longtail.engine.optim import learning_rate
from longtail.engine.trainer import Trainer
from longtail.losses import (
    class_balanced_focal_loss,
    cross_entropy_loss,
    effective_number_weights,
    focal_loss,
    label_aware_smoothing,
    label_aware_smoothing_loss,
    ldam_loss,
    ldam_margins,
)
from longtail.methods import Batch, Method, Mixed, StageData, decouple
from tests.conftest import tiny
from tests.engine.test_train import CPU, DATA, run_until
from tests.methods.test_methods import COUNTS, batch
from tests.raises import raises

N_C = torch.from_numpy(COUNTS)
LOG_PRIOR = (N_C / N_C.sum()).log()
HEAD, SCALE = {"net.head.weight", "net.head.bias"}, {"net.head.scale_C"}


def short(name: str, epochs: int = 1, **changes) -> Config:
    """Return a configuration with one epoch of six steps, and this number of epochs in a second stage."""
    config = tiny(name, epochs=1)
    if config.method.second_stage_epochs_field:
        changes = {config.method.second_stage_epochs_field: epochs} | changes
    return replace(config, method=replace(config.method, **changes))


def make(name: str, **changes) -> Method:
    torch.manual_seed(0)
    return methods.make(short(name, **changes), COUNTS)


def into(method: Method, stage: int) -> Method:
    method.set_stage(method.stages[stage])
    return method.train()


def one_view(seed: int = 0) -> Batch:
    return batch(seed)._replace(key=None)


def learning(method: Method) -> set[str]:
    return {name for name, p in method.named_parameters() if p.requires_grad}


def trunk_of(method: Method) -> set[str]:
    return {name for name, _ in method.named_parameters() if name.startswith("net.trunk.")}


# What learns


@pytest.mark.parametrize(
    ("name", "first", "second"), [("crt", HEAD, HEAD), ("lws", HEAD, SCALE), ("mislas", HEAD, HEAD | SCALE)]
)
def test_trained_parameters_of_each_stage(name, first, second):
    method = make(name)
    trunk = trunk_of(method)
    assert len(trunk) > 20
    assert learning(into(method, 0)) == trunk | first
    assert learning(into(method, 1)) == second
    method.loss(one_view())["loss"].backward()
    assert {n for n, p in method.named_parameters() if p.grad is not None} == second
    assert learning(into(method, 0)) == trunk | first  # as evaluation and a resume go through stages in any order


def state(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in run.method.state_dict().items()}


def moved(before: dict[str, torch.Tensor], run: Trainer) -> set[str]:
    return {name for name, t in run.method.state_dict().items() if not torch.equal(t, before[name])}


@pytest.mark.parametrize(("name", "second"), [("crt", HEAD), ("lws", SCALE), ("mislas", HEAD | SCALE)])
def test_unchanged_parameters_of_the_second_stage(name, second, tmp_path):
    """This includes batch-norm statistics, except for MiSLAS, which updates them without training the weights."""
    first = run_until(short(name), tmp_path, 6)
    before = state(first)
    last = run_until(short(name), tmp_path)
    assert last.stage_index == 1 and last.steps_done() == 12
    averages = {n for n, _ in last.method.named_buffers() if n.startswith("net.trunk.") and n in before}
    assert len(averages) >= 3 * 7  # means, variances and counts
    assert moved(before, last) == second | (averages if name == "mislas" else set())


@pytest.mark.parametrize("name", ["crt", "lws", "mislas"])
def test_second_stage_samples_classes_equally_with_a_decreasing_rate(name):
    method = make(name, linear_lr=0.3)
    first, second = method.stages
    assert (first.sampler, second.sampler) == ("uniform", "balanced") and first.mixup == (name == "mislas")
    assert second.frozen and not second.mixup and second.shift_norm == (name == "mislas")
    for step in (0, 5, 17):
        wanted = 0.3 * 0.5 * (1 + math.cos(math.pi * step / 20))
        assert learning_rate(second.optim, step, 5, 4) == pytest.approx(wanted)


# cRT


def test_crt_resets_its_head_once(tmp_path, monkeypatch):
    """This also holds if the second stage is resumed. The new weights depend on the seed."""
    drawn, redraw = [], decouple.reset_head
    monkeypatch.setattr(
        decouple, "reset_head", lambda head, rng: (redraw(head, rng), drawn.append(head.weight.clone()))
    )
    for stop in (3, 6, 8, 10, None):
        run = run_until(short("crt"), tmp_path, stop)
    assert len(drawn) == 1 and run.steps_done() == 12
    for seed in (0, 0, 1):
        through(short("crt"), tmp_path / "other", seed)
    assert torch.equal(drawn[1], drawn[0]) and torch.equal(drawn[2], drawn[0]) and not torch.equal(drawn[3], drawn[0])


def test_reset_head_has_new_weights():
    method = into(make("crt"), 1)
    head = method.net.head
    weight, before = head.weight, head.weight.detach().clone()
    method.on_stage_start(StageData(None, None, torch.Generator().manual_seed(0)))
    assert head.weight is weight and not torch.isclose(weight, before).any()  # the optimizer has the same parameter
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.1) and (head.bias == 0).all()
    after = weight.detach().clone()
    into(method, 0).on_stage_start(StageData(None, None, torch.Generator().manual_seed(1)))
    assert torch.equal(weight, after)  # the first stage keeps the classifier of the new network


def test_crt_learns_by_cross_entropy_on_the_averages_of_the_trunk():
    method, b = into(make("crt"), 1), one_view()
    loss = method.loss(b)["loss"]
    by_averages, by_batch = (method.net.head(method.net.trunk.train(mode)(b.query)) for mode in (False, True))
    torch.testing.assert_close(loss, cross_entropy_loss(by_averages, b.y_B))
    assert not torch.isclose(loss, cross_entropy_loss(by_batch, b.y_B))


# LWS


def test_lws_scales_the_logits_of_each_class():
    method = into(make("lws"), 1).eval()
    x_BF, head = method.features(one_view().query), method.net.head
    plain = F.linear(x_BF, head.weight, head.bias)
    torch.testing.assert_close(method.classify(x_BF), plain)  # factors begin at 1
    with torch.no_grad():
        head.scale_C.copy_(torch.arange(10) / 5)
    for c in range(10):
        torch.testing.assert_close(method.classify(x_BF)[:, c], c / 5 * plain[:, c])


def test_lws_gives_the_optimizer_its_factors_alone(tmp_path):
    run = Trainer(short("lws"), 0, DATA, tmp_path, CPU)
    run.set_stage(1)
    (group,) = run.optimizer.param_groups
    assert group["weight_decay"] == run.config.method.linear_decay == 5e-4 and [id(p) for p in group["params"]] == [
        id(run.method.net.head.scale_C)
    ]


# tau-norm


def validation(seed: int) -> tuple[torch.Tensor, ...]:
    """Return long-tailed features near the weights of their classes, whose lengths decrease toward the tail."""
    g = torch.Generator().manual_seed(seed)
    direction = F.normalize(torch.randn(10, 64, generator=g))
    y_N = torch.arange(10).repeat_interleave(torch.tensor([30, 20, 15, 10, 5, 4, 3, 3, 2, 2]))
    x_NF = direction[y_N] + 0.5 * torch.rand(len(y_N), 64, generator=g)
    return direction * torch.logspace(0.5, -0.5, 10)[:, None], x_NF, y_N


def power_by_loop(weight, x_NF, y_N) -> tuple[float, float]:
    """Return the smallest of the best powers, by the mean accuracy of the classes and by that of all images."""
    balanced, plain = [], []
    for p in range(21):
        rows = [row / row.norm() ** (p / 10) for row in weight.double()]
        right = torch.stack([x_NF.double() @ row for row in rows], 1).argmax(1) == y_N
        plain.append(right.double().mean().item())
        balanced.append(sum(right[y_N == c].double().mean().item() for c in y_N.unique()) / len(y_N.unique()))
    return tuple(next(p / 10 for p in range(21) if s[p] > max(s) - 1e-9) for s in (balanced, plain))


def tau_norm(weight: torch.Tensor, **changes) -> Method:
    method = into(make("tau-norm", **changes), 1)
    with torch.no_grad():
        method.net.head.weight.copy_(weight), method.net.head.bias.fill_(3.0)
    return method


@pytest.mark.parametrize("seed", [0, 2, 8])  # the two ways to score disagree here
def test_tau_norm_chooses_its_power_on_the_validation_split(seed):
    weight, x_NF, y_N = validation(seed)
    power, by_images = power_by_loop(weight, x_NF, y_N)
    assert 0 < power < 2 and power != by_images
    method = tau_norm(weight)
    method.on_stage_start(StageData(None, lambda: (x_NF, y_N), torch.Generator()))
    wanted = [w / math.sqrt((w**2).sum()) ** power for w in weight.double()]
    torch.testing.assert_close(method.net.head.weight.double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)
    assert (method.net.head.bias == 0).all()


def test_tau_norm_takes_the_smallest_of_equal_powers_and_leaves_out_absent_classes():
    weight, x_NF, y_N = validation(0)
    same = F.normalize(weight)  # rows of one length: no power changes anything
    method = tau_norm(same)
    assert method.best_power(StageData(None, lambda: (x_NF, y_N), torch.Generator())) == 0
    few = y_N < 4
    power, _ = power_by_loop(weight, x_NF[few], y_N[few])
    assert tau_norm(weight).best_power(StageData(None, lambda: (x_NF[few], y_N[few]), torch.Generator())) == power


def test_tau_norm_with_a_power_given_looks_at_no_images():
    weight, *_ = validation(0)
    method = tau_norm(weight, power=0.7)
    method.on_stage_start(StageData(None, None, torch.Generator()))
    wanted = torch.stack([row / row.norm() ** 0.7 for row in weight])
    torch.testing.assert_close(method.net.head.weight.detach(), wanted)


def test_tau_norm_without_validation_images_says_what_to_do(tmp_path):
    """The error is raised before training."""
    config = short("tau-norm")
    with raises("too-few-data", "--data.val_fraction 0.2"):
        Trainer(config, 0, replace(load(config.data), val=None), tmp_path, CPU)
    Trainer(
        replace(config, method=replace(config.method, power=0.5)),
        0,
        replace(load(config.data), val=None),
        tmp_path,
        CPU,
    )


def through(config: Config, folder: Path, seed: int = 0) -> Trainer:
    """Enter and start all stages without a step."""
    run = Trainer(config, seed, load(config.data), folder, CPU)
    for stage_index in range(len(run.method.stages)):
        run.set_stage(stage_index)
        run.start_stage()
    return run


def test_tau_norm_sees_the_validation_images_as_the_network_will(tmp_path):
    before = Trainer(short("tau-norm"), 0, load(short("tau-norm").data), tmp_path, CPU)
    weight = before.method.net.head.weight.detach().clone()
    x_NF = before.evaluator.features(before.data.val)  # of plain views
    power, _ = power_by_loop(weight, x_NF, torch.from_numpy(before.data.val.labels))
    found = through(short("tau-norm"), tmp_path).method.net.head.weight.detach()
    torch.testing.assert_close(found, torch.stack([row / row.norm() ** power for row in weight]))


# NCM


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_ncm_is_the_nearest_class_mean(distance):
    g = torch.Generator().manual_seed(0)
    y_N = torch.arange(10).repeat_interleave(N_C)
    x_NF, test = (torch.rand(n, 64, generator=g) * torch.rand(n, 1, generator=g) for n in (len(y_N), 200))
    method = into(make("ncm", distance=distance), 1)
    method.on_stage_start(StageData(lambda: (x_NF, y_N), None, torch.Generator()))
    means = [x_NF[y_N == c].double().mean(0) for c in range(10)]

    def nearest(x, by):
        far = {"l2": lambda m: (x - m).norm(), "cosine": lambda m: -(x @ m) / x.norm() / m.norm()}[by]
        return min(range(10), key=lambda c: far(means[c]).item())

    found = method.classify(test).argmax(1).tolist()
    assert found == [nearest(x.double(), distance) for x in test]
    other = "l2" if distance == "cosine" else "cosine"
    assert sum(c != nearest(x.double(), other) for c, x in zip(found, test, strict=True)) > 20


def test_ncm_takes_the_means_of_plain_training_images(tmp_path):
    run = through(short("ncm", distance="l2"), tmp_path)
    x_NF = run.evaluator.features(run.data.train)
    means = torch.stack([x_NF[torch.from_numpy(run.data.train.labels) == c].mean(0) for c in range(10)])
    torch.testing.assert_close(run.method.net.head.weight.detach(), means, rtol=1e-4, atol=1e-5)


# Logit adjustment


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_logit_adjustment_in_the_loss(strength):
    method, b = make("logit-adjustment", strength=strength).eval(), one_view()
    logits = method.net(b.query)
    wanted = F.cross_entropy(logits + strength * LOG_PRIOR, b.y_B)
    torch.testing.assert_close(method.loss(b)["loss"], wanted)
    torch.testing.assert_close(method(b.query), logits)
    assert len(method.stages) == 1


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_logit_adjustment_post_hoc(strength):
    method, b = make("logit-adjustment-post-hoc", strength=strength).eval(), one_view()
    logits = method(b.query)
    torch.testing.assert_close(method.loss(b)["loss"], F.cross_entropy(logits, b.y_B))
    for stage in (0, 1):
        into(method, stage).eval().on_stage_start(StageData(None, None, torch.Generator()))
        torch.testing.assert_close(method(b.query), logits - stage * strength * LOG_PRIOR)


def test_post_hoc_adjustment_is_cross_entropy_with_another_bias(tmp_path):
    """This also holds with `--model.no_bias`."""
    ce, adjusted = (run_until(short(name), tmp_path / name) for name in ("ce", "logit-adjustment-post-hoc"))
    assert moved(state(ce), adjusted) == {"net.head.bias"}
    prior = torch.from_numpy(DATA.train.counts / DATA.train.counts.sum()).log().float()
    torch.testing.assert_close(ce.method.net.head.bias - adjusted.method.net.head.bias, prior)
    config = short("logit-adjustment-post-hoc")
    bare = methods.make(replace(config, model=replace(config.model, bias=False)), COUNTS)
    assert bare.net.head.bias is not None


# Class weights


def weights_at(method: Method, epochs: int) -> list[bool]:
    """Return for each epoch whether classes are weighted by their effective number; otherwise weights are equal."""
    found, late = [], effective_number_weights(N_C, 0.9999)
    for epoch in range(epochs):
        method.on_epoch_start(epoch, epochs)
        weighted = not torch.equal(method.weight_C, torch.ones(10))
        torch.testing.assert_close(method.weight_C, late if weighted else torch.ones(10))
        found.append(weighted)
    return found


@pytest.mark.parametrize("name", ["focal", "ldam-drw"])
@pytest.mark.parametrize(("share", "epoch"), [(0.0, 0), (0.8, 8), (0.75, 8), (1.0, 10)])
def test_weights_are_deferred(name, share, epoch):
    method = make(name, drw_from=share)
    place = method.weight_C.data_ptr()
    assert weights_at(method, 10) == [i >= epoch for i in range(10)]
    method.on_epoch_start(0, 10)  # as another run of the process would
    assert (method.weight_C == (method.late_weight_C if share == 0 else 1)).all()
    assert method.weight_C.data_ptr() == place  # a captured step refers to it by its address


@pytest.mark.parametrize("epoch", [0, 9])
def test_deferred_losses_use_the_weights(epoch):
    b, weight = one_view(), effective_number_weights(N_C, 0.9999) if epoch else torch.ones(10)
    ldam = make("ldam-drw", margin=0.4, scale=20.0).eval()
    focal = make("focal", gamma=2.0, drw_from=0.5).eval()
    ldam.on_epoch_start(epoch, 10), focal.on_epoch_start(epoch, 10)
    cosine = F.normalize(ldam.net.trunk(b.query)) @ F.normalize(ldam.net.head.weight).T
    torch.testing.assert_close(ldam(b.query), 20 * cosine)
    wanted = ldam_loss(cosine, b.y_B, ldam_margins(N_C, 0.4), 20.0, weight)
    torch.testing.assert_close(ldam.loss(b)["loss"], wanted)
    torch.testing.assert_close(focal.loss(b)["loss"], focal_loss(focal(b.query), b.y_B, 2.0, weight))


def test_a_run_tells_the_method_its_epoch(tmp_path):
    """This includes runs that are resumed, or whose stage is entered again."""
    run = Trainer(replace(short("ldam-drw"), train=tiny(epochs=5).train), 0, DATA, tmp_path, CPU)
    for step, late in ((0, False), (23, False), (24, True), (6, False), (29, True)):
        run.prepare(step)
        assert (run.method.weight_C != 1).any() == late
    run.set_stage(0)
    run.method.weight_C.fill_(7.0)
    run.prepare(29)
    torch.testing.assert_close(run.method.weight_C, run.method.late_weight_C)


def test_cb_focal_starts_each_sigmoid_at_one_of_its_classes():
    method, b = make("cb-focal", gamma=0.5, beta=0.99), one_view()
    torch.testing.assert_close(method.net.head.bias.sigmoid(), torch.full((10,), 0.1))
    method.eval()
    wanted = class_balanced_focal_loss(method(b.query), b.y_B, effective_number_weights(N_C, 0.99), 0.5)
    torch.testing.assert_close(method.loss(b)["loss"], wanted)


# The optimizer


def groups_of(run: Trainer) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay of each trained parameter by its name."""
    names = {id(p): name for name, p in run.method.named_parameters()}
    found = [(names[id(p)], (g["lr"], g["weight_decay"])) for g in run.optimizer.param_groups for p in g["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


def test_cb_focal_does_not_decay_its_bias(tmp_path):
    run = Trainer(short("cb-focal"), 0, DATA, tmp_path, CPU)
    found = groups_of(run)
    assert found.keys() == learning(run.method)
    decay = run.config.optim.weight_decay
    assert decay > 0 and {name: d for name, (_, d) in found.items() if d != decay} == {"net.head.bias": 0.0}


def test_mislas_learns_its_classifier_more_slowly_than_its_factors(tmp_path):
    run = Trainer(short("mislas", epochs=2, linear_lr=0.3, classifier_lr=0.05), 0, DATA, tmp_path, CPU)
    run.prepare(3)
    assert {rate for rate, _ in groups_of(run).values()} == {run.rate} and groups_of(run).keys() == learning(run.method)
    run.set_stage(1)
    for step in (0, 7):
        run.prepare(step)
        rate = 0.3 * 0.5 * (1 + math.cos(math.pi * step / 12))
        wanted = {"net.head.weight": 0.05 * rate, "net.head.bias": 0.05 * rate, "net.head.scale_C": rate}
        assert {name: lr for name, (lr, _) in groups_of(run).items()} == pytest.approx(wanted)


# MiSLAS, and mixup


def test_mislas_smooths_the_head_most_in_its_second_stage():
    method, b = make("mislas", smooth_head=0.5, smooth_tail=0.1), one_view()
    logits = into(method, 0).eval()(b.query)
    torch.testing.assert_close(method.loss(b)["loss"], cross_entropy_loss(logits, b.y_B))
    into(method, 1)
    smooth = label_aware_smoothing(N_C, head=0.5, tail=0.1)
    torch.testing.assert_close(smooth[[0, 9]], torch.tensor([0.5, 0.1]))
    x_BF = method.net.trunk(b.query)  # by this batch's mean and variance
    wanted = label_aware_smoothing_loss(method.net.head(x_BF), b.y_B, smooth)
    torch.testing.assert_close(method.loss(b)["loss"], wanted)
    assert not torch.allclose(method.eval().loss(b)["loss"], wanted)


@pytest.mark.parametrize("name", ["ce", "balanced-softmax", "focal", "ldam-drw", "cb-focal", "mislas"])
def test_mixup_mixes_the_losses_as_it_mixed_the_images(name):
    method, b = make(name).eval(), one_view()
    other = b.y_B.roll(1)
    first, second = (method.loss(b._replace(y_B=y))["loss"] for y in (b.y_B, other))
    terms = method.loss(b._replace(mixed=Mixed(other, torch.tensor(0.3))))
    assert not torch.isclose(first, second)
    torch.testing.assert_close(terms["loss"], 0.3 * first + 0.7 * second)
    assert terms["accuracy"] == method.loss(b)["accuracy"]
