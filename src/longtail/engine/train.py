"""Training of all seeds of a configuration, each in a run folder that can be resumed.

`train` opens a `Session`, which has what the seeds share: the device, the images and the run folders. For each group of
seeds that train in parallel the session creates a `Trainer` each, runs the loop of `loop.py`, and evaluates the networks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError

from longtail import run_folder
from longtail.config import Config
from longtail.data.lazy_images import StreamedImages
from longtail.data.sources import DataSet, load
from longtail.distributed import (
    check_same,
    is_distributed,
    is_main_process,
    is_peer_failure,
    local_main_first,
    run_on_main,
)
from longtail.engine.cuda_graph import use_own_stream
from longtail.engine.device import choose_device, preserve_global_settings
from longtail.engine.distributed import check_same_settings, report_peer_failure, start_processes, with_world_size
from longtail.engine.environment import describe_model, read_thread_count, write_start_files
from longtail.engine.evaluate import peak_memory
from longtail.engine.failures import (
    describe_non_finite,
    explain_input_error,
    find_fitting_batch,
    is_out_of_memory,
    suggest_smaller_batch,
    suggest_smaller_model,
)
from longtail.engine.head_runs import Backbones, HeadTrainer, find_stored_candidate
from longtail.engine.loggers import Log, Loggers, check_loggers
from longtail.engine.loop import fit, train_step
from longtail.engine.meter import NonFiniteError
from longtail.engine.run_lock import check_folders, contains_run, find_unfinished, lock_folder
from longtail.engine.signals import StopSignals
from longtail.engine.time_budget import TimeLimit, plan_time, read_reduced_settings
from longtail.engine.trainer import Trainer
from longtail.errors import (
    DiskFullError,
    RankError,
    RunError,
    UnreadableImageError,
    UserError,
    disk_full_text,
    error_text,
)
from longtail.files import RefusedFile
from longtail.plan import Plan
from longtail.progress import log_info


def train(
    config: Config,
    out: Path | str,
    resume: bool = False,
    data: DataSet | None = None,
    candidates: Sequence[Config] = (),
    limit: TimeLimit | None = None,
    backbones: Backbones | None = None,
) -> list[Path]:
    """Train one run for each seed in OUT/seedN and evaluate it, as `longtail train` does; return the run folders.

    Under torchrun every process calls this function. All processes train each run together, one seed after the other. Steps are
    then eager or compiled, but not captured.

    Args:
        config: The configuration.
        out: The folder above the run folders.
        resume: Whether existing runs are continued; otherwise they are an error.
        data: The images that `config.data` describes, if they are loaded already.
        candidates: With `data.cached_views`: configurations from which cross-validation selects one, in place of `config`.
            They differ from it in the settings of the head only.
        limit: A time limit, with the plan in place of `config` and `candidates`. Settings are reduced to fit into it.
        backbones: Frozen backbones of earlier calls, whose features are used again. The time of the training is then not
            estimated, because it is a part of a longer work.
    """
    if not isinstance(config, Config):
        raise UserError(f"train takes a Config, such as recipes.digits_lt(), got {type(config).__name__}")
    check_loggers(config.log)
    with preserve_global_settings(), report_peer_failure():
        device = start_processes(choose_device(config.train.device))
        check_same_settings(config, out, resume)
        plan = limit.plan if limit else Plan(config, tuple(candidates))
        seconds = limit.seconds if limit else None
        with Session(plan.map(with_world_size), Path(out), resume, device, data, seconds, backbones) as session:
            for seeds in session.seed_groups():
                session.train_seeds(seeds)
        return list(session.folders.values())


class Session:
    """One call of `train`: what its seeds share. It locks the run folders until it ends."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        resume: bool,
        device: torch.device,
        data: DataSet | None = None,
        time_limit: float | None = None,
        backbones: Backbones | None = None,
    ) -> None:
        """Check the run folders and load the images. All processes must do this.

        Args:
            plan: The configuration, with the number of processes, and the candidates of cross-validation.
            out: The folder above the run folders.
            resume: Whether existing runs are continued.
            device: The device of this process.
            data: The images, if they are loaded already.
            time_limit: The time limit in seconds. It has no effect on runs that are continued.
            backbones: Frozen backbones of earlier calls; None: the time is estimated.
        """
        self.resume, self.device, self.time_limit = resume, device, time_limit
        self.heads: HeadTrainer | None = None
        self.is_verbose = plan.config.log.progress != "none" and is_main_process()
        self.is_planned, self.backbones = backbones is not None, backbones or Backbones()
        self.locks = contextlib.ExitStack()
        self.folders = {seed: out / f"seed{seed}" for seed in plan.config.train.seeds}
        self.plan = self._continue_plan(plan) if resume else plan
        self.config = config = self.plan.config
        run_on_main(check_folders, self.folders.values(), config, resume)
        run_on_main(check_seed_folders, self.folders)
        self.data = self.load_data() if data is None else data
        check_same(self.data.checksum, "other images (by their checksum): give all processes the same --data.root")
        self.unfinished: dict[int, Path] = run_on_main(find_unfinished, self.folders, config, self.data)
        for folder in self.folders.values():
            if self.is_verbose and folder not in self.unfinished.values():
                log_info(f"{folder} is already finished")

    def _continue_plan(self, plan: Plan) -> Plan:
        """Return the plan with the settings with which existing runs were started; the plan itself if there are none."""
        folders = list(self.folders.values())
        reduced = read_reduced_settings(folders) if self.time_limit and plan.adapt else None
        if reduced is not None and plan.adapt is not None:
            plan = plan.adapt(reduced)
        stored = find_stored_candidate(plan.candidates, folders)
        self.is_planned = self.is_planned or any(contains_run(folder) for folder in folders)
        return Plan(stored) if stored else plan

    def _plan_time(self) -> None:
        """Log the estimated time, and reduce settings to fit into the time limit. Runs that are continued do not change."""
        if self.is_planned or (not self.is_verbose and self.time_limit is None):
            return
        self.is_planned = True
        folder = next(iter(self.folders.values()))
        (self.plan,) = plan_time(
            [self.plan], [self.data], [folder], self.device, self.backbones, self.time_limit, self.is_verbose
        )
        self.config = self.plan.config

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.locks.close()

    def load_data(self) -> DataSet:
        """Load the images, and describe them on the screen."""
        config = self.config.data
        data = local_main_first(lambda: load(config)) if config.may_download else load(config, run_on_main)
        if self.is_verbose:
            for line in data.describe():
                log_info(line)
        return data

    def seed_groups(self) -> Iterator[list[int]]:
        """Yield the unfinished seeds in groups that train in parallel: a small network leaves most of a GPU idle."""
        train = self.config.train
        has_stream = isinstance(self.data.train.images, StreamedImages)
        sequential = self.device.type != "cuda" or train.execution == "eager" or has_stream or is_distributed()
        size, seeds = 1 if sequential else train.parallel_seeds, list(self.unfinished)
        for i in range(0, len(seeds), size):
            yield seeds[i : i + size]

    def train_seeds(self, seeds: Sequence[int]) -> None:
        """Train and evaluate seeds in parallel. Errors that a user can fix become a UserError."""
        trainers: list[Trainer] = []
        is_exhausted = False
        try:
            self._train_seeds(seeds, trainers)
        except NonFiniteError as error:
            advice = describe_non_finite(error.trainer, error) if error.trainer else str(error)
            raise RunError(advice, kind="non-finite") from error
        except RuntimeError as error:
            if is_peer_failure(error):
                raise RunError(
                    "a peer process exited and stopped the run; continue with --resume", kind="peer-failure"
                ) from error
            if not is_out_of_memory(error):
                raise
            is_exhausted = True  # handled below, because the traceback here still holds the memory
        except (UnreadableImageError, ValueError) as error:
            if advised := explain_input_error(error, [self.unfinished[seed] for seed in seeds]):
                raise advised from error
            raise
        except BrokenPipeError:  # the reader of the output has closed it
            raise
        except RefusedFile as error:
            raise UserError(
                f"cannot use {error.filename} ({error_text(error)}): remove it, and continue with --resume",
                kind="unsafe-file",
            ) from error
        except (OSError, SafetensorError, DiskFullError) as error:
            parent = self.unfinished[seeds[0]].parent
            fix = "free some space" if disk_full_text(error) else "check its files and their permissions"
            raise RunError(
                f"cannot write to {parent} ({error_text(error)}): {fix}, and continue with --resume",
                kind="disk-full" if disk_full_text(error) else "not-writable",
            ) from error
        if is_exhausted:
            self._report_exhausted(seeds, trainers)

    def _report_exhausted(self, seeds: Sequence[int], trainers: list[Trainer]) -> NoReturn:
        """Raise a RunError that says how to use less memory."""
        train = self.config.train
        if is_distributed():
            raise RankError(suggest_smaller_batch(train), kind="out-of-memory")
        if len(seeds) > 1:
            raise RunError(
                f"out of memory with {len(seeds)} seeds in parallel: continue with --resume --train.parallel_seeds 1",
                kind="out-of-memory",
            )
        smaller = suggest_smaller_model(train, self.data.train, self.device)
        advice = find_fitting_batch(trainers[0], train_step) if trainers else smaller
        trainers.clear()  # otherwise the traceback of the error would keep them and their memory
        raise RunError(advice, kind="out-of-memory")

    def _train_seeds(self, seeds: Sequence[int], trainers: list[Trainer]) -> None:
        """Create the trainers, append them to a list, and train those in parallel that are at the same step."""
        self._plan_time()
        if self.config.data.cached_views:
            return self._train_heads(seeds)
        for seed in seeds:
            trainers.append(self.make_trainer(seed, trainers[0] if trainers else None))
        for group in group_by_step(trainers):
            train_group(group)

    def _train_heads(self, seeds: Sequence[int]) -> None:
        """Train heads on cached features. The first call computes the features and selects the configuration."""
        if self.heads is None:
            backbone = self.backbones.find(self.config, self.data, self.device)
            self.heads = HeadTrainer(self.config, backbone, self.is_verbose)
            self.heads.select(self.plan.candidates or [self.config])
            self.config = self.heads.config
        for seed in seeds:
            folder = self.unfinished[seed]
            lock_folder(self.locks, self.config, self.data, self.resume, folder)
            self.heads.train(seed, folder)

    def make_trainer(self, seed: int, sibling: Trainer | None) -> Trainer:
        """Return the trainer of a seed, resumed from its checkpoint if there is one, and lock its folder.

        Args:
            seed: The seed.
            sibling: A trainer of another seed, whose images in memory are shared.
        """
        folder = self.unfinished[seed]
        trainer = Trainer(self.config, seed, self.data, folder, self.device, sibling)
        run_on_main(lock_folder, self.locks, self.config, self.data, self.resume, folder)
        run_on_main(check_seed_folders, {seed: folder})
        is_begun, is_resumed = contains_run(folder), trainer.resume()
        check_same(
            trainer.steps_done(), f"another checkpoint in {folder}: --out must be a folder that all processes share"
        )
        earlier = run_on_main(read_thread_counts, folder) if is_resumed else set()
        run_on_main(write_start_files, trainer)
        if self.is_verbose and self.device.type == "cpu" and earlier - {torch.get_num_threads()}:
            counts = f"{torch.get_num_threads()} now, {' and '.join(map(str, sorted(earlier)))} before"
            rounding = "results may differ from an uninterrupted run by rounding"
            log_info(f"{folder}: resumed with another number of threads ({counts}): {rounding}")
        if self.is_verbose:
            restart = ", from the start: it was stopped before its first checkpoint" if is_begun else ""
            step = f"step {trainer.steps_done()} of {trainer.total_steps()}"
            where = f", continues at {step}" if is_resumed else restart
            log_info(f"{folder}: {describe_model(trainer)}{where}")
        return trainer


def check_seed_folders(folders: dict[int, Path]) -> None:
    """Raise a UserError if the folder of a seed holds the run of another seed, for example because it was renamed."""
    for seed, folder in folders.items():
        if contains_run(folder) and (folder / run_folder.ENVIRONMENT).exists():
            stored = run_folder.read_started(folder).seed
            if stored != seed:
                fix = f"rename it to {folder.with_name(f'seed{stored}')}, or choose another --out"
                raise UserError(f"{folder} holds the run of seed {stored}, not of seed {seed}: {fix}", kind="mismatch")


def read_thread_counts(folder: Path) -> set[int]:
    """Return the numbers of threads with which a run was started and resumed, as far as they are recorded."""
    if not (folder / run_folder.ENVIRONMENT).exists():
        return set()
    stored = run_folder.read_started(folder).environment
    return {n for entry in (stored, *(stored.get("resumed") or [])) if (n := read_thread_count(entry)) is not None}


def group_by_step(trainers: Sequence[Trainer]) -> list[list[Trainer]]:
    """Return groups that can train in parallel. After a crash between two checkpoints, seeds may be at different steps."""
    groups: dict[int, list[Trainer]] = {}
    for trainer in trainers:
        groups.setdefault(trainer.steps_done(), []).append(trainer)
    return list(groups.values())


def train_group(trainers: Sequence[Trainer]) -> None:
    """Train and evaluate seeds in parallel, with logs and loggers open, and stop at signals."""
    first = trainers[0]
    config, title = first.config, run_folder.format_seeds([trainer.seed for trainer in trainers])
    with contextlib.ExitStack() as stack:
        loggers = [stack.enter_context(Loggers(t.folder, t.config, t.seed)) for t in trainers]
        stack.enter_context(use_own_stream(first.device))
        with StopSignals() as stop, contextlib.ExitStack() as open_logs:
            logs = []
            for trainer, others in zip(trainers, loggers, strict=True):
                progress = config.log.progress if trainer is first and is_main_process() else "none"
                path = trainer.folder / run_folder.LOG if is_main_process() else None
                label = f"{config.method.label}, {title}"
                log = Log(path, trainer.total_steps(), progress, label, others.send_rows)
                logs.append(open_logs.enter_context(log))
            try:
                fit(trainers, logs, stop)
            finally:
                for trainer in trainers:
                    trainer.batches.close()
        evaluate_group(trainers, loggers)


def evaluate_group(trainers: Sequence[Trainer], loggers: Sequence[Loggers]) -> None:
    """Evaluate the networks of the last epoch and write the files of finished runs.

    If one cannot be evaluated, its error is raised after the others were evaluated.

    Args:
        trainers: The trainers.
        loggers: Their loggers, which get the metrics.
    """
    shared = {"together": len(trainers), "peak_memory": peak_memory(trainers[0].device)}
    failure: UserError | None = None
    for trainer, others in zip(trainers, loggers, strict=True):
        cost = {"seconds": trainer.seconds, "setup_seconds": trainer.setup_seconds, **shared}
        try:
            others.send_metrics(trainer.evaluator.finish(trainer.folder, cost))
        except UserError as error:
            failure = failure or error
    if failure:
        raise failure
