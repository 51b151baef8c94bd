"""The equations: pure functions of tensors, importing torch and nothing of ours."""

from longtail.losses.chunked import AnchorTerms, Samples, chunk_for, chunked_terms
from longtail.losses.contrastive import supcon_loss
from longtail.losses.paco import paco_loss, paco_terms
from longtail.losses.softmax import (
    balanced_softmax_loss,
    class_balanced_focal_loss,
    cross_entropy_loss,
    effective_number_weights,
    focal_loss,
    label_aware_smoothing,
    label_aware_smoothing_loss,
    ldam_loss,
    ldam_margins,
)

__all__ = [
    "AnchorTerms",
    "Samples",
    "balanced_softmax_loss",
    "chunk_for",
    "chunked_terms",
    "class_balanced_focal_loss",
    "cross_entropy_loss",
    "effective_number_weights",
    "focal_loss",
    "label_aware_smoothing",
    "label_aware_smoothing_loss",
    "ldam_loss",
    "ldam_margins",
    "paco_loss",
    "paco_terms",
    "supcon_loss",
]
