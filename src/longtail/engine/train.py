"""Training: `fit` is the loop; around it, one run per seed, each in a folder that can be resumed."""

import signal
import threading
from pathlib import Path
from types import FrameType

import torch

from longtail import runs
from longtail.config import Config, differences, to_dict
from longtail.data.sources import DataSet, load
from longtail.engine.device import choose_device
from longtail.engine.environment import describe_environment
from longtail.engine.evaluate import finish
from longtail.engine.log import Log
from longtail.engine.meter import NonFinite
from longtail.engine.run import Run
from longtail.engine.schedule import learning_rate
from longtail.errors import Interrupted, RunError, UserError


def fit(run: Run, log: Log, stop: "StopSignals") -> None:
    """Every step that is left, from wherever the run stands."""
    for stage in run.stages_left():
        for step in run.steps_left():
            for batch in run.batches(step):
                terms = run.method.loss(batch)
                (terms["loss"] / run.accumulate).backward()
                run.meter.add(terms, run.steps_done())
            for group in run.optimiser.param_groups:
                group["lr"] = learning_rate(stage.optim, step, run.steps_per_epoch, stage.epochs)
            run.optimiser.step()
            run.optimiser.zero_grad()
            run.method.after_step()
            run.step = step + 1
            if run.step % run.steps_per_epoch == 0:
                run.end_epoch(log)
            elif log.wants_news():
                log.news(run.steps_done(), run.row())
            if stop.signum is not None:
                run.save()
                message = f"stopped at step {run.steps_done()} and saved in {run.folder}: --resume continues"
                raise Interrupted(message, stop.signum)


def train(config: Config, out: Path | str, resume: bool = False, data: DataSet | None = None) -> list[Path]:
    """Train one run per seed in OUT/seedN and evaluate it; the run folders. The twin of `longtail train`.

    `data` is what `config.data` describes, where the caller has loaded (and shown) it already.
    """
    device = choose_device(config.train.device)
    folders = {seed: Path(out) / f"seed{seed}" for seed in config.train.seeds}
    for folder in folders.values():
        check_folder(folder, config, resume)
    if data is None:
        data = load(config.data)
        if config.log.progress != "none":
            print(*data.describe(), sep="\n", flush=True)
    for seed, folder in folders.items():
        if (folder / runs.METRICS).exists():
            print(f"{folder} has finished already", flush=True)
        else:
            train_seed(config, seed, data, folder, device)
    return list(folders.values())


def train_seed(config: Config, seed: int, data: DataSet, folder: Path, device: torch.device) -> None:
    """One run, from its start or its checkpoint to its metrics."""
    run = Run(config, seed, data, folder, device)
    start_folder(run)
    if run.restore() and config.log.progress != "none":
        print(f"{folder} continues at step {run.steps_done()} of {run.total_steps()}", flush=True)
    title = f"{config.method.label}, seed {seed}"
    exhausted = False
    with StopSignals() as stop, Log(folder / runs.LOG, run.total_steps(), config.log.progress, title) as log:
        try:
            fit(run, log, stop)
        except NonFinite as error:
            raise RunError(advise_finite(run, error)) from error
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            exhausted = True  # handled below: in here the traceback still holds the memory
    if exhausted:
        raise RunError(advise_batch(run))
    finish(run.method, data, run.views, device, config.train.batch_size, folder, run.seconds)


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """A folder that holds a run is continued on request, and only by the configuration that started it."""
    if not (folder / runs.CONFIG).exists():
        return
    if not resume:
        raise UserError(f"{folder} already holds a run: continue it with --resume, or choose another --out")
    there, here = runs.load_config(folder).identity(), config.identity()
    for field, (was, now) in differences(there, here).items():
        changed = f"{field} was {was}, now {now}"
        raise UserError(f"{folder} was started with another configuration ({changed}): use its flags, or another --out")


def start_folder(run: Run) -> None:
    """The files that say what the run is."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        runs.write_json(run.folder / runs.CONFIG, to_dict(run.config))
        runs.write_json(run.folder / runs.ENVIRONMENT, describe_environment(run))
    except OSError as error:
        raise UserError(f"cannot write to {run.folder} ({error.strerror}): choose another --out") from error


def advise_finite(run: Run, error: NonFinite) -> str:
    """What a spoilt run tells: where, which term, what to try."""
    saved = (
        "the last checkpoint is from before it"
        if (run.folder / runs.CHECKPOINT).exists()
        else "no checkpoint was reached"
    )
    lr = run.stage.optim.lr
    advice = f"lower --optim.lr (now {lr:g}), lengthen --optim.warmup_epochs"
    if any("logit" in term for term in error.terms):
        advice += ", or raise the temperature (--method.tau, --method.centre_tau)"
    return f"step {error.step}: {' and '.join(error.terms)} became infinite or NaN ({saved}): {advice}"


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def advise_batch(run: Run) -> str:
    """Halve the batch until a step fits, and name that size."""
    size = run.loader.batch_size
    while size > 1:
        size //= 2
        if _fits(run, size):
            keep = f"--train.batch_size {size} --train.accumulate {-(-run.loader.batch_size * run.accumulate // size)}"
            return f"out of memory at batch size {run.loader.batch_size}: {size} fits; try {keep}"
    return f"out of memory on {run.device} even at batch size 1: try a smaller --model.name or --data.image_size"


def _fits(run: Run, size: int) -> bool:
    """Whether forward and backward of `size` images run through; the run itself is over, so its state does not matter."""
    run.optimiser.zero_grad()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        run.method.loss(next(run.batches(0)).first(size))["loss"].backward()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return False
    return True


class StopSignals:
    """Ctrl-C and SIGTERM become a wish that the loop grants after the step under way; a second Ctrl-C insists."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "StopSignals":
        # Python takes signals in the main thread alone; elsewhere the caller's handling stays as it is.
        main = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self._wish) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
        return self

    def _wish(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt
        self.signum = signum

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)
