"""Training: `fit` is the loop and `advance` its step; around them, one run per seed, each in a folder that can be resumed."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from longtail import runs
from longtail.config import Config
from longtail.data.sources import DataSet, load
from longtail.engine.advice import advise_batch, advise_finite, out_of_memory
from longtail.engine.capture import CapturedStep
from longtail.engine.device import choose_device
from longtail.engine.environment import describe_model
from longtail.engine.evaluate import finish, peak_memory
from longtail.engine.folder import check_folder, check_images, locked, start_folder
from longtail.engine.log import Log
from longtail.engine.meter import NonFinite
from longtail.engine.run import Run
from longtail.engine.signals import StopSignals
from longtail.errors import Interrupted, RunError, UserError


def fit(run: Run, log: Log, stop: StopSignals) -> None:
    """Every step that is left, from wherever the run stands."""
    run.start_clock()
    for _ in run.stages_left():
        step_on: Callable[[], None] = partial(advance, run)
        if run.captured and run.steps_left():
            step_on = CapturedStep(run, step_on)
        for step in run.steps_left():
            run.prepare(step)
            step_on()
            run.finished(step)
            if run.step % run.steps_per_epoch == 0:
                run.end_epoch(log)
            elif log.wants_news():
                log.news(run.steps_done(), run.row())
            if stop.signum is not None:
                run.save()
                message = f"stopped at step {run.steps_done()} and saved in {run.folder}: --resume continues"
                raise Interrupted(message, stop.signum)


def advance(run: Run) -> None:
    """The device's part of a step, which never waits for the host: views, loss, gradients, update, key network, queue."""
    for _ in range(run.accumulate):
        terms = run.method.loss(run.batch())
        (terms["loss"] / run.accumulate).backward()
        run.meter.add(terms, run.clock)
    run.optimiser.step()
    run.optimiser.zero_grad()
    run.method.after_step()


def train(config: Config, out: Path | str, resume: bool = False, data: DataSet | None = None) -> list[Path]:
    """Train one run per seed in OUT/seedN and evaluate it; the run folders. The twin of `longtail train`.

    `data` is what `config.data` describes, where the caller has loaded (and shown) it already.
    """
    if not isinstance(config, Config):
        raise UserError(f"train takes a Config, such as recipes.digits_lt(), got {type(config).__name__}")
    device, shows = choose_device(config.train.device), config.log.progress != "none"
    folders = {seed: Path(out) / f"seed{seed}" for seed in config.train.seeds}
    for folder in folders.values():
        check_folder(folder, config, resume)
    if data is None:
        data = load(config.data)
        if shows:
            print(*data.describe(), sep="\n", flush=True)
    for folder in folders.values():
        check_images(folder, data)
    for seed, folder in folders.items():
        if not (folder / runs.METRICS).exists():
            train_seed(config, seed, data, folder, device, shows)
        elif shows:
            print(f"{folder} has finished already", flush=True)
    return list(folders.values())


def train_seed(config: Config, seed: int, data: DataSet, folder: Path, device: torch.device, shows: bool) -> None:
    """One run, from its start or its checkpoint to its metrics."""
    run, exhausted, lock = None, False, contextlib.ExitStack()
    try:
        run = Run(config, seed, data, folder, device)
        lock.enter_context(locked(folder))
        resumed = run.restore()
        start_folder(run)
        if shows:
            where = f", continues at step {run.steps_done()} of {run.total_steps()}" if resumed else ""
            print(f"{folder}: {describe_model(run)}{where}", flush=True)
        title = f"{config.method.label}, seed {seed}"
        with StopSignals() as stop, Log(folder / runs.LOG, run.total_steps(), config.log.progress, title) as log:
            fit(run, log, stop)
        finish(run.method, data, run.views, device, config.train.batch_size, folder, run.seconds, peak_memory(device))
    except NonFinite as error:
        raise RunError(advise_finite(run, error) if run else str(error)) from error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        exhausted = True  # handled below: in here the traceback still holds the memory
    except (OSError, SafetensorError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise RunError(f"cannot write to {folder} ({reason}): free some space and --resume") from error
    finally:
        lock.close()
    if exhausted:
        small = f"the network and {len(data.train.labels):,} images do not fit in the memory of {device}"
        raise RunError(
            advise_batch(run, advance) if run else f"{small}: try a smaller --data.image_size or --model.name"
        )
