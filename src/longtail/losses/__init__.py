"""The equations: pure functions of tensors, importing torch and nothing of ours."""

from longtail.losses.contrastive import supcon_loss
from longtail.losses.paco import paco_loss, paco_terms
from longtail.losses.softmax import balanced_softmax_loss, cross_entropy_loss

__all__ = ["balanced_softmax_loss", "cross_entropy_loss", "paco_loss", "paco_terms", "supcon_loss"]
