"""PaCo: the query trunk feeds the class centers (the classifier's rows, through F = identity) and the projection G at once."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from longtail import config as cfg
from longtail import theory
from longtail.data.samplers import class_shares
from longtail.losses import AnchorTerms, Samples, chunk_for, chunked_terms, paco_terms
from longtail.methods.base import Batch, magnitudes, reweighted, share_right
from longtail.methods.contrast import Contrast, Met, MomentumContrast
from longtail.models.heads import Classifier


class Numbers(NamedTuple):
    """What the loss takes beside anchors and partners, in the order in which it takes it."""

    log_prior_C: Tensor | None
    alpha: float
    tau: float
    center_tau: float
    smoothing: float

    @staticmethod
    def of(config: cfg.PaCo | cfg.GPaCo, alpha: float, log_prior_C: Tensor) -> "Numbers":
        prior_C = log_prior_C if config.rebalance else None
        return Numbers(prior_C, alpha, config.tau, config.center_tau, config.smoothing)


class Centered(Contrast):
    """Anchors meet samples and centers: Eq. 8, or Eq. 4 without rebalance."""

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
        met = self.samples(q_BD, k_BD, y_B)
        return loss_terms(x_BF, q_BD, y_B, met, self.linear, self.numbers(), self.config.chunk)

    def numbers(self) -> Numbers:
        return Numbers.of(self.config, self.alpha, self.log_prior_C)

    def prior(self) -> Tensor:
        drawn_C = super().prior()
        return reweighted(drawn_C, (-self.log_prior_C.double()).exp()) if self.config.rebalance else drawn_C


class PaCo(Centered, MomentumContrast, settings=cfg.PaCo):
    config: cfg.PaCo


class GPaCo(Centered, settings=cfg.GPaCo):
    """Cui et al., 2023: no key network; both views go through the one network and are anchors, and the queue has the second."""

    G_layers = 3
    config: cfg.GPaCo

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.key is not None
        x_BF = self.features(torch.cat([batch.query, batch.key]))  # twice as many anchors as images
        q_BD = self.project(self.G, x_BF)
        self.fresh.append((q_BD[len(batch.y_B) :].detach(), batch.y_B))
        return self.after_projections(x_BF, q_BD, q_BD[:0], batch.y_B.repeat(2))


def loss_terms(
    x_BF: Tensor, q_BD: Tensor, y_B: Tensor, met: Met, centers: nn.Linear, numbers: Numbers, chunk: int
) -> dict[str, Tensor]:
    """Anchors, by their features and queries, against centers and samples: the loss, and what the log has beside it."""
    chunk = chunk_for(chunk, len(y_B), len(centers.weight) + len(met.y_M))
    given = x_BF, q_BD, y_B, met, centers, numbers
    terms = in_chunks(*given, chunk) if chunk else at_once(*given)
    return {
        "loss": terms.loss_B.mean(),
        "accuracy": share_right(terms.guess_B, y_B),
        "P_sup": terms.P_sup_B.detach().mean(),
        "center_logit": terms.center_B.amax() / numbers.center_tau,
        "contrast_logit": terms.contrast_B.amax() / numbers.tau,
    }


def at_once(x_BF: Tensor, q_BD: Tensor, y_B: Tensor, met: Met, centers: nn.Linear, numbers: Numbers) -> AnchorTerms:
    contrast_BM, y_M, drop_BM = met.with_anchors(q_BD)
    center_BC = centers(x_BF)
    terms = paco_terms(center_BC, contrast_BM, y_B, y_M, drop_BM, *numbers)
    return AnchorTerms(*terms, center_BC.detach().argmax(1), magnitudes(center_BC), magnitudes(contrast_BM))


def in_chunks(
    x_BF: Tensor, q_BD: Tensor, y_B: Tensor, met: Met, centers: nn.Linear, numbers: Numbers, chunk: int
) -> AnchorTerms:
    """The same for very many classes."""
    itself_B = met.first + torch.arange(len(q_BD), device=y_B.device)
    samples = Samples(q_BD, met.z_MD, met.y_M, itself_B)
    return chunked_terms(x_BF, centers.weight, centers.bias, y_B, samples, *numbers, chunk=chunk)
