"""Where model meets loss. A method is found by the type of its configuration; the training loop knows none by name."""

from typing import Any

import torch

from longtail import config as cfg
from longtail.methods.base import Batch, Method, Stage
from longtail.methods.paco import PaCo
from longtail.methods.softmax import BalancedSoftmax, CrossEntropy
from longtail.methods.supcon import SupCon
from longtail.models.backbones import make_trunk
from longtail.models.heads import Classifier

BY_CONFIG: dict[type[cfg.MethodConfig], type[Method]] = {
    cfg.CrossEntropy: CrossEntropy,
    cfg.BalancedSoftmax: BalancedSoftmax,
    cfg.SupCon: SupCon,
    cfg.PaCo: PaCo,
}


def make(config: cfg.Config, counts: Any, stored: bool = False) -> Method:
    """The method that `config` describes, for training data with these class counts.

    Where its weights are `stored` and about to be loaded, no pretrained ones are fetched.
    """
    trunk = make_trunk(config.model.name, config.model.pretrained and not stored, config.data.image_size)
    net = Classifier(trunk, len(counts), config.model.bias)
    return BY_CONFIG[type(config.method)](net, torch.as_tensor(counts), config)


__all__ = ["BY_CONFIG", "Batch", "Method", "Stage", "make"]
