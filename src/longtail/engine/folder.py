"""The folder of a run while it is trained: who may go on in it, one process at a time, and the files that say what it is."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from longtail import files, run_folder
from longtail.config import Config, differences, to_dict
from longtail.data.decode import BadImage, find_unreadable, unreadable_image_error
from longtail.data.lazy_images import StreamedImages
from longtail.data.sources import DataSet
from longtail.engine.environment import describe_environment
from longtail.errors import UserError, disk_full_as_user_error

if TYPE_CHECKING:
    from longtail.engine.trainer import Trainer


def holds_a_run(folder: Path) -> bool:
    """One that has got somewhere: what stopped before its first epoch, at an image that cannot be read, may begin anew."""
    try:
        log, others = folder / run_folder.LOG, (run_folder.CHECKPOINT, run_folder.METRICS)
        begun = any(os.path.lexists(folder / name) for name in others) or (log.exists() and log.stat().st_size > 0)
        return begun and os.path.lexists(folder / run_folder.CONFIG)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}, choose another", kind="unreadable-file") from error


def check_folder(folder: Path, config: Config, resume: bool, top: Path | None = None) -> None:
    """A folder that holds a run is continued on request, and only by the configuration that started it.

    A link that leaves OUT (`top`, the parent of `folder` if not given) is refused: whoever made it would decide where this
    process writes.
    """
    check_links(folder, top or folder.parent)
    if not holds_a_run(folder):
        return
    if not resume:
        done = (folder / run_folder.METRICS).exists()
        what = "a finished run: use it" if done else "a run: continue it with --resume"
        raise UserError(f"{folder} already holds {what}, or choose another --out", kind="exists")
    there, here = run_folder.load_config(folder).identity(), config.identity()
    found = differences(there, here)
    if found:
        field = "train.epochs" if "train.epochs" in found else next(iter(found))  # others follow from it
        was, now = found[field]
        changed = f"{field} was {was}, now {now}"
        raise UserError(
            f"{folder} was started with another configuration ({changed}): use its flags, or another --out",
            kind="mismatch",
        )


def check_links(folder: Path, top: Path) -> None:
    """Raise a UserError if a symbolic link leads from a run folder out of `top`, the folder that the user named."""
    files.check_working_directory((folder, top))
    try:
        files.check_inside(folder, top)
    except files.RefusedFile as error:
        advice = f"remove the link, or name the folder above {os.path.realpath(folder)} as --out"
        raise UserError(f"{folder} leads out of {top} by a symbolic link: {advice}", kind="unsafe-file") from error


def check_images(folder: Path, data: DataSet) -> None:
    """Seeds of one run share their images."""
    if not holds_a_run(folder) or not os.path.lexists(folder / run_folder.ENVIRONMENT):
        return
    if run_folder.read_started(folder).environment["data"]["checksum"] != data.checksum:
        raise UserError(f"{folder} was trained on other images: use its --data.root, or another --out", kind="mismatch")


def check_folders(folders: Iterable[Path], config: Config, resume: bool) -> None:
    for folder in folders:
        check_folder(folder, config, resume)


def folders_left(folders: dict[int, Path], config: Config, data: DataSet) -> dict[int, Path]:
    """Of the seeds that have not finished, once all were seen to have the same images, and a new one all that it will need."""
    for folder in folders.values():
        check_images(folder, data)
    left = {seed: folder for seed, folder in folders.items() if not os.path.lexists(folder / run_folder.METRICS)}
    if config.data.on_error == "stop" and not all(
        map(holds_a_run, left.values())
    ):  # with "skip" they have been looked at
        check_evaluated(data)
    return left


def check_evaluated(data: DataSet) -> None:
    """Images that would be read after the last epoch for the first time: a bad one is to be known before the first."""
    for source in (data.test, data.val):
        if source is not None and isinstance(source.images, StreamedImages):
            for number, why in find_unreadable(source.images.read_encoded, np.arange(len(source.labels))).items():
                raise unreadable_image_error(source.images.describe(number), BadImage(why))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in a run folder; the lock goes with the process."""
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
            take(file)
        except OSError as error:
            raise UserError(
                f"another process trains in {folder}: wait for it, or choose another --out", kind="exists"
            ) from error
        yield


def take_folder(held: contextlib.ExitStack, config: Config, data: DataSet, resume: bool, folder: Path) -> None:
    """For this process alone until `held` ends; and looked at once more, as another may have begun a run there meanwhile."""
    held.enter_context(locked(folder))
    check_folder(folder, config, resume)
    check_images(folder, data)


def take(file: IO[bytes]) -> None:
    """The lock, for this process alone. Who draws a report shares it for a moment, and is waited for; who trains is not."""
    for _ in range(50):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an error where somebody has it alone
            time.sleep(0.02)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def from_anywhere(config: Config) -> Config:
    """The same, to be read in whatever folder one stands."""
    root = config.data.root
    return config if root is None else replace(config, data=replace(config.data, root=Path(os.path.abspath(root))))


def start_folder(trainer: "Trainer") -> None:
    """The files that say what the run is; a resume is added to what the first start wrote."""
    path, now = trainer.folder / run_folder.ENVIRONMENT, describe_environment(trainer)
    try:
        trainer.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and holds_a_run(trainer.folder):
            first = run_folder.read_started(trainer.folder).environment
            again = {k: now[k] for k in ("started", "commit", "versions", "device", "threads", "precision", "step")}
            now = first | {"resumed": [*(first.get("resumed") or []), again]}
        else:
            files.write_json(trainer.folder / run_folder.CONFIG, to_dict(from_anywhere(trainer.config)))
        lines = [json.dumps(image._asdict()) + "\n" for image in trainer.data.skipped]
        if lines:
            files.write_text(trainer.folder / run_folder.SKIPPED, "".join(lines))
        else:  # of an attempt that was stopped before its first epoch
            (trainer.folder / run_folder.SKIPPED).unlink(missing_ok=True)
        files.write_json(path, now)
    except OSError as error:
        raise UserError(
            f"cannot write to {trainer.folder} ({error.strerror}): choose another --out",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "not-writable",
        ) from error
