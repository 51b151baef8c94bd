"""Logistic regression on features, the baseline that anyone would try first. C classes, F features, N images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.methods.base import Stage, StageData, uniform_prior
from longtail.methods.softmax import CrossEntropy

if TYPE_CHECKING:
    from longtail import config as cfg


ONE_THREAD_PRODUCTS = 2**27
"""The largest number of products of a pass over the images for which the threads of a regression wait longer than they work."""


class LogisticRegression(CrossEntropy, settings="logistic-regression"):
    """Class-balanced logistic regression of scikit-learn on the features of the plain training images, as a linear head."""

    config: cfg.LogisticRegressionSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), Stage("regression", 0, config.optim, replaces_head=True)

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name != "regression":
            return
        x_NF, y_N = start.train()
        weight_CF, bias_C = fit_logistic_regression(x_NF, y_N, len(self.log_prior_C), self.config.C, start.weight_N)
        if self.linear.bias is None:
            bias_C.zero_()
        else:
            self.linear.bias.copy_(bias_C)
        self.linear.weight.copy_(weight_CF)

    def prior(self) -> Tensor:
        """Return uniform frequencies: all classes have the same weight in the regression."""
        return uniform_prior(super().prior())


def fit_logistic_regression(
    x_NF: Tensor, y_N: Tensor, classes: int, C: float = 1.0, weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights (C, F) and biases (C,) of a class-balanced logistic regression.

    A class without images is never predicted.

    Args:
        x_NF: The features.
        y_N: The labels.
        classes: The number of classes.
        C: The inverse strength of the regularization, as in scikit-learn.
        weight_N: The weight of each image; None for equal weights.
    """
    from sklearn.linear_model import LogisticRegression as Regression
    from threadpoolctl import threadpool_limits  # scikit-learn requires it

    present = y_N.unique()
    weight_CF = x_NF.new_zeros(classes, x_NF.shape[1])
    bias_C = x_NF.new_full((classes,), torch.finfo(torch.float32).min)
    if len(present) == 1:
        bias_C[present] = 0.0
        return weight_CF, bias_C
    regression = Regression(C=C, class_weight="balanced", max_iter=1000)
    weights = None if weight_N is None else weight_N.cpu().numpy()
    with threadpool_limits(1 if x_NF.numel() * classes <= ONE_THREAD_PRODUCTS else None):
        fitted = regression.fit(x_NF.cpu().numpy(), y_N.cpu().numpy(), weights)
    weight, bias = torch.from_numpy(fitted.coef_).to(x_NF), torch.from_numpy(fitted.intercept_).to(x_NF)
    if len(present) == 2:  # scikit-learn has one row, for the second class
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    weight_CF[present], bias_C[present] = weight, bias
    return weight_CF, bias_C
