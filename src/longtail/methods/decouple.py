"""Decoupling (Kang et al., 2020): a trunk learned by cross-entropy, then a classifier that class sizes did not form."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail.errors import UserError
from longtail.methods.base import Stage, StageData, uniform_prior
from longtail.methods.softmax import CrossEntropy
from longtail.methods.stages import linear_stage
from longtail.models.heads import ScaledHead, linear_head

POWERS = [p / 10 for p in range(21)]


class CRT(CrossEntropy, settings="crt"):
    """Classifier re-training: a new linear classifier on the frozen trunk, its images drawn class-balanced."""

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), linear_stage(config, sampler="balanced")

    def on_stage_start(self, start: StageData) -> None:
        if self.stage.frozen:
            reset_head(self.linear, start.rng)


class LWS(CrossEntropy, settings="lws"):
    """Learnable weight scaling: a factor per class on the frozen network, images drawn class-balanced."""

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
    """w_c / |w_c|^tau, without bias: nothing is trained, tau is chosen on the validation split."""

    config: cfg.TauNorm

    def check(self, validated: bool) -> None:
        if self.config.power is None and not validated:
            advice = "hold images out with --data.val_fraction 0.2 (classes of five give one), or give --method.power"
            raise UserError(
                f"tau-norm chooses its power on a validation split, which is empty: {advice}", kind="too-few-data"
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
        """What rows of one length aim at; no loss implies it."""
        return uniform_prior(super().prior())

    def best_power(self, start: StageData) -> float:
        """By the mean over classes of their accuracy; of equals the smallest."""
        assert start.val is not None  # or `check` would have said so
        x_NF, y_N = start.val()
        scores = [mean_class_accuracy(x_NF @ tau_normalize(self.linear.weight, p).T, y_N) for p in POWERS]
        return POWERS[int(torch.stack(scores).argmax())]


class NCM(CrossEntropy, settings="ncm"):
    """The nearest class mean of the training images' features; it is a linear classifier too."""

    config: cfg.NCM

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config), Stage("means", 0, config.optim)

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return linear_head(width, classes)

    @torch.no_grad()
    def on_stage_start(self, start: StageData) -> None:
        if self.stage.name != "means":
            return
        mean_CF = class_means(*start.train(), len(self.log_prior_C))
        if self.config.distance == "cosine":  # the length of x is the same for all classes
            mean_CF = F.normalize(mean_CF)
        self.linear.weight.copy_(mean_CF)  # |x - m|² is smallest where m·x - |m|²/2 is largest
        known_C = self.log_prior_C.isfinite()  # a class without training images is nobody's nearest
        self.linear.bias.copy_(torch.where(known_C, -(mean_CF**2).sum(1) / 2, torch.finfo(torch.float32).min))

    def prior(self) -> Tensor:
        """A distance knows no frequencies."""
        return uniform_prior(super().prior())


def reset_head(head: nn.Linear, rng: torch.Generator) -> None:
    """New weights, as a fresh head has them, and no bias; drawn on the CPU, so that all devices agree."""
    fresh = nn.init.kaiming_normal_(torch.empty(head.weight.shape), generator=rng)
    with torch.no_grad():
        head.weight.copy_(fresh)
        if head.bias is not None:
            head.bias.zero_()


def tau_normalize(weight_CF: Tensor, power: float) -> Tensor:
    return weight_CF / weight_CF.norm(dim=1, keepdim=True).clamp(min=1e-12) ** power


def class_means(x_NF: Tensor, y_N: Tensor, classes: int) -> Tensor:
    """Of each class's features; zero for one without images.

    Summed class after class, in the order of the images: that of `index_add_` on CUDA changes from run to run.
    """
    n_C = torch.bincount(y_N, minlength=classes)
    sums_CF = torch.segment_reduce(x_NF[y_N.argsort(stable=True)], "sum", lengths=n_C, initial=0)
    return sums_CF / n_C.clamp(min=1)[:, None]


def mean_class_accuracy(logits_NC: Tensor, y_N: Tensor) -> Tensor:
    """Mean over the classes that are there of the share of images recognized."""
    right_N = (logits_NC.argmax(1) == y_N).float()
    return class_means(right_N[:, None], y_N, logits_NC.shape[1]).sum() / len(y_N.unique())
