"""Facts about the machine that decide whether floating-point results can be repeated bit for bit."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "pillow", "pyarrow", "safetensors", "onnx")


def describe_machine() -> dict[str, Any]:
    """Return the CPU model, its instruction set as torch uses it, the thread count, and the package versions."""
    return {
        "cpu": describe_cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch_build": torch.__version__,
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in PACKAGES},
    }


def describe_cpu() -> dict[str, str]:
    """Return vendor, family, model, stepping and model name from /proc/cpuinfo; elsewhere the platform's own name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    pairs = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in pairs.items()}
    wanted = ("vendor_id", "model name", "cpu family", "model", "stepping")
    return {key: found[key] for key in wanted if key in found} or {"model name": platform.processor()}


def find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def repeats_exactly(stored: dict[str, Any]) -> bool:
    """Return True if this machine computes the same bits as the one described by `stored`."""
    here = describe_machine()
    keys = ("cpu", "cpu_capability", "system", "architecture", "threads", "torch_build")
    return all(here[key] == stored[key] for key in keys)
