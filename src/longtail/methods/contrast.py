"""Parts that the contrastive methods share.

Shapes: B images or anchors, V = 2B key views, M samples, D projected width, F features, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from longtail.data.samplers import class_shares
from longtail.distributed import all_gather, gather_with_grad, rank
from longtail.losses.contrast_set import ContrastSet
from longtail.losses.paco import LossParams
from longtail.losses.softmax import balanced_softmax_loss
from longtail.methods.base import Batch, Method, ViewName, accuracy
from longtail.models.heads import Classifier, ProjectionHead

if TYPE_CHECKING:
    from longtail.config import Config, ThreeViewSettings
    from longtail.models.momentum import LabeledQueue


class LabeledSamples(NamedTuple):
    """Samples that are the same in all processes, with their labels. They take the place of a queue."""

    keys_KD: Tensor
    labels_K: Tensor


def gather_contrast_set(
    q_BD: Tensor, k_BD: Tensor, y_B: Tensor, queue: LabeledQueue | LabeledSamples, contrast: str
) -> ContrastSet:
    """Return the samples that the anchors of a step are compared with: queries, keys, and the queue.

    The queue must not contain the keys of this step yet, or they would be in A(i) twice.

    Args:
        q_BD: The projected query views, which are the anchors.
        k_BD: The projected key views; no rows if all views are among the queries.
        y_B: The labels of the anchors; the keys have those of the first anchors.
        queue: The keys of past steps, or other samples.
        contrast: With several processes, whether queries and keys are those of this process ("local") or of all ("global"). In
            "global" the gradient also flows through the samples that were sent to other processes.
    """
    samples, labels, first = [q_BD, k_BD], [y_B, y_B[: len(k_BD)]], 0
    if contrast == "global":
        first = rank() * (len(q_BD) + len(k_BD))
        samples, labels = [gather_with_grad(torch.cat(samples))], [all_gather(torch.cat(labels))]
    itself_B = first + torch.arange(len(q_BD), device=y_B.device)
    return ContrastSet(q_BD, torch.cat([*samples, queue.keys_KD]), torch.cat([*labels, queue.labels_K]), itself_B)


def make_loss_params(config: Config, counts_C: Tensor) -> LossParams:
    """Return the parameters of the loss of PaCo and GPaCo; an alpha of "auto" is computed from the paper's theory.

    Args:
        config: The configuration of the run.
        counts_C: The number of training images of each class.
    """
    c: Any = config.method
    train = config.train
    alpha = c.alpha
    if alpha == "auto":
        from longtail import theory

        shares_C = class_shares(train.sampler, counts_C, done=0.5)  # if they change: those halfway through
        batch = train.batch_size * (train.processes if c.contrast == "global" else 1)
        alpha = theory.auto_alpha(shares_C, c.queue, batch)
    return LossParams(alpha, c.tau, c.center_tau, c.smoothing)


class ThreeViewContrast(Method):
    """The step of methods that classify the query view and contrast two key views. Subclasses define `contrast_loss`.

    All views go through backbone and projection in one batch, as in the code of BCL and ProCo. The classifier is trained by
    Balanced Softmax, so that its logits are free of class frequencies.
    """

    two_views = True
    extra_views: ClassVar[tuple[ViewName, ...]] = ("key",)
    compiled_functions = ("loss_from_projections",)
    config: ThreeViewSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        super().__init__(net, counts_C, config)
        self.G = self.make_projection()

    def make_projection(self) -> ProjectionHead:
        """Return a projection from the features of the backbone."""
        c = self.config
        return ProjectionHead(self.net.trunk.width, c.projection_hidden, c.projection_dim, c.projection_norm)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        x = self.features(torch.cat([batch.query, batch.key, *batch.extra]))
        B = len(batch.y_B)
        z_VD, y_V = self.G(x)[B:], batch.y_B.repeat(2)
        self.observe(z_VD.detach(), y_V)
        return self.loss_from_projections(x[:B], z_VD, batch.y_B)

    def observe(self, z_VD: Tensor, y_V: Tensor) -> None:
        """Update statistics of the projections, before the loss is computed."""

    def loss_from_projections(self, x_BF: Tensor, z_VD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns. `compile` fuses the operations of this part.

        Args:
            x_BF: The features of the query views.
            z_VD: The projections of the key views: those of the first views of all images, then those of the second.
            y_B: The labels of the images.
        """
        logits_BC = self.classify(x_BF)
        softmax = balanced_softmax_loss(logits_BC, y_B, self.log_prior_C)
        contrast = self.contrast_loss(z_VD, y_B.repeat(2))
        loss = self.config.softmax_weight * softmax + self.config.weight * contrast
        return {"loss": loss, "accuracy": accuracy(logits_BC, y_B), "softmax": softmax, "contrast": contrast}

    def contrast_loss(self, z_VD: Tensor, y_V: Tensor) -> Tensor:
        """Return the contrastive loss of the projections of the key views."""
        raise NotImplementedError

    def compiled_modules(self) -> tuple[nn.Module, ...]:
        return (self.G,)

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C)
