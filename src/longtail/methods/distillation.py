"""Distillation: finished networks teach another one, in the logit space in which the student will be read.

The teachers are not part of the method's modules, so that neither checkpoints nor model.safetensors contain them.

Shapes: V = views · B views of B images, K teachers, F features, C classes, D width of the teachers' features together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.losses.distillation import class_contrast_loss, distillation_loss, log_mean_softmax
from longtail.losses.numerics import at_least_float32
from longtail.losses.softmax import balanced_softmax_loss
from longtail.methods.base import Batch, Method, Mixed, Stage, accuracy
from longtail.models.heads import Classifier, ProjectionHead
from longtail.models.momentum import LabeledQueue

if TYPE_CHECKING:
    from longtail.config import Config, DistillationSettings
    from longtail.models.side_stream import SideStream

FIRST_TEMPERATURE = 0.1
"""The temperature of each class in the contrast at the start of training."""


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
        return at_least_float32(self.method(self.convert(x))) + self.log_shift_C

    def predict_with_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prior-adjusted logits of views, and their features with length 1: of RIDE those of all experts."""
        x_BF = self.method.features(self.convert(x))
        logits_BC = at_least_float32(self.method.classify(x_BF)) + self.log_shift_C
        return logits_BC, F.normalize(at_least_float32(x_BF).flatten(1))

    def convert(self, x: Tensor) -> Tensor:
        """Return views of the student with the normalization and the size that the teacher expects."""
        if not self.is_normalized:
            x = x.float() * self.scale_C11 + self.shift_C11
        if x.shape[-1] != self.image_size:
            x = F.interpolate(x.float(), self.image_size, mode="bilinear", antialias=True)
        return x

    def extra_repr(self) -> str:
        """Return what determines the logits in addition to the layers: it is part of the key of stored logits."""
        return f"image_size={self.image_size}, {self.method.config}"


class TeacherContrast(nn.Module):
    """The contrast between features of the student and features of the teachers, with what it learns and stores.

    Args:
        width: The width of the student's features.
        teacher_width: The width D of the teachers' features together.
        queue: The number of past features of the teachers.
        log_prior_C: The log class frequencies of the training images.
    """

    log_prior_C: Tensor

    def __init__(self, width: int, teacher_width: int, queue: int, log_prior_C: Tensor) -> None:
        super().__init__()
        self.P = ProjectionHead(width, 0, teacher_width, norm=False)
        self.queue = LabeledQueue(queue, teacher_width)
        # The log of each temperature divided by the first one, so that weight decay pulls temperatures back to it.
        self.log_scale_C = nn.Parameter(torch.zeros(len(log_prior_C)))
        self.register_buffer("log_prior_C", log_prior_C.clone(), persistent=False)

    def forward(self, x_VF: Tensor, keys_VD: Tensor, y_V: Tensor) -> Tensor:
        """Return the loss of views.

        Args:
            x_VF: The features of the student.
            keys_VD: The features of the teachers for the same views.
            y_V: The labels.
        """
        keys_KD = torch.cat([keys_VD, self.queue.keys_KD.to(keys_VD.dtype)])
        labels_K = torch.cat([y_V, self.queue.labels_K])
        temperature_C = FIRST_TEMPERATURE * self.log_scale_C.exp()
        return class_contrast_loss(self.P(x_VF), keys_KD, labels_K, y_V, self.log_prior_C, temperature_C)


class Distillation(Method, settings="distillation"):
    """A linear classifier that is trained by distillation and by Balanced Softmax on the labels, on one or more views.

        loss = weight · distillation_loss(a, s + log π) + (1 - weight) · cross_entropy(s + log π, y)
               + contrast · class_contrast_loss(q, k, y)

    The loss of the labels of a mixture is the mean of the losses of both labels, weighted by their shares.
    """

    compiled_functions = ("loss_from_logits",)
    config: DistillationSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        super().__init__(net, counts_C, config)
        self.teachers: tuple[Teacher, ...] = ()
        """The teachers, which the engine sets for training. A tuple is not registered as a module."""
        self.contrast: TeacherContrast | None = None

    def set_teachers(self, teachers: tuple[Teacher, ...]) -> None:
        """Set the teachers, and create the contrast with their features if it has a weight. Only training needs this."""
        self.teachers = teachers
        if self.config.contrast:
            trunk, like = self.net.trunk, self.log_prior_C
            with torch.no_grad():
                size = max(teacher.image_size for teacher in teachers)
                width = self.teach(like.new_zeros(1, 3, size, size)).shape[1] - len(like)
            contrast = TeacherContrast(trunk.width, width, self.config.contrast_queue, like)
            self.contrast = contrast.to(device=like.device)

    def make_stages(self, config: Config) -> tuple[Stage, ...]:
        changes: dict[str, Any] = {"mixes_extra": True}
        if self.config.mixture != "none":
            changes |= {"mixup": self.config.mixture_alpha, "mixture": self.config.mixture}
        return (self.first_stage(config, **changes),)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        x, y_V = batch.all_views(), batch.all_labels()
        taught_V = torch.cat(batch.stored) if batch.stored else self.teach(x)
        teacher_VC, keys_VD = taught_V.tensor_split([len(self.log_prior_C)], dim=1)
        mixed = None if batch.mixed is None else Mixed(batch.mixed.y_B.repeat(batch.views), batch.mixed.share)
        x_VF = self.features(x)
        terms = self.loss_from_logits(self.classify(x_VF), teacher_VC, y_V, *(mixed or ()))
        if self.contrast is None:
            return terms
        self.contrast.queue.waiting.append((keys_VD, y_V))  # until `after_backward`
        contrast = self.contrast(x_VF, keys_VD, y_V)
        return terms | {"loss": terms["loss"] + self.config.contrast * contrast, "contrast": contrast}

    def waiting_lists(self) -> tuple[list[Any], ...]:
        return () if self.contrast is None else (self.contrast.queue.waiting,)

    def after_backward(self, side: SideStream) -> None:
        if self.contrast is not None:
            self.contrast.queue.push_waiting(side)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch with the outputs of the teachers, for all students that share it."""
        return batch._replace(stored=self.teach(batch.all_views()).split(len(batch.y_B)))

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        """Return the prior-adjusted logits of all teachers together (V, C); with a contrast also their features, (V, C + D).

        The features of several teachers are concatenated, and have length 1 together.
        """
        if not self.config.contrast:
            return log_mean_softmax(torch.stack([teacher(x) for teacher in self.teachers]))
        logits, keys = zip(*(teacher.predict_with_features(x) for teacher in self.teachers), strict=True)
        return torch.cat([log_mean_softmax(torch.stack(logits)), F.normalize(torch.cat(keys, 1))], 1)

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
        """Return the backbones of the teachers, which our kernels do not support in evaluation mode, and the contrast."""
        contrast = () if self.contrast is None else (self.contrast,)
        return (*(teacher.method.net.trunk.body for teacher in self.teachers), *contrast)

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C)
