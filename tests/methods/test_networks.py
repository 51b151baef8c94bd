"""BBN, Causal Norm, ResLT, OLTR and RIDE against float64 loops of their equations; what is trained in which stage,
what the samplers draw, and what is deployed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import methods, recipes
from longtail.data.long_tail import exponential_counts
from longtail.data.sources import load
from longtail.engine.trainer import Trainer
from longtail.methods import Batch, Method, StageData
from longtail.methods.ride import POSITIVE_WEIGHT
from longtail.models.side_stream import SideStream
from tests.conftest import tiny
from tests.raises import raises

COUNTS = np.array([50, 20, 10, 5, 3, 2, 2, 1, 1, 1])
C, B = len(COUNTS), 12
CPU = torch.device("cpu")


def make(name: str, counts=COUNTS, **changes) -> Method:
    torch.manual_seed(0)
    config = tiny(name)
    return methods.make(replace(config, method=replace(config.method, **changes)), counts)


def images(seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(B, 3, 8, 8, generator=g), None, torch.randint(C, (B,), generator=g))


def features(method: Method, seed: int = 0) -> Tensor:
    """Return positive features in float64, like those after a ReLU."""
    return torch.rand(B, method.net.trunk.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_p(logits: Tensor, y: int) -> Tensor:
    return logits[y] - logits.exp().sum().log()


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def learning(method: Method) -> set[str]:
    return {name for name, p in method.named_parameters() if p.requires_grad}


def restless(module: nn.Module) -> None:
    """Change all weights, because weights that are initialized to zero would hide errors."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g))


# BBN


@pytest.mark.parametrize("epochs", [200, 7])
def test_bbn_s_weight_falls_along_a_parabola(epochs):
    method = make("bbn")
    for T in (1, 2, epochs // 2, epochs):
        method.on_epoch_start(T - 1, epochs)
        assert method.a.item() == pytest.approx(1 - ((T - 1) / epochs) ** 2)


def test_bbn_has_the_initial_weights_of_its_authors():
    """Kaiming initialization is two and a half times as large for any number of features."""
    weight = make("bbn").net.head.weight
    assert weight.abs().max() <= weight.shape[1] ** -0.5 and weight.std() > 0.5 * weight.shape[1] ** -0.5


@pytest.mark.parametrize("a", [1.0, 0.8, 0.3, 0.0])
def test_bbn_s_loss_agrees_with_a_loop(a):
    method = make("bbn").double()
    restless(method.net.head)
    method.a.fill_(a)
    x, y, other = features(method), images(0).y_B, images(1).y_B
    W, b, half, wanted, right = method.net.head.weight, method.net.head.bias, x.shape[1] // 2, 0, 0.0
    for i in range(B):
        seen = torch.cat([2 * a * x[i, :half], 2 * (1 - a) * x[i, half:]])
        logits = torch.stack([dot(W[c], seen) + b[c] for c in range(C)])
        wanted -= (a * log_p(logits, y[i]) + (1 - a) * log_p(logits, other[i])) / B
        guess = logits.argmax()
        right += 100 * (a * bool(guess == y[i]) + (1 - a) * bool(guess == other[i])) / B
    terms = method.loss_from_features(x, y, other)
    torch.testing.assert_close(terms["loss"], wanted)
    assert terms["accuracy"].item() == pytest.approx(right, rel=1e-6)


def test_bbn_shows_each_branch_its_own_images_and_at_test_both_the_same():
    method = make("bbn").eval()
    method.a.fill_(0.7)
    body, first, second = method.net.trunk.body, images(0), images(1)
    left = body.left(body.shared(first.query)).mean((2, 3))
    right = body.right(body.shared(second.query)).mean((2, 3))
    wanted = method.loss_from_features(torch.cat([left, right], 1), first.y_B, second.y_B)["loss"]
    torch.testing.assert_close(method.loss(first._replace(partner=second))["loss"], wanted)
    both = torch.cat([left, body.right(body.shared(first.query)).mean((2, 3))], 1)
    torch.testing.assert_close(method(first.query), F.linear(both, method.net.head.weight, method.net.head.bias))


def test_bbn_s_partners_are_drawn_by_the_inverse_of_their_class_s_size(tmp_path):
    """Three epochs of 384 images are drawn; the uniform batches have every image once per epoch."""
    config = tiny("bbn", epochs=3)
    data = load(config.data)
    run, seen, partners = Trainer(config, 0, data, tmp_path, CPU), [], []
    for step in range(3 * run.steps_per_epoch):
        run.prepare(step)
        batch = run.batches.next()
        seen.append(batch.y_B)
        partners.append(batch.partner.y_B)
        assert batch.partner.query.shape == batch.query.shape and not torch.equal(batch.partner.query, batch.query)
    found = torch.bincount(torch.cat(partners), minlength=10) / 1152
    wanted = torch.tensor([1 / n / sum(1 / m for m in data.train.counts) for n in data.train.counts]).float()
    assert ((found - wanted).abs() < 5 * (wanted / 1152).sqrt()).all()
    drawn = torch.bincount(torch.cat(seen), minlength=10).double() / 3
    assert ((drawn - torch.from_numpy(data.train.counts)).abs() < 3).all()  # 5 of 389 images are left out of an epoch


# Causal Norm


def causal_by_hand(head: nn.Module, x: Tensor, heads: int, scale: float, gamma: float, removal: float) -> Tensor:
    """Return the logits for each image; removal 0 gives those of training."""
    logits, size = torch.zeros(len(x), C).double(), x.shape[1] // heads
    for b in range(len(x)):
        for c in range(C):
            for h in range(heads):
                part = slice(h * size, (h + 1) * size)
                w, d = head.weight[c, part], head.drift_F[part]
                unit, d = x[b, part] / dot(x[b, part], x[b, part]).sqrt(), d / dot(d, d).sqrt().clamp(min=1e-12)
                rest = unit - removal * dot(unit, d) * d
                logits[b, c] += scale / heads * dot(rest, w) / (dot(w, w).sqrt() + gamma)
    return logits


@pytest.mark.parametrize("heads", [1, 2, 4])
@torch.no_grad()
def test_causal_norm_agrees_with_a_loop_over_heads_in_training_and_at_test(heads):
    method = make("causal-norm", heads=heads, scale=16, gamma=1 / 32, removal=1.5).double()
    x, head = features(method)[:4, :], method.net.head
    head.drift_F.copy_(torch.randn(x.shape[1], generator=torch.Generator().manual_seed(3)))
    given = (head, x, heads, 16, 1 / 32)
    torch.testing.assert_close(method.train().classify(x), causal_by_hand(*given, 0))
    torch.testing.assert_close(method.eval().classify(x), causal_by_hand(*given, 1.5))
    y = images().y_B[:4]
    wanted = -sum(log_p(causal_by_hand(*given, 0)[i], y[i]) for i in range(4)) / 4
    torch.testing.assert_close(method.train().loss_from_features(x, y)["loss"], wanted)


@torch.no_grad()
def test_causal_norm_removes_nothing_without_drift_or_with_removal_zero():
    for changes, drift in (({"removal": 0}, 1.0), ({}, 0.0)):
        method = make("causal-norm", **changes).double()
        method.net.head.drift_F.fill_(drift)
        x = features(method)
        torch.testing.assert_close(method.eval().classify(x), method.train().classify(x))
    method = make("causal-norm", removal=1).double().eval()
    method.net.head.drift_F.copy_(features(method)[0])
    assert method.classify(3 * features(method)[:1]).abs().max() < 1e-12  # along the drift, and at 1 all of it goes


def test_the_drift_is_a_moving_sum_of_batch_means():
    """It moves twice in a step of two batches, and does not change in a step without a batch."""
    method, here = make("causal-norm", drift=0.8).train(), SideStream(CPU)
    means = [method.features(images(i).query).detach().double().mean(0) for i in range(4)]
    wanted, drift = torch.zeros_like(means[0]), method.net.head.drift_F
    for step in ([0], [1], [2, 3], []):
        for i in step:
            assert torch.allclose(drift.double(), wanted, rtol=1e-4)  # it moves when the step is made
            method.loss(images(i))["loss"].backward()
        for i in step:
            wanted = 0.8 * wanted + means[i]
        method.after_backward(here)
        torch.testing.assert_close(drift.double(), wanted, rtol=1e-4, atol=1e-6)
    assert wanted.norm() > 0.1 and "net.head.drift_F" in method.state_dict()


def test_causal_norm_s_features_are_the_plain_ones_or_the_twins():
    assert make("causal-norm").net.trunk.width == 64 and make("causal-norm", twin_block=True).net.trunk.width == 128
    with raises("conflict", "--method.heads 3", "64"):
        make("causal-norm", heads=3)


# ResLT


@pytest.mark.parametrize(("imbalance", "weight"), [(100, 0.995), (50, 0.99), (10, 0.72)])
def test_reslt_s_branches_learn_the_published_classes_of_cifar100(imbalance, weight):
    config = recipes.cifar100_lt("reslt", imbalance)
    method = methods.make(config, exponential_counts(500, 100, imbalance))
    wanted = [range(100), range(35, 100), range(70, 100)]
    assert [mask.nonzero()[:, 0].tolist() for mask in method.is_trained_RC] == [list(r) for r in wanted]
    assert config.method.weight == weight


def test_reslt_orders_classes_by_frequency_and_not_by_index():
    """The branches get the 6 rarest and the 3 rarest of ten classes; of equally frequent classes, later ones count as rarer."""
    counts = np.array([1, 50, 2, 20, 1, 10, 5, 3, 2, 1])
    masks = [set(mask.nonzero()[:, 0].tolist()) for mask in make("reslt", counts, medium=0.6, few=0.3).is_trained_RC]
    assert masks == [set(range(10)), {0, 2, 4, 7, 8, 9}, {0, 4, 9}]
    assert make("reslt", [3, 2, 1], medium=0.1, few=0.1).is_trained_RC.sum(1).tolist() == [3, 1, 1]  # never none


@pytest.mark.parametrize("weight", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("labels", ["all", "frequent"])
def test_reslt_s_loss_agrees_with_a_loop(weight, labels):
    """This includes batches without an image for the second and third branch."""
    method = make("reslt", medium=0.6, few=0.3, weight=weight).double()
    restless(method.net.head)
    x, y = features(method) - 0.5, images().y_B if labels == "all" else torch.arange(B) % 4
    W, b, size = method.net.head.linear.weight, method.net.head.linear.bias, x.shape[1] // 3
    own, counted, fused, sums = 0, 0, 0, []
    for i in range(B):
        logits = [torch.stack([dot(W[c], x[i, r * size : (r + 1) * size]) + b[c] for c in range(C)]) for r in range(3)]
        for r, first in enumerate((0, 4, 7)):  # COUNTS fall
            if y[i] >= first:
                own, counted = own - log_p(logits[r], y[i]), counted + 1
        sums.append(logits[0] + logits[1] + logits[2])
        fused = fused - log_p(sums[-1], y[i]) / B
    assert counted == B if labels == "frequent" else B < counted < 3 * B
    terms = method.loss_from_features(x, y)
    torch.testing.assert_close(terms["loss"], weight * own / counted + (1 - weight) * fused)
    torch.testing.assert_close(method.classify(x), torch.stack(sums))


# OLTR


def oltr_by_hand(head: nn.Module, x: Tensor, scale: float) -> Tensor:
    out = torch.zeros(len(x), C).double()
    for i, f in enumerate(x):
        recall = torch.stack([dot(head.linear.weight[c], f) + head.linear.bias[c] for c in range(C)])
        memory = sum(log_p(recall, c).exp() * head.centroid_CF[c] for c in range(C))
        select = torch.stack([dot(row, f) + b for row, b in zip(head.select.weight, head.select.bias, strict=True)])
        reach = 10 / min((f - m).norm() for m in head.centroid_CF)
        v = reach * (f + select.tanh() * memory)
        squashed = v.norm() / (1 + v.norm()) * v / v.norm()
        for c in range(C):
            w = head.weight[c]
            out[i, c] = scale * dot(squashed, w / dot(w, w).sqrt())
    return out


def test_oltr_s_head_agrees_with_a_loop_once_the_memory_is_in_use():
    method = make("oltr").double()
    restless(method.net.head)
    head, x = method.net.head, features(method)[:4]
    with torch.no_grad():
        head.linear.weight.mul_(0.2)  # so that it recalls more than one centroid
        torch.testing.assert_close(head(x), x @ head.linear.weight.T + head.linear.bias)
        method.set_stage(method.stages[1])
        torch.testing.assert_close(head(x), oltr_by_hand(head, x, 16))
        x[2] = head.centroid_CF[3] = 0
        assert head(x).isfinite().all()  # a feature that is its centroid


def test_oltr_s_first_stage_is_plain_cross_entropy():
    method = make("oltr")
    method.set_stage(method.stages[0])
    names = learning(method)
    assert {n for n in names if "head" in n} == {"net.head.linear.weight", "net.head.linear.bias"}
    assert not any("attention" in n for n in names) and any("trunk.body.shared" in n for n in names)
    assert method.stage.sampler == "uniform"
    batch, body, linear = images(), method.net.trunk.body, method.net.head.linear
    logits = linear(body.shared(batch.query).mean((2, 3))).double()
    wanted = -sum(log_p(logits[i], batch.y_B[i]) for i in range(B)) / B
    torch.testing.assert_close(method.loss(batch)["loss"].double(), wanted, rtol=1e-5, atol=1e-6)


def test_oltr_s_second_stage_adds_distances():
    """The addition is 0.01 · (|f - M_y|²/2 + 0.01 · max(0, margin - mean squared distance to the others))."""
    published = make("oltr").config
    assert (published.weight, published.margin, published.scale) == (0.01, 10, 16)
    margin = 37.0  # some images are nearer to the others, some farther away
    method = make("oltr", margin=margin).double()
    restless(method.net.head)
    method.set_stage(method.stages[1])
    x, y, M = features(method), images().y_B, method.net.head.centroid_CF
    with torch.no_grad():
        M.mul_(torch.linspace(0.02, 0.8, C)[:, None])
    logits, pull, push, near = oltr_by_hand(method.net.head, x, 16), 0, 0, set()
    for i in range(B):
        squared = [dot(x[i] - m, x[i] - m) for m in M]
        others = sum(squared[c] for c in range(C) if c != y[i]) / (C - 1)
        pull, push = pull + squared[y[i]] / 2 / B, push + max(0.0, margin - others) / B
        near.add(bool(others < margin))
    assert near == {True, False}
    wanted = -sum(log_p(logits[i], y[i]) for i in range(B)) / B + 0.01 * (pull + 0.01 * push)
    torch.testing.assert_close(method.loss_from_features(x, y)["loss"], wanted)
    assert method.stage.sampler == "balanced"


@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_oltr_s_centroids_learn_by_the_distance_alone(weight):
    method = make("oltr", weight=weight).double()
    restless(method.net.head)
    method.set_stage(method.stages[1])
    x, y = features(method), images().y_B
    method.loss_from_features(x, y)["loss"].backward()
    head, names = method.net.head, learning(method)
    found = head.centroid_CF.grad
    method.zero_grad()
    (weight * method.distance_loss(x, y)).backward()
    torch.testing.assert_close(found, head.centroid_CF.grad)
    assert bool(found.any()) == (weight > 0) and names == dict(method.named_parameters()).keys()  # everything learns


def test_memory_of_oltr_starts_with_the_class_means_of_the_first_stage():
    method = make("oltr").eval()
    method.set_stage(method.stages[0])
    batch = images(5)
    x, y = method.features(batch.query).detach(), batch.y_B % 7  # three classes without an image
    recall = method.net.head.linear.weight.detach().clone()

    def start() -> StageData:
        return StageData(lambda: (method.features(batch.query), y), None, torch.Generator())

    method.on_stage_start(start())
    assert not method.net.head.centroid_CF.any()
    method.set_stage(method.stages[1])
    method.on_stage_start(start())
    for c in range(C):
        mine = [x[i].double() for i in range(B) if y[i] == c]
        wanted = sum(mine) / len(mine) if mine else torch.zeros(64).double()
        torch.testing.assert_close(method.net.head.centroid_CF[c].double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        method.net.head.linear.weight, recall
    )  # the memory is addressed by the classifier of the first stage


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_oltr_s_trunk_moves_more_slowly_in_the_second_stage(share):
    method = make("oltr", trunk_lr=share)
    method.set_stage(method.stages[1])
    new, trunk = method.param_groups()
    shared = {id(p) for p in method.net.trunk.body.shared.parameters()}
    assert {id(p) for p in trunk["params"]} == shared and trunk["lr_scale"] == share and "lr_scale" not in new
    assert {id(p) for p in new["params"]} == {id(p) for p in method.parameters()} - shared


# RIDE


def expert_logits(method: Method, x: Tensor) -> Tensor:
    """Return 30 times the cosines of features and weights of each expert, (B, E, C)."""
    weight = method.net.head.weight
    E, size = len(weight), x.shape[1] // len(weight)
    out = torch.zeros(len(x), E, C).double()
    for i in range(len(x)):
        for e in range(E):
            f = x[i, e * size : (e + 1) * size]
            for c in range(C):
                w = weight[e, c]
                out[i, e, c] = 30 * dot(f, w) / (dot(f, f) * dot(w, w)).sqrt()
    return out


@pytest.mark.parametrize(("epoch", "late"), [(159, False), (160, True)])
@pytest.mark.parametrize("experts", [1, 3])
def test_ride_s_loss_agrees_with_a_loop(epoch, late, experts):
    """The loss is LDAM for each expert minus 0.45 · T² · KL(mean || expert), with class weights from epoch 160 on."""
    method = make("ride-3", experts=experts, temperature=1.5).double()
    method.on_epoch_start(epoch, 200)
    x, y = features(method), images().y_B
    logits = expert_logits(method, x)
    m = [0.5 * n**-0.25 / max(k**-0.25 for k in COUNTS) for n in COUNTS]
    w, T = [1.0] * C, [1.5] * C
    if late:
        inverse = [(1 - 0.9999) / (1 - 0.9999**n) for n in COUNTS]
        w = [C * v / sum(inverse) for v in inverse]
        flat = [C * n / COUNTS.sum() * 0.05 + 0.95 for n in COUNTS]
        T = [1.5 * t / max(flat) for t in flat]
    T = torch.tensor(T).double()
    wanted, apart = 0, 0
    for e in range(experts):
        terms = []
        for i in range(B):
            shifted = logits[i, e] - 30 * m[y[i]] * F.one_hot(y[i], C)
            terms.append(-w[y[i]] * log_p(shifted, y[i]))
            mean, own = (logits[i].mean(0) / T).softmax(0), (logits[i, e] / T).softmax(0)
            apart = apart + (sum(T) / C) ** 2 * sum(p * (p / q).log() for p, q in zip(mean, own, strict=True)) / B
        wanted = wanted + sum(terms) / sum(w[c] for c in y)
    terms = method.loss_from_features(x, y)
    torch.testing.assert_close(terms["loss"], wanted - 0.45 * apart, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms["divergence"], torch.as_tensor(apart), rtol=1e-6, atol=1e-6)
    assert (apart > 0.1) == (experts > 1)
    torch.testing.assert_close(method.classify(x), logits.mean(1))


def router_by_hand(head: nn.Module, f: Tensor, mean: Tensor, e: int) -> Tensor:
    """Compute the router from the largest logits and the feature of length 1."""
    unit = f / dot(f, f).sqrt()
    seen = [max(dot(row, unit) + b, 0.0) for row, b in zip(head.seen[e].weight, head.seen[e].bias, strict=True)]
    top = sorted(mean, reverse=True)[:30]
    return dot(head.needed[e].weight[0], torch.stack([*top, *map(torch.as_tensor, seen)])) + head.needed[e].bias[0]


def enter_routing(method: Method, seed: int = 0) -> Method:
    """Enter the stage of the router, which forwards some images to the next expert."""
    method.set_stage(method.stages[1])
    torch.manual_seed(seed)
    with torch.no_grad():
        for seen, needed in zip(method.net.head.seen, method.net.head.needed, strict=True):
            seen.reset_parameters()
            needed.reset_parameters()
            needed.weight[:, :-16].mul_(0.3)
            needed.weight[:, -16:].mul_(6)
    return method


@pytest.mark.parametrize("classes", [C, 40])
def test_ride_s_router_agrees_with_a_loop(classes):
    """With 40 classes the router gets the 30 largest logits."""
    method = enter_routing(make("ride-3", [2] * classes)).double()
    head, x = method.net.head, features(method)
    x_BEF, logits = head.run_experts(x)
    with torch.no_grad():
        for e in range(2):
            found = head.router_logit(x_BEF[:, e], logits[:, e], e)
            wanted = [router_by_hand(head, x_BEF[i, e], logits[i, e], e) for i in range(B)]
            torch.testing.assert_close(found, torch.stack(wanted))


def test_target_of_the_router_is_whether_a_later_expert_is_right():
    """The loss is binary cross-entropy, in which positives count a hundred times; the labels cover all cases."""
    method = enter_routing(make("ride-3")).double()
    head, x = method.net.head, features(method)
    x_BEF, logits = head.run_experts(x)
    y = torch.stack([logits[i, (0, 2, 1)[i % 3]].argmax() if i % 4 else torch.tensor(i % C) for i in range(B)])
    wanted, cases = 0, set()
    for i in range(B):
        for e in range(2):
            mean = sum(logits[i, k] for k in range(e + 1)) / (e + 1)
            wrong = bool(mean.argmax() != y[i])
            help_ = any(bool(logits[i, k].argmax() == y[i]) for k in range(e + 1, 3))
            cases.add((wrong, help_))
            p = router_by_hand(head, x_BEF[i, e], mean, e).sigmoid()
            wanted = wanted - (POSITIVE_WEIGHT * p.log() if wrong and help_ else (1 - p).log()) / B
    assert POSITIVE_WEIGHT == 100 and cases == {(True, True), (True, False), (False, True), (False, False)}
    terms = method.loss_from_features(x, y)
    torch.testing.assert_close(terms["loss"], wanted)
    asked = route_by_hand(head, x_BEF, logits)[1]
    assert terms["experts_asked"].item() == pytest.approx(sum(asked) / B, rel=1e-6)
    assert method.extra_metrics(x)["experts_asked"] == pytest.approx(sum(asked) / B, rel=1e-6)


def route_by_hand(head: nn.Module, x_BEF: Tensor, logits: Tensor) -> tuple[Tensor, list[int]]:
    """Route each image to the next expert as long as the router requires it."""
    out, asked = [], []
    for i in range(len(x_BEF)):
        used = 1
        while used < 3 and router_by_hand(head, x_BEF[i, used - 1], logits[i, :used].mean(0), used - 1).sigmoid() > 0.5:
            used += 1
        out.append(logits[i, :used].mean(0))
        asked.append(used)
    return torch.stack(out), asked


@torch.no_grad()
def test_ride_deploys_the_mean_of_the_used_experts():
    """For many routers, routed evaluation, evaluation of all experts, and a loop agree."""
    method, met = make("ride-3").eval(), set()
    for seed in range(20):
        enter_routing(method, seed)
        x = method.features(images(seed).query)
        wanted, asked = route_by_hand(method.net.head, *method.net.head.run_experts(x))
        torch.testing.assert_close(method.classify(x), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(method(images(seed).query), wanted, rtol=1e-4, atol=1e-4)
        assert method.extra_metrics(x)["experts_asked"] == pytest.approx(np.mean(asked), rel=1e-6)
        met.add(tuple(sorted(set(asked))))
    assert (1, 2, 3) in met and len(met) > 2


def test_ride_s_router_alone_learns_in_the_second_stage():
    method = make("ride-3")
    first, second = method.stages
    method.set_stage(first)
    head = {n for n in learning(method) if ".head." in n}
    assert head == {"net.head.weight"} and any("trunk" in n for n in learning(method))
    x = features(method).float()
    assert torch.equal(method.classify(x), method.net.head.run_experts(x)[1].mean(1))
    assert method.extra_metrics(x) == {"experts_asked": 3.0}
    method.set_stage(second)
    method.train()
    routers = {f"net.head.{part}.{e}.{t}" for part in ("seen", "needed") for e in (0, 1) for t in ("weight", "bias")}
    assert learning(method) == routers and second.sampler == "balanced"
    before = {n: t.clone() for n, t in method.state_dict().items()}
    method.loss(images())["loss"].backward()
    with torch.no_grad():
        for p in method.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    moved = {n for n, t in method.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == routers  # no running average of the trunk either


@pytest.mark.parametrize("changes", [{"router_epochs": 0}, {"experts": 1}])
def test_ride_without_a_router_has_one_stage_and_asks_all(changes):
    method = make("ride-3", **changes)
    assert len(method.stages) == 1
    x = method.eval().features(images().query)
    torch.testing.assert_close(method(images().query), method.net.head.run_experts(x)[1].mean(1))
    assert method.extra_metrics(x) == {"experts_asked": float(method.config.experts)}
