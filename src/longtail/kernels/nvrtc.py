"""Compile CUDA sources at run time with NVRTC, cache the machine code on disk, and launch kernels.

Kernels are templates; each instance is compiled when it is first needed. NVRTC and the interface of the driver (cuda.bindings)
are installed with CUDA builds of torch.
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

KernelArgument = Tensor | int | float | ctypes.Array | None


@functools.cache
def is_available(device: torch.device) -> bool:
    """Return whether kernels can be compiled and launched on this device; a trial kernel is compiled and launched.

    The kernels need bf16, that is, compute capability 8.0 or higher.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        trial = CudaSource("nothing", 'extern "C" __global__ void nothing() {}')
        code, name = trial.compile("nothing", current_architecture())
        for early in (False, True):
            Kernel(code, name.decode())((1, 1), 1, early=early)
    except (ImportError, OSError, RuntimeError):  # no bindings, no compiler, or one that does not support this device
        return False
    return True


def template_instance(name: str, *constants: int | bool) -> str:
    """Return the C++ name of a template instance, for example "pool<64, 64, 8>"."""
    return f"{name}<{', '.join(str(c).lower() for c in constants)}>"


class CudaSource:
    """The text of a CUDA C++ source with its compiler options, and its compiled kernels.

    Args:
        name: File name for compiler messages.
        text: The source.
        *options: Further options of NVRTC.
    """

    def __init__(self, name: str, text: str, *options: str) -> None:
        self.name, self.text, self.options = name, text, options
        self.compiled: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.loaded: dict[str, Kernel] = {}

    def kernel(self, name: str) -> "Kernel":
        """Return a kernel by its name with template arguments; it is compiled and loaded once."""
        if name not in self.loaded:
            cubin = self.cubin(name, current_architecture())
            try:
                self.loaded[name] = Kernel(*cubin)
            except RuntimeError:  # the cached file is damaged
                self.loaded[name] = Kernel(*self.compile_and_store(name, current_architecture()))
        return self.loaded[name]

    def compile_all(self, names: Iterable[str]) -> None:
        """Compile several kernels in parallel, except for those in the cache."""
        architecture = current_architecture()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.cubin(name, architecture), set(names)))

    def cubin(self, name: str, architecture: str) -> tuple[bytes, str]:
        """Return the machine code of a kernel and its mangled name, from the cache if possible."""
        if (name, architecture) not in self.compiled:
            try:
                mangled, code = self.cache_path(name, architecture).read_bytes().split(b"\0", 1)
                self.compiled[name, architecture] = code, mangled.decode()
            except (OSError, ValueError):
                self.compiled[name, architecture] = self.compile_and_store(name, architecture)
        return self.compiled[name, architecture]

    def cache_path(self, name: str, architecture: str) -> Path:
        """Return the cache file of a kernel, which is named after everything that the machine code depends on."""
        from cuda.bindings import nvrtc

        version = ".".join(map(str, check_status(nvrtc.nvrtcVersion())))
        key = "\n".join((self.text, name, architecture, version, *self.options))
        return cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"

    def compile_and_store(self, name: str, architecture: str) -> tuple[bytes, str]:
        """Compile a kernel and write it to the cache. A cache that is not writable is ignored."""
        code, mangled = self.compile(name, architecture)
        path = self.cache_path(name, architecture)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(mangled + b"\0" + code)
            temporary.replace(path)
        except OSError:
            pass
        return code, mangled.decode()

    def compile(self, name: str, architecture: str) -> tuple[bytes, bytes]:
        """Return the machine code of a kernel and its mangled name.

        Raises:
            RuntimeError: If the source does not compile; the message has the compiler's log.
        """
        from cuda.bindings import nvrtc

        program = check_status(nvrtc.nvrtcCreateProgram(self.text.encode(), self.name.encode(), 0, None, None))
        check_status(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        options = [o.encode() for o in ("--std=c++17", f"--gpu-architecture={architecture}", *self.options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(check_status(nvrtc.nvrtcGetProgramLogSize(program)))
            check_status(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"cannot compile {name} for {architecture}: {log.decode(errors='replace')}")
        mangled = bytes(check_status(nvrtc.nvrtcGetLoweredName(program, name.encode())))
        code = bytes(check_status(nvrtc.nvrtcGetCUBINSize(program)))
        check_status(nvrtc.nvrtcGetCUBIN(program, code))
        check_status(nvrtc.nvrtcDestroyProgram(program))
        return code, mangled


def read_source(path: Path, *options: str) -> CudaSource:
    """Read a CUDA source from a file; the options are those of `CudaSource`."""
    return CudaSource(path.name, path.read_text(encoding="utf-8"), *options)


class Kernel:
    """A loaded kernel, which can be called to launch it.

    Args:
        code: Machine code (cubin).
        name: The mangled name of the kernel.
    """

    def __init__(self, code: bytes, name: str) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # creates the CUDA context if there is none yet
        self.launch, self.max_shared = driver.cuLaunchKernelEx, 0
        self.module = check_status(driver.cuModuleLoadData(code))
        self.function = check_status(driver.cuModuleGetFunction(self.module, name.encode()))

    def __call__(
        self, blocks: tuple[int, int], threads: int, *args: KernelArgument, shared: int = 0, early: bool = False
    ) -> None:
        """Launch the kernel on the current stream.

        Args:
            blocks: Columns and rows of the grid.
            threads: Threads per block.
            *args: The arguments of the kernel, see `to_ctypes`.
            shared: Bytes of dynamic shared memory.
            early: Let the kernel start while the previous kernel on the stream still runs (programmatic dependent launch). The
                kernel itself waits for it where it has to. Devices below compute capability 9.0 ignore this.
        """
        values = [to_ctypes(a) for a in args]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        if shared > self.max_shared:
            self.raise_max_shared(shared)
        config = launch_config(*blocks, threads, shared, torch.cuda.current_stream().cuda_stream, early)
        check_status(self.launch(config, self.function, ctypes.addressof(addresses), 0))

    def raise_max_shared(self, shared: int) -> None:
        """Allow launches with so many bytes of dynamic shared memory; CUDA requires this above its default limit."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check_status(driver.cuFuncSetAttribute(self.function, attribute, shared))
        self.max_shared = shared


def to_ctypes(value: KernelArgument) -> Any:
    """Convert an argument: tensors become pointers, None a null pointer, numbers have 32 bits, ctypes objects are unchanged."""
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
    """Return the driver's launch configuration; the arguments are those of `Kernel.__call__`."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = columns, rows, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    if early and torch.cuda.get_device_capability() >= (9, 0):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def current_architecture() -> str:
    """Return the name of the current device's architecture for the compiler, for example "sm_90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def cache_dir() -> Path:
    """Return the folder of the compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail" / "kernels"


def check_status(result: tuple[Any, ...]) -> Any:
    """Return the result of a CUDA call without its status code. Raise RuntimeError if the call failed."""
    status, *rest = result
    if status.value != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return rest[0] if len(rest) == 1 else rest
