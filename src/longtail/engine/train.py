"""Training: `fit` is the loop and `advance` its step; around them, one run per seed, each in a folder that can be resumed.

On a GPU several seeds train side by side: a network this small leaves most of the device idle.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from longtail import run_folder
from longtail.config import Config
from longtail.data.lazy_images import StreamedImages
from longtail.data.sources import DataSet, load
from longtail.engine import distributed
from longtail.engine.advice import (
    advise_batch,
    advise_finite,
    advise_input,
    advise_several,
    advise_smaller,
    out_of_memory,
)
from longtail.engine.capture import CapturedStep, own_stream, rehearse
from longtail.engine.device import choose_device, compile_kernels, precision, products_in
from longtail.engine.environment import describe_model, threads_of
from longtail.engine.evaluate import finish, peak_memory
from longtail.engine.folder import check_folders, folders_left, holds_a_run, start_folder, take_folder
from longtail.engine.listeners import Listeners
from longtail.engine.listeners import check as check_listeners
from longtail.engine.log import Log
from longtail.engine.meter import NonFinite
from longtail.engine.run import Run
from longtail.engine.signals import StopSignals
from longtail.errors import (
    DiskFullError,
    Interrupted,
    RankError,
    RunError,
    UnreadableImageError,
    UserError,
    disk_full_text,
    error_text,
)
from longtail.files import RefusedFile
from longtail.models.side_stream import SideStream
from longtail.progress import columns, wrapped

Take = Callable[[Path], None]  # a run folder, for this process alone


def fit(group: Sequence[Run], logs: Sequence[Log], stop: StopSignals) -> None:
    """Every step that is left, from wherever the runs stand: all at the same step."""
    for _ in zip(*(run.stages_left() for run in group), strict=True):
        stop_if_asked(group, logs, stop)  # while the stage began
        step_on = make_step(group)
        for run in group:
            run.start_clock()
        for step in group[0].steps_left():
            for run in group:
                run.prepare(step)
            step_on()
            for run in group:
                run.finished(step)
            if group[0].step % group[0].steps_per_epoch == 0:
                end_epoch(group, logs)
            else:
                for_each(group, logs, show)
            stop_if_asked(group, logs, stop)


def stop_if_asked(group: Sequence[Run], logs: Sequence[Log], stop: StopSignals) -> None:
    """Save and end, at a signal. A stage that has only begun is not saved: it begins anew from the end of the one before."""
    signum = distributed.largest(stop.signum or 0)
    if not signum:
        return
    if group[0].step:
        for_each(group, logs, lambda run, _: run.save())
    where = f"step {group[0].steps_done()} and saved in {', '.join(str(run.folder) for run in group)}"
    raise Interrupted(f"stopped at {where}: --resume continues", signum)


def end_epoch(group: Sequence[Run], logs: Sequence[Log]) -> None:
    """Of all runs at the same moment: what one writes is no part of another's time."""
    if group[0].device.type == "cuda":
        torch.cuda.synchronize()
    now = time.perf_counter()
    for_each(group, logs, lambda run, log: run.end_epoch(log, now))
    for run in group:
        run.start_clock()


def show(run: Run, log: Log) -> None:
    if distributed.largest(log.wants_news()):
        row = run.row()
        log.news(run.steps_done(), row, run.seconds_left(row["seconds"]))


def for_each(group: Sequence[Run], logs: Sequence[Log], work: Callable[[Run, Log], None]) -> None:
    """Also where one of them has failed: the others are saved before its failure is raised."""
    failure: NonFinite | None = None
    for run, log in zip(group, logs, strict=True):
        try:
            work(run, log)
        except NonFinite as error:
            error.run = run
            failure = failure or error
    if failure:
        for run in group:
            if not run.meter.spoilt():
                run.save()
        raise failure


def make_step(group: Sequence[Run]) -> Callable[[], None]:
    """The device's part of one step of each run; what making it costs is no part of the training's time."""

    def each() -> None:
        for run in group:
            advance(run)

    first = group[0]
    if not (first.captured or first.compiled) or not first.steps_left():
        return each
    start, step = time.perf_counter(), each
    compile_kernels(first.method)
    with warnings.catch_warnings():  # the compiler's advice on precision is not the user's concern
        warnings.filterwarnings("ignore", module=r"torch\._inductor")
        if first.captured:
            step = CapturedStep(group, advance)
            torch.cuda.synchronize()
        else:
            rehearse(group, advance)
    for run in group:
        run.setup_seconds += time.perf_counter() - start
    return step


BOOKS = 2  # the line on which terms are added up and keys are put away; 0 and 1 have the networks' own work


def advance(run: Run) -> None:
    """The device's part of a step, which never waits for the host: loss, gradients, update, key network, queue.

    Several processes meet here at the end of the way back, and where norms, contrast or queue ask for one another's images.
    """
    beside = SideStream(run.device, line=BOOKS)
    for _ in range(run.accumulate):
        with products_in(precision(run.config.train, run.device), run.device):
            terms = run.method.loss(run.batches.next())
            beside.run(run.meter.add, terms, run.clock)
            loss = terms["loss"] if run.accumulate == 1 else terms["loss"] / run.accumulate  # two launches less
            loss.backward()
        beside.join()
    run.method.after_backward(beside)
    distributed.average(run.method)
    run.clip()
    run.gradients.add(run.method, beside)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.method.after_step()
    beside.join()


def train(config: Config, out: Path | str, resume: bool = False, data: DataSet | None = None) -> list[Path]:
    """Train one run per seed in OUT/seedN and evaluate it; the run folders. The twin of `longtail train`.

    `data` is what `config.data` describes, where the caller has loaded (and shown) it already. Under torchrun every process
    calls this: they train each run together, with steps that are eager or compiled but not captured, one seed after the other.
    """
    if not isinstance(config, Config):
        raise UserError(f"train takes a Config, such as recipes.digits_lt(), got {type(config).__name__}")
    check_listeners(config.log)
    device = distributed.start(choose_device(config.train.device))
    with distributed.report_lost_peer():
        distributed.check_same_settings(config, out, resume)
        return train_on(device, distributed.counted(config), out, resume, data)


def train_on(
    device: torch.device, config: Config, out: Path | str, resume: bool, data: DataSet | None = None
) -> list[Path]:
    """Train one run per seed on a device, after the processes have met."""
    folders = {seed: Path(out) / f"seed{seed}" for seed in config.train.seeds}
    distributed.by_first(check_folders, folders.values(), config, resume)
    distributed.by_first(check_seeds, folders)
    if data is None:
        fetch = config.data.may_download
        data = distributed.in_turn(lambda: load(config.data)) if fetch else load(config.data, distributed.by_first)
        if shows(config):
            print(*(wrapped(line, columns()) for line in data.describe()), sep="\n", flush=True)
    distributed.check_same(data.checksum, "other images (by their checksum): give all the same --data.root")
    in_a_row = (
        device.type != "cuda" or config.train.execution == "eager" or isinstance(data.train.images, StreamedImages)
    )
    together = 1 if in_a_row or distributed.several() else config.train.parallel_seeds
    left = distributed.by_first(folders_left, folders, config, data)
    for folder in folders.values():
        if shows(config) and folder not in left.values():
            print(f"{folder} has finished already", flush=True)
    seeds = list(left)
    with contextlib.ExitStack() as held:
        take = functools.partial(take_folder, held, config, data, resume)
        for i in range(0, len(seeds), together):
            train_seeds(config, {seed: left[seed] for seed in seeds[i : i + together]}, data, device, take)
    return list(folders.values())


def shows(config: Config) -> bool:
    """Whether this process says what happens."""
    return config.log.progress != "none" and distributed.is_first()


def train_seeds(config: Config, folders: dict[int, Path], data: DataSet, device: torch.device, take: Take) -> None:
    """Runs side by side, from their start or their checkpoints to their metrics."""
    made: list[Run] = []
    exhausted = False
    try:
        make_and_train(made, config, folders, data, device, take)
    except NonFinite as error:
        raise RunError(advise_finite(error.run, error) if error.run else str(error), kind="non-finite") from error
    except RuntimeError as error:
        if distributed.is_lost(error):
            raise RunError(
                "another process has ended, and with it the run: --resume continues", kind="peer-failure"
            ) from error
        if not out_of_memory(error):
            raise
        exhausted = True  # handled below: in here the traceback still holds the memory
    except (UnreadableImageError, ValueError) as error:
        if advised := advise_input(error, folders.values()):
            raise advised from error
        raise
    except BrokenPipeError:  # who reads what is printed has gone away
        raise
    except RefusedFile as error:
        raise UserError(
            f"cannot use {error.filename} ({error_text(error)}): remove it, then --resume", kind="unsafe-file"
        ) from error
    except (OSError, SafetensorError, DiskFullError) as error:
        parent = next(iter(folders.values())).parent
        raise RunError(
            f"cannot write to {parent} ({error_text(error)}): free some space and --resume",
            kind="disk-full" if disk_full_text(error) else "not-writable",
        ) from error
    if exhausted and distributed.several():
        raise RankError(advise_several(config.train), kind="out-of-memory")
    if exhausted and len(folders) > 1:
        raise RunError(
            f"out of memory with {len(folders)} seeds side by side: --resume with --train.parallel_seeds 1",
            kind="out-of-memory",
        )
    if exhausted:
        advice = advise_batch(made[0], advance) if made else advise_smaller(config.train, data.train, device)
        made.clear()  # or whoever keeps the error would keep the run, and its memory
        raise RunError(advice, kind="out-of-memory")


def make_and_train(
    made: list[Run], config: Config, folders: dict[int, Path], data: DataSet, device: torch.device, take: Take
) -> None:
    """The runs, of which `made` keeps account, and their training."""
    for seed, folder in folders.items():
        run = Run(config, seed, data, folder, device, made[0] if made else None)
        distributed.by_first(take, folder)
        distributed.by_first(check_seeds, {seed: folder})
        begun, resumed = holds_a_run(folder), run.restore()
        distributed.check_same(
            run.steps_done(), f"another checkpoint in {folder}: --out must be a folder that all share"
        )
        earlier = distributed.by_first(earlier_threads, folder) if resumed else set()
        distributed.by_first(start_folder, run)
        made.append(run)
        if shows(config) and device.type == "cpu" and earlier - {torch.get_num_threads()}:
            counts = f"{torch.get_num_threads()} now, {' and '.join(map(str, sorted(earlier)))} before"
            rounding = "results may differ in rounding from an uninterrupted run"
            print(f"{folder}: resumed with another number of threads ({counts}): {rounding}", flush=True)
        if shows(config):
            anew = ", from the start: it was stopped before its first checkpoint" if begun else ""
            where = f", continues at step {run.steps_done()} of {run.total_steps()}" if resumed else anew
            print(f"{folder}: {describe_model(run)}{where}", flush=True)
    for group in at_the_same_step(made):
        train_group(group)


def check_seeds(folders: dict[int, Path]) -> None:
    """Raise a UserError if the folder of a seed holds the run of another seed, for example because it was renamed."""
    for seed, folder in folders.items():
        if holds_a_run(folder) and (folder / run_folder.ENVIRONMENT).exists():
            stored = run_folder.read_started(folder).seed
            if stored != seed:
                fix = f"rename it to {folder.with_name(f'seed{stored}')}, or choose another --out"
                raise UserError(f"{folder} holds the run of seed {stored}, not of seed {seed}: {fix}", kind="mismatch")


def earlier_threads(folder: Path) -> set[int]:
    """Return the numbers of threads with which a run was started and resumed so far, as far as they are known."""
    if not (folder / run_folder.ENVIRONMENT).exists():
        return set()
    stored = run_folder.read_started(folder).environment
    return {n for entry in (stored, *(stored.get("resumed") or [])) if (n := threads_of(entry)) is not None}


def at_the_same_step(all_runs: Sequence[Run]) -> list[list[Run]]:
    """Groups that can train side by side; after a crash between two checkpoints the seeds may stand at different steps."""
    groups: dict[int, list[Run]] = {}
    for run in all_runs:
        groups.setdefault(run.steps_done(), []).append(run)
    return list(groups.values())


def train_group(group: Sequence[Run]) -> None:
    with contextlib.ExitStack() as listening:
        heard = [listening.enter_context(Listeners(run.folder, run.config, run.seed)) for run in group]
        listening.enter_context(own_stream(group[0].device))
        fit_group(group, heard)
        measure_group(group, heard)


def fit_group(group: Sequence[Run], heard: Sequence[Listeners]) -> None:
    """Train them, with their logs open and stop signals minded."""
    config = group[0].config
    seeds = run_folder.format_seeds([run.seed for run in group])
    with StopSignals() as stop, contextlib.ExitStack() as open_logs:
        logs = []
        for run, listeners in zip(group, heard, strict=True):  # the first speaks for all
            progress = config.log.progress if run is group[0] else "none"
            path, progress = (run.folder / run_folder.LOG, progress) if distributed.is_first() else (None, "none")
            log = Log(path, run.total_steps(), progress, f"{config.method.label}, {seeds}", listeners.hear)
            logs.append(open_logs.enter_context(log))
        try:
            fit(group, logs, stop)
        finally:
            for run in group:
                run.batches.close()


def measure_group(group: Sequence[Run], heard: Sequence[Listeners]) -> None:
    """The last epoch's networks, and the files of finished runs."""
    shared = {"together": len(group), "peak_memory": peak_memory(group[0].device)}
    failure: UserError | None = None
    for run, listeners in zip(group, heard, strict=True):
        cost = {"seconds": run.seconds, "setup_seconds": run.setup_seconds, **shared}
        try:
            batch = run.config.train.batch_size
            metrics = finish(run.method, run.data, run.views, run.device, batch, run.folder, cost)
            listeners.finished(metrics)
        except UserError as error:  # one that cannot be evaluated is no reason not to evaluate the next
            failure = failure or error
    if failure:
        raise failure
