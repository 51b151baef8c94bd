"""The device of a run, and the settings of torch that are restored."""

import itertools
import operator
import os
from dataclasses import replace

import pytest
import torch

from longtail import recipes
from longtail.config import TrainConfig
from longtail.engine.device import (
    CUDA_QUEUES,
    MIN_STEPS,
    MIN_STEPS_FUSED,
    can_compile,
    can_kernels_train,
    check_execution,
    choose_device,
    matmul_precision,
    preserve_global_settings,
    request_cuda_queues,
    should_compile,
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
        with pytest.raises(ZeroDivisionError), matmul_precision(precision, CUDA):
            assert torch.get_float32_matmul_precision() == inside
            raise ZeroDivisionError  # also when something goes wrong
        assert torch.get_float32_matmul_precision() == before
        with matmul_precision(precision, torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(found[0])
        torch.backends.cuda.matmul.fp32_precision = found[1]


@pytest.mark.parametrize("variable", CUDA_QUEUES)
def test_cuda_gets_more_queues_unless_the_user_has_set_them(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    with request_cuda_queues():
        assert os.environ[variable] == "1"
    assert os.environ[variable] == "1"
    monkeypatch.delenv(variable)
    with preserve_global_settings():
        choose_device("auto")
        assert os.environ[variable] == CUDA_QUEUES[variable]
    assert variable not in os.environ
    choose_device("auto")
    assert variable not in os.environ


def test_global_settings_are_restored():
    cudnn, dynamo = torch.backends.cudnn, torch._dynamo.config
    before = cudnn.allow_tf32, cudnn.deterministic, dynamo.suppress_errors, dynamo.recompile_limit
    with pytest.raises(ZeroDivisionError), preserve_global_settings():
        cudnn.allow_tf32, cudnn.deterministic = not before[0], not before[1]
        dynamo.suppress_errors, dynamo.recompile_limit = not before[2], before[3] + 1
        raise ZeroDivisionError
    assert (cudnn.allow_tf32, cudnn.deterministic, dynamo.suppress_errors, dynamo.recompile_limit) == before


def hold(switch: str) -> None:
    operator.attrgetter(switch)(torch).fp32_precision = "tf32"
    for device, precision in itertools.product(("cpu", "cuda"), ("bf16", "fp32")):
        with matmul_precision(precision, torch.device(device)):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("switch", ["backends.cuda.matmul", "backends"])
def test_newer_settings_of_torch_are_restored(switch):
    """The test runs in a separate process, because torch does not allow both kinds of settings in one."""
    process = start(hold, switch)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("step", "precision", "device", "steps", "fused", "pays"),
    [
        ("auto", "auto", "cuda", MIN_STEPS, False, True),
        ("auto", "auto", "cuda", MIN_STEPS - 1, False, False),
        ("auto", "auto", "cuda", MIN_STEPS_FUSED, True, True),
        ("auto", "auto", "cuda", MIN_STEPS_FUSED - 1, True, False),
        ("fused", "auto", "cuda", MIN_STEPS_FUSED, True, True),
        ("auto", "fp32", "cuda", MIN_STEPS_FUSED, False, False),  # fp32 is for checking
        ("auto", "bf16", "cpu", MIN_STEPS_FUSED, False, False),
        ("captured", "auto", "cuda", MIN_STEPS_FUSED, False, False),
        ("eager", "auto", "cuda", MIN_STEPS_FUSED, False, False),
        ("compiled", "fp32", "cpu", 1, False, True),
    ],
)
def test_runs_are_compiled_on_request_or_if_it_saves_time(step, precision, device, steps, fused, pays, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert should_compile(TrainConfig(execution=step, precision=precision), torch.device(device), steps, fused) is pays


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_auto_goes_without_and_compiled_says_so(device, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not should_compile(TrainConfig(), torch.device(device), MIN_STEPS_FUSED, fused=True)
    with raises("missing-package", "--train.execution compiled", "g++"):
        check_execution(TrainConfig(execution="compiled"), torch.device(device))


def test_a_compiler_may_be_named_by_the_environment(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name if name == "/opt/mine" else None)
    monkeypatch.setenv("CC", "/opt/mine")
    assert can_compile(CUDA) and not can_compile(torch.device("cpu"))
    monkeypatch.setenv("CXX", "/opt/mine")
    assert can_compile(torch.device("cpu"))


@pytest.mark.parametrize("norm", ["batch", "ghost", "sync"])
def test_kernels_support_plain_batch_norm_only(norm):
    """The kernels use the statistics of the whole batch."""
    config = recipes.cifar100_lt("paco")
    config = replace(config, model=replace(config.model, norm=norm))
    assert can_kernels_train(make_backbone("resnet32_cifar"), config) == (norm == "batch")
