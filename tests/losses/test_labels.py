"""Labels out of range are an error of every loss, even if they are valid indices of other tensors."""

import subprocess
import sys

import pytest
import torch

from longtail.losses import (
    balanced_softmax_loss,
    bcl_loss,
    chunked_terms,
    class_balanced_focal_loss,
    cross_entropy_loss,
    focal_loss,
    label_aware_smoothing_loss,
    ldam_loss,
    ncl_loss,
    paco_loss,
    paco_terms,
    proco_loss,
)
from longtail.losses.contrast_set import ContrastSet
from longtail.nn import PaCoLoss
from tests.losses.test_losses import B, C, M, case

WEIGHT = torch.linspace(0.5, 1.5, C)
COMPILED = ["paco", "gpaco", "ncl", "bcl", "class-balanced focal", "label-aware smoothing", "cross entropy"]
IMPOSSIBLE = [-(2**40), -100, -C - 1, -C, -1, C, C + 1, C + M - 1, C + M, 100, 2**40]


def paco(smoothing: float = 0.0):
    center, contrast, _, y_M, drop, prior = case(0, torch.float32)

    def loss(y_B):
        return paco_loss(center, contrast, y_B, y_M, drop, prior, smoothing=smoothing)

    return loss


def chunked(y_B):
    x = torch.linspace(-1, 1, B * 3).reshape(B, 3)
    return chunked_terms(x, torch.linspace(-1, 1, C * 3).reshape(C, 3), WEIGHT, y_B, chunk=2).loss_B.mean()


def bcl(y_B):
    x = torch.linspace(-1, 1, B * 3).reshape(B, 3)
    return bcl_loss(ContrastSet(x, x, y_B, torch.arange(B)), y_B, C)


def proco(y_B):
    x = torch.linspace(-1, 1, B * 3).reshape(B, 3)
    return proco_loss(x, y_B, 0.5 * x[:C], WEIGHT.log())


def ncl(y_B):
    logits = torch.linspace(-1, 1, 2 * B * C).reshape(2, B, C)
    return sum(ncl_loss(logits, y_B, WEIGHT.log(), hard=2))


def on_logits(loss, *values):
    return lambda y_B: loss(torch.linspace(-1, 1, B * C).reshape(B, C), y_B, *values)


LOSSES = {
    "paco": paco(),
    "gpaco": paco(smoothing=0.2),
    "chunked": chunked,
    "ncl": ncl,
    "bcl": bcl,
    "proco": proco,
    "cross entropy": on_logits(cross_entropy_loss),
    "weighted": on_logits(cross_entropy_loss, WEIGHT),
    "balanced": on_logits(balanced_softmax_loss, WEIGHT.log()),
    "focal": on_logits(focal_loss),
    "weighted focal": on_logits(focal_loss, 1.0, WEIGHT),
    "class-balanced focal": on_logits(class_balanced_focal_loss, WEIGHT),
    "ldam": on_logits(ldam_loss, WEIGHT),
    "weighted ldam": on_logits(ldam_loss, WEIGHT, 30.0, WEIGHT),
    "label-aware smoothing": on_logits(label_aware_smoothing_loss, WEIGHT / 2),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("label", IMPOSSIBLE)
def test_impossible_labels_are_errors(name, label):
    """This holds for every row, and also for -100, which torch ignores by default."""
    for row in (0, B - 1):
        y_B = torch.arange(B) % C
        assert LOSSES[name](y_B).isfinite()
        y_B[row] = label
        with pytest.raises(IndexError, match=f"Target {label} "):
            LOSSES[name](y_B)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("label", [-100, -1, C, C + 3])
def test_module_refuses_impossible_labels_before_it_remembers_them(label, chunk):
    torch.manual_seed(0)
    criterion = PaCoLoss(6, [9, 5, 3, 2, 1], queue=16, projection_dim=4, chunk=chunk)
    features, keys = torch.randn(4, 6), torch.randn(4, 4)
    with pytest.raises(IndexError, match=f"Target {label} "):
        criterion(features, keys, torch.tensor([0, 1, label, 2]))
    assert (criterion.queue.labels_K < 0).all()
    assert criterion(features, keys, torch.tensor([0, 1, 4, 2])).isfinite()
    assert criterion.queue.labels_K[criterion.queue.labels_K >= 0].tolist() == [0, 1, 4, 2]


def test_labels_of_samples_are_only_compared():
    center, contrast, y_B, y_M, drop, prior = case(0)
    wanted, _ = paco_terms(center, contrast, y_B, torch.where(y_M == 3, -7, y_M), drop, prior)
    found, _ = paco_terms(center, contrast, y_B, torch.where(y_M == 3, C + 7, y_M), drop, prior)
    assert torch.equal(found[y_B != 3], wanted[y_B != 3])


@pytest.mark.parametrize("label", [-100, -1, C, C + M - 1])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_losses_refuse_impossible_labels(name, backend, label):
    """In compiled code, labels are checked by the operations that use them as indices."""
    torch.compiler.reset()
    loss = torch.compile(LOSSES[name], dynamic=False, fullgraph=True, backend=backend)
    y_B = torch.arange(B) % C
    torch.testing.assert_close(loss(y_B), LOSSES[name](y_B))
    y_B[2] = label
    with pytest.raises((IndexError, RuntimeError), match="bounds"):
        loss(y_B)


ON_DEVICE = """
import sys, torch
from longtail import losses
name, label = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
B, C, M = 6, 5, 9
y = (torch.arange(B) % C).cuda()
y[2] = label
center, contrast, w = torch.randn(B, C).cuda(), torch.randn(B, M).cuda(), torch.ones(C).cuda()
if name == "paco":
    losses.paco_loss(center, contrast, y, torch.arange(M).cuda() % C, torch.zeros(B, M, dtype=torch.bool).cuda())
elif name == "chunked":
    losses.chunked_terms(contrast, torch.randn(C, M).cuda(), None, y)
else:
    getattr(losses, name)(center, y, *[w][: name != "cross_entropy_loss"])
torch.cuda.synchronize()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", [-100, -1, 5, 13])
@pytest.mark.parametrize("name", ["paco", "chunked", "cross_entropy_loss", "class_balanced_focal_loss"])
def test_on_a_gpu_impossible_labels_are_device_assertions(name, label):
    """The test runs in a separate process, because the device cannot be used afterward."""
    work = [sys.executable, "-c", ON_DEVICE, name]
    assert subprocess.run([*work, "1"], capture_output=True, timeout=300).returncode == 0
    done = subprocess.run([*work, str(label)], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "assert" in done.stderr
