"""PaCo: the query trunk feeds the class centres (the classifier's rows, through F = identity) and the projection G at once."""

from torch import Tensor

from longtail import config as cfg
from longtail.losses import paco_terms
from longtail.methods.base import accuracy, largest
from longtail.methods.contrast import MomentumContrast


class PaCo(MomentumContrast, settings=cfg.PaCo):
    config: cfg.PaCo

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c = self.config
        contrast_BM, y_M, drop_BM = self.contrast(q_BD, k_BD, y_B)
        centre_BC = self.classify(x_BF)
        log_q_C = self.log_prior_C if c.rebalance else None
        loss_B, P_sup_B = paco_terms(centre_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, c.alpha, c.tau, c.centre_tau)
        return {
            "loss": loss_B.mean(),
            "accuracy": accuracy(centre_BC, y_B),
            "P_sup": P_sup_B.detach().mean(),
            "centre_logit": largest(centre_BC) / c.centre_tau,
            "contrast_logit": largest(contrast_BM) / c.tau,
        }
