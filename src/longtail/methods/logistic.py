"""Logistic regression on features, the baseline that anyone would try first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtail.methods.base import Stage, StageData, uniform_prior
from longtail.methods.softmax import CrossEntropy
from longtail.models.logistic import fit_logistic_regression

if TYPE_CHECKING:
    from longtail import config as cfg


class LogisticRegression(CrossEntropy, settings="logistic-regression"):
    """Class-balanced logistic regression on the standardized features of the plain training images, as a linear head."""

    config: cfg.LogisticRegressionSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), Stage("regression", 0, config.optim, replaces_head=True)

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name != "regression":
            return
        (x_NF, y_N), has_bias = start.train(), self.linear.bias is not None
        weight_CF, bias_C = fit_logistic_regression(
            x_NF, y_N, len(self.log_prior_C), self.config.C, start.weight_N, has_bias
        )
        self.linear.weight.copy_(weight_CF)
        if has_bias:
            self.linear.bias.copy_(bias_C)

    def prior(self) -> Tensor:
        """Return uniform frequencies: all classes have the same weight in the regression."""
        return uniform_prior(super().prior())
