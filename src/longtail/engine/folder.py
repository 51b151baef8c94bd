"""The folder of a run while it is trained: who may go on in it, one process at a time, and the files that say what it is."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from longtail import runs
from longtail.config import Config, differences, to_dict
from longtail.data.sources import DataSet
from longtail.engine.environment import describe_environment
from longtail.engine.run import Run
from longtail.errors import UserError, room_for


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
        with room_for(folder):
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
            again = {k: now[k] for k in ("started", "commit", "versions", "device", "precision", "step")}
            now = first | {"resumed": [*first.get("resumed", []), again]}
        else:
            runs.write_json(run.folder / runs.CONFIG, to_dict(run.config))
        lines = [json.dumps(image._asdict()) + "\n" for image in run.data.skipped]
        if lines:
            runs.write_text(run.folder / runs.SKIPPED, "".join(lines))
        runs.write_json(path, now)
    except OSError as error:
        raise UserError(f"cannot write to {run.folder} ({error.strerror}): choose another --out") from error
