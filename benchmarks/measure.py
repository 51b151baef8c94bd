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


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(work: Callable[[], Any], device: torch.device, calls: int, budget: float) -> float:
    """Return the wall time of a call, including the work of the host: the median over blocks of calls.

    The first call is not measured, because it selects kernels and allocates memory.

    Args:
        work: The function to call.
        device: The device that it uses.
        calls: The number of calls in a block.
        budget: The total time in seconds. At least three blocks are measured, also if they take longer.
    """
    work()
    synchronize(device)
    blocks: list[float] = []
    while len(blocks) < 3 or (sum(blocks) < budget and len(blocks) < 25):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        blocks.append(time.perf_counter() - start)
    return sorted(blocks)[len(blocks) // 2] / calls


def peak_memory(work: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory of a call in bytes, in addition to what was in use: of the GPU, or on Linux of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
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


def free_memory() -> None:
    """Free the memory of the last measurement. Captured graphs are in reference cycles, so this needs the garbage collector."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine(device: torch.device) -> Row:
    """Return machine, versions, commit and date of a measurement."""
    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "cpu_cores": count_cores(),
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


def format_table(rows: Sequence[Row]) -> str:
    """Return rows as an aligned table; numbers have three significant digits."""
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
