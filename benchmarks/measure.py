"""Functions that the benchmarks share: timing, a description of the machine, and tables."""

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import PIL
import torch
import torchvision

import longtail
from longtail.engine.environment import find_commit
from longtail.files import write_json

Row = dict[str, Any]


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(work: Callable[[], Any], device: torch.device, calls: int, budget: float) -> float:
    """By the wall clock, host included: the median over blocks of `calls`, as many as `budget` seconds allow, at least three.

    The first call is not counted: it chooses kernels and allocates.
    """
    work()
    wait(device)
    blocks: list[float] = []
    while len(blocks) < 3 or (sum(blocks) < budget and len(blocks) < 25):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait(device)
        blocks.append(time.perf_counter() - start)
    return sorted(blocks)[len(blocks) // 2] / calls


def peak_memory(work: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes at the peak beyond what was there before: on a CUDA device, or of the process where Linux counts them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
    except (OSError, AttributeError):
        return None
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Return an entry of the memory statistics of a process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def release() -> None:
    """Give back what the last measurement held: captured graphs sit in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def where(device: torch.device) -> Row:
    """Return machine, versions, commit and date of a measurement."""
    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "cpu_cores": cores(),
        "versions": {
            "longtail": longtail.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "pillow": PIL.__version__,
            "numpy": numpy.__version__,
        },
        "commit": find_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def table(rows: Sequence[Row]) -> str:
    """Columns as wide as their widest entry; numbers to three digits."""
    names = list(rows[0])
    lines = [names, *([_entry(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(entry.rjust(width) for entry, width in zip(line, widths, strict=True)) for line in lines)


def _entry(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def save(path: Path | None, tree: Row) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, tree)
