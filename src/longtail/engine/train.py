"""Training: `fit` is the loop and `advance` its step; around them, one run per seed, each in a folder that can be resumed."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from longtail import runs
from longtail.config import Config, differences, to_dict
from longtail.data.sources import DataSet, load
from longtail.engine.advice import advise_batch, advise_finite, out_of_memory
from longtail.engine.capture import CapturedStep
from longtail.engine.device import choose_device
from longtail.engine.environment import describe_environment, describe_model
from longtail.engine.evaluate import finish, peak_memory
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
        resumed = run.restore()
        lock.enter_context(locked(folder))
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


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """A folder that holds a run is continued on request, and only by the configuration that started it."""
    try:
        there_is_one = (folder / runs.CONFIG).exists()
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}, choose another") from error
    if not there_is_one:
        return
    if not resume:
        raise UserError(f"{folder} already holds a run: continue it with --resume, or choose another --out")
    there, here = runs.load_config(folder).identity(), config.identity()
    for field, (was, now) in differences(there, here).items():
        changed = f"{field} was {was}, now {now}"
        raise UserError(f"{folder} was started with another configuration ({changed}): use its flags, or another --out")


def check_images(folder: Path, data: DataSet) -> None:
    """Seeds of one run share their images."""
    if (folder / runs.ENVIRONMENT).exists():
        stored = runs.read_json(folder / runs.ENVIRONMENT)
        if not isinstance(stored, dict) or stored.get("data", {}).get("checksum") != data.checksum:
            raise UserError(f"{folder} was trained on other images: use its --data.root, or another --out")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in a run folder; the lock goes with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process trains in {folder}: wait for it, or choose another --out") from error
        yield


def start_folder(run: Run) -> None:
    """The files that say what the run is; a resume is added to what the first start wrote."""
    path, now = run.folder / runs.ENVIRONMENT, describe_environment(run)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            first = runs.read_json(path)
            again = {k: now[k] for k in ("started", "commit", "versions", "device")}
            now = first | {"resumed": [*first.get("resumed", []), again]}
        else:
            runs.write_json(run.folder / runs.CONFIG, to_dict(run.config))
        runs.write_json(path, now)
    except OSError as error:
        raise UserError(f"cannot write to {run.folder} ({error.strerror}): choose another --out") from error
