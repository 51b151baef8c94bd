"""Methods with one loss on the logits: cross-entropy, Balanced Softmax, logit adjustment, focal, CB-Focal, LDAM."""

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
from longtail.methods.base import Batch, Method, Stage, StageData, accuracy, reweight_frequencies
from longtail.models.heads import Classifier, CosineHead, make_linear_head


class Softmax(Method):
    """A method with a loss on the logits, which subclasses define as `objective`. Mixup mixes it like the images."""

    can_weight_images = True

    def loss_from_features(
        self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor, weight_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        loss = self.objective(logits_BC, y_B) if weight_B is None else self.objective(logits_BC, y_B, weight_B)
        if mixed:
            other_B, share = mixed
            loss = share * loss + (1 - share) * self.objective(logits_BC, other_B)
        return {"loss": loss, "accuracy": accuracy(logits_BC, y_B)}

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Return the loss of logits.

        Args:
            logits_BC: The logits.
            y_B: The labels.
            weight_B: The weight of each image; None for equal weights. A method without it cannot weight images.
        """
        raise NotImplementedError


class ShiftedSoftmax(Softmax):
    """Cross-entropy of the logits plus a `shift` for each class. It is computed in chunks if there are very many classes."""

    def shift(self) -> Tensor | None:
        """Return the numbers that the loss adds to the logits of each class; None for nothing."""
        return None

    def prior(self) -> Tensor:
        shift_C = self.shift()
        return super().prior() if shift_C is None else self.prior_after(shift_C)

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        shift_C = self.shift()
        if shift_C is None:
            return cross_entropy_loss(logits_BC, y_B, weight_B=weight_B)
        return balanced_softmax_loss(logits_BC, y_B, shift_C, weight_B)

    def loss_from_features(
        self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor, weight_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        if mixed or not isinstance(self.config, cfg.ChunkedSettings):
            return super().loss_from_features(x_BF, y_B, *mixed, weight_B=weight_B)
        return softmax_objective(x_BF, y_B, self.linear, self.shift(), self.config.chunk, weight_B)


class CrossEntropy(ShiftedSoftmax, settings="ce"):
    """Cross-entropy without a shift."""


class BalancedSoftmax(ShiftedSoftmax, settings="balanced-softmax"):
    """Balanced Softmax (Ren et al., 2020): the logits are shifted by the log class frequencies, log q(y)."""

    config: cfg.BalancedSoftmaxSettings

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        if not batch.extra:
            return super().loss(batch)
        weights = {} if batch.weight_B is None else {"weight_B": batch.weight_B.repeat(batch.views)}
        return self.loss_from_features(self.features(batch.all_views()), batch.all_labels(), **weights)

    def loss_from_features(
        self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor, weight_B: Tensor | None = None
    ) -> dict[str, Tensor]:
        terms = super().loss_from_features(x_BF, y_B, *mixed, weight_B=weight_B)
        if not self.config.consistency:
            return terms
        return self.with_consistency(terms, self.classify(x_BF), self.log_prior_C)

    def shift(self) -> Tensor | None:
        return self.log_prior_C


class LogitAdjustment(ShiftedSoftmax, settings="logit-adjustment"):
    """Logit adjustment (Menon et al., 2021) in the loss, or post hoc in the bias of the trained classifier."""

    config: cfg.LogitAdjustmentSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        adjust = Stage("adjust", 0, config.optim)
        return (self.first_stage(config), adjust) if self.config.post_hoc else (self.first_stage(config),)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.LogitAdjustmentSettings)
        return make_linear_head(width, classes, config.model.bias or config.method.post_hoc)

    def shift(self) -> Tensor | None:
        return None if self.config.post_hoc else self.adjustment()

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name == "adjust":
            self.linear.bias.sub_(self.adjustment())

    def prior(self) -> Tensor:
        """Return the frequencies after the adjustment, which are the same for both variants."""
        return self.prior_after(self.adjustment())

    def adjustment(self) -> Tensor:
        """Return strength · log q(y); 0 for classes without training images."""
        return torch.where(self.log_prior_C.isfinite(), self.config.strength * self.log_prior_C, 0.0)


class DeferredReweighting(Softmax):
    """A softmax method with deferred re-weighting (DRW): classes are weighted from some epoch on."""

    config: cfg.DeferredSettings
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
        """Return the frequencies times the weights: a weight has the effect of so many more images."""
        return (
            reweight_frequencies(super().prior(), self.late_weight_C) if self.config.drw_from < 1 else super().prior()
        )

    def is_late(self, epoch: int, epochs: int) -> bool:
        """Return whether classes are weighted in an epoch."""
        return epoch >= self.config.drw_from * epochs - 1e-6  # in floating point 0.55 · 100 is more than 55


class Focal(DeferredReweighting, settings="focal"):
    """Focal loss (Lin et al., 2017) on softmax probabilities, optionally with deferred re-weighting."""

    config: cfg.FocalSettings

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        return focal_loss(logits_BC, y_B, self.config.gamma, self.weight_C, weight_B)


class LDAM(DeferredReweighting, settings="ldam"):
    """LDAM (Cao et al., 2019): a cosine classifier with larger margins for rare classes, optionally re-weighted late."""

    config: cfg.LDAMSettings
    margin_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("margin_C", ldam_margins(counts_C, self.config.margin), persistent=False)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        assert isinstance(config.method, cfg.LDAMSettings)
        return CosineHead(width, classes, config.method.scale)

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        scale = self.config.scale
        return ldam_loss(logits_BC / scale, y_B, self.margin_C, scale, self.weight_C, weight_B)


class ClassBalancedFocal(Softmax, settings="cb-focal"):
    """Class-balanced focal loss (Cui et al., 2019): a sigmoid for each class. The bias has no weight decay."""

    config: cfg.ClassBalancedFocalSettings
    weight_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("weight_C", effective_number_weights(counts_C, self.config.beta), persistent=False)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        head = make_linear_head(width, classes)
        nn.init.constant_(head.bias, -math.log(max(classes - 1, 1)))
        return head

    def param_groups(self) -> list[dict[str, Any]]:
        bias = self.net.get_parameter("head.bias")
        rest = [p for p in self.parameters() if p.requires_grad and p is not bias]
        return [{"params": rest}, {"params": [bias], "weight_decay": 0.0}]

    def prior(self) -> Tensor:
        return reweight_frequencies(super().prior(), self.weight_C)

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        return class_balanced_focal_loss(logits_BC, y_B, self.weight_C, self.config.gamma, weight_B)
