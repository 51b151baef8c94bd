"""Run the CUDA kernels on the CPU, because CI has no GPU: g++ compiles them with emulator.h, which emulates CUDA."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from longtail.kernels.nvrtc import CudaSource, KernelArgument, to_ctypes

ORDERS = ("forward", "reversed", "shuffled")  # of the threads; as in threads.h
OPTIONS = ("-O2", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC")
ALONE = ("-fno-gnu-unique", "-Wl,-Bsymbolic")  # keep the variables of each library separate
ENTRY = """
extern "C" const char* kernel_{i}(void** args, size_t n, unsigned blocks, unsigned rows, unsigned threads, int shared,
                                  int order) {{
  emulated::room_bytes = shared;
  return emulated::launch({name}, args, n, {{blocks, rows}}, threads, (emulated::Order)order);
}}
"""


class Emulated(CudaSource):
    """A CUDA source whose kernels run on CPU tensors."""

    def __init__(self, source: CudaSource, folder: Path) -> None:
        super().__init__(source.name, source.text, *source.options)
        self.folder, self.order = folder, "forward"

    def kernel(self, name: str) -> "Kernel":
        if name not in self.loaded:
            self.compile_all([name])
        return self.loaded[name]

    def compile_all(self, names: Iterable[str]) -> None:
        """Compile kernels into one library."""
        wanted = sorted(set(names))
        code = self.folder / f"{Path(self.name).stem}_{len(self.loaded)}.cpp"
        entries = [ENTRY.format(i=i, name=name) for i, name in enumerate(wanted)]
        code.write_text("\n".join(('#include "emulator.h"', f'#line 1 "{self.name}"', self.text, *entries)))
        library = code.with_suffix(".so")
        command = ["g++", *OPTIONS, *ALONE, f"-I{Path(__file__).parent}", "-o", library, code]
        compiler = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert compiler.returncode == 0, compiler.stderr
        functions = ctypes.CDLL(str(library))
        self.loaded |= {name: Kernel(self, functions[f"kernel_{i}"]) for i, name in enumerate(wanted)}


class Kernel:
    """An emulated kernel with the interface of `longtail.kernels.nvrtc.Kernel`."""

    def __init__(self, source: Emulated, function: "ctypes._NamedFuncPointer") -> None:
        self.source, self.function = source, function
        self.function.restype = ctypes.c_char_p

    def __call__(
        self, blocks: tuple[int, int], threads: int, *args: KernelArgument, shared: int = 0, early: bool = False
    ) -> None:
        values = [to_ctypes(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        order = ORDERS.index(self.source.order)
        fault = self.function(pointers, ctypes.c_size_t(len(values)), *blocks, threads, shared, order)
        if fault is not None:
            raise RuntimeError(fault.decode())


def emulate(source: CudaSource, folder: Path) -> Emulated:
    if shutil.which("g++") is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs Linux and g++")
    return Emulated(source, folder)
