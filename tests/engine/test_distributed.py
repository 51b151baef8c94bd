"""Runs of several processes: same state, one log, every image counted once, bitwise resume, common end."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from longtail import recipes, run_folder
from longtail.config import Config
from longtail.data import decode, sources
from longtail.distributed import rank_and_world_size
from longtail.engine import distributed
from longtail.engine.evaluate import evaluate, rank_slice
from longtail.engine.loggers import Log
from longtail.engine.loop import fit
from longtail.engine.signals import StopSignals
from longtail.engine.train import train
from longtail.engine.trainer import Trainer
from longtail.errors import Interrupted, RunError, UserError
from longtail.methods.base import Method
from longtail.models.backbones import Trunk
from tests.conftest import tiny
from tests.engine.test_train import CPU, StopAt, load_once, log_of, state_of
from tests.processes import together
from tests.raises import raises

WORLD = 2


def small(name: str, **train_changes: Any) -> Config:
    config = tiny(name, batch_size=24, **({"processes": WORLD} | train_changes))
    return replace(config, optim=replace(config.optim, warmup_epochs=0))


def drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add dropout to the features, so that the random numbers of each process matter."""
    features = Trunk.forward

    def dropped(self, x, *part):
        return torch.nn.functional.dropout(features(self, x, *part), 0.3, self.training)

    monkeypatch.setattr(Trunk, "forward", dropped)


def run_until(config: Config, folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Train until a step, and return the state of this process. Only the last process receives the request to stop."""
    rank, world = rank_and_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        drop_out(patch)
        run = Trainer(config, 0, load_once(config.data), folder, CPU)
        run.resume()
        drawn = torch.initial_seed()
        path = folder / run_folder.LOG if rank == 0 else None
        with Log(path, run.total_steps(), "none", "") as log:
            try:
                fit([run], [log], StopAt(run, step) if rank == world - 1 else StopSignals())
            except Interrupted:
                assert run.steps_done() == step
    return {**state_of(run), "drawn": torch.tensor(drawn), "next": torch.rand(3), "query": run.batches.buffers[0].query}


def stopped_and_resumed(config: Config, folder: Path) -> list[dict[str, torch.Tensor]]:
    whole = run_until(config, folder / "whole")
    for stop in (3, 16, 30):  # in the middle of an epoch, at the end of one, in the second stage
        if stop < 8 * (config.train.epochs + config.method.second_epochs):
            run_until(config, folder / "parts", stop)
    return [whole, run_until(config, folder / "parts")]


OWN = ("drawn", "next", "query")  # state that differs between processes


@pytest.mark.parametrize("name", ["paco", "crt"])
def test_it_resumes_bit_for_bit_and_all_have_the_same_state(name, tmp_path):
    config = small(name)
    ranks = together(WORLD, tmp_path / "ranks", stopped_and_resumed, config, tmp_path)
    for whole, parts in ranks:
        assert whole.keys() == parts.keys() and len(whole) > 20
        assert all(torch.equal(whole[key], parts[key]) for key in whole.keys() - {"drawn"})
    (one, _), (other, _) = ranks
    assert all(torch.equal(one[key], other[key]) != (key in OWN) for key in one)
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    steps = len(load_once(config.data).train.labels) // WORLD // 24
    assert len(log_of(tmp_path / "whole")) == (5 if name == "crt" else 3) and steps == 8


def trained(names: list[str], out: Path) -> list[dict[str, torch.Tensor]]:
    """Return the state of each method after a complete run of three processes."""
    found = []
    for name in names:
        config = small(name, epochs=2, processes=3)
        if name == "tau-norm":
            config = replace(config, data=replace(config.data, val_fraction=0.2))
        with watched() as made:
            train(config, out / name, data=load_once(config.data))
        found.append(made[-1].method.state_dict())
    return found


@contextlib.contextmanager
def watched() -> Iterator[list[Trainer]]:
    """Yield a list to which all new trainers are appended."""
    made: list[Trainer] = []
    clock = Trainer.start_clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "start_clock", lambda self: (made.append(self), clock(self)))
        yield made


def check_three(names: list[str], folder: Path) -> None:
    """Train in three processes, which divides neither training nor test images evenly, and check the results.

    All processes have the same network, and one process reproduces the predictions.
    """
    ranks = together(3, folder / "ranks", trained, names, folder)
    for which, name in enumerate(names):
        states = [rank[which] for rank in ranks]
        assert all(torch.equal(state[key], states[0][key]) for state in states for key in state), name
        assert all(value.isfinite().all() for value in states[0].values()), name
        run = folder / name / "seed0"
        metrics, found = json.loads((run / run_folder.METRICS).read_text()), dict(np.load(run / "predictions.npz"))
        data = load_once(run_folder.load_config(run).data)
        assert found["ids"].tolist() == list(data.test.ids) and np.array_equal(found["labels"], data.test.labels)
        assert np.sum(metrics["confusion"]) == len(data.test.labels) == 400
        with watched():
            again = evaluate(run, device="cpu")[run]
        logits = np.load(run / "predictions.npz")["logits"]
        np.testing.assert_allclose(logits, found["logits"], rtol=1e-4, atol=1e-4)
        assert again["top1"] == metrics["top1"] and again["knn_top1"] == pytest.approx(metrics["knn_top1"], abs=0.3)
        assert again["seconds"] == metrics["seconds"] and run_folder.load_config(run).train.processes == 3


def test_three_processes_have_one_network_and_count_every_test_image_once(tmp_path):
    check_three(["ncm", "tau-norm", "mislas", "causal-norm"], tmp_path)


@pytest.mark.long
def test_three_processes_have_one_network_with_every_method(tmp_path):
    check_three(list(recipes.METHODS), tmp_path)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 400])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_stretches_have_every_row_once(n, world):
    rows = [rank_slice(n, rank, world) for rank in range(world)]
    assert len({len(part) for part in rows}) == 1 and np.array_equal(np.concatenate(rows)[:n], np.arange(n))


def logged(out: Path) -> dict[str, Any]:
    """Train with the rank as loss; return the log, and the validation accuracy of this process alone."""
    rank, _ = rank_and_world_size()
    config = small("ce", epochs=1, validate_every=1)
    config = replace(config, data=replace(config.data, val_fraction=0.2))
    loss = Method.loss

    def told(self, batch):
        return loss(self, batch) | {"rank": torch.tensor(float(rank))}

    with pytest.MonkeyPatch.context() as patch, watched() as made:
        patch.setattr(Method, "loss", told)
        train(config, out, data=load_once(config.data))
    run = made[-1]
    mine = run.evaluator.balanced_accuracy(run.data.val)
    distributed.disconnect()  # alone, it has all images to itself
    return {"together": mine, "alone": run.evaluator.balanced_accuracy(run.data.val)}


def test_the_log_is_of_all_processes(tmp_path):
    ranks = together(WORLD, tmp_path / "ranks", logged, tmp_path)
    (row,) = log_of(tmp_path / "seed0")
    assert row["rank"] == 0.5
    assert {x for rank in ranks for x in rank.values()} == {row["val_accuracy"]}


def spoilt(out: Path) -> dict[str, Any]:
    """Train with one infinite loss in the second process."""
    rank, _ = rank_and_world_size()
    loss, steps = Method.loss, []

    def bad(self, batch):
        steps.append(1)
        terms = loss(self, batch)
        return terms | {"loss": terms["loss"] * (float("inf") if rank == 1 and len(steps) == 11 else 1)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "loss", bad)
        config = small("ce")
        with raises("non-finite", "step 10", "loss", error=RunError):
            train(config, out, data=load_once(config.data))
    return {"steps": len(steps), "saved": (out / "seed0" / run_folder.CHECKPOINT).exists()}


def test_a_loss_that_is_infinite_in_one_process_ends_all(tmp_path):
    found = together(WORLD, tmp_path / "ranks", spoilt, tmp_path)
    assert found == [{"steps": 16, "saved": True}] * 2  # at the end of the epoch


def refused(out: Path) -> None:
    """Check the error of each process if the first one cannot start, or if the disk is full."""
    config = small("ce", epochs=1)
    data = load_once(config.data)
    train(config, out, data=data)
    with raises("exists", out / "seed0"):
        train(config, out, data=data)
    train(config, out, resume=True, data=data)  # has finished
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_world_size()[0] == 0:
            patch.setattr("torch.save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with raises("disk-full", error=RunError):
            train(config, out / "full", data=data)
    with raises("unsupported", "--train.execution captured"):
        train(replace(config, train=replace(config.train, execution="captured")), out / "captured", data=data)


def test_errors_of_the_first_process_are_raised_in_all(tmp_path):
    """One process cannot continue a run of two processes either."""
    together(WORLD, tmp_path / "ranks", refused, tmp_path)
    files = {str(path.relative_to(tmp_path / "seed0")) for path in (tmp_path / "seed0").rglob("*.*")}
    assert {"config.json", "metrics.json", "model.safetensors", "checkpoint/state.pt"} <= files
    assert not any("tmp" in name for name in files) and load_file(tmp_path / "seed0" / run_folder.MODEL)
    config = small("ce", epochs=1)
    with raises("mismatch", "train.processes was", "2", "1"):
        train(replace(config, train=replace(config.train, processes=1)), tmp_path, resume=True)
    with raises("conflict", "torchrun", "--nproc-per-node 2"):
        train(config, tmp_path / "new")


def images_of(folder: Path, train_images: int, bad: int = 0) -> Config:
    """Write files of two classes, some of them unreadable, and one test image of each class."""
    rng = np.random.default_rng(0)
    for split, n in (("train", train_images), ("val", 2)):
        for i in range(n):
            path = folder / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (10, 10, 3), dtype=np.uint8)).save(path)
            if split == "train" and i < bad:
                path.write_bytes(b"")
    config, made = small("ce", epochs=1), recipes.make(folder)
    return replace(config, data=replace(made.data, image_size=8, load="stream", on_error="skip", workers=1))


def looked(config: Config, out: Path) -> dict[str, Any]:
    """Return how often this process searched for unreadable images, and its training images."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch, watched() as found:
        patch.setattr(sources, "find_unreadable", lambda *args: calls.append(1) or decode.find_unreadable(*args))
        train(config, out)
    data = found[0].data
    return {"calls": len(calls), "ids": data.train.ids.tolist(), "note": data.notes[-1], "checksum": data.checksum}


def test_one_process_looks_for_bad_images_and_tells_the_others(tmp_path):
    config = images_of(tmp_path / "images", 21, bad=3)
    first, second = together(WORLD, tmp_path / "ranks", looked, config, tmp_path / "run")
    assert (first.pop("calls"), second.pop("calls")) == (2, 0) and first == second
    assert len(first["ids"]) == 18 and "3" in first["note"].split()
    alone = sources.load(config.data)
    assert (alone.train.ids.tolist(), alone.checksum) == (first["ids"], first["checksum"])


def too_few(config: Config, out: Path) -> bool:
    with raises("too-few-data", "3 processes", "--nproc-per-node 2"):
        train(replace(config, train=replace(config.train, processes=3)), out)
    return True


def test_more_processes_than_images_are_too_many(tmp_path):
    assert together(3, tmp_path / "ranks", too_few, images_of(tmp_path / "images", 2), tmp_path / "run") == [True] * 3


def test_a_batch_above_the_share_of_a_process_is_its_share(tmp_path):
    config = images_of(tmp_path / "images", 7)
    together(WORLD, tmp_path / "ranks", logged_of, config, tmp_path / "run")
    assert len(log_of(tmp_path / "run/seed0")) == 1


def logged_of(config: Config, out: Path) -> None:
    train(config, out)


def test_processes_do_not_share_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with raises("conflict", "4 processes", "--nproc-per-node 2"):
        distributed.choose_gpu(0, 4)


# Ranks that were started with other settings


DIFFERENT = {
    "method.name": lambda config, out: (small("paco"), out, False),
    "optim.lr": lambda config, out: (replace(config, optim=replace(config.optim, lr=0.5)), out, False),
    "train.seeds": lambda config, out: (replace(config, train=replace(config.train, seeds=(0, 1))), out, False),
    "train.checkpoint_every": lambda config, out: (small("ce", checkpoint_every=2), out, False),
    "data.on_error": lambda config, out: (replace(config, data=replace(config.data, on_error="skip")), out, False),
    "out": lambda config, out: (config, out.with_name("elsewhere"), False),
    "resume": lambda config, out: (config, out, True),
}


def started_differently(field: str, out: Path) -> str:
    """Return the error of this rank if the last rank has another value of one setting."""
    config, resume = small("ce"), False
    if rank_and_world_size()[0] == rank_and_world_size()[1] - 1:
        config, out, resume = DIFFERENT[field](config, out)
    with pytest.raises(UserError) as caught:
        train(config, out, resume=resume)
    assert type(caught.value) is UserError and caught.value.kind == "mismatch"
    return str(caught.value)


@pytest.mark.parametrize("field", DIFFERENT)
def test_ranks_with_other_settings_all_stop(field, tmp_path):
    first, *others = together(3, tmp_path / "ranks", started_differently, field, tmp_path / "run")
    assert others == [first, first] and first.startswith(f"{field} ") and "rank 2" in first
    assert not (tmp_path / "run").exists() and not (tmp_path / "elsewhere").exists()


def differ_in_display(out: Path) -> None:
    """Train with settings that may differ between machines."""
    config = small("ce", epochs=1)
    if rank_and_world_size()[0]:
        config = replace(config, data=replace(config.data, workers=1), log=replace(config.log, progress="plain"))
    train(config, out, data=load_once(config.data))


def test_settings_of_a_machine_may_differ(tmp_path):
    together(WORLD, tmp_path / "ranks", differ_in_display, tmp_path / "run")
    assert (tmp_path / "run/seed0" / run_folder.METRICS).exists()


def have_other_images(out: Path) -> str:
    config = small("ce", epochs=1)
    data = load_once(config.data)
    with raises("mismatch", "rank 1", error=RunError) as caught:
        train(config, out, data=replace(data, checksum="other") if rank_and_world_size()[0] else data)
    return str(caught.value)


def test_other_images_stop_all_ranks(tmp_path):
    first, second = together(WORLD, tmp_path / "ranks", have_other_images, tmp_path / "run")
    assert first == second and "checksum" in first


def lose_a_peer(out: Path) -> list[str]:
    """End the second rank while the first one waits for it, and return its errors."""
    config = small("ce", epochs=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as caught:
        if rank_and_world_size()[0]:
            patch.setattr(
                "longtail.engine.train.load", lambda *_: (_ for _ in ()).throw(RunError("gone", kind="bad-list"))
            )
        try:
            train(config, out)
        finally:
            if rank_and_world_size()[0]:
                distributed.disconnect()
    return [caught.value.kind, str(caught.value)]


def test_a_rank_that_ends_is_one_line_for_the_others(tmp_path):
    first, second = together(WORLD, tmp_path / "ranks", lose_a_peer, tmp_path / "run")
    assert first[0] == "peer-failure" and "--resume" in first[1] and second == ["bad-list", "gone"]


@pytest.mark.long
def test_real_processes_with_other_flags_end_at_once(tmp_path):
    """The processes are started separately, as from two shells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "longtail",
        "train",
        "digits-lt",
        "--method",
        "ce",
        "--train.device",
        "cpu",
        "--out",
        "x",
    ]
    both = []
    for rank, rate in enumerate(("0.1", "0.2")):
        environment = os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        options = {
            "env": environment,
            "cwd": tmp_path,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        both.append(subprocess.Popen([*command, "--optim.lr", rate], **options))
    try:
        (_, said), (_, silent) = (process.communicate(timeout=100) for process in both)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [2, 2]
    assert all(part in said for part in ("optim.lr", "0.1", "rank 0", "0.2", "rank 1")), said
    assert "Traceback" not in said + silent
    assert not list(tmp_path.iterdir())
