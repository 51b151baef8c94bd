"""Losses as pure functions of tensors. They import torch, and nothing else of this package."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.losses.chunked import chunk_for, chunked_terms
    from longtail.losses.contrast_set import AnchorTerms, ContrastSet
    from longtail.losses.contrast_set import ContrastSet as Samples
    from longtail.losses.contrastive import bcl_loss, supcon_loss
    from longtail.losses.ncl import ncl_loss
    from longtail.losses.paco import LossParams, paco_loss, paco_objective, paco_terms
    from longtail.losses.proco import proco_logits, proco_loss
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
        softmax_objective,
    )

_HOME = {
    "AnchorTerms": "contrast_set",
    "ContrastSet": "contrast_set",
    "LossParams": "paco",
    "balanced_softmax_loss": "softmax",
    "bcl_loss": "contrastive",
    "chunk_for": "chunked",
    "chunked_terms": "chunked",
    "class_balanced_focal_loss": "softmax",
    "consistency_loss": "ncl",
    "cross_entropy_loss": "softmax",
    "class_contrast_loss": "distillation",
    "distillation_loss": "distillation",
    "effective_number_weights": "softmax",
    "focal_loss": "softmax",
    "label_aware_smoothing": "softmax",
    "label_aware_smoothing_loss": "softmax",
    "ldam_loss": "softmax",
    "ldam_margins": "softmax",
    "ncl_loss": "ncl",
    "paco_loss": "paco",
    "paco_objective": "paco",
    "paco_terms": "paco",
    "proco_logits": "proco",
    "proco_loss": "proco",
    "softmax_objective": "softmax",
    "supcon_loss": "contrastive",
}
_RENAMED = {"Samples": "ContrastSet"}

__all__ = [
    "AnchorTerms",
    "ContrastSet",
    "LossParams",
    "Samples",
    "balanced_softmax_loss",
    "bcl_loss",
    "chunk_for",
    "chunked_terms",
    "class_balanced_focal_loss",
    "consistency_loss",
    "cross_entropy_loss",
    "distillation_loss",
    "effective_number_weights",
    "focal_loss",
    "label_aware_smoothing",
    "label_aware_smoothing_loss",
    "ldam_loss",
    "ldam_margins",
    "ncl_loss",
    "paco_loss",
    "paco_objective",
    "paco_terms",
    "proco_logits",
    "proco_loss",
    "softmax_objective",
    "supcon_loss",
]


def __getattr__(name: str) -> Any:
    name = _RENAMED.get(name, name)
    if name in _HOME:
        return getattr(importlib.import_module(f"longtail.losses.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
