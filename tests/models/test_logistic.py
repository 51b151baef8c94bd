"""Test the logistic regression against the pipeline of scikit-learn that a user would write."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from longtail.models.logistic import fit_logistic_regression


def features(classes: int, n: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features with very different scales, and labels of classes with very different sizes."""
    rng = torch.Generator().manual_seed(classes)
    y_N = (classes * torch.rand(n, generator=rng, dtype=torch.float64) ** 2).long()
    x_NF = torch.randn(n, 5, generator=rng, dtype=torch.float64) + y_N[:, None]
    return x_NF * torch.tensor([1e-3, 1.0, 30.0, 1.0, 2.0]) + torch.tensor([0.0, 5.0, -100.0, 0.0, 1.0]), y_N


@pytest.mark.parametrize("C", [1.0, 0.01])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("classes", [2, 4])
def test_is_the_pipeline_of_scikit_learn(classes, has_bias, C):
    x_NF, y_N = features(classes)
    model = LogisticRegression(C=C, class_weight="balanced", max_iter=1000, fit_intercept=has_bias)
    wanted = make_pipeline(StandardScaler(with_mean=has_bias), model).fit(x_NF.numpy(), y_N.numpy())
    weight_CF, bias_C = fit_logistic_regression(x_NF, y_N, classes, C, has_bias=has_bias)
    found = (x_NF @ weight_CF.T + bias_C).softmax(1)
    np.testing.assert_allclose(found, wanted.predict_proba(x_NF.numpy()), atol=1e-6)
    assert has_bias or not bias_C.any()


def test_weights_count_images_several_times():
    x_NF, y_N = features(3)
    weight_N = torch.randint(1, 4, (len(y_N),), generator=torch.Generator().manual_seed(0))
    one = fit_logistic_regression(x_NF, y_N, 3, weight_N=weight_N.double())
    other = fit_logistic_regression(x_NF.repeat_interleave(weight_N, 0), y_N.repeat_interleave(weight_N), 3)
    logits = [x_NF @ weight_CF.T + bias_C for weight_CF, bias_C in (one, other)]
    # class_weight="balanced" uses the number of images without weights, so only the order of the logits is compared
    assert (logits[0].argmax(1) == logits[1].argmax(1)).float().mean() > 0.9


def test_constant_features_and_absent_classes():
    x_NF, y_N = features(3)
    x_NF[:, 1] = 7.0
    weight_CF, bias_C = fit_logistic_regression(x_NF, y_N, 5)
    assert weight_CF.isfinite().all() and bias_C.isfinite().all()
    predicted = (x_NF @ weight_CF.T + bias_C).argmax(1)
    assert (predicted < 3).all() and (predicted == y_N).double().mean() > 0.6


def test_a_single_class_is_always_predicted():
    x_NF, _ = features(3)
    weight_CF, bias_C = fit_logistic_regression(x_NF, torch.full((len(x_NF),), 2), 4)
    assert ((x_NF @ weight_CF.T + bias_C).argmax(1) == 2).all()
