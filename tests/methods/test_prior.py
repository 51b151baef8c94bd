"""The class frequencies that the logits of a method assume, by minimizing its loss for a known distribution.

X kinds of image, C classes; p(x|y) is a table, and the network is free to give any logits to any kind.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from longtail import config as cfg
from longtail import methods, recipes
from longtail.data.samplers import class_shares
from tests.conftest import tiny

COUNTS = torch.tensor([200, 60, 20, 5])
LIKELIHOOD_CX = torch.tensor(
    [[0.5, 0.2, 0.2, 0.1, 0.0], [0.2, 0.4, 0.2, 0.1, 0.1], [0.1, 0.2, 0.3, 0.2, 0.2], [0.1, 0.1, 0.1, 0.3, 0.4]]
).double()


def made(settings: cfg.MethodConfig, **train) -> methods.Method:
    config = replace(tiny("ce", **train), method=settings)
    return methods.make(config, COUNTS.numpy())


def learned(method: methods.Method, drawn_C: torch.Tensor) -> torch.Tensor:
    """Return the logits (X, C) that minimize the loss of a batch with the given class frequencies."""
    often_CX = (20_000 * drawn_C[:, None] * LIKELIHOOD_CX).round().long()
    y_B, x_B = (axis.flatten().repeat_interleave(often_CX.flatten()) for axis in torch.where(often_CX >= 0))
    logits_XC = torch.zeros(*often_CX.T.shape, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([logits_XC], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        descent.zero_grad()
        total = method.objective(logits_XC[x_B], y_B)
        total.backward()
        return total

    descent.step(loss)
    return logits_XC.detach()


@pytest.mark.parametrize(
    ("settings", "train"),
    [
        (cfg.CrossEntropySettings(), {}),
        (cfg.CrossEntropySettings(), {"sampler": "balanced"}),
        (cfg.CrossEntropySettings(), {"sampler": "sqrt"}),
        (cfg.BalancedSoftmaxSettings(), {}),
        (cfg.BalancedSoftmaxSettings(), {"sampler": "sqrt"}),
        (cfg.LogitAdjustmentSettings(strength=0.5), {}),
        (cfg.LogitAdjustmentSettings(strength=1.5), {"sampler": "reversed"}),
        (cfg.FocalSettings(gamma=0.0), {}),
        (cfg.FocalSettings(gamma=0.0, drw_from=0.5, drw_beta=0.99), {}),
        (cfg.LDAMSettings(margin=0.0, scale=1.0, drw_from=0.0, drw_beta=0.9), {}),
    ],
)
def test_the_least_loss_has_the_posterior_of_these_frequencies(settings, train):
    method = made(settings, **train)
    method.on_epoch_start(9, 10)  # late: class weights are in force
    logits_XC = learned(method, class_shares(method.stages[0].sampler, COUNTS))
    prior_C = method.prior()
    assert prior_C.sum() == pytest.approx(1) and prior_C.dtype == torch.float64
    joint_XC = (prior_C[:, None] * LIKELIHOOD_CX).T
    torch.testing.assert_close(logits_XC.softmax(1), joint_XC / joint_XC.sum(1, keepdim=True), atol=1e-3, rtol=0)


AS_TRAINED = ("ce", "focal", "supcon", "paco-no-rebalance", "ce-supcon", "ce-supcon-reweighted", "ce-supcon-balanced")
ALIKE = (
    *("balanced-softmax", "paco", "gpaco", "balanced-softmax-supcon", "crt", "lws", "mislas", "oltr"),
    *(
        "logit-adjustment",
        "logit-adjustment-post-hoc",
        "tau-norm",
        "ncm",
        "bbn",
        "causal-norm",
        "reslt",
        "bcl",
        "proco",
    ),
)
NEARLY_ALIKE = ("ldam-drw", "cb-focal", "ride-1", "ride-2", "ride-3", "ride-4")


def test_every_method_has_a_prior():
    """Methods that are in no list have tests of their own; here only the validity of their frequencies is checked."""
    uniform, trained = np.full(4, 0.25), (COUNTS / COUNTS.sum()).numpy()
    meant = {name: methods.make(tiny(name), COUNTS.numpy()).prior().numpy() for name in recipes.METHODS}
    for name, prior in meant.items():
        assert prior.shape == (4,) and (prior > 0).all() and prior.sum() == pytest.approx(1), name
    for name in AS_TRAINED:
        np.testing.assert_allclose(meant[name], trained, err_msg=name)
    for name in ALIKE:
        np.testing.assert_allclose(meant[name], uniform, err_msg=name)
    for name in NEARLY_ALIKE:  # weighted by the effective number of images
        np.testing.assert_allclose(meant[name], uniform, atol=0.01, err_msg=name)
        assert meant[name][0] > meant[name][-1] and not np.allclose(meant[name], uniform)


def test_deployed_network_keeps_its_logits_without_training_modules():
    method = methods.make(tiny("paco"), COUNTS.numpy()).eval()
    x = torch.rand(2, 3, 8, 8)
    before, every = method(x), sum(p.numel() for p in method.parameters())
    assert torch.equal(method.drop_training_modules()(x), before)
    left = sum(p.numel() for p in method.parameters())
    assert left == sum(p.numel() for p in method.net.parameters()) < every / 2
