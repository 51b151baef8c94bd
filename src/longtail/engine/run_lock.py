"""Run folders before training: which of them may be used, and the lock that admits one process at a time."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from longtail import files, run_folder
from longtail.config import Config, differences
from longtail.data.decode import BadImage, find_unreadable, unreadable_image_error
from longtail.data.lazy_images import StreamedImages
from longtail.data.sources import DataSet
from longtail.errors import UserError, disk_full_as_user_error

LOCK_ATTEMPTS, LOCK_PAUSE = 50, 0.02
"""How often the lock is tried, with pauses in seconds, while a report holds a shared lock for a moment."""


def contains_run(folder: Path) -> bool:
    """Return whether a folder has a run with results. A run that stopped in its first epoch may start again."""
    try:
        log, others = folder / run_folder.LOG, (run_folder.CHECKPOINT, run_folder.METRICS)
        has_results = any(os.path.lexists(folder / name) for name in others) or (
            log.exists() and log.stat().st_size > 0
        )
        return has_results and os.path.lexists(folder / run_folder.CONFIG)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; choose another", kind="unreadable-file") from error


def check_folder(folder: Path, config: Config, resume: bool, top: Path | None = None) -> None:
    """Raise a UserError if a run cannot be started or continued in a folder.

    An existing run is continued on request only, and only with the configuration that started it. A symbolic link that leads
    out of `top` is refused, because its author would decide where this process writes.

    Args:
        folder: The run folder.
        config: The configuration.
        resume: Whether to continue an existing run.
        top: The folder that the user named; by default the parent of `folder`.
    """
    check_links(folder, top or folder.parent)
    if not contains_run(folder):
        return
    if not resume:
        is_done = (folder / run_folder.METRICS).exists()
        what = "a finished run: use that run" if is_done else "a run: continue it with --resume"
        raise UserError(f"{folder} already contains {what}, or choose another --out", kind="exists")
    found = differences(run_folder.load_config(folder).identity(), config.identity())
    if found:
        field = "train.epochs" if "train.epochs" in found else next(iter(found))  # other fields follow from it
        before, now = found[field]
        raise UserError(
            f"{folder} was started with another configuration ({field} was {before}, now {now}): "
            "use the same settings, or choose another --out",
            kind="mismatch",
        )


def check_links(folder: Path, top: Path) -> None:
    """Raise a UserError if a symbolic link leads from a run folder out of `top`, the folder that the user named."""
    files.check_working_directory((folder, top))
    try:
        files.check_inside(folder, top)
    except files.RefusedFile as error:
        advice = f"remove the link, or name the folder above {os.path.realpath(folder)} as --out"
        raise UserError(
            f"{folder} is outside of {top}, because of a symbolic link: {advice}", kind="unsafe-file"
        ) from error


def check_same_images(folder: Path, data: DataSet) -> None:
    """Raise a UserError if a folder holds a run on other images."""
    if not contains_run(folder) or not os.path.lexists(folder / run_folder.ENVIRONMENT):
        return
    if run_folder.read_started(folder).environment["data"]["checksum"] != data.checksum:
        raise UserError(f"{folder} was trained on other images: use its --data.root, or another --out", kind="mismatch")


def check_folders(folders: Iterable[Path], config: Config, resume: bool) -> None:
    """Check several folders; `check_folder` describes the arguments."""
    for folder in folders:
        check_folder(folder, config, resume)


def find_unfinished(folders: dict[int, Path], config: Config, data: DataSet) -> dict[int, Path]:
    """Return the folders of the seeds that have not finished. All images that a new run needs are checked before it starts.

    Args:
        folders: The run folder of each seed.
        config: The configuration.
        data: The images, which must be those of all existing runs.
    """
    for folder in folders.values():
        check_same_images(folder, data)
    unfinished = {seed: folder for seed, folder in folders.items() if not os.path.lexists(folder / run_folder.METRICS)}
    # With on_error="skip" all images were checked when they were loaded.
    if config.data.on_error == "stop" and not all(map(contains_run, unfinished.values())):
        check_evaluation_images(data)
    return unfinished


def check_evaluation_images(data: DataSet) -> None:
    """Raise a UserError for an unreadable test or validation image, which otherwise would be noticed after the last epoch."""
    for source in (data.test, data.val):
        if source is not None and isinstance(source.images, StreamedImages):
            for number, why in find_unreadable(source.images.read_encoded, np.arange(len(source.labels))).items():
                raise unreadable_image_error(source.images.describe(number), BadImage(why))


# The lock


def lock_folder(locks: contextlib.ExitStack, config: Config, data: DataSet, resume: bool, folder: Path) -> None:
    """Lock a run folder, and check it again, because another process may have started a run there in the meantime.

    Args:
        locks: Holds the lock until it is closed.
        config: The configuration.
        data: The images.
        resume: Whether to continue an existing run.
        folder: The run folder.
    """
    locks.enter_context(open_locked(folder))
    check_folder(folder, config, resume)
    check_same_images(folder, data)


@contextlib.contextmanager
def open_locked(folder: Path) -> Iterator[None]:
    """Create a run folder and lock it for this process. The system releases the lock when the process ends."""
    try:
        with disk_full_as_user_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = files.open_lock(folder / run_folder.LOCK)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): choose another --out",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "not-writable",
        ) from error
    with file:
        try:
            acquire_lock(file)
        except OSError as error:
            raise UserError(
                f"another process is training in {folder}: wait until it has finished, or choose another --out",
                kind="exists",
            ) from error
        yield


def acquire_lock(file: IO[bytes]) -> None:
    """Acquire an exclusive lock; raise OSError if another process trains. A report's short shared lock is waited for."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            return files.lock(file)
        except OSError:
            files.lock(file, shared=True)  # raises if the other lock is exclusive
            time.sleep(LOCK_PAUSE)
    files.lock(file)
