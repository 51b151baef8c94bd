"""Class-balanced logistic regression on standardized features, by scikit-learn. C classes, F features, N images."""

import torch
from torch import Tensor

ONE_THREAD_PRODUCTS = 2**27
"""The largest number of products of a pass over the images for which the threads of a regression wait longer than they work."""


def fit_logistic_regression(
    x_NF: Tensor,
    y_N: Tensor,
    classes: int,
    C: float = 1.0,
    weight_N: Tensor | None = None,
    has_bias: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the weights (C, F) and biases (C,) of a class-balanced logistic regression, for the features as they are.

    The features are standardized for the regression, which then needs fewer iterations. A class without images is never
    predicted.

    Args:
        x_NF: The features.
        y_N: The labels.
        classes: The number of classes.
        C: The inverse strength of the regularization, as in scikit-learn.
        weight_N: The weight of each image; None for equal weights.
        has_bias: Whether there are biases. Otherwise features are only divided by their standard deviations.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits  # scikit-learn requires it

    present = y_N.unique()
    weight_CF = x_NF.new_zeros(classes, x_NF.shape[1])
    bias_C = x_NF.new_full((classes,), torch.finfo(torch.float32).min)
    if len(present) == 1:
        bias_C[present] = 0.0
        return weight_CF, bias_C
    features, weights = x_NF.cpu().numpy(), None if weight_N is None else weight_N.cpu().numpy()
    scaler = StandardScaler(with_mean=has_bias).fit(features, sample_weight=weights)
    regression = LogisticRegression(C=C, class_weight="balanced", max_iter=1000, fit_intercept=has_bias)
    with threadpool_limits(1 if x_NF.numel() * classes <= ONE_THREAD_PRODUCTS else None):
        fitted = regression.fit(scaler.transform(features), y_N.cpu().numpy(), weights)
    coef_KF = fitted.coef_ / scaler.scale_
    intercept_K = fitted.intercept_ - (coef_KF @ scaler.mean_ if has_bias else 0)
    weight, bias = torch.from_numpy(coef_KF).to(x_NF), torch.from_numpy(intercept_K).to(x_NF)
    if len(present) == 2:  # scikit-learn has one row, for the second class
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    weight_CF[present], bias_C[present] = weight, bias
    return weight_CF, bias_C
