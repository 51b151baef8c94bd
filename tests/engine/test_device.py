"""Where a run computes: torch's own switches are left as they were found."""

import subprocess
import sys

import pytest
import torch

from longtail.engine.device import products_in

CUDA = torch.device("cuda")  # need not be there


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize(("precision", "inside"), [("bf16", "high"), ("fp32", "highest")])
def test_products_are_rounded_inside_and_not_after(before, precision, inside):
    found = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision(before)
        with pytest.raises(ZeroDivisionError), products_in(precision, CUDA):
            assert torch.get_float32_matmul_precision() == inside
            raise ZeroDivisionError  # also when something goes wrong
        assert torch.get_float32_matmul_precision() == before
        with products_in(precision, torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(found[0])
        torch.backends.cuda.matmul.fp32_precision = found[1]


@pytest.mark.parametrize("switch", ["torch.backends.cuda.matmul", "torch.backends"])
def test_torchs_newer_switches_hold(switch):
    """In a process of their own, as the two kinds of switches do not go together."""
    script = f"""
import torch
from longtail.engine.device import products_in
{switch}.fp32_precision = "tf32"
for device in ("cpu", "cuda"):
    for precision in ("bf16", "fp32"):
        with products_in(precision, torch.device(device)):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
