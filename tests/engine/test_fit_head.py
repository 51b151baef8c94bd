"""Tests of the training of heads on stored features."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longtail.engine.fit_head import Scaling, fit_head, head_config, supports_features
from longtail.errors import RunError
from longtail.methods import Batch, StageData
from longtail.methods.decouple import class_means
from longtail.methods.registry import find_method
from longtail.recipes import METHODS
from tests.raises import raises

COUNTS = (40, 20, 10, 5)
SUPPORTED = [n for n, preset in METHODS.items() if supports_features(find_method(preset.settings_class()))]
WEIGHTED = [n for n in SUPPORTED if find_method(METHODS[n].settings_class()).can_weight_images and n != "mislas"]
LINEAR = [n for n in SUPPORTED if n not in ("ldam-drw", "bcl")]  # whose heads are cosine classifiers


def make_set(counts=COUNTS, width=12, views=2, seed=0, dtype=torch.float64):
    """Return views of features around a center for each class, which is far from the origin, and the labels."""
    rng = torch.Generator().manual_seed(seed)
    centers_CF = 3 * torch.randn(len(counts), width, generator=torch.Generator().manual_seed(100), dtype=dtype)
    y_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(views, len(y_N), width, generator=rng, dtype=dtype)
    return centers_CF[y_N] + noise + 5, y_N


def config_for(name, images=75, epochs=8, **settings):
    if name == "tau-norm":
        settings = {"power": 1.0} | settings
    return head_config(name, images, epochs=epochs, batch_size=32, **settings)


def fit(name, x=None, y_N=None, classes=4, seed=0, epochs=8, **rest):
    if x is None:
        x, y_N = make_set()
    return fit_head(x, y_N, config_for(name, len(y_N), epochs), classes, seed, **rest)


def weights(method):
    return {name: value.clone() for name, value in method.net.head.state_dict().items()}


def test_most_methods_are_supported():
    assert {"ce", "balanced-softmax", "paco", "gpaco", "supcon", "ncm", "crt", "lws", "mislas"} < set(SUPPORTED)
    assert {"bbn", "reslt", "ride-3", "oltr"}.isdisjoint(SUPPORTED)


X, Y = torch.zeros(2, 4, 3), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("features", "labels", "kind"),
    [
        (X.numpy(), Y, "invalid-value"),
        (X[0], Y, "invalid-value"),
        (X.long(), Y, "invalid-value"),
        (X, Y.numpy(), "bad-labels"),
        (X, Y.float(), "bad-labels"),
        (X, Y[:3], "bad-labels"),
        (X, Y + 1, "bad-labels"),
        (X, Y - 1, "bad-labels"),
        (X[:, :0], Y[:0], "bad-labels"),
    ],
)
def test_wrong_features_and_labels_are_rejected(features, labels, kind):
    with raises(kind):
        fit_head(features, labels, config_for("ce", 4), 4)


@pytest.mark.parametrize("name", SUPPORTED)
def test_learns(name):
    x, y_N = make_set()
    state, rows = torch.get_rng_state(), []
    method = fit(name, x, y_N, epochs=20, log_epoch=rows.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert not method.training
    x_test, y_test = make_set((10,) * 4, views=1, seed=1)
    with torch.no_grad():
        accuracy = (method(x_test[0]).argmax(1) == y_test).double().mean()
    assert accuracy > 0.9
    assert len(rows) == (0 if name in ("ncm", "logistic-regression") else 40 if name in ("lws", "mislas") else 20)
    assert not rows or rows[-1]["loss"] < rows[0]["loss"] or name == "mislas"


@pytest.mark.parametrize("name", SUPPORTED)
def test_is_a_function_of_the_seed(name):
    x, y_N = make_set((8, 4))
    one, again, other = (weights(fit(name, x, y_N, classes=2, seed=seed, epochs=1)) for seed in (0, 0, 1))
    assert all(torch.equal(again[k], v) for k, v in one.items())
    is_deterministic = name in ("ncm", "logistic-regression")
    assert is_deterministic or any(not torch.equal(other[k], v) for k, v in one.items())


# Cosines depend on the shift, and the regularization of scikit-learn's regression on the scale.
@pytest.mark.parametrize("name", [name for name in LINEAR if name not in ("ncm", "logistic-regression")])
def test_shift_and_scale_of_features_do_not_matter(name):
    x, y_N = make_set()
    one, other = fit(name, x, y_N, epochs=2), fit(name, 7 * x - 3, y_N, epochs=2)
    torch.testing.assert_close(other(7 * x[0] - 3), one(x[0]))


def test_scaling_is_folded_exactly():
    x_NF = make_set()[0][0]
    for center in (True, False):
        scaling = Scaling.of(x_NF, center)
        scaled_NF = scaling.apply(x_NF)
        torch.testing.assert_close(scaled_NF.square().mean(), torch.ones((), dtype=x_NF.dtype))
        assert not center or scaled_NF.mean(0).abs().max() < 1e-12
        head = torch.nn.Linear(12, 4, bias=center, dtype=torch.float64)
        before = head(scaled_NF)
        scaling.fold_into(head)
        torch.testing.assert_close(head(x_NF), before)
    constant = Scaling.of(torch.ones(5, 3), center=True)
    assert constant.scale == 1 and not constant.apply(torch.ones(5, 3)).any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["ce", "balanced-softmax", "logit-adjustment"])
def test_is_gradient_descent(name, weighted):
    """Compare with a loop in plain torch: the whole set is one batch, and SGD has no momentum."""
    x, y_N = make_set(views=1)
    weight_N = torch.rand(len(y_N), generator=torch.Generator().manual_seed(2)).double() if weighted else None
    config = head_config(name, len(y_N), epochs=5, batch_size=1000, weight_decay=0.01)
    config = replace(config, optim=replace(config.optim, momentum=0, schedule="constant"))
    start = fit_head(x, y_N, replace(config, optim=replace(config.optim, lr=1e-30)), 4, weight_N=weight_N)
    method = fit_head(x, y_N, config, 4, weight_N=weight_N)

    w_N = torch.ones(len(y_N), dtype=torch.float64) if weight_N is None else weight_N
    w_N = w_N / w_N.sum()
    mean_F = w_N @ x[0]
    scale = (w_N @ (x[0] - mean_F) ** 2).mean().sqrt()
    scaled_NF = (x[0] - mean_F) / scale
    W_CF = start.linear.weight.detach() * scale
    b_C = start.linear.bias.detach() + start.linear.weight.detach() @ mean_F
    share_C = torch.zeros(4, dtype=torch.float64).index_add(0, y_N, w_N)
    log_q_C = 0 if name == "ce" else share_C.log()
    for _ in range(5):
        p_NC = (scaled_NF @ W_CF.T + b_C + log_q_C).softmax(1) - F.one_hot(y_N, 4)
        gradients = (w_N[:, None] * p_NC).T @ scaled_NF, w_N @ p_NC
        W_CF, b_C = (v - 0.1 * (g + 0.01 * v) for v, g in zip((W_CF, b_C), gradients, strict=True))
    tight = {"rtol": 1e-5, "atol": 1e-6}  # the prior is stored in float32
    torch.testing.assert_close(method.linear.weight.detach(), W_CF / scale, **tight)
    torch.testing.assert_close(method(x[0]).detach(), scaled_NF @ W_CF.T + b_C, **tight)


@pytest.mark.parametrize("name", [n for n in WEIGHTED if n not in ("crt", "lws")])  # those draw images at random
def test_weights_are_repetitions(name):
    x, y_N = make_set((6, 4, 3, 2), views=1)
    repeats_N = torch.arange(len(y_N)) % 3 + 1
    config = config_for(name, images=100)
    one = fit_head(x, y_N, replace(config, train=replace(config.train, batch_size=100)), 4, weight_N=repeats_N.double())
    other = fit_head(
        x.repeat_interleave(repeats_N, 1),
        y_N.repeat_interleave(repeats_N),
        replace(config, train=replace(config.train, batch_size=100)),
        4,
    )
    torch.testing.assert_close(one(x[0]), other(x[0]))
    torch.testing.assert_close(one.prior(), other.prior())


@pytest.mark.parametrize("name", [*WEIGHTED, "mislas"])
def test_equal_weights_change_no_loss(name):
    x, y_N = make_set()
    method = fit(name, x, y_N, epochs=2)
    plain = method.loss(Batch(x[0], x[1], y_N))["loss"]
    weighted = method.loss(Batch(x[0], x[1], y_N, weight_B=torch.full((len(y_N),), 0.3).double()))["loss"]
    torch.testing.assert_close(weighted, plain)


def test_class_means_are_weighted():
    x, y_N = make_set((3, 2, 0, 1))
    weight_N = torch.rand(6, generator=torch.Generator().manual_seed(0)).double()
    mean_CF = class_means(x[0], y_N, 4, weight_N)
    for c in (0, 1, 3):
        w = weight_N[y_N == c]
        torch.testing.assert_close(mean_CF[c], w @ x[0][y_N == c] / w.sum())
    assert not mean_CF[2].any()


@pytest.mark.parametrize("name", LINEAR)
def test_a_class_without_images_is_never_predicted(name):
    x, y_N = make_set((20, 10, 0, 0, 5))
    method = fit(name, x, y_N, classes=6, epochs=2)  # the last class is beyond all labels
    far = 100 * torch.randn(500, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits = method(torch.cat([x[0], far]))
    assert logits.isfinite().all()
    assert set(logits.argmax(1).tolist()) <= {0, 1, 4}
    assert method.prior()[[2, 3, 5]].eq(0).all()


def test_precision_is_that_of_the_features():
    x, y_N = make_set()
    for dtype in (torch.float32, torch.float64):
        assert fit("paco", x.to(dtype), y_N, epochs=1).linear.weight.dtype == dtype


def test_validation_features_choose_the_power_of_tau_norm():
    x, y_N = make_set()
    config = head_config("tau-norm", len(y_N), epochs=20, batch_size=32)
    with raises("too-few-data"):
        fit_head(x, y_N, config, 4)
    method = fit_head(x, y_N, config, 4, val=(x[1], y_N))
    assert (method(x[1]).argmax(1) == y_N).double().mean() > 0.9


def test_stages_for_the_backbone_are_left_out():
    rows = []
    fit("crt", epochs=3, log_epoch=rows.append)
    assert [row["stage"] for row in rows] == ["linear"] * 3


@pytest.mark.parametrize("name", ["bbn", "ride-2", "oltr", "reslt"])
def test_methods_that_change_the_backbone_are_refused(name):
    with raises("unsupported"):
        fit(name)


@pytest.mark.parametrize("name", ["paco", "supcon", "mislas"])
def test_weights_are_refused_where_the_loss_has_none(name):
    x, y_N = make_set()
    with raises("unsupported"):
        fit(name, x, y_N, weight_N=torch.ones(len(y_N)).double())


def test_a_loss_that_is_not_finite_is_an_error():
    x, y_N = make_set()
    x[:, 3] = torch.nan
    with raises("non-finite", 1, error=RunError):
        fit("ce", x, y_N)


def test_few_images_are_one_batch():
    x, y_N = make_set((2, 1), views=1)
    for name in ("balanced-softmax", "paco"):
        rows = []
        fit_head(x, y_N, head_config(name, 3, epochs=2), 2, log_epoch=rows.append)
        assert len(rows) == 2


def test_stage_data_has_no_weights_by_default():
    assert StageData(lambda: None, None, torch.Generator()).weight_N is None
