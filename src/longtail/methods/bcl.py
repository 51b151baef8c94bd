"""BCL (Zhu et al., CVPR 2022): balanced contrast of two key views, with a projected center of every class among the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtail.losses.contrastive import bcl_loss
from longtail.methods.contrast import LabeledSamples, gather_contrast_set
from longtail.methods.three_views import ThreeViewContrast
from longtail.models.heads import Classifier, CosineHead

if TYPE_CHECKING:
    from longtail import config as cfg


class BCL(ThreeViewContrast, settings="bcl"):
    """The centers are the rows of the cosine classifier after a projection of their own."""

    config: cfg.BCLSettings

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.center_G = self.make_projection()

    @classmethod
    def head(cls, width: int, classes: int, config: cfg.Config) -> nn.Module:
        return CosineHead(width, classes, config.method.scale)  # type: ignore[attr-defined]

    def contrast_loss(self, z_VD: Tensor, y_V: Tensor) -> Tensor:
        c, classes = self.config, len(self.log_prior_C)
        centers = LabeledSamples(self.center_G(self.class_weights), torch.arange(classes, device=y_V.device))
        contrast = gather_contrast_set(z_VD, z_VD[:0], y_V, centers, c.contrast)
        return bcl_loss(contrast, y_V, classes, c.tau)
