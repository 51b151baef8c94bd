"""SupCon (Khosla et al., 2020) with the key encoder and queue of MoCo, and the multi-task baseline of the PaCo paper."""

from torch import Tensor

from longtail import config as cfg
from longtail.losses import balanced_softmax_loss, cross_entropy_loss, effective_number_weights, supcon_loss
from longtail.methods.base import Batch, Stage, accuracy, max_abs
from longtail.methods.contrast import gather_contrast_set
from longtail.methods.decouple import linear_stage
from longtail.methods.paco import MomentumContrast
from longtail.models.heads import Classifier


class SupCon(MomentumContrast, settings="supcon"):
    """Stage 1 trains the backbone by Eq. 3; stage 2 trains a linear classifier on the frozen backbone by cross-entropy."""

    config: cfg.SupConSettings

    def make_stages(self, config: cfg.Config) -> tuple[Stage, ...]:
        return self.first_stage(config, name="contrast"), linear_stage(config, replaces_head=True)

    @property
    def head_stage(self) -> Stage:
        return self.stages[1]

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


class MultiTask(MomentumContrast, settings="multi-task"):
    """A softmax loss on the logits plus a weighted SupCon loss among the samples."""

    config: cfg.MultiTaskSettings
    weight_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("weight_C", effective_number_weights(counts_C, self.config.beta), persistent=False)

    def prior(self) -> Tensor:
        return self.prior_after(self.log_prior_C) if self.config.rebalance else super().prior()

    def loss_from_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c, logits_BC = self.config, self.classify(x_BF)
        samples = gather_contrast_set(q_BD, k_BD, y_B, self.queue, c.contrast)
        contrast_BM, y_M = samples.products(), samples.y_M
        weight_B = self.weight_C[y_B] if c.supcon == "reweighted" else None
        log_prior_M = self.log_prior_C[y_M.clamp(min=0)] if c.supcon == "balanced" else None
        contrast = supcon_loss(contrast_BM, y_B, y_M, samples.drop_mask(), c.tau, weight_B, log_prior_M)
        softmax = (
            balanced_softmax_loss(logits_BC, y_B, self.log_prior_C)
            if c.rebalance
            else cross_entropy_loss(logits_BC, y_B)
        )
        return {
            "loss": softmax + c.weight * contrast,
            "accuracy": accuracy(logits_BC, y_B),
            "softmax": softmax,
            "contrast": contrast,
            "contrast_logit": max_abs(contrast_BM) / c.tau,
        }
