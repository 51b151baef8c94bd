"""SupCon (Khosla et al., 2020) in the MoCo frame, with its linear stage."""

from torch import Tensor

from longtail import config as cfg
from longtail.losses import cross_entropy_loss, supcon_loss
from longtail.methods.base import Batch, Stage, accuracy, largest
from longtail.methods.contrast import MomentumContrast
from longtail.methods.stages import linear_stage


class SupCon(MomentumContrast, settings=cfg.SupCon):
    """Stage 1 learns the trunk by Eq. 3; stage 2 a linear classifier on the frozen trunk by cross-entropy."""

    config: cfg.SupCon

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config, name="contrast"), linear_stage(config)

    def enter(self, stage: Stage) -> None:
        super().enter(stage)
        self.G.requires_grad_(not stage.frozen)
        self.net.head.requires_grad_(stage.frozen)

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        if self.stage.frozen:
            return self.after_trunk(self.features(batch.query), batch.y_B)
        return super().loss(batch)

    def after_trunk(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        logits_BC = self.classify(x_BF)
        return {"loss": cross_entropy_loss(logits_BC, y_B), "accuracy": accuracy(logits_BC, y_B)}

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        contrast_BM, y_M, drop_BM = self.contrast(q_BD, k_BD, y_B)
        loss = supcon_loss(contrast_BM, y_B, y_M, drop_BM, self.config.tau)
        return {"loss": loss, "contrast_logit": largest(contrast_BM) / self.config.tau}

    def after_step(self) -> None:
        if not self.stage.frozen:
            super().after_step()
