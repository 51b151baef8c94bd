"""Error messages for training that cannot continue: where it stopped, what was wrong, and what to try."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from longtail import run_folder
from longtail.config import TrainConfig
from longtail.data.lazy_images import Split, StreamedImages
from longtail.distributed import rank
from longtail.engine.meter import NonFiniteError
from longtail.engine.trainer import Trainer
from longtail.errors import RankError, RunError, UnreadableImageError

ALLOCATION_ERRORS = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
"""Parts of the messages of out-of-memory errors that are plain RuntimeErrors: on the CPU, and of page-locked memory."""


def describe_non_finite(trainer: Trainer, error: NonFiniteError) -> str:
    """Return the message for a loss, or another logged term, that became infinite or NaN."""
    saved = (trainer.folder / run_folder.CHECKPOINT).exists()
    checkpoint = "the last checkpoint is from an earlier step" if saved else "there is no checkpoint yet"
    advice = f"lower {trainer.stage.lr_flag} (now {trainer.stage.optim.lr:g})"
    if trainer.stage.optim.warmup_epochs or trainer.stage_index == 0:
        advice += ", lengthen --optim.warmup_epochs"
    if any("logit" in term for term in error.terms):
        advice += ", or raise the temperature (--method.tau, --method.center_tau)"
    what = f"step {error.step}: {' and '.join(error.terms)} became infinite or NaN ({checkpoint})"
    others = [str(seed) for seed in trainer.config.train.seeds if seed != trainer.seed]
    rest = f"; continue the other seeds with --train.seeds {' '.join(others)} --resume" if others else ""
    return f"{trainer.folder}: {what}: train again in another --out; {advice}{rest}"


def explain_input_error(error: UnreadableImageError | ValueError, folders: Iterable[Path]) -> RunError | None:
    """Return a RunError that says how to continue after an input error; None if the error itself is clear enough.

    There are two such errors: an image that became unreadable during training, because without it, or with another image in
    its place, the run would be a different one; and a batch of one image, for which batch norm has no statistics.

    Args:
        error: The error.
        folders: The run folders of the seeds that were trained.
    """
    if isinstance(error, UnreadableImageError) and any((folder / run_folder.CHECKPOINT).exists() for folder in folders):
        return RankError(
            f"{error.found}: restore this file and continue with --resume, or train without it in another --out",
            kind="bad-image",
        )
    if "more than 1 value per channel" in str(error):
        needs = "batch norm needs at least two images in each process"
        return RunError(f"{needs}: raise --train.batch_size, or train in fewer processes", kind="conflict")
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error, or the error that caused it, reports that the GPU or the machine has too little memory."""
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in ALLOCATION_ERRORS):
        return True
    # A step that cannot be captured for lack of memory raises a second error later.
    cause = error.__cause__ or error.__context__
    return isinstance(cause, Exception) and is_out_of_memory(cause)


def find_fitting_batch(trainer: Trainer, train_step: Callable[[Trainer], None]) -> str:
    """Halve the batch until a step fits into memory, and return a message that names that size.

    The trainer cannot be used afterward.
    """
    given, accumulate = trainer.loader.batch_size, trainer.accumulate
    trainer.accumulate, size = 1, given // 2
    while size > 1:  # batch norm needs two
        if _batch_fits(trainer, train_step, size):
            flags = f"--train.batch_size {size} --train.accumulate {-(-given * accumulate // size)}"
            return f"out of memory at batch size {given}: {size} fits; try {flags}"
        size //= 2
    if isinstance(trainer.data.train.images, StreamedImages):  # their buffers do not shrink with the step
        return suggest_smaller_model(trainer.config.train, trainer.data.train, trainer.device)
    return f"out of memory on {trainer.device} even at batch size 2: try a smaller --model.name or --data.image_size"


def suggest_smaller_model(train: TrainConfig, source: Split, device: torch.device) -> str:
    """Return the message for running out of memory before the first step.

    Args:
        train: The settings of training.
        source: The training images.
        device: The device that has too little memory.
    """
    if isinstance(source.images, StreamedImages):
        side, images = source.images.side, train.batch_size * train.accumulate
        what, fix = f"{images:,} images at a time at {side}x{side} pixels", "--data.resolution, --train.batch_size"
    else:
        what, fix = f"{len(source.labels):,} images", "--data.image_size"
    return f"the network and {what} do not fit in the memory of {device}: try a smaller {fix} or --model.name"


def suggest_smaller_batch(train: TrainConfig) -> str:
    """Return the message for one process of several, which cannot try a smaller batch without the others."""
    half = f"--train.batch_size {max(train.batch_size // 2, 1)} --train.accumulate {2 * train.accumulate}"
    return f"rank {rank()}: out of memory at batch size {train.batch_size}: try {half}"


def _batch_fits(trainer: Trainer, train_step: Callable[[Trainer], None], size: int) -> bool:
    trainer.optimizer.zero_grad()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    trainer.batches.rows_B = trainer.batches.rows_B[:size]
    try:
        trainer.prepare(0)
        train_step(trainer)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
