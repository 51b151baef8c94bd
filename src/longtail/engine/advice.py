"""What a run that cannot go on says: where it stood, what was wrong, what to try."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from longtail import run_folder
from longtail.config import TrainConfig
from longtail.data.lazy_images import Split, StreamedImages
from longtail.data.samplers import rank_and_world_size
from longtail.engine.meter import NonFinite
from longtail.engine.run import Run
from longtail.errors import RankError, RunError, UnreadableImageError


def advise_finite(run: Run, error: NonFinite) -> str:
    """Of a loss that became infinite or NaN."""
    saved = (run.folder / run_folder.CHECKPOINT).exists()
    checkpoint = "the last checkpoint is from before it" if saved else "no checkpoint was reached"
    advice = f"lower {run.stage.rate} (now {run.stage.optim.lr:g})"
    if run.stage.optim.warmup_epochs or run.stage_index == 0:
        advice += ", lengthen --optim.warmup_epochs"
    if any("logit" in term for term in error.terms):
        advice += ", or raise the temperature (--method.tau, --method.center_tau)"
    what = f"step {error.step}: {' and '.join(error.terms)} became infinite or NaN ({checkpoint})"
    others = [str(seed) for seed in run.config.train.seeds if seed != run.seed]
    rest = f"; the other seeds go on with --train.seeds {' '.join(others)} --resume" if others else ""
    return f"{run.folder}: {what}: {advice}, in another --out{rest}"


def advise_input(error: UnreadableImageError | ValueError, folders: Iterable[Path]) -> RunError | None:
    """Of a file that went bad under a run (without it, or with another in its place, it would be another run), and of a single
    image a step, of which batch norm has nothing to average; None where there is no more to say."""
    if isinstance(error, UnreadableImageError) and any((folder / run_folder.CHECKPOINT).exists() for folder in folders):
        return RankError(
            f"{error.found}: put this very file back and --resume, or begin anew without it in another --out",
            kind="bad-image",
        )
    if "more than 1 value per channel" in str(error):
        needs = "batch norm needs two images in each process at least"
        return RunError(f"{needs}: raise --train.batch_size, or train in fewer processes", kind="conflict")
    return None


def out_of_memory(error: Exception) -> bool:
    """Of the GPU, or of the machine: torch's CPU allocator has no exception of its own."""
    words = (
        "can't allocate memory",
        "not enough memory",
        "CUDA error: out of memory",
    )  # the last for page-locked memory
    if isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words):
        return True
    before = (
        error.__cause__ or error.__context__
    )  # a step that cannot be recorded for lack of memory fails once more, later
    return isinstance(before, Exception) and out_of_memory(before)


def advise_batch(run: Run, advance: Callable[[Run], None]) -> str:
    """Halve the batch until a whole step fits, and name that size. The run is over: its state does not matter any more."""
    given, accumulate = run.loader.batch_size, run.accumulate
    run.accumulate, size = 1, given // 2
    while size > 1:  # batch norm needs two
        if _fits(run, advance, size):
            keep = f"--train.batch_size {size} --train.accumulate {-(-given * accumulate // size)}"
            return f"out of memory at batch size {given}: {size} fits; try {keep}"
        size //= 2
    if isinstance(
        run.data.train.images, StreamedImages
    ):  # whose canvases are as many as before, however small the step
        return advise_smaller(run.config.train, run.data.train, run.device)
    return f"out of memory on {run.device} even at a batch of two: try a smaller --model.name or --data.image_size"


def advise_smaller(train: TrainConfig, source: Split, device: torch.device) -> str:
    """Where not even the first step was reached."""
    if isinstance(source.images, StreamedImages):
        side, images = source.images.side, train.batch_size * train.accumulate
        what, fix = f"{images:,} at a time at {side}x{side} pixels", "--data.resolution, --train.batch_size"
    else:
        what, fix = f"{len(source.labels):,} of them", "--data.image_size"
    return (
        f"the network and its images, {what}, do not fit in the memory of {device}: try a smaller {fix} or --model.name"
    )


def advise_several(train: TrainConfig) -> str:
    """As `advise_batch`, of one process among several, which cannot try a step without the others."""
    half = f"--train.batch_size {max(train.batch_size // 2, 1)} --train.accumulate {2 * train.accumulate}"
    return f"process {rank_and_world_size()[0]}: out of memory at batch size {train.batch_size}: try {half}"


def _fits(run: Run, advance: Callable[[Run], None], size: int) -> bool:
    run.optimizer.zero_grad()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    run.batches.rows_B = run.batches.rows_B[:size]
    try:
        run.prepare(0)
        advance(run)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    return True
