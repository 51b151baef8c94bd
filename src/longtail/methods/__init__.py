"""Where model meets loss. A method is found by the type of its settings; the training loop knows none by name."""

import importlib
import pkgutil
from typing import Any

import torch

from longtail.config import Config
from longtail.methods.base import Batch, Method, Mixed, Stage, Start
from longtail.models import norms

for _module in pkgutil.iter_modules(__path__):  # a file beside this one that has a method is found
    importlib.import_module(f"{__name__}.{_module.name}")


def make(config: Config, counts: Any, stored: bool = False) -> Method:
    """The method that `config` describes, for training data with these class counts.

    Where its weights are `stored` and about to be loaded, no pretrained ones are fetched.
    """
    kind = Method.BY_SETTINGS[type(config.method)]
    net = kind.network(config, len(counts), config.model.pretrained and not stored)
    method = kind(net, torch.as_tensor(counts), config)
    norms.convert_batch_norms(method, config.model.norm, config.model.ghost)
    return method


__all__ = ["Batch", "Method", "Mixed", "Stage", "Start", "make"]
