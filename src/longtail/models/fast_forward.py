"""Fast inference of a frozen backbone in float32: ONNX Runtime on the CPU if it is installed, otherwise PyTorch."""

import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
"""Maps normalized images (N,3,H,W) to float32 features (N,F), without gradients."""
MIN_COSINE = 0.9999
"""Smallest cosine similarity between the features of ONNX Runtime and PyTorch; otherwise PyTorch is used."""
INPUT = "images"


def make_plain_forward(body: nn.Module, device: torch.device) -> Forward:
    """Return a function that runs a copy of a network in evaluation mode, with the channels-last memory format."""
    net = copy.deepcopy(body).eval().requires_grad_(False).float()
    net = net.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return net(x.to(memory_format=torch.channels_last)).float()

    return forward


def make_onnx_forward(body: nn.Module, image_size: int) -> Forward:
    """Return a function that runs a network in ONNX Runtime on the CPU.

    The TorchScript-based exporter takes a second; the one based on torch.export takes several times as long.
    """
    import onnxruntime

    net, example = (
        copy.deepcopy(body).cpu().eval().requires_grad_(False).float(),
        torch.zeros(2, 3, image_size, image_size),
    )
    content, before = io.BytesIO(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options: dict[str, Any] = {"input_names": [INPUT], "dynamic_axes": {INPUT: {0: "batch"}}}
            torch.onnx.export(net, (example,), content, dynamo=False, **options)  # type: ignore[arg-type]
    finally:
        logging.disable(before)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content.getvalue(), settings, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {INPUT: x.numpy(force=True)})[0])


def make_fast_forward(body: nn.Module, image_size: int, device: torch.device) -> Forward:
    """Return the fastest function that computes the same features as a network.

    Args:
        body: The network. It is copied, and may be changed afterwards.
        image_size: Height and width of the images in pixels.
        device: The device of the images.
    """
    plain = make_plain_forward(body, device)
    if (
        device.type != "cpu"
        or importlib.util.find_spec("onnxruntime") is None
        or importlib.util.find_spec("onnx") is None
    ):
        return plain
    x = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    try:
        fast = make_onnx_forward(body, image_size)
        is_exact = F.cosine_similarity(plain(x), fast(x)).amin() >= MIN_COSINE  # False for NaN
    except Exception as error:  # exporters raise many types for operations that they do not support
        logging.getLogger(__name__).debug("ONNX Runtime is not used: %s", error)
        return plain
    return fast if is_exact else plain
