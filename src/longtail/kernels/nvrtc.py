"""Our CUDA sources, compiled when a kernel is first needed, one instance for each size, and kept on the disk for the next run.

NVRTC, the compiler, and the driver's interface (cuda.bindings) come with torch where there is CUDA.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | ctypes.Array | None  # of a kernel


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled and run on this device, seen by trying; they want bf16, capability 8 or more."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        code, name = CudaSource("nothing", 'extern "C" __global__ void nothing() {}').compile("nothing", architecture())
        for early in (False, True):
            Kernel(code, name.decode())((1, 1), 1, early=early)
    except (ImportError, OSError, RuntimeError):  # no bindings, no compiler, or one that does not know this device
        return False
    return True


def expression(name: str, *constants: int | bool) -> str:
    """A template with its arguments, as C++ writes it."""
    return f"{name}<{', '.join(str(c).lower() for c in constants)}>"


class CudaSource:
    """A text of CUDA C++, with the compiler's options for it."""

    def __init__(self, name: str, text: str, *options: str) -> None:
        self.name, self.text, self.options = name, text, options
        self.compiled: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.loaded: dict[str, Kernel] = {}

    def kernel(self, name: str) -> "Kernel":
        """An instance, compiled and loaded once."""
        if name not in self.loaded:
            found = self.cubin(name, architecture())
            try:
                self.loaded[name] = Kernel(*found)
            except RuntimeError:  # what lay on the disk was damaged
                self.loaded[name] = Kernel(*self.compile_and_keep(name, architecture()))
        return self.loaded[name]

    def compile_all(self, names: Iterable[str]) -> None:
        """Many at a time; what is on the disk already costs nothing."""
        here = architecture()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.cubin(name, here), set(names)))

    def cubin(self, name: str, architecture: str) -> tuple[bytes, str]:
        """Machine code of an instance, and the name it has there."""
        if (name, architecture) not in self.compiled:
            try:
                lowered, code = self.place(name, architecture).read_bytes().split(b"\0", 1)
                self.compiled[name, architecture] = code, lowered.decode()
            except (OSError, ValueError):
                self.compiled[name, architecture] = self.compile_and_keep(name, architecture)
        return self.compiled[name, architecture]

    def place(self, name: str, architecture: str) -> Path:
        """Where it lies on the disk."""
        from cuda.bindings import nvrtc

        version = ".".join(map(str, checked(nvrtc.nvrtcVersion())))
        key = "\n".join((self.text, name, architecture, version, *self.options))
        return cache() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"

    def compile_and_keep(self, name: str, architecture: str) -> tuple[bytes, str]:
        code, lowered = self.compile(name, architecture)
        path = self.place(name, architecture)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}.tmp")
            fresh.write_bytes(lowered + b"\0" + code)
            fresh.replace(path)
        except OSError:  # a disk that cannot be written to costs time only
            pass
        return code, lowered.decode()

    def compile(self, name: str, architecture: str) -> tuple[bytes, bytes]:
        from cuda.bindings import nvrtc

        program = checked(nvrtc.nvrtcCreateProgram(self.text.encode(), self.name.encode(), 0, None, None))
        checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        options = [o.encode() for o in ("--std=c++17", f"--gpu-architecture={architecture}", *self.options)]
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


def read(path: Path, *options: str) -> CudaSource:
    return CudaSource(path.name, path.read_text(encoding="utf-8"), *options)


class Kernel:
    """A loaded kernel.

    One that is launched `early` may begin while the launch before it on the stream, also a kernel, is still at work: it says by
    itself from where on it must wait. Devices before capability 9 do not know this, and wait as usual.
    """

    def __init__(self, code: bytes, name: str) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # makes the context, where there is none yet
        self.launch, self.shared = driver.cuLaunchKernelEx, 0
        self.module = checked(driver.cuModuleLoadData(code))
        self.function = checked(driver.cuModuleGetFunction(self.module, name.encode()))

    def __call__(
        self, blocks: tuple[int, int], threads: int, *args: Argument, shared: int = 0, early: bool = False
    ) -> None:
        """On the current stream, with so many bytes of shared memory beyond what the kernel declares."""
        values = [as_c(a) for a in args]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        if shared > self.shared:  # more than the usual must be asked for
            self.allow(shared)
        how = launch_config(*blocks, threads, shared, torch.cuda.current_stream().cuda_stream, early)
        checked(self.launch(how, self.function, ctypes.addressof(addresses), 0))

    def allow(self, shared: int) -> None:
        from cuda.bindings import driver

        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.function, most, shared))
        self.shared = shared


def as_c(value: Argument) -> Any:
    """Tensors are passed as pointers, None as a null pointer, numbers in 32 bits, and what ctypes has made by value."""
    match value:
        case Tensor():
            return ctypes.c_void_p(value.data_ptr())
        case None:
            return ctypes.c_void_p(None)
        case int():
            return ctypes.c_int(value)
        case float():
            return ctypes.c_float(value)
        case _:
            return value


def launch_config(columns: int, rows: int, threads: int, shared: int, stream: int, early: bool) -> Any:
    from cuda.bindings import driver

    how = driver.CUlaunchConfig()
    how.gridDimX, how.gridDimY, how.gridDimZ = columns, rows, 1
    how.blockDimX, how.blockDimY, how.blockDimZ = threads, 1, 1
    how.sharedMemBytes, how.hStream = shared, stream
    if early and torch.cuda.get_device_capability() >= (9, 0):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        how.attrs, how.numAttrs = [attribute], 1
    return how


def architecture() -> str:
    """Of the current device, as the compiler names it."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail" / "kernels"


def checked(answer: tuple[Any, ...]) -> Any:
    """The answer of a CUDA call without its status, which must be success."""
    status, *rest = answer
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return rest[0] if len(rest) == 1 else rest
