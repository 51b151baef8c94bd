"""SupCon (Khosla et al., 2020) with the key encoder and queue of MoCo, and with its linear stage."""

from torch import Tensor

from longtail import config as cfg
from longtail.losses import cross_entropy_loss, supcon_loss
from longtail.methods.base import Batch, Stage, accuracy, max_abs
from longtail.methods.contrast import gather_contrast_set
from longtail.methods.paco import MomentumContrast
from longtail.methods.stages import linear_stage


class SupCon(MomentumContrast, settings="supcon"):
    """Stage 1 trains the backbone by Eq. 3; stage 2 trains a linear classifier on the frozen backbone by cross-entropy."""

    config: cfg.SupCon

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config, name="contrast"), linear_stage(config)

    def set_stage(self, stage: Stage) -> None:
        super().set_stage(stage)
        self.G.requires_grad_(not stage.frozen)
        self.net.head.requires_grad_(stage.frozen)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage.frozen:
            return self.loss_from_features(self.features(batch.query), batch.y_B)
        return super().loss(batch)

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        return {"loss": cross_entropy_loss(logits_BC, y_B), "accuracy": accuracy(logits_BC, y_B)}

    def loss_from_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        contrast = gather_contrast_set(q_BD, k_BD, y_B, self.queue, self.config.contrast)
        contrast_BM = contrast.products()
        loss = supcon_loss(contrast_BM, y_B, contrast.y_M, contrast.drop_mask(), self.config.tau)
        return {"loss": loss, "contrast_logit": max_abs(contrast_BM) / self.config.tau}

    def after_step(self) -> None:
        if not self.stage.frozen:
            super().after_step()
