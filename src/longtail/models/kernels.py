"""resnet.cu, compiled when it is first needed, a kernel for each size, and kept on the disk for the next run."""

import ctypes
import functools
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc  # comes with torch where there is CUDA
from torch import Tensor

SOURCE = Path(__file__).with_name("resnet.cu").read_text(encoding="utf-8")


def expression(name: str, *constants: int | bool) -> str:
    """A template with its arguments, as C++ writes it."""
    return f"{name}<{', '.join(str(c).lower() for c in constants)}>"


@functools.cache
def kernel(name: str) -> "Kernel":
    major, minor = torch.cuda.get_device_capability()
    return Kernel(*cubin(name, f"sm_{major}{minor}"))


def compile_all(names: Iterable[str]) -> None:
    """Many at a time; what is on the disk is only loaded."""
    torch.cuda.current_stream()  # makes the context that compilation does not need, but loading does
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: cubin(name, architecture), set(names)))


def cubin(name: str, architecture: str) -> tuple[bytes, str]:
    """Machine code of an instance, and the name it has there."""
    version = ".".join(map(str, checked(nvrtc.nvrtcVersion())))
    key = hashlib.sha256("\n".join((SOURCE, name, architecture, version)).encode()).hexdigest()[:32]
    path = cache() / f"{key}.cubin"
    try:
        code, lowered = path.read_bytes().split(b"\0", 1)[::-1]
        return code, lowered.decode()
    except (OSError, ValueError):
        code, lowered = compile_one(name, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_bytes(lowered + b"\0" + code)
        fresh.replace(path)
    except OSError:  # a disk that cannot be written to costs time only
        pass
    return code, lowered.decode()


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail" / "kernels"


def compile_one(name: str, architecture: str) -> tuple[bytes, bytes]:
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"resnet.cu", 0, None, None))
    checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [b"--std=c++17", f"--gpu-architecture={architecture}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{name} does not compile for {architecture}: {log.decode(errors='replace')}")
    lowered = bytes(checked(nvrtc.nvrtcGetLoweredName(program, name.encode())))
    code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return code, lowered


class Kernel:
    """A loaded kernel. Tensors are passed as pointers, None as a null pointer, numbers as 32-bit integers."""

    def __init__(self, code: bytes, name: str) -> None:
        self.module = checked(driver.cuModuleLoadData(code))
        self.function = checked(driver.cuModuleGetFunction(self.module, name.encode()))

    def __call__(self, blocks: tuple[int, int], threads: int, *args: Tensor | int | None) -> None:
        """On the current stream."""
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in args)
        types = tuple(ctypes.c_int if isinstance(a, int) else ctypes.c_void_p for a in args)
        stream = torch.cuda.current_stream().cuda_stream
        checked(driver.cuLaunchKernel(self.function, *blocks, 1, threads, 1, 1, 0, stream, (values, types), 0))


def checked(answer: tuple[Any, ...]) -> Any:
    """The answer of a CUDA call without its status, which must be success."""
    status, *rest = answer
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return rest[0] if len(rest) == 1 else rest
