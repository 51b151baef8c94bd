"""Methods with a second stage for the classifier: decoupling (Kang et al., 2020) and MiSLAS (Zhong et al., 2021)."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.deprecated import find_renamed
from longtail.errors import UserError
from longtail.losses import cross_entropy_loss, label_aware_smoothing, label_aware_smoothing_loss
from longtail.methods.base import Stage, StageData, uniform_prior
from longtail.methods.softmax import CrossEntropy, Softmax
from longtail.models.head_init import class_means
from longtail.models.heads import Classifier, ScaledHead, make_linear_head

__getattr__ = find_renamed(__name__, {"redraw": "reset_head"})

TAU_CANDIDATES = [p / 10 for p in range(21)]
"""The powers among which tau-normalization chooses."""


class CRT(CrossEntropy, settings="crt"):
    """Classifier re-training (cRT): a new linear classifier on the frozen backbone, with class-balanced sampling."""

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), linear_stage(config, sampler="balanced", replaces_head=True)

    def on_stage_start(self, start: StageData) -> None:
        if self.stage.frozen:
            reset_head(self.linear, start.rng)


class LWS(CrossEntropy, settings="lws"):
    """Learnable weight scaling (LWS): a factor for each class on the frozen network, with class-balanced sampling."""

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), linear_stage(config, sampler="balanced")

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return ScaledHead(width, classes, config.model.bias)

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        for name, parameter in self.net.head.named_parameters():
            parameter.requires_grad_((name == "scale_C") == stage.frozen)


class TauNorm(CrossEntropy, settings="tau-norm"):
    """Tau-normalization: weights w_c / |w_c|^tau without bias. Nothing is trained; tau is chosen on the validation split."""

    config: cfg.TauNormSettings

    def check(self, validated: bool) -> None:
        if self.config.power is None and not validated:
            advice = "split off validation images with --data.val_fraction 0.2, or set --method.power"
            raise UserError(
                f"tau-norm chooses its power on the validation split, which is empty: {advice}", kind="too-few-data"
            )

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), Stage("normalize", 0, config.optim)

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name != "normalize":
            return
        power = self.config.power if self.config.power is not None else self.best_power(start)
        self.linear.weight.copy_(tau_normalize(self.linear.weight, power))
        if self.linear.bias is not None:
            self.linear.bias.zero_()

    def prior(self) -> Tensor:
        """Return uniform frequencies, which the normalization aims at; no loss implies them."""
        return uniform_prior(super().prior())

    def best_power(self, start: StageData) -> float:
        """Return the power with the best mean accuracy of the classes; the smallest of several."""
        assert start.val is not None  # `check` has made sure of it
        x_NF, y_N = start.val()
        scores = [mean_class_accuracy(x_NF @ tau_normalize(self.linear.weight, p).T, y_N) for p in TAU_CANDIDATES]
        return TAU_CANDIDATES[int(torch.stack(scores).argmax())]


class NCM(CrossEntropy, settings="ncm"):
    """The nearest class mean of the features of the training images, as a linear classifier."""

    config: cfg.NCMSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), Stage("means", 0, config.optim, replaces_head=True)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return make_linear_head(width, classes)

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name != "means":
            return
        mean_CF = class_means(*start.train(), len(self.log_prior_C), start.weight_N)
        if self.config.distance == "cosine":  # the length of x is the same for all classes
            mean_CF = F.normalize(mean_CF)
        self.linear.weight.copy_(mean_CF)  # |x - m|² is smallest where m·x - |m|²/2 is largest
        known_C = self.log_prior_C.isfinite()  # a class without training images is never predicted
        self.linear.bias.copy_(torch.where(known_C, -(mean_CF**2).sum(1) / 2, torch.finfo(torch.float32).min))

    def prior(self) -> Tensor:
        """Return uniform frequencies: distances do not depend on frequencies."""
        return uniform_prior(super().prior())


class MiSLAS(Softmax, settings="mislas"):
    """MiSLAS: mixup in the first stage; label-aware smoothing, shifted batch norm and LWS in the second."""

    config: cfg.MiSLASSettings
    smooth_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c = self.config
        smooth_C = label_aware_smoothing(counts_C, c.smooth_head, c.smooth_tail)
        self.register_buffer("smooth_C", smooth_C, persistent=False)

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        second = linear_stage(config, sampler="balanced", shift_norm=True)
        return self.first_stage(config, mixup=self.config.mixup), second

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return ScaledHead(width, classes, config.model.bias)

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        self.net.get_parameter("head.scale_C").requires_grad_(stage.frozen)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; in the second stage the classifier has a lower rate than the factors of the classes."""
        if not self.stage.frozen:
            return super().param_groups()
        head = dict(self.net.head.named_parameters())
        scale = head.pop("scale_C")
        return [{"params": list(head.values()), "lr_scale": self.config.classifier_lr}, {"params": [scale]}]

    def objective(self, logits_BC: Tensor, y_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        if self.stage.frozen:
            return label_aware_smoothing_loss(logits_BC, y_B, self.smooth_C, weight_B)
        return cross_entropy_loss(logits_BC, y_B, weight_B=weight_B)


def second_stage(config: cfg.Config, name: str, rate_field: str, decay: float | None = None, **changes: Any) -> Stage:
    """Return a second stage with SGD and a cosine schedule. The method's settings have its rate and length.

    Args:
        config: The configuration of the run.
        name: The name of the stage.
        rate_field: The setting of the method that has the learning rate.
        decay: The weight decay; None for that of the first stage.
        changes: Other fields of the stage.
    """
    c, weight_decay = config.method, config.optim.weight_decay if decay is None else decay
    optim = replace(
        config.optim,
        name="sgd",
        lr=getattr(c, rate_field),
        head_lr=1,
        layer_decay=1,
        schedule="cosine",
        warmup_epochs=0,
        weight_decay=weight_decay,
    )
    return Stage(name, c.second_epochs, optim, lr_flag=f"--method.{rate_field}", **changes)


def linear_stage(config: cfg.Config, **changes: Any) -> Stage:
    """Return a second stage that trains the head on the frozen backbone, with a step schedule if the method has milestones."""
    assert isinstance(config.method, cfg.LinearStageSettings)
    stage = second_stage(config, "linear", "linear_lr", config.method.linear_decay, frozen=True, **changes)
    if not config.method.linear_milestones:
        return stage
    return replace(
        stage, optim=replace(stage.optim, schedule="step", milestones=config.method.linear_milestones, gamma=0.1)
    )


def reset_head(head: nn.Linear, rng: torch.Generator) -> None:
    """Initialize a head again. Weights are drawn on the CPU, so that they are the same on all devices."""
    fresh = nn.init.kaiming_normal_(torch.empty(head.weight.shape), generator=rng)
    with torch.no_grad():
        head.weight.copy_(fresh)
        if head.bias is not None:
            head.bias.zero_()


def tau_normalize(weight_CF: Tensor, power: float) -> Tensor:
    """Return the weights of each class divided by a power of their norm."""
    return weight_CF / weight_CF.norm(dim=1, keepdim=True).clamp(min=1e-12) ** power


def mean_class_accuracy(logits_NC: Tensor, y_N: Tensor) -> Tensor:
    """Return the mean of the accuracies of all classes that occur."""
    right_N = (logits_NC.argmax(1) == y_N).float()
    return class_means(right_N[:, None], y_N, logits_NC.shape[1]).sum() / len(y_N.unique())
