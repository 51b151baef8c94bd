"""Where a run happened: versions, commit, device, data, size of the network."""

import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail import __version__
from longtail.data.lazy_images import Split, StreamedImages
from longtail.engine.device import precision
from longtail.metrics import shot_groups

if TYPE_CHECKING:
    from longtail.engine.trainer import Trainer


def describe_environment(trainer: "Trainer") -> dict[str, Any]:
    cuda = trainer.device.type == "cuda"
    return {
        "seed": trainer.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": {"longtail": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "numpy")},
        "device": torch.cuda.get_device_name() if cuda else f"CPU, threads: {torch.get_num_threads()}",
        "threads": torch.get_num_threads(),
        "precision": precision(trainer.config.train, trainer.device),
        "step": trainer.step_mode,
        "epochs": sum(stage.epochs for stage in trainer.method.stages),
        "data": {
            "checksum": trainer.data.checksum,
            "images": len(trainer.data.train.labels),
            "classes": len(trainer.data.train.class_names),
            "counts": trainer.data.train.counts.tolist(),
            "shot_groups": {name: int(mask.sum()) for name, mask in shot_groups(trainer.data.counts).items()},
            "resolution": resolution(trainer.data.train),
            "notes": list(trainer.data.notes),
        },
        "model": trainer.config.model.name,
        "parameters": parameters(trainer),
        "chosen": trainer.method.resolved_settings(),
    }


def threads_of(entry: dict[str, Any]) -> int | None:
    """Return the number of threads that an environment, or an entry of its `resumed`, tells; None if it does not.

    Entries without the field `threads` have the number in the description of the device.
    """
    if type(threads := entry.get("threads")) is int:
        return threads
    found = re.fullmatch(r"CPU, threads: (\d{1,6})", str(entry.get("device")))
    return int(found[1]) if found else None


def resolution(source: Split) -> int:
    """The longer side in pixels at which streamed images are kept; 0: center squares were held in memory at image_size."""
    return source.images.side if isinstance(source.images, StreamedImages) else 0


def parameters(trainer: "Trainer") -> int:
    """Of the network that deploys: trunk and classifier."""
    return sum(p.numel() for p in trainer.method.net.parameters())


def describe_model(trainer: "Trainer") -> str:
    """What trains where, in a line."""
    chosen = "".join(f", {name} {value:g}" for name, value in trainer.method.resolved_settings().items())
    what = f"{trainer.config.method.label}{chosen}, {trainer.config.model.name} with {parameters(trainer):,} parameters"
    return f"{what}, {precision(trainer.config.train, trainer.device)} on {trainer.device.type}"


def commit() -> str | None:
    """The commit of the source tree this package runs from ($LONGTAIL_COMMIT where the tree was copied without history)."""
    package = Path(__file__).resolve().parents[1]
    if os.environ.get("LONGTAIL_COMMIT") or package.parent.name != "src":
        return os.environ.get("LONGTAIL_COMMIT")
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
