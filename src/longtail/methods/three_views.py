"""The step that BCL and ProCo share: a classified view and two contrasted views of each image.

Shapes: B images, V = 2B key views, D projected width, F features, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from longtail.losses.softmax import balanced_softmax_loss
from longtail.methods.base import Batch, Method, ViewName, accuracy
from longtail.models.heads import Classifier, ProjectionHead

if TYPE_CHECKING:
    from longtail.config import Config, ThreeViewSettings


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
