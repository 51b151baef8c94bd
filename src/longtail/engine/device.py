"""The device of a run, and how a method is prepared for it: precision, memory format, CUDA kernels, torch.compile."""

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn

from longtail.config import Config, TrainConfig
from longtail.errors import UserError, unknown_name
from longtail.kernels import nvrtc, resnet
from longtail.kernels.sgd import PieceTables
from longtail.methods import Method
from longtail.models.backbones import FeatureMaps, Trunk, has_kernels
from longtail.models.momentum import MomentumNetwork

DEVICES = ("auto", "cpu", "cuda")
MIN_STEPS, MIN_STEPS_FUSED = 10_000, 20_000
"""Steps from which torch.compile saves more time than it takes, and the same if our kernels train the backbone.

Measured on an H200: compiling what follows a fused backbone takes 15 s (5 s from the cache) and saves 0.25 ms per step; for
PaCo with the ResNet-50 for CIFAR it takes 75 s and saves 8 ms."""

CUDA_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32"}
"""Environment variables with the number of CUDA's work queues per device, which is 8 by default.

Streams that share a queue wait for one another. With 8 queues the streams of nvJPEG waited for the training step (docs/log.md:
508 ms per batch, and 10 ms with 32 queues)."""


def choose_device(name: str, flag: str = "--train.device") -> torch.device:
    """Return the device with a name.

    Args:
        name: "cpu", "cuda", or "auto" for CUDA if it is available.
        flag: The flag to mention in the error message.

    Raises:
        UserError: CUDA is asked for, but is not available, or there is no such name.
    """
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    with request_cuda_queues():
        available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(f"{flag} cuda: torch finds no CUDA device; use {flag} cpu, or auto", kind="conflict")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


# Global settings


@contextlib.contextmanager
def preserve_global_settings() -> Iterator[None]:
    """Restore at the end what training and evaluation change in the process.

    These are settings of cuDNN, torch.compile and CUDA, and the state of torch's random generator on the CPU.
    """
    cudnn, dynamo = torch.backends.cudnn, torch._dynamo.config
    before = [
        (settings, name, getattr(settings, name))
        for settings, names in (
            (cudnn, ("allow_tf32", "deterministic")),
            (dynamo, ("suppress_errors", "recompile_limit")),
        )
        for name in names
    ]
    try:
        with request_cuda_queues(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for settings, name, value in before:
            if getattr(settings, name) != value:
                setattr(settings, name, value)


@contextlib.contextmanager
def request_cuda_queues() -> Iterator[None]:
    """Set `CUDA_QUEUES` in the environment, from which CUDA reads them when it starts, unless the user has set them."""
    added = [name for name in CUDA_QUEUES if name not in os.environ]
    os.environ.update({name: CUDA_QUEUES[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads of torch. Threads of small layers wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of float32 matrix products on CUDA: TF32 for the heads of a bf16 backbone, and full precision for fp32.

    Args:
        precision: "bf16" or "fp32".
        device: The device of the products.
    """
    before = read_matmul_precision()
    if device.type != "cuda" or before is None:
        yield
        return
    torch.set_float32_matmul_precision("high" if precision == "bf16" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.matmul.fp32_precision = before[1]


def read_matmul_precision() -> tuple[str, str] | None:
    """Return torch's old and new setting of this precision; None if the caller used only the new one, which is then kept."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    except RuntimeError:  # torch cannot express the new setting by the old one
        return None


# Settings that depend on the device


def memory_format(train: TrainConfig) -> torch.memory_format:
    """Return the memory format of images and weights; if they differed, every convolution would convert one of them."""
    return torch.channels_last if train.channels_last else torch.contiguous_format


def resolve_precision(train: TrainConfig, device: torch.device) -> str:
    """Return "bf16" or "fp32"; "auto" is bf16 on CUDA."""
    return train.precision if train.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"


def check_execution(train: TrainConfig, device: torch.device) -> None:
    """Raise a UserError if steps cannot be executed in the mode `--train.execution` on this device."""
    if train.execution == "captured" and train.processes > 1:
        raise UserError(
            "--train.execution captured: steps of several processes cannot be captured; use auto", kind="unsupported"
        )
    if train.execution == "fused" and not uses_kernels(train, device):
        raise UserError(
            "--train.execution fused: the kernels need bf16 and a CUDA GPU of compute capability 8 or higher; use auto",
            kind="conflict",
        )
    if train.execution == "compiled" and not can_compile(device):
        raise UserError(
            "--train.execution compiled: torch.compile finds no C++ compiler; install g++, or use auto",
            kind="missing-package",
        )


def uses_kernels(train: TrainConfig, device: torch.device) -> bool:
    """Return whether our CUDA kernels make the views and train the networks that they support; they work in bf16."""
    is_low = resolve_precision(train, device) == "bf16"
    return train.execution in ("auto", "fused") and is_low and nvrtc.is_available(device)


def can_kernels_train(net: nn.Module, config: Config) -> bool:
    """Return whether our kernels can train a network."""
    is_known = has_kernels(net) and config.data.image_size == resnet.IMAGE_SIZE
    return is_known and config.train.channels_last and config.model.norm == "batch" and not config.optim.sam


def should_compile(train: TrainConfig, device: torch.device, steps: int, fused: bool) -> bool:
    """Return whether torch.compile is used: on request, and with `auto` on a GPU if enough steps profit from it.

    Args:
        train: The settings of training.
        device: The device.
        steps: The number of steps of the run.
        fused: Whether our kernels train the backbone.
    """
    is_fast = (
        train.execution in ("auto", "fused") and resolve_precision(train, device) == "bf16" and device.type == "cuda"
    )
    pays = is_fast and steps >= (MIN_STEPS_FUSED if fused else MIN_STEPS) and can_compile(device)
    return train.execution == "compiled" or pays


def can_compile(device: torch.device) -> bool:
    """Return whether there is the compiler that torch.compile needs: for C on CUDA (Triton), and for C++ on the CPU.

    Without it, the backward pass would fail at its first step.
    """
    names = ("gcc", "clang", os.environ.get("CC")) if device.type == "cuda" else ("g++", os.environ.get("CXX"))
    return any(shutil.which(name) for name in names if name)


# Preparing a method


def compile_networks(method: Method) -> None:
    """Compile the backbones that our kernels do not support, and what follows a backbone."""
    torch._dynamo.config.suppress_errors = True  # parts of a network that the compiler does not support run eagerly
    torch._dynamo.config.recompile_limit = 64  # a process may train with many settings; seeds share a compilation
    method.compile()
    for trunk in (m for m in method.modules() if isinstance(m, Trunk) and not is_fused(m)):
        trunk.body.compile()


def compile_kernels(method: Method) -> None:
    """Compile the kernels of a fused network in parallel; the first step would compile them one after the other."""
    for part in method.net.trunk.modules():
        if isinstance(part, Trunk | FeatureMaps) and part.fused:
            images = next(method.parameters()).new_empty(
                1, 3, resnet.IMAGE_SIZE, resnet.IMAGE_SIZE
            )  # for any number of images
            as_map = isinstance(part, FeatureMaps)
            resnet.compile_kernels(part.net if as_map else part.body, images, as_map)  # type: ignore[arg-type]


def is_fused(network: nn.Module) -> bool:
    """Return whether our kernels train a network, or a part of it."""
    return any(isinstance(part, Trunk | FeatureMaps) and part.fused for part in network.modules())


def to_device(method: Method, config: Config, device: torch.device) -> Method:
    """Move a method to a device, set the precision and memory format of its backbones, and return it.

    Args:
        method: The method.
        config: The configuration of the run.
        device: The device.
    """
    train = config.train
    method = method.to(device=device, memory_format=memory_format(train))  # type: ignore[call-overload]
    is_low = resolve_precision(train, device) == "bf16"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # earlier runs of this process do not count
    if device.type == "cuda" and not is_low:
        # fp32 is for verification: full precision instead of TF32, and sums in a fixed order
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    for part in method.modules():
        if isinstance(part, Trunk):
            part.precision = torch.bfloat16 if is_low else torch.float32
        if isinstance(part, Trunk | FeatureMaps):
            net = part.body if isinstance(part, Trunk) else part.net
            part.fused = can_kernels_train(net, config) and uses_kernels(train, device)
    for key in (m for m in method.modules() if isinstance(m, MomentumNetwork)):
        key.pieces = PieceTables() if is_fused(method) else None
    return method
