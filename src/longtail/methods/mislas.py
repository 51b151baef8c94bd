"""MiSLAS (Zhong et al., 2021): mixup in the first stage; label-aware smoothing, shifted batch norm and LWS in the second."""

from typing import Any

from torch import Tensor, nn

from longtail import config as cfg
from longtail.losses import cross_entropy_loss, label_aware_smoothing, label_aware_smoothing_loss
from longtail.methods.base import Stage
from longtail.methods.softmax import Softmax
from longtail.methods.stages import linear_stage
from longtail.models.heads import Classifier, ScaledHead


class MiSLAS(Softmax, settings="mislas"):
    config: cfg.MiSLAS
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
        """In the second stage the classifier learns more slowly than the factors per class."""
        if not self.stage.frozen:
            return super().param_groups()
        head = dict(self.net.head.named_parameters())
        scale = head.pop("scale_C")
        return [{"params": list(head.values()), "lr_scale": self.config.classifier_lr}, {"params": [scale]}]

    def objective(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        if self.stage.frozen:
            return label_aware_smoothing_loss(logits_BC, y_B, self.smooth_C)
        return cross_entropy_loss(logits_BC, y_B)
