"""PaCo: the query trunk feeds the class centres (the classifier's rows, through F = identity) and the projection G at once."""

import torch
from torch import Tensor

from longtail import config as cfg
from longtail.losses import paco_terms
from longtail.methods.base import Batch, accuracy, largest
from longtail.methods.contrast import Contrast, MomentumContrast


class Centred(Contrast):
    """Anchors meet samples and centres: Eq. 8, or Eq. 4 without rebalance."""

    config: cfg.PaCo | cfg.GPaCo

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c = self.config
        contrast_BM, y_M, drop_BM = self.contrast(q_BD, k_BD, y_B)
        centre_BC = self.classify(x_BF)
        log_q_C = self.log_prior_C if c.rebalance else None
        loss_B, P_sup_B = paco_terms(
            centre_BC, contrast_BM, y_B, y_M, drop_BM, log_q_C, c.alpha, c.tau, c.centre_tau, c.smoothing
        )
        return {
            "loss": loss_B.mean(),
            "accuracy": accuracy(centre_BC, y_B),
            "P_sup": P_sup_B.detach().mean(),
            "centre_logit": largest(centre_BC) / c.centre_tau,
            "contrast_logit": largest(contrast_BM) / c.tau,
        }


class PaCo(Centred, MomentumContrast, settings=cfg.PaCo):
    config: cfg.PaCo


class GPaCo(Centred, settings=cfg.GPaCo):
    """Cui et al., 2023: no key network; both views go through the one network and are anchors, and the queue has the second."""

    G_layers = 3
    config: cfg.GPaCo

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        x_BF = self.features(torch.cat([batch.query, batch.key]))  # twice as many anchors as images
        q_BD = self.project(self.G, x_BF)
        self.fresh.append((q_BD[len(batch.y_B) :].detach(), batch.y_B))
        return self.after_projections(x_BF, q_BD, q_BD[:0], batch.y_B.repeat(2))
