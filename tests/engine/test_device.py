"""Where a run computes: torch's own switches are left as they were found."""

import itertools
import operator
import os
from dataclasses import replace

import pytest
import torch

from longtail import recipes
from longtail.config import TrainConfig
from longtail.engine.device import (
    QUEUES,
    REPAID,
    REPAID_FUSED,
    can_compile,
    check_step,
    choose_device,
    compiling_pays,
    fits,
    products_in,
)
from longtail.models.backbones import make_backbone
from tests.processes import start
from tests.raises import raises

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


@pytest.mark.parametrize("variable", QUEUES)
def test_cuda_gets_more_queues_unless_the_user_has_said_how_many(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    choose_device("auto")
    assert os.environ[variable] == "1"
    monkeypatch.delenv(variable)
    choose_device("auto")
    assert os.environ[variable] == QUEUES[variable]


def hold(switch: str) -> None:
    operator.attrgetter(switch)(torch).fp32_precision = "tf32"
    for device, precision in itertools.product(("cpu", "cuda"), ("bf16", "fp32")):
        with products_in(precision, torch.device(device)):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("switch", ["backends.cuda.matmul", "backends"])
def test_torchs_newer_switches_hold(switch):
    """In a process of their own, as the two kinds of switches do not go together."""
    process = start(hold, switch)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("step", "precision", "device", "steps", "fused", "pays"),
    [
        ("auto", "auto", "cuda", REPAID, False, True),
        ("auto", "auto", "cuda", REPAID - 1, False, False),
        ("auto", "auto", "cuda", REPAID_FUSED, True, True),
        ("auto", "auto", "cuda", REPAID_FUSED - 1, True, False),
        ("fused", "auto", "cuda", REPAID_FUSED, True, True),
        ("auto", "fp32", "cuda", REPAID_FUSED, False, False),  # fp32 is for checking
        ("auto", "bf16", "cpu", REPAID_FUSED, False, False),
        ("captured", "auto", "cuda", REPAID_FUSED, False, False),
        ("eager", "auto", "cuda", REPAID_FUSED, False, False),
        ("compiled", "fp32", "cpu", 1, False, True),
    ],
)
def test_a_run_compiles_where_it_is_asked_to_or_repaid(step, precision, device, steps, fused, pays, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert compiling_pays(TrainConfig(step=step, precision=precision), torch.device(device), steps, fused) is pays


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_auto_goes_without_and_compiled_says_so(device, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not compiling_pays(TrainConfig(), torch.device(device), REPAID_FUSED, fused=True)
    with raises("missing-package", "--train.execution compiled", "g++"):
        check_step(TrainConfig(execution="compiled"), torch.device(device))


def test_a_compiler_may_be_named_by_the_environment(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name if name == "/opt/mine" else None)
    monkeypatch.setenv("CC", "/opt/mine")
    assert can_compile(CUDA) and not can_compile(torch.device("cpu"))
    monkeypatch.setenv("CXX", "/opt/mine")
    assert can_compile(torch.device("cpu"))


@pytest.mark.parametrize("norm", ["batch", "ghost", "sync"])
def test_our_kernels_know_no_other_norm(norm):
    """They normalize by the batch."""
    config = recipes.cifar100_lt("paco")
    config = replace(config, model=replace(config.model, norm=norm))
    assert fits(make_backbone("resnet32_cifar"), config) == (norm == "batch")
