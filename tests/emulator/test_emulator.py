"""Test that the emulator detects missing barriers and invalid instructions."""

import pytest
import torch

from longtail.kernels.nvrtc import CudaSource
from tests.emulator import ORDERS, emulate

TEXT = """
template <bool BARRIER>
__global__ void neighbors(const int* x, int* to) {
  __shared__ int shared[64];
  shared[threadIdx.x] = x[threadIdx.x];
  if (BARRIER) __syncthreads();
  to[threadIdx.x] = shared[63 - threadIdx.x];
  __syncthreads();
}

__global__ void half_of_them_wait() {
  if (threadIdx.x % 2) __syncthreads();
}

__global__ void apart(const float* x, float* to) {
  unsigned r[4];
  __shared__ __align__(16) char tile[16];
  if (threadIdx.x % 2) to[0] = __shfl_xor_sync(~0u, x[0], 1);
  else load_matrices(r, at(tile));
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    toys = emulate(CudaSource("toys.cu", TEXT), tmp_path_factory.mktemp("toys"))
    toys.compile_all(["neighbors<true>", "neighbors<false>", "half_of_them_wait", "apart"])
    return toys


@pytest.mark.parametrize("order", ORDERS)
def test_missing_barrier_changes_the_result(source, order):
    source.order, x = order, torch.arange(64, dtype=torch.int32)
    for name in ("neighbors<true>", "neighbors<false>"):
        for _ in range(2):  # the second time, too: shared memory is not kept
            to = torch.zeros_like(x)
            source.kernel(name)((1, 1), 64, x, to)
            assert torch.equal(to, x.flip(0)) == (name == "neighbors<true>")


def test_deadlocks_and_undefined_behavior_are_errors(source):
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="wait for each other"):
        source.kernel("half_of_them_wait")((1, 1), 64)
    with pytest.raises(RuntimeError, match="different instructions"):
        source.kernel("apart")((1, 1), 32, x, x)
    with pytest.raises(RuntimeError, match="another number of arguments"):
        source.kernel("apart")((1, 1), 32, x)
