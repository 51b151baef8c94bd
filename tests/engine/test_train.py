"""Runs on the embedded digits: learning, bitwise resume, stopping, and error messages."""

import functools
import gc
import itertools
import json
import os
import signal
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from longtail import methods, recipes, run_folder
from longtail.config import to_dict
from longtail.data.decode import read_file
from longtail.data.loader import PREFETCHED_BATCHES, ResidentLoader
from longtail.data.sources import load
from longtail.engine import checkpoint
from longtail.engine.cuda_graph import step_state, warm_up_and_restore
from longtail.engine.device import to_device
from longtail.engine.environment import describe_environment, write_start_files
from longtail.engine.evaluate import evaluate
from longtail.engine.failures import is_out_of_memory
from longtail.engine.loggers import Log
from longtail.engine.loop import fit, train_step
from longtail.engine.run_lock import open_locked
from longtail.engine.signals import StopSignals
from longtail.engine.train import Session, train
from longtail.engine.trainer import Trainer
from longtail.errors import Interrupted, RunError
from longtail.kernels import nvrtc
from longtail.methods import Batch
from longtail.methods.branches import BBN
from longtail.methods.paco import PaCo
from longtail.methods.softmax import CrossEntropy
from longtail.models import backbones
from longtail.models.backbones import Trunk
from longtail.views import Views
from tests.conftest import tiny
from tests.processes import start_command
from tests.raises import raises

METHODS = ["ce", "balanced-softmax", "supcon", "paco", "paco-no-rebalance"]
LOSSES = Path(__file__).parent / "losses.json"
CPU = torch.device("cpu")
load_once = functools.cache(load)
DATA = load_once(tiny().data)


class StopAt(StopSignals):
    """Requests a stop when the run has completed this number of steps."""

    def __init__(self, run: Trainer, step: int | None) -> None:
        self.run, self.at = run, step

    @property
    def signum(self):
        return signal.SIGTERM if self.at is not None and self.run.steps_done() >= self.at else None


def run_until(
    config, folder: Path, step: int | None = None, device: torch.device = CPU, double: bool = False
) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    run = Trainer(config, 0, load_once(config.data), folder, device)
    if double:
        in_double(run.method)
    run.resume()
    with Log(folder / run_folder.LOG, run.total_steps(), "none", "") as log:
        try:
            fit([run], [log], StopAt(run, step))
        except Interrupted:
            assert run.steps_done() == step
    return run


def in_double(method: methods.Method) -> None:
    """Use double precision. In float32 processors differ in rounding, which changes the third digit after a few steps."""
    method.double()
    for part in method.modules():
        if isinstance(part, Trunk):
            part.register_forward_pre_hook(lambda _, given: (given[0].double(), *given[1:]))


def state_of(run: Trainer) -> dict:
    return {
        **run.method.state_dict(),
        **{f"sgd{i}": s["momentum_buffer"] for i, s in run.optimizer.state_dict()["state"].items()},
    }


def log_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]


def test_resumed_run_with_accumulation_equals_the_uninterrupted_one(tmp_path):
    """The run is stopped in the middle of an epoch. test_methods_resume.py tests every method without accumulation."""
    config = tiny("paco", accumulate=2)
    whole = run_until(config, tmp_path / "whole")
    for stop in (4, 8, 15, 27):
        if stop < whole.total_steps():
            run_until(config, tmp_path / "parts", stop)
    parts = run_until(config, tmp_path / "parts")
    one, two = state_of(whole), state_of(parts)
    assert one.keys() == two.keys() and len(one) > 20
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    assert len(log_of(tmp_path / "whole")) == 3


@pytest.mark.parametrize("method", ["paco", "bbn"])
def test_streamed_images_are_those_in_memory(method, tmp_path):
    """Digits that are stored as files and read ahead have the losses of digits in memory, also after a resume."""
    config = tiny(method)
    stream = replace(config, data=replace(config.data, load="stream", workers=2))
    wanted = run_until(config, tmp_path / "resident")
    run_until(stream, tmp_path / "stream", 8)
    found = run_until(stream, tmp_path / "stream")
    one, two = state_of(wanted), state_of(found)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert log_of(tmp_path / "resident") == log_of(tmp_path / "stream")


def test_seconds_go_on_counting_over_a_resume_in_mid_epoch(tmp_path, monkeypatch):
    """Every step takes at least 20 ms. The seconds of each epoch and of the run include all of their steps."""
    loss = CrossEntropy.loss
    monkeypatch.setattr(CrossEntropy, "loss", lambda self, batch: (time.sleep(0.02), loss(self, batch))[1])
    config = tiny("ce")
    run_until(config, tmp_path, 4)
    time.sleep(0.3)  # between the two runs, and so of neither
    run = run_until(config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / run_folder.LOG).read_text().splitlines()]
    assert all(row["seconds"] >= 6 * 0.02 for row in rows)
    assert run.seconds == pytest.approx(sum(row["seconds"] for row in rows))
    assert all(row["images_per_second"] == pytest.approx(384 / row["seconds"]) for row in rows)


def test_a_checkpoint_in_another_precision_is_refused(tmp_path):
    run_until(tiny("ce"), tmp_path, 3)
    with raises("mismatch", "--train.precision fp32"):
        run_until(tiny("ce", precision="bf16"), tmp_path)


def test_a_refused_resume_changes_nothing_and_an_accepted_one_is_added(tmp_path):
    config, folder = tiny("ce", epochs=2), tmp_path / "seed0"
    write_start_files(run_until(config, folder, 3))
    first = (folder / run_folder.ENVIRONMENT).read_text()
    with raises("mismatch", "images"):
        train(config, tmp_path, resume=True, data=replace(DATA, checksum="other"))
    assert (folder / run_folder.ENVIRONMENT).read_text() == first
    train(config, tmp_path, resume=True, data=DATA)
    environment = json.loads((folder / run_folder.ENVIRONMENT).read_text())
    again = environment.pop("resumed")[0]
    assert again["device"].startswith("CPU") and (again["step"], again["precision"]) == ("eager", "fp32")
    assert environment == json.loads(first)


def test_networks_and_views_are_channels_last(tmp_path):
    """The memory format does not change results, and images and weights have it."""
    runs_ = [Trainer(tiny("ce", channels_last=flag), 0, DATA, tmp_path, CPU) for flag in (True, False)]
    losses = []
    for run, flag in zip(runs_, (True, False), strict=True):
        run.prepare(0)
        batch = run.batches.next()
        weight = run.method.net.trunk.body.conv1.weight
        assert all(t.is_contiguous(memory_format=torch.channels_last) == flag for t in (batch.query, weight))
        losses.append(run.method.loss(batch)["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_pretrained_weights_are_fetched_once(tmp_path, monkeypatch):
    """A resumed or evaluated run has stored weights and does not load pretrained ones."""
    asked, create = [], backbones.timm.create_model

    def spy(name, pretrained=False, **kwargs):
        asked.append(pretrained)
        net = create(name, pretrained=False, **kwargs)
        if pretrained:
            torch.nn.init.constant_(net.conv1.weight, 0.5)
        return net

    monkeypatch.setattr(backbones.timm, "create_model", spy)
    monkeypatch.setattr(backbones.weights, "find_weights", lambda _: "hub")
    config = tiny("ce", epochs=1, batch_size=128)
    config = replace(config, model=replace(config.model, name="resnet18", pretrained=True))
    config = replace(config, data=replace(config.data, image_size=32), optim=replace(config.optim, lr=1e-9))
    run = run_until(config, tmp_path / "seed0", 2)
    assert (run.method.net.trunk.body.conv1.weight - 0.5).abs().max() < 1e-4
    write_start_files(run)
    train(config, tmp_path, resume=True)
    evaluate(tmp_path)
    assert asked == [True, False, False]


@pytest.mark.parametrize("method", ["ncm", "logit-adjustment-post-hoc"])
def test_a_signal_while_a_stage_begins_ends_the_run(method, tmp_path, monkeypatch):
    """The stage may have no epochs, and so no step to stop after. On resume its work is repeated."""
    config = tiny(method, epochs=1)
    kind = methods.find_method(config.method)
    begin = kind.on_stage_start

    def interrupted(self, start):
        if self.stage is self.stages[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(self, start)

    monkeypatch.setattr(kind, "on_stage_start", interrupted)
    with raises("interrupted", "--resume", error=Interrupted):
        train(config, tmp_path)
    assert not (tmp_path / "seed0" / run_folder.METRICS).exists()
    monkeypatch.undo()
    assert train(config, tmp_path, resume=True) and (tmp_path / "seed0" / run_folder.METRICS).exists()


def test_within_an_epoch_a_pipe_is_told_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("longtail.engine.loggers.PIPE_SECONDS", 0.0)
    config = tiny("ce", epochs=1)
    train(replace(config, log=replace(config.log, progress="plain")), tmp_path, data=DATA)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" left")]
    assert len(lines) == len(DATA.train.labels) // 64 > 3 and lines[-1].endswith("  0:00 left")


def test_time_left_follows_from_the_completed_epochs(tmp_path):
    run = run_until(tiny("ce", epochs=2), tmp_path, step=3)
    run.seconds = 4.0
    assert run.total_steps() == 12 and run.seconds_left(2.0) == 6.0 / 3 * 9


def test_seeds_differ_and_repeat(tmp_path):
    config = tiny("ce", epochs=1, seeds=(0, 1))
    a, b = train(config, tmp_path / "a"), train(config, tmp_path / "b")
    weights = [load_file(f / run_folder.MODEL)["head.weight"] for f in (*a, *b)]
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])


def losses_of(method: str, folder: Path) -> list[float]:
    """Return the losses of two epochs and of the second stage."""
    run_until(tiny(method, epochs=2), folder, double=True)
    return [row["loss"] for row in log_of(folder)]


def store_losses(file: Path, folder: Path) -> list[str]:
    """Store the losses of methods that have none in the file; stored ones do not change."""
    there = json.loads(file.read_text())
    new = {method: losses_of(method, folder / method) for method in recipes.METHODS if method not in there}
    rows = [f" {json.dumps(method)}: {json.dumps(losses)}" for method, losses in (there | new).items()]
    file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return list(new)


def test_a_refactor_reproduces_these_losses(tmp_path):
    """A change that is not meant to change results must not change these losses.

    A new method has no stored losses: `python -m tests.engine.test_train` adds them.
    """
    wanted = json.loads(LOSSES.read_text())
    assert wanted.keys() <= recipes.METHODS.keys()
    # Logged in float32. The views are float32 too: processors without AVX round them differently, which a few steps magnify.
    tolerance = 1e-5 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 5e-3
    for method, losses in wanted.items():
        assert losses_of(method, tmp_path / method) == pytest.approx(losses, rel=tolerance), method


@pytest.mark.parametrize("method", ["balanced-softmax", "supcon", "paco"])
def test_a_short_run_learns(method, tmp_path):
    """There are ten classes, so chance is 10 %. The rare classes with one to twenty images are learned too."""
    config = tiny(method, epochs=12)
    if method == "supcon":
        config = replace(config, method=replace(config.method, linear_epochs=12))
    (folder,) = train(config, tmp_path)
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    assert metrics["top1"] > 60 and metrics["few"] > 25 and metrics["knn_top1"] > 50


def test_a_finished_run_holds_every_file(tmp_path):
    (folder,) = train(tiny("paco", epochs=1), tmp_path)
    metrics = json.loads((folder / run_folder.METRICS).read_text())
    wanted = "top1 many medium few per_class counts class_names macro_f1 ece knn_top1 confusion shifted"
    wanted += " seconds peak_memory latency_b64"
    assert set(wanted.split()) <= metrics.keys()
    assert metrics["counts"] == DATA.train.counts.tolist() and metrics["latency_b64"] > 0 and metrics["seconds"] > 0
    predictions, features = np.load(folder / "predictions.npz"), np.load(folder / "features.npz")
    assert predictions["logits"].shape == (400, 10) and (predictions["labels"] == DATA.test.labels).all()
    assert 100 * (predictions["logits"].argmax(1) == predictions["labels"]).mean() == pytest.approx(metrics["top1"])
    assert features["features"].dtype == np.float16 and len(features["features"]) == 400
    environment = json.loads((folder / run_folder.ENVIRONMENT).read_text())
    assert environment["data"]["checksum"] == DATA.checksum
    examples = json.loads((folder / "examples" / "index.json").read_text())
    assert examples["worst_rare"] and all(
        (folder / "examples" / f"{i}.png").exists() for i in examples["worst_rare"][0]["items"]
    )
    assert to_dict(run_folder.load_config(folder)) == to_dict(tiny("paco", epochs=1))
    row = log_of(folder)[0]
    assert {"stage", "epoch", "loss", "accuracy", "P_sup", "lr"} <= row.keys() and 0 < row["P_sup"] < 1


def test_validation_split_is_scored_and_the_test_set_is_not_touched_while_training(tmp_path):
    """Other test images do not change the log. The first stage of SupCon has no classifier to evaluate."""
    config = tiny("supcon", epochs=2, validate_every=1)
    data = load(replace(config.data, val_fraction=0.2))
    blank = replace(data.test, images=np.zeros_like(data.test.images))
    rows = []
    for name, shown in (("a", data), ("b", replace(data, test=blank))):
        train(config, tmp_path / name, data=shown)
        rows.append(log_of(tmp_path / name / "seed0"))
    assert rows[0] == rows[1] and ["val_accuracy" in row for row in rows[0]] == [False, False, True, True]
    assert all(0 <= row["val_accuracy"] <= 100 for row in rows[0][2:])
    metrics = [json.loads((tmp_path / n / "seed0" / run_folder.METRICS).read_text()) for n in ("a", "b")]
    assert metrics[0]["top1"] != metrics[1]["top1"]
    assert metrics[0]["counts"] == DATA.train.counts.tolist()  # shot groups do not depend on the split


def test_accumulation_averages_gradients(tmp_path):
    """Two batches of 32 have the gradient of one of 64 if images are independent, that is, with frozen batch norm."""
    one, two = (Trainer(tiny("ce", batch_size=64 // n, accumulate=n), 0, DATA, tmp_path, CPU) for n in (1, 2))
    one.prepare(0), two.prepare(0)
    same = one.batches.next()
    halves = [Batch(same.query[part], None, same.y_B[part]) for part in (slice(32), slice(32, 64))]
    for run, batches in ((one, [same]), (two, halves)):
        run.method.eval()
        run.batches.next = iter(batches).__next__
        train_step(run)
    for a, b in zip(one.method.parameters(), two.method.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert two.steps_per_epoch == two.loader.num_batches // 2


def test_an_epoch_shows_no_image_twice_and_leaves_out_only_the_remainder():
    """389 images in batches of 50 are seven batches with 350 different images; the next epoch has others."""
    loader = ResidentLoader(DATA.train, 50, 0, CPU)
    loader.images_N = torch.arange(389)  # in place of pixels
    seen = []
    for epoch in (0, 1, 0):
        loader.seek(epoch, 0)
        seen.append(loader.take(loader.num_batches)[0].images.tolist())
    assert loader.num_batches == 7 and len(set(seen[0])) == 350 and seen[0] == seen[2] and seen[0] != seen[1]
    loader.seek(0, 3)
    assert loader.take(1)[0].images.tolist() == seen[0][150:200]


# What goes wrong


def test_a_non_finite_loss_names_step_term_and_cure(tmp_path, monkeypatch):
    loss = PaCo.loss

    def spoilt(self, batch):
        terms = loss(self, batch)
        bad = torch.where(self.queue.position == 192, torch.nan, 0.0)  # after three batches of 64
        return terms | {"loss": terms["loss"] + bad, "contrast_logit": terms["contrast_logit"] + bad}

    monkeypatch.setattr(PaCo, "loss", spoilt)
    with raises(
        "non-finite", "step 3", "loss", "contrast_logit", "--optim.lr", "--method.tau", error=RunError
    ) as caught:
        train(tiny("paco"), tmp_path)
    assert caught.value.exit_code == 1 and not (tmp_path / "seed0" / run_folder.CHECKPOINT).exists()


@pytest.mark.parametrize("kind", [PaCo, BBN])  # one whose batches have partners
def test_out_of_memory_names_the_batch_that_fits(kind, tmp_path, monkeypatch):
    loss = kind.loss

    def small_memory(self, batch):
        if len(batch.y_B) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, batch)

    monkeypatch.setattr(kind, "loss", small_memory)
    alive = weakref.WeakSet()
    monkeypatch.setattr(Trainer, "start_clock", lambda run, start=Trainer.start_clock: (alive.add(run), start(run)))
    advice = ("--train.batch_size 16", "--train.accumulate 4")
    with raises("out-of-memory", "64", *advice, error=RunError) as caught:
        train(tiny(kind.__name__.lower()), tmp_path)
    gc.collect()
    assert caught.value.__traceback__ and not alive  # the error does not keep the run, and so its memory


@pytest.mark.parametrize("owner, work", [(PaCo, "loss"), (Views, "query")])  # or while views are made
def test_the_cpu_can_run_out_of_memory_too(owner, work, tmp_path, monkeypatch):
    def no_memory(self, *_):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setattr(owner, work, no_memory)
    with raises("out-of-memory", "--model.name", "--data.image_size", error=RunError):
        train(tiny("paco"), tmp_path)


def test_who_reads_going_away_is_no_full_disk(tmp_path, monkeypatch):
    def gone(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("longtail.engine.train.fit", gone)
    with pytest.raises(BrokenPipeError):
        train(tiny("ce", epochs=1), tmp_path)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    (folder,) = train(tiny("ce", epochs=1), tmp_path)
    before = (folder / run_folder.METRICS).stat().st_mtime_ns
    with raises("exists", folder, "finished"):
        train(tiny("ce", epochs=1), tmp_path)
    with raises("mismatch", "method.name was", "ce", "paco"):
        train(tiny("paco", epochs=1), tmp_path, resume=True)
    with raises("mismatch", "train.epochs was", "1", "2"):
        train(tiny("ce", epochs=2), tmp_path, resume=True)
    train(tiny("ce", epochs=1), tmp_path, resume=True)  # finished: nothing to do
    assert (folder / run_folder.METRICS).stat().st_mtime_ns == before
    (folder / run_folder.METRICS).unlink()
    with raises("exists", folder, "--resume"):
        train(tiny("ce", epochs=1), tmp_path)


@pytest.mark.usefixtures("printed_messages")
def test_resume_without_a_checkpoint_reports_that_it_starts_again(tmp_path, capsys):
    config = tiny("ce", epochs=1)
    config = replace(config, log=replace(config.log, progress="auto"))
    (folder,) = train(config, tmp_path)
    assert "checkpoint" not in capsys.readouterr().out
    whole = (folder / run_folder.MODEL).read_bytes()
    for name in (run_folder.METRICS, run_folder.CHECKPOINT):
        (folder / name).unlink()
    train(config, tmp_path, resume=True)
    assert "first checkpoint" in capsys.readouterr().out
    assert (folder / run_folder.MODEL).read_bytes() == whole and len(
        (folder / run_folder.LOG).read_text().splitlines()
    ) == 1


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    config = tiny("ce", epochs=2)
    folder = tmp_path / "seed0"
    run = run_until(config, folder, 3)
    write_start_files(run)
    (folder / run_folder.CHECKPOINT).write_bytes(b"no checkpoint")
    with raises("damaged-file", folder / run_folder.CHECKPOINT):
        train(config, tmp_path, resume=True)


def test_checkpoint_with_the_older_mark_of_the_meter_is_resumed(tmp_path):
    """Such checkpoints have -1 for a term that was always finite."""
    run_until(tiny("ce", epochs=2), tmp_path, 3)
    state = checkpoint.load(tmp_path / run_folder.CHECKPOINT, CPU)
    state["meter"]["first_bad"].fill_(-1)
    checkpoint.save(tmp_path / run_folder.CHECKPOINT, state)
    assert run_until(tiny("ce", epochs=2), tmp_path).steps_done() == 12


def test_fused_is_refused_if_it_is_not_supported(tmp_path):
    with raises("conflict", "--train.execution fused", "bf16"):
        Trainer(tiny("ce", execution="fused"), 0, DATA, tmp_path, CPU)


@pytest.mark.parametrize(
    ("size", "model", "changes", "fused"),
    [
        (32, "resnet8_cifar", {}, True),
        (8, "resnet8_cifar", {}, False),  # a size the kernels do not know
        (32, "resnet18_cifar", {}, False),
        (32, "resnet8_cifar", {"channels_last": False}, False),
        (32, "resnet8_cifar", {"precision": "fp32"}, False),
        (32, "resnet8_cifar", {"execution": "captured"}, False),
    ],
)
def test_only_supported_networks_are_fused(size, model, changes, fused, monkeypatch):
    monkeypatch.setattr(nvrtc, "is_available", lambda device: True)
    config = tiny("paco", **({"precision": "bf16"} | changes))
    config = replace(config, data=replace(config.data, image_size=size), model=replace(config.model, name=model))
    method = to_device(methods.make(config, DATA.train.counts), config, CPU)
    assert [m.fused for m in method.modules() if isinstance(m, backbones.Trunk)] == [fused, fused]  # query and key


@pytest.mark.parametrize(("step", "how"), [("auto", "eager"), ("captured", "eager"), ("compiled", "compiled")])
def test_environment_has_the_execution_mode(step, how, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)  # as if there were a compiler
    run = Trainer(tiny("ce", execution=step), 0, DATA, tmp_path, CPU)
    assert describe_environment(run)["step"] == how


def test_memory_that_ran_out_is_found_behind_a_later_error():
    with pytest.raises(RuntimeError) as caught:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("unjoined work")
    assert is_out_of_memory(caught.value) and not is_out_of_memory(RuntimeError("unjoined work"))


def test_a_checkpoint_of_other_images_is_refused(tmp_path):
    run = run_until(tiny("ce", epochs=2), tmp_path, 3)
    state = checkpoint.load(tmp_path / run_folder.CHECKPOINT, CPU)
    checkpoint.save(tmp_path / run_folder.CHECKPOINT, state | {"checksum": "other"})
    with raises("mismatch", "images"):
        run.resume()


@pytest.mark.parametrize("spoil", [{"step": "x"}, {"step": 10**9}, {"stage": 5}, {"rng": None}, {"method": {}}, None])
def test_a_foreign_checkpoint_is_one_line(spoil, tmp_path):
    run = run_until(tiny("ce", epochs=2), tmp_path, 3)
    state = checkpoint.load(tmp_path / run_folder.CHECKPOINT, CPU)
    checkpoint.save(tmp_path / run_folder.CHECKPOINT, state | spoil if spoil else {"something": "else"})
    with raises("damaged-file", tmp_path / run_folder.CHECKPOINT):
        run.resume()


def test_flipped_bits_in_a_checkpoint_are_found(tmp_path):
    run = run_until(tiny("ce", epochs=2), tmp_path, 3)
    path = tmp_path / run_folder.CHECKPOINT
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises("damaged-file", path):
        run.resume()


def test_one_process_at_a_time_in_a_folder(tmp_path):
    with open_locked(tmp_path / "seed0"), raises("exists", tmp_path / "seed0"):
        train(tiny("ce", epochs=1), tmp_path)
    train(tiny("ce", epochs=1), tmp_path)


def test_seeds_of_one_run_share_their_images(tmp_path):
    train(tiny("ce", epochs=1), tmp_path)
    with raises("mismatch", tmp_path / "seed0", "--data.root"):
        train(tiny("ce", epochs=1, seeds=(0, 1)), tmp_path, resume=True, data=replace(DATA, checksum="other"))
    assert not (tmp_path / "seed1").exists()


def test_a_model_file_of_another_network_is_one_line(tmp_path):
    (folder,) = train(tiny("ce", epochs=1), tmp_path)
    for content in (b"", b"x" * 100):
        (folder / run_folder.MODEL).write_bytes(content)
        with raises("damaged-file", folder / run_folder.MODEL):
            evaluate(tmp_path)
    (folder / run_folder.MODEL).unlink()
    with raises("damaged-file", folder / run_folder.MODEL):
        evaluate(tmp_path)


def test_a_full_disk_at_the_end_is_one_line(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save", full)
    with raises("disk-full", tmp_path, "--resume", error=RunError):
        train(tiny("ce", epochs=1), tmp_path)
    monkeypatch.undo()
    train(tiny("ce", epochs=1), tmp_path, resume=True)


def test_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """If the disk becomes full while saving, the previous checkpoint remains."""
    path = tmp_path / "checkpoint" / "state.pt"
    checkpoint.save(path, {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with raises("disk-full", path, error=RunError):
        checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path, CPU) == {"step": 1} and [p.name for p in path.parent.iterdir()] == ["state.pt"]


def test_missing_cuda_is_reported_before_anything_is_written(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with raises("conflict", "--train.device cuda"):
        train(tiny("ce", device="cuda"), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    (folder,) = train(tiny("paco", epochs=8, checkpoint_every=100), tmp_path_factory.mktemp("whole"), data=DATA)
    return folder


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_saves_and_resume_continues(signum, unbroken, tmp_path):
    """A process that gets a signal exits with the usual code, and the resumed run equals the uninterrupted one."""
    flags = [
        "--train.epochs",
        "8",
        "--train.device",
        "cpu",
        "--train.checkpoint_every",
        "100",
        "--log.progress",
        "none",
    ]
    command = ["train", "digits-lt", "--method", "paco", "--out", str(tmp_path / "run"), *flags]
    process, log, waited = (
        start_command(command, tmp_path / "said"),
        tmp_path / "run/seed0" / run_folder.LOG,
        time.monotonic(),
    )
    while not (log.exists() and log.read_text()) and process.is_alive() and time.monotonic() - waited < 100:
        time.sleep(0.01)
    os.kill(process.pid, signum)
    process.join(100)
    errors = (tmp_path / "said").read_text()
    assert process.exitcode == 128 + signum, errors
    assert "saved in" in errors.splitlines()[-1] and "Traceback" not in errors
    (folder,) = train(run_folder.load_config(tmp_path / "run/seed0"), tmp_path / "run", resume=True, data=DATA)
    one, two = (load_file(each / run_folder.MODEL) for each in (folder, unbroken))
    assert log_of(folder) == log_of(unbroken) and all(torch.equal(one[k], two[k]) for k in one)


def test_training_in_bf16_decreases_the_loss(tmp_path):
    run = run_until(tiny("paco", precision="bf16", epochs=2), tmp_path)
    rows = log_of(tmp_path)
    assert rows[1]["loss"] < rows[0]["loss"] and run.method.net.head.weight.dtype == torch.float32


@pytest.mark.parametrize("method", ["paco", "supcon"])
def test_warm_up_restores_the_state(method, tmp_path):
    """The warm-up makes a step that compiles, and restores the state."""
    plain, rehearsed = (Trainer(tiny(method), 0, DATA, tmp_path, CPU) for _ in range(2))
    drawn = torch.get_rng_state()
    warm_up_and_restore([rehearsed], train_step)
    assert torch.equal(torch.get_rng_state(), drawn) and rehearsed.step == 0
    for step in range(3):
        for run in (plain, rehearsed):
            run.prepare(step)
            train_step(run)
            run.count_step()
    one, two = step_state(plain), step_state(rehearsed)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("stored:", *store_losses(LOSSES, Path(folder)) or ["nothing, all methods have their losses"])


def test_one_image_a_step_is_too_few_for_batch_norm(tmp_path):
    config = tiny("ce", epochs=1)
    network = replace(config.model, name="resnet18")  # whose last map has a single pixel here
    with raises("conflict", "--train.batch_size", error=RunError):
        train(replace(config, model=network, train=replace(config.train, batch_size=1)), tmp_path)


def test_run_continues_after_the_damaged_file_is_restored(tmp_path, monkeypatch):
    """Without the file, or with another in its place, the run would be a different one."""
    rng = np.random.default_rng(0)
    for c, split in itertools.product("ab", ("train", "val")):
        (tmp_path / "images" / split / c).mkdir(parents=True)
        for i in range(8):
            Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8)).save(tmp_path / f"images/{split}/{c}/{i}.png")
    config = tiny("ce", epochs=2 * PREFETCHED_BATCHES)  # of one step: some images are read after the first checkpoint
    data = replace(config.data, name="folder", root=tmp_path / "images", imbalance=1, load="stream", image_size=8)
    config = replace(config, data=data, train=replace(config.train, batch_size=16, checkpoint_every=1))
    (whole,) = train(config, tmp_path / "whole")
    checkpoint = tmp_path / "out" / "seed0" / run_folder.CHECKPOINT

    def read_until_checkpoint(path):
        return b"" if str(path).endswith("a/3.png") and checkpoint.exists() else read_file(path)

    with monkeypatch.context() as patch:
        patch.setattr("longtail.data.folder.read_file", read_until_checkpoint)
        with raises("bad-image", "a/3.png", "--resume", error=RunError):
            train(config, tmp_path / "out")
    (again,) = train(config, tmp_path / "out", resume=True)
    assert (again / run_folder.MODEL).read_bytes() == (whole / run_folder.MODEL).read_bytes()


def test_a_run_that_another_process_began_meanwhile_is_not_continued(tmp_path, monkeypatch):
    """Seeds are trained one after the other, and each folder is checked again before its training."""
    mine, other = tiny("ce", epochs=1, seeds=(0, 1)), tiny("ce", epochs=1, seeds=(1,))
    other = replace(other, optim=replace(other.optim, lr=0.5))
    begin = Session.train_seeds

    def beginning(self, seeds):
        begin(self, seeds)
        if 0 in seeds:
            monkeypatch.setattr(Session, "train_seeds", begin)
            train(other, tmp_path, data=DATA)
            (tmp_path / "seed1" / run_folder.METRICS).unlink()  # as if it had been stopped

    monkeypatch.setattr(Session, "train_seeds", beginning)
    with raises("exists", tmp_path / "seed1"):
        train(mine, tmp_path, data=DATA)
    assert run_folder.load_config(tmp_path / "seed1").optim.lr == 0.5
