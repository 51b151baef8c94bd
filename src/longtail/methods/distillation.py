"""Distillation: finished networks teach another one, in the logit space in which the student will be read.

The teachers are not part of the method's modules, so that neither checkpoints nor model.safetensors contain them.

Shapes: V = views · B views of B images, K teachers, F features, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.losses.distillation import distillation_loss, log_mean_softmax
from longtail.losses.numerics import at_least_float32
from longtail.losses.softmax import balanced_softmax_loss
from longtail.methods.base import Batch, Method, Mixed, Stage, accuracy
from longtail.models.heads import Classifier

if TYPE_CHECKING:
    from longtail.config import Config, DistillationSettings


class Teacher(nn.Module):
    """A frozen network that maps the views of a student to the prior-adjusted logits a = t + log π.

    The logits z of a method assume the class frequencies q = `Method.prior()`, so that t = z - log q.

    Args:
        method: The method of the teacher, with its trained network.
        log_prior_C: The log class frequencies of the training images, log π.
        image_size: Height and width of the teacher's input; larger views are reduced.
        scale: Factor of each channel, from the normalization of the student to that of the teacher.
        shift: Summand of each channel.
    """

    log_shift_C: Tensor
    scale_C11: Tensor
    shift_C11: Tensor

    def __init__(self, method: Method, log_prior_C: Tensor, image_size: int, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.method, self.image_size = method.eval().requires_grad_(False), image_size
        log_q_C = method.prior().log().to(log_prior_C)
        self.register_buffer("log_shift_C", log_prior_C - log_q_C)
        self.register_buffer("scale_C11", scale)
        self.register_buffer("shift_C11", shift)
        self.is_normalized = bool((scale == 1).all() and (shift == 0).all())

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_normalized:
            x = x.float() * self.scale_C11 + self.shift_C11
        if x.shape[-1] != self.image_size:
            x = F.interpolate(x.float(), self.image_size, mode="bilinear", antialias=True)
        return at_least_float32(self.method(x)) + self.log_shift_C

    def extra_repr(self) -> str:
        """Return what determines the logits in addition to the layers: it is part of the key of stored logits."""
        return f"image_size={self.image_size}, {self.method.config}"


class Distillation(Method, settings="distillation"):
    """A linear classifier that is trained by distillation and by Balanced Softmax on the labels, on one or more views.

        loss = weight · distillation_loss(a, s + log π) + (1 - weight) · cross_entropy(s + log π, y)

    The loss of the labels of a mixture is the mean of the losses of both labels, weighted by their shares.
    """

    compiled_functions = ("loss_from_logits",)
    config: DistillationSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        super().__init__(net, counts_C, config)
        self.teachers: tuple[Teacher, ...] = ()
        """The teachers, which the engine sets for training. A tuple is not registered as a module."""

    def make_stages(self, config: Config) -> tuple[Stage, ...]:
        changes: dict[str, Any] = {"mixes_extra": True}
        if self.config.mixture != "none":
            changes |= {"mixup": self.config.mixture_alpha, "mixture": self.config.mixture}
        return (self.first_stage(config, **changes),)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        x = batch.all_views()
        teacher_VC = torch.cat(batch.stored) if batch.stored else self.teach(x)
        mixed = None if batch.mixed is None else Mixed(batch.mixed.y_B.repeat(batch.views), batch.mixed.share)
        return self.loss_from_logits(self.net(x), teacher_VC, batch.all_labels(), *(mixed or ()))

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch with the logits of the teachers, for all students that share it."""
        return batch._replace(stored=self.teach(batch.all_views()).split(len(batch.y_B)))

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        """Return the prior-adjusted logits of all teachers together."""
        return log_mean_softmax(torch.stack([teacher(x) for teacher in self.teachers]))

    def loss_from_logits(self, logits_VC: Tensor, teacher_VC: Tensor, y_V: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns. `compile` fuses the operations of this part.

        Args:
            logits_VC: The logits s of the student.
            teacher_VC: The prior-adjusted logits a of the teachers.
            y_V: The labels.
            mixed: The fields of `Mixed` if views are mixed.
        """
        c, adjusted_VC = self.config, at_least_float32(logits_VC) + self.log_prior_C
        taught = distillation_loss(teacher_VC, adjusted_VC, y_V, c.temperature, c.target, c.dkd_alpha, c.dkd_beta)
        labels = balanced_softmax_loss(logits_VC, y_V, self.log_prior_C)
        if mixed:
            other_V, share = mixed
            labels = share * labels + (1 - share) * balanced_softmax_loss(logits_VC, other_V, self.log_prior_C)
        loss = c.weight * taught + (1 - c.weight) * labels
        return {"loss": loss, "accuracy": accuracy(logits_VC, y_V), "distillation": taught, "softmax": labels}

    def compiled_modules(self) -> tuple[nn.Module, ...]:
        """Return the backbones of the teachers, most of which our kernels do not support in evaluation mode."""
        return tuple(teacher.method.net.trunk.body for teacher in self.teachers)

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C)
