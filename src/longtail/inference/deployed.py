"""The network for export, as one module from pixels to probabilities, and its description."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from longtail import __version__
from longtail.config import to_dict
from longtail.inference.model import Model
from longtail.inference.priors import describe_frequencies
from longtail.models.backbones import FeatureMaps, Trunk
from longtail.views import ops
from longtail.views.view import STATISTICS

INPUT, OUTPUTS = "images", ("logits", "probabilities")
INPUT_WORDS = (
    "RGB images after cropping and resizing, uint8 (batch, 3, {size}, {size}); normalization is part of the network"
)
LOGITS_WORDS = "float32 (batch, {classes}), the output of the trained network"
PROBABILITIES_WORDS = "float32 (batch, {classes}), with the temperature and the class frequencies below"


class Deployed(nn.Module):
    """Module that maps uint8 images (B, 3, size, size) to logits and probabilities (B, C), in float32 on the CPU."""

    shift_C: Tensor
    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.method).cpu().float().eval()
        for module in self.network.modules():
            if isinstance(module, Trunk):
                module.precision = torch.float32
            if isinstance(module, Trunk | FeatureMaps):
                module.fused = False
        self.size, self.temperature = model.image_size, model.temperature or 1.0
        self.register_buffer("shift_C", model.shift().float())
        for name, numbers in zip(("mean_C11", "std_C11"), STATISTICS[model.config.views.normalize], strict=True):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.normalize(ops.to_float(images), self.mean_C11, self.std_C11)
        logits_BC = self.network.classify(self.network.features(x))
        return logits_BC, (logits_BC / self.temperature + self.shift_C).softmax(1)


def describe_model(model: Model) -> dict[str, Any]:
    """Return the description that an exported file contains, as plain JSON without the paths of the training data."""
    config = to_dict(model.config)
    config["data"] |= {"root": None, "train_list": None, "test_list": None}
    size, classes = {"size": model.image_size}, {"classes": len(model.class_names)}
    words = (LOGITS_WORDS.format(**classes), PROBABILITIES_WORDS.format(**classes))
    return {
        "longtail": __version__,
        "method": model.config.method.label,
        "network": model.config.model.name,
        "input": {INPUT: INPUT_WORDS.format(**size)},
        "outputs": dict(zip(OUTPUTS, words, strict=True)),
        "class_names": list(model.class_names),
        "counts": None if model.counts is None else model.counts.tolist(),
        "preprocessing": model.preprocessing.describe() | {"side": model.preprocessing.side},
        "temperature": model.temperature,
        "logits_stand_for": describe_frequencies(model.implied_prior, model.counts),
        "prior": None if model.prior is None else {"name": model.prior.name, "shares": model.prior.shares_C.tolist()},
        "config": config,
    }
