"""Where a run computes, and how a method is put there."""

import contextlib
import os
import shutil
from collections.abc import Iterator

import torch
from torch import nn

from longtail.config import Config, TrainConfig
from longtail.errors import UserError
from longtail.kernels import nvrtc, resnet
from longtail.kernels.sgd import PieceTables
from longtail.methods import Method
from longtail.models.backbones import FeatureMaps, Trunk, has_kernels
from longtail.models.momentum import MomentumNetwork

# Steps that repay torch.compile, on an H200: what follows a fused trunk takes some 15 s (5 where the cache has it) and saves a
# quarter of a millisecond a step; PaCo with the CIFAR ResNet-50 takes 75 s and saves 8 ms.
REPAID_FUSED, REPAID = 20_000, 10_000

# CUDA has 8 queues to a GPU unless told otherwise, when it starts. Streams beyond that share them and wait for what is not
# theirs: those that nvJPEG decodes on waited for the step (docs/log.md: 508 ms a batch, with 32 queues 10).
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "32"}


def choose_device(name: str, flag: str = "--train.device") -> torch.device:
    """`auto` takes CUDA where there is one; asking for what is not there is an error."""
    for variable, most in QUEUES.items():
        os.environ.setdefault(variable, most)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{flag} cuda: torch sees no CUDA device here; use {flag} cpu, or auto", kind="conflict")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def memory_format(train: TrainConfig) -> torch.memory_format:
    """Of images and weights alike, or every convolution would convert one of them."""
    return torch.channels_last if train.channels_last else torch.contiguous_format


def precision(train: TrainConfig, device: torch.device) -> str:
    """What `auto` means here."""
    return train.precision if train.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"


@contextlib.contextmanager
def products_in(precision: str, device: torch.device) -> Iterator[None]:
    """Beside a trunk in bf16 the heads' float32 products on CUDA may round their factors to TF32's ten bits."""
    before = matmul_switches()
    if device.type != "cuda" or before is None:
        yield
        return
    torch.set_float32_matmul_precision("high" if precision == "bf16" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.matmul.fp32_precision = before[1]


def matmul_switches() -> tuple[str, str] | None:
    """torch's older and its newer one; none where the caller has chosen by the newer kind alone, which shall hold."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    except RuntimeError:  # torch does not tell by the one what was set by the other
        return None


def check_step(train: TrainConfig, device: torch.device) -> None:
    """Whether steps can be made here the way that is asked for. What processes tell one another is not captured."""
    if train.execution == "captured" and train.processes > 1:
        raise UserError(
            "--train.execution captured: steps of several processes are not captured: use auto", kind="unsupported"
        )
    if train.execution == "fused" and not uses_kernels(train, device):
        raise UserError(
            "--train.execution fused: our kernels want bf16 and a CUDA GPU of capability 8 or more: use auto",
            kind="conflict",
        )
    if train.execution == "compiled" and not can_compile(device):
        raise UserError(
            "--train.execution compiled: torch.compile finds no C++ compiler here: install g++, or use auto",
            kind="missing-package",
        )


def uses_kernels(train: TrainConfig, device: torch.device) -> bool:
    """Whether our kernels do what they know: views, the CIFAR ResNets; they work in bf16."""
    return train.execution in ("auto", "fused") and precision(train, device) == "bf16" and nvrtc.is_available(device)


def fits(net: nn.Module, config: Config) -> bool:
    """Whether our kernels know how to train this network."""
    known = has_kernels(net) and config.data.image_size == resnet.IMAGE_SIZE
    return known and config.train.channels_last and config.model.norm == "batch"


def compiling_pays(train: TrainConfig, device: torch.device, steps: int, fused: bool) -> bool:
    """Whether torch.compile gets its part: where asked for, and in `auto` on a GPU where so many steps repay its time."""
    fast = train.execution in ("auto", "fused") and precision(train, device) == "bf16" and device.type == "cuda"
    repaid = fast and steps >= (REPAID_FUSED if fused else REPAID) and can_compile(device)
    return train.execution == "compiled" or repaid


def can_compile(device: torch.device) -> bool:
    """Triton asks for a C compiler, torch on the CPU for a C++ one; without, the backward pass would fail at its first step."""
    names = ("gcc", "clang", os.environ.get("CC")) if device.type == "cuda" else ("g++", os.environ.get("CXX"))
    return any(shutil.which(name) for name in names if name)


def compile_networks(method: Method) -> None:
    """Let torch.compile have the trunks that our kernels do not know, and what follows a trunk."""
    torch._dynamo.config.suppress_errors = True  # what the compiler does not understand of a network runs as it is
    torch._dynamo.config.recompile_limit = 64  # settings that one process may go through; seeds share a compilation
    method.compile()
    for trunk in (m for m in method.modules() if isinstance(m, Trunk) and not is_fused(m)):
        trunk.body.compile()


def compile_kernels(method: Method) -> None:
    """Compile the kernels of a fused network many at a time, before the first step asks for one after the other."""
    for part in method.net.trunk.modules():
        if isinstance(part, Trunk | FeatureMaps) and part.fused:
            # The kernels do not depend on the batch size.
            images = next(method.parameters()).new_empty(1, 3, resnet.IMAGE_SIZE, resnet.IMAGE_SIZE)
            as_map = isinstance(part, FeatureMaps)
            resnet.compile_kernels(part.net if as_map else part.body, images, as_map)  # type: ignore[arg-type]


def is_fused(network: nn.Module) -> bool:
    """Whether our kernels train it, or a part of it."""
    return any(isinstance(part, Trunk | FeatureMaps) and part.fused for part in network.modules())


def to_device(method: Method, config: Config, device: torch.device) -> Method:
    """The method on its device, its trunks in the precision and memory format asked for."""
    train = config.train
    method = method.to(device=device, memory_format=memory_format(train))  # type: ignore[call-overload]
    low = precision(train, device) == "bf16"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of this run, not of those before it in the process
    if device.type == "cuda" and not low:
        # fp32 is for checking: IEEE products instead of TF32's ten bits, and sums in one order
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    for part in method.modules():
        if isinstance(part, Trunk):
            part.precision = torch.bfloat16 if low else torch.float32
        if isinstance(part, Trunk | FeatureMaps):
            net = part.body if isinstance(part, Trunk) else part.net
            part.fused = fits(net, config) and uses_kernels(train, device)
    for key in (m for m in method.modules() if isinstance(m, MomentumNetwork)):
        key.pieces = PieceTables() if is_fused(method) else None
    return method
