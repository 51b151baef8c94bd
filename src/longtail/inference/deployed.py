"""What deploys, as one module from pixels to probabilities, and what there is to know about it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from longtail import __version__
from longtail.config import to_dict
from longtail.inference.model import Model
from longtail.inference.priors import named
from longtail.models.backbones import FeatureMaps, Trunk
from longtail.views import ops
from longtail.views.view import STATISTICS

INPUT, OUTPUTS = "images", ("logits", "probabilities")
INPUT_WORDS = "RGB images cut to size, uint8 (batch, 3, {size}, {size}); they are normalized inside"
LOGITS_WORDS = "float32 (batch, {classes}), as the network was trained to give them"
PROBABILITIES_WORDS = "float32 (batch, {classes}), at the temperature and for the class frequencies below"


class Deployed(nn.Module):
    """uint8 images (B, 3, size, size) to logits and probabilities (B, C), in float32 on the CPU."""

    shift_C: Tensor
    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.method).cpu().float().eval()
        for part in self.network.modules():
            if isinstance(part, Trunk):
                part.precision = torch.float32
            if isinstance(part, Trunk | FeatureMaps):
                part.fused = False
        self.size, self.temperature = model.image_size, model.temperature or 1.0
        self.register_buffer("shift_C", model.shift().float())
        for name, numbers in zip(("mean_C11", "std_C11"), STATISTICS[model.config.views.normalize], strict=True):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.normalize(ops.to_float(images), self.mean_C11, self.std_C11)
        logits_BC = self.network.classify(self.network.features(x))
        return logits_BC, (logits_BC / self.temperature + self.shift_C).softmax(1)


def facts(model: Model) -> dict[str, Any]:
    """What travels with an exported file, as plain JSON; where its data lay is nobody's business."""
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
        "logits_stand_for": named(model.meant, model.counts),
        "prior": None if model.prior is None else {"name": model.prior.name, "shares": model.prior.shares_C.tolist()},
        "config": config,
    }
