"""All state of a run in one file, replaced atomically: a crash leaves the old checkpoint or the new one, never a part."""

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from longtail.errors import RunError, UserError, why


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside the old file, flush to the disk, then rename over it."""
    fresh = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(fresh, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            fresh.unlink()
        before = "the previous checkpoint is whole" if path.is_file() else "there is none from before"
        raise RunError(f"cannot save {path} ({why(error)}): {before}; free some space and --resume") from error


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """The stored state; tensors and plain values only, no code is executed. The file's own checksums are verified."""
    try:
        with zipfile.ZipFile(path) as archive:
            if bad := archive.testzip():
                raise ValueError(f"{bad} is damaged")
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        reason = f"cannot read the checkpoint {path} ({_first_line(error)})"
        raise UserError(f"{reason}: delete its run folder to start that seed anew") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to execute what it holds
        return "it holds more than tensors and numbers, and nothing of it was executed"
    return (str(error).splitlines() or [type(error).__name__])[0]
