"""The registry of methods. Importing this module imports every file of this package, so that new files are found."""

import importlib
import pkgutil
from typing import Any

import torch

import longtail.methods
from longtail.config import Config, MethodConfig
from longtail.methods.base import Method
from longtail.models import norms

for _module in pkgutil.iter_modules(longtail.methods.__path__):
    if _module.name != "registry":
        importlib.import_module(f"longtail.methods.{_module.name}")


def find_method(settings: MethodConfig) -> type[Method]:
    """Return the class of the method that has these settings."""
    return Method.BY_SETTINGS[settings.name]


def make(config: Config, counts: Any, stored: bool = False) -> Method:
    """Return the method that a configuration describes, with new weights.

    Args:
        config: The configuration.
        counts: The number of training images of each class.
        stored: Whether stored weights will be loaded, so that no pretrained weights are downloaded.
    """
    kind = find_method(config.method)
    net = kind.build_network(config, len(counts), config.model.pretrained and not stored)
    method = kind(net, torch.as_tensor(counts), config)
    norms.convert_batch_norms(method, config.model.norm, config.model.ghost)
    return method
