"""The paper's baseline: a softmax loss on the classifier's logits plus a weighted SupCon among the samples."""

from torch import Tensor

from longtail import config as cfg
from longtail.losses import balanced_softmax_loss, cross_entropy_loss, effective_number_weights, supcon_loss
from longtail.methods.base import accuracy, largest, reweighted
from longtail.methods.contrast import MomentumContrast
from longtail.models.heads import Classifier


class MultiTask(MomentumContrast, settings=cfg.MultiTask):
    config: cfg.MultiTask
    weight_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        self.register_buffer("weight_C", effective_number_weights(counts_C, self.config.beta), persistent=False)

    def prior(self) -> Tensor:
        drawn_C = super().prior()
        return reweighted(drawn_C, (-self.log_prior_C.double()).exp()) if self.config.rebalance else drawn_C

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c, logits_BC = self.config, self.classify(x_BF)
        contrast_BM, y_M, drop_BM = self.contrast(q_BD, k_BD, y_B)
        weight_B = self.weight_C[y_B] if c.supcon == "reweighted" else None
        log_prior_M = self.log_prior_C[y_M.clamp(min=0)] if c.supcon == "balanced" else None
        contrast = supcon_loss(contrast_BM, y_B, y_M, drop_BM, c.tau, weight_B, log_prior_M)
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
            "contrast_logit": largest(contrast_BM) / c.tau,
        }
