"""The record of a run's start: configuration, versions, commit, device, data, size of the network."""

import json
import os
import platform
import re
import subprocess
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail import __version__, files, run_folder
from longtail.config import Config, to_dict
from longtail.data.lazy_images import Split, StreamedImages
from longtail.engine.device import resolve_precision
from longtail.engine.run_lock import contains_run
from longtail.errors import UserError
from longtail.metrics import shot_groups

if TYPE_CHECKING:
    from longtail.engine.head_runs import HeadRun
    from longtail.engine.trainer import Trainer

RESUMED_FIELDS = ("started", "commit", "versions", "device", "threads", "precision", "step")
"""The fields of environment.json that are recorded again when a run is resumed."""


def write_start_files(trainer: "Trainer | HeadRun") -> None:
    """Write the files that describe a run. If the run is resumed, add an entry to the existing files."""
    path, now = trainer.folder / run_folder.ENVIRONMENT, describe_environment(trainer)
    try:
        trainer.folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and contains_run(trainer.folder):
            first = run_folder.read_started(trainer.folder).environment
            resumed = {name: now[name] for name in RESUMED_FIELDS}
            now = first | {"resumed": [*(first.get("resumed") or []), resumed]}
        else:
            files.write_json(trainer.folder / run_folder.CONFIG, to_dict(with_absolute_root(trainer.config)))
        lines = [json.dumps(image._asdict()) + "\n" for image in trainer.data.skipped]
        if lines:
            files.write_text(trainer.folder / run_folder.SKIPPED, "".join(lines))
        else:  # a file of an earlier start that was stopped before its first epoch
            (trainer.folder / run_folder.SKIPPED).unlink(missing_ok=True)
        files.write_json(path, now)
    except OSError as error:
        raise UserError(
            f"cannot write to {trainer.folder} ({error.strerror}): choose another --out",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "not-writable",
        ) from error


def with_absolute_root(config: Config) -> Config:
    """Return the configuration with an absolute `data.root`, which is valid in any working directory."""
    root = config.data.root
    return config if root is None else replace(config, data=replace(config.data, root=Path(os.path.abspath(root))))


def describe_environment(trainer: "Trainer | HeadRun") -> dict[str, Any]:
    """Return the content of environment.json."""
    cuda = trainer.device.type == "cuda"
    return {
        "seed": trainer.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": find_commit(),
        "versions": {"longtail": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "numpy")},
        "device": torch.cuda.get_device_name() if cuda else f"CPU, threads: {torch.get_num_threads()}",
        "threads": torch.get_num_threads(),
        "precision": resolve_precision(trainer.config.train, trainer.device),
        "step": trainer.step_mode,
        "epochs": sum(stage.epochs for stage in trainer.method.stages),
        "data": {
            "checksum": trainer.data.checksum,
            "images": len(trainer.data.train.labels),
            "classes": len(trainer.data.train.class_names),
            "counts": trainer.data.train.counts.tolist(),
            "shot_groups": {name: int(mask.sum()) for name, mask in shot_groups(trainer.data.counts).items()},
            "resolution": stored_resolution(trainer.data.train),
            "notes": list(trainer.data.notes),
        },
        "model": trainer.config.model.name,
        "parameters": count_parameters(trainer),
        "chosen": trainer.method.resolved_settings(),
    }


def read_thread_count(entry: dict[str, Any]) -> int | None:
    """Return the number of threads in an environment, or in an entry of its `resumed`; None if it is not recorded.

    Entries without the field `threads` have the number in the description of the device.
    """
    if type(threads := entry.get("threads")) is int:
        return threads
    found = re.fullmatch(r"CPU, threads: (\d{1,6})", str(entry.get("device")))
    return int(found[1]) if found else None


def stored_resolution(source: Split) -> int:
    """Return the longest side in pixels of streamed images; 0 for center squares that are held in memory at `image_size`."""
    return source.images.side if isinstance(source.images, StreamedImages) else 0


def count_parameters(trainer: "Trainer | HeadRun") -> int:
    """Return the number of parameters of the deployed network: backbone and classifier."""
    return sum(p.numel() for p in trainer.method.net.parameters())


def describe_model(trainer: "Trainer | HeadRun") -> str:
    """Return method, network, precision and device as one line of text."""
    resolved = "".join(f", {name} {value:g}" for name, value in trainer.method.resolved_settings().items())
    network = f"{trainer.config.model.name} with {count_parameters(trainer):,} parameters"
    precision = resolve_precision(trainer.config.train, trainer.device)
    return f"{trainer.config.method.label}{resolved}, {network}, {precision} on {trainer.device.type}"


def find_commit() -> str | None:
    """Return the commit of the source tree that this package runs from, or else $LONGTAIL_COMMIT; None if it is not known."""
    package = Path(__file__).resolve().parents[1]
    if os.environ.get("LONGTAIL_COMMIT") or package.parent.name != "src":
        return os.environ.get("LONGTAIL_COMMIT")
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
