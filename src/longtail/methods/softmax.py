"""One network, one view, one loss on its logits: cross-entropy, Balanced Softmax, logit adjustment, focal, CB-Focal, LDAM."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import (
    balanced_softmax_loss,
    class_balanced_focal_loss,
    cross_entropy_loss,
    effective_number_weights,
    focal_loss,
    ldam_loss,
    ldam_margins,
    softmax_objective,
)
from longtail.methods.base import Method, Stage, StageData, accuracy, reweighted
from longtail.models.heads import Classifier, CosineHead, linear_head


class Softmax(Method):
    """Subclasses give the `objective`; mixup mixes it as it mixed the images."""

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        loss = self.objective(logits_BC, y_B)
        if mixed:
            other_B, share = mixed
            loss = share * loss + (1 - share) * self.objective(logits_BC, other_B)
        return {"loss": loss, "accuracy": accuracy(logits_BC, y_B)}

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        raise NotImplementedError


class ShiftedSoftmax(Softmax):
    """Cross-entropy of the logits plus a `shift` of each class; in chunks where there are very many classes."""

    def shift(self) -> Tensor | None:
        """Return what the loss adds to the logits of each class; None for nothing."""
        return None

    def prior(self) -> Tensor:
        shift_C = self.shift()
        return super().prior() if shift_C is None else self.prior_after(shift_C)

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        shift_C = self.shift()
        if shift_C is None:
            return cross_entropy_loss(logits_BC, y_B)
        return balanced_softmax_loss(logits_BC, y_B, shift_C)

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        if mixed or not isinstance(self.config, cfg.Chunked):
            return super().loss_from_features(x_BF, y_B, *mixed)
        return softmax_objective(x_BF, y_B, self.linear, self.shift(), self.config.chunk)


class CrossEntropy(ShiftedSoftmax, settings="ce"):
    """Without a shift."""


class BalancedSoftmax(ShiftedSoftmax, settings="balanced-softmax"):
    def shift(self) -> Tensor | None:
        return self.log_prior_C


class LogitAdjustment(ShiftedSoftmax, settings="logit-adjustment"):
    """In the loss; or post hoc, in the classifier's bias once it has been learned."""

    config: cfg.LogitAdjustment

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        adjust = Stage("adjust", 0, config.optim)
        return (self.first_stage(config), adjust) if self.config.post_hoc else (self.first_stage(config),)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.LogitAdjustment)
        return linear_head(width, classes, config.model.bias or config.method.post_hoc)

    def shift(self) -> Tensor | None:
        return None if self.config.post_hoc else self.adjustment()

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name == "adjust":
            self.linear.bias.sub_(self.adjustment())

    def prior(self) -> Tensor:
        """Added in the loss or taken off afterwards, it is the same."""
        return self.prior_after(self.adjustment())

    def adjustment(self) -> Tensor:
        """strength · log q(y); nothing for a class without training images, of which nothing is known."""
        return torch.where(self.log_prior_C.isfinite(), self.config.strength * self.log_prior_C, 0.0)


class DeferredReweighting(Softmax):
    """A softmax method whose classes are weighted from some epoch on (DRW)."""

    config: cfg.Deferred
    weight_C: Tensor
    late_weight_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("weight_C", torch.ones(len(counts_C)), persistent=False)
        late_C = effective_number_weights(counts_C, self.config.drw_beta)
        self.register_buffer("late_weight_C", late_C, persistent=False)

    def on_epoch_start(self, epoch: int, epochs: int) -> None:
        late = self.is_late(epoch, epochs)
        self.weight_C.copy_(self.late_weight_C if late else torch.ones_like(self.weight_C))

    def prior(self) -> Tensor:
        """Classes that are weighted count as if they had so many more images."""
        return reweighted(super().prior(), self.late_weight_C) if self.config.drw_from < 1 else super().prior()

    def is_late(self, epoch: int, epochs: int) -> bool:
        return epoch >= self.config.drw_from * epochs - 1e-6  # 0.55 · 100 is a little more than 55


class Focal(DeferredReweighting, settings="focal"):
    config: cfg.Focal

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        return focal_loss(logits_BC, y_B, self.config.gamma, self.weight_C)


class LDAM(DeferredReweighting, settings="ldam"):
    config: cfg.LDAM
    margin_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("margin_C", ldam_margins(counts_C, self.config.margin), persistent=False)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.LDAM)
        return CosineHead(width, classes, config.method.scale)

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        scale = self.config.scale
        return ldam_loss(logits_BC / scale, y_B, self.margin_C, scale, self.weight_C)


class ClassBalancedFocal(Softmax, settings="cb-focal"):
    """A sigmoid per class, which the bias starts at 1/C; the bias is not decayed."""

    config: cfg.ClassBalancedFocal
    weight_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("weight_C", effective_number_weights(counts_C, self.config.beta), persistent=False)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        head = linear_head(width, classes)
        nn.init.constant_(head.bias, -math.log(max(classes - 1, 1)))
        return head

    def param_groups(self) -> list[dict[str, Any]]:
        bias = self.net.get_parameter("head.bias")
        rest = [p for p in self.parameters() if p.requires_grad and p is not bias]
        return [{"params": rest}, {"params": [bias], "weight_decay": 0.0}]

    def prior(self) -> Tensor:
        return reweighted(super().prior(), self.weight_C)

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        return class_balanced_focal_loss(logits_BC, y_B, self.weight_C, self.config.gamma)
