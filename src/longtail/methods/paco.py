"""PaCo: the query trunk feeds the class centres (the classifier's rows, through F = identity) and the projection G at once."""

import torch
from torch import Tensor

from longtail import config as cfg
from longtail import theory
from longtail.data.samplers import class_shares
from longtail.losses import AnchorTerms, Samples, chunk_for, chunked_terms, paco_terms
from longtail.methods.base import Batch, magnitudes, reweighted, share_right
from longtail.methods.contrast import Contrast, MomentumContrast
from longtail.models.heads import Classifier


class Centred(Contrast):
    """Anchors meet samples and centres: Eq. 8, or Eq. 4 without rebalance."""

    config: cfg.PaCo | cfg.GPaCo

    def __init__(self, net: Classifier, counts_C: Tensor, config: cfg.Config) -> None:
        super().__init__(net, counts_C, config)
        c, train = self.config, config.train
        if c.alpha == "auto":
            shares_C = class_shares(train.sampler, counts_C, done=0.5)  # where they change, those halfway
            batch = train.batch_size * (train.processes if c.contrast == "global" else 1)
            self.alpha = theory.auto_alpha(shares_C, c.queue, batch)
        else:
            self.alpha = c.alpha

    def chosen(self) -> dict[str, float]:
        return {"alpha": self.alpha} if self.config.alpha == "auto" else {}

    def after_projections(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        c, partners = self.config, len(self.linear.weight) + len(q_BD) + len(k_BD) + self.queue.length
        chunk = chunk_for(c.chunk, len(y_B), partners)
        given = x_BF, q_BD, k_BD, y_B
        terms = self.in_chunks(*given, chunk) if chunk else self.at_once(*given)
        return {
            "loss": terms.loss_B.mean(),
            "accuracy": share_right(terms.guess_B, y_B),
            "P_sup": terms.P_sup_B.detach().mean(),
            "centre_logit": terms.centre_B.amax() / c.centre_tau,
            "contrast_logit": terms.contrast_B.amax() / c.tau,
        }

    def at_once(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor) -> AnchorTerms:
        contrast_BM, y_M, drop_BM = self.contrast(q_BD, k_BD, y_B)
        centre_BC = self.classify(x_BF)
        terms = paco_terms(centre_BC, contrast_BM, y_B, y_M, drop_BM, *self.numbers())
        return AnchorTerms(*terms, centre_BC.detach().argmax(1), magnitudes(centre_BC), magnitudes(contrast_BM))

    def in_chunks(self, x_BF: Tensor, q_BD: Tensor, k_BD: Tensor, y_B: Tensor, chunk: int) -> AnchorTerms:
        """The same for very many classes."""
        z_MD, y_M, first = self.samples(q_BD, k_BD, y_B)
        samples = Samples(q_BD, z_MD, y_M, first + torch.arange(len(q_BD), device=y_B.device))
        return chunked_terms(x_BF, self.linear.weight, self.linear.bias, y_B, samples, *self.numbers(), chunk=chunk)

    def prior(self) -> Tensor:
        drawn_C = super().prior()
        return reweighted(drawn_C, (-self.log_prior_C.double()).exp()) if self.config.rebalance else drawn_C

    def numbers(self) -> tuple[Tensor | None, float, float, float, float]:
        """What the loss takes beside anchors and partners."""
        c = self.config
        return self.log_prior_C if c.rebalance else None, self.alpha, c.tau, c.centre_tau, c.smoothing


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
