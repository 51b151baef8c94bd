"""Run folders as they lie on the disk: who reads them needs neither torch nor the code that wrote them.

config.json  environment.json     written when the run starts; with skipped.jsonl, where images could not be read
log.jsonl                         a line an epoch
checkpoint/state.pt               all state, for --resume
model.safetensors  predictions.npz  features.npz  examples/  and last metrics.json: the run has finished
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longtail.config import Config, from_dict
from longtail.errors import UserError

CONFIG, ENVIRONMENT, LOG, METRICS = "config.json", "environment.json", "log.jsonl", "metrics.json"
ENVIRONMENT_KEYS, METRICS_KEYS = (
    ("seed", "started", "precision", "data"),
    ("top1", "few", "per_class", "shifted", "seconds"),
)
CHECKPOINT, MODEL = "checkpoint/state.pt", "model.safetensors"
SKIPPED = "skipped.jsonl"  # images that were left out as they could not be read: id, reason


@dataclass(frozen=True)
class Run:
    """A finished run: what was asked, where it ran, what came out."""

    folder: Path
    config: Config
    environment: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.environment["seed"])


def seeds_named(seeds: Sequence[int]) -> str:
    """As in "seed 0" and "seeds 0 1 2"."""
    return f"seed{'s' * (len(seeds) > 1)} {' '.join(map(str, seeds))}"


def find(paths: Iterable[Path | str] | Path | str) -> list[Path]:
    """All run folders at or below the given path or paths, finished or not, in the order of their names."""
    found: set[Path] = set()
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.exists():
            raise UserError(f"{path} does not exist: name a run folder or a folder that holds runs")
        found |= {Path(top) for top, _, files in os.walk(path) if CONFIG in files and ENVIRONMENT in files}
    return sorted(found)


def read(folder: Path) -> Run:
    """A finished run."""
    config, environment, metrics = load_config(folder), read_json(folder / ENVIRONMENT), read_json(folder / METRICS)
    for name, tree, keys in ((ENVIRONMENT, environment, ENVIRONMENT_KEYS), (METRICS, metrics, METRICS_KEYS)):
        missing = [key for key in keys if not isinstance(tree, dict) or key not in tree]
        if missing:
            raise UserError(f"{folder / name} has no {missing[0]!r}: is it a run folder of longtail?")
    return Run(folder, config, environment, metrics)


def finished(paths: Iterable[Path | str] | Path | str) -> list[Run]:
    """The finished runs at or below the given path or paths; an error where there is none."""
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    folders = find(paths)
    done = [read(f) for f in folders if (f / METRICS).exists()]
    if not done:
        where = ", ".join(map(str, paths))
        advice = (
            f"{len(folders)} unfinished, continue with --resume" if folders else "train first, e.g. `longtail demo`"
        )
        raise UserError(f"no finished run below {where or 'nothing'}: {advice}")
    return done


def load_config(path: Path) -> Config:
    """Of a run folder, or of the file itself."""
    file = path if path.is_file() else path / CONFIG
    tree = read_json(file)
    try:
        return from_dict(Config, tree)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def stored_config(path: Path) -> Config:
    """Of a run, of the first of several below a folder, or of a file: to be trained anew, by however many processes."""
    below = [path] if path.is_file() else find(path)
    if not below:
        raise UserError(f"no run below {path}: name a run folder, one that holds runs, or a {CONFIG}")
    config = load_config(below[0])
    return replace(config, train=replace(config.train, processes=1))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): is it a run folder of longtail?") from error


def write_json(path: Path, tree: Any) -> None:
    """Indented, but a list of numbers (the accuracy of a hundred classes) stays on one line."""
    text = json.dumps(tree, indent=1) + "\n"
    write_text(path, re.sub(r'\[\n([^][{}"]*)\]', lambda numbers: f"[{' '.join(numbers[1].split())}]", text))


def write_text(path: Path, text: str) -> None:
    """Atomically: a reader sees the old file or the new one."""
    fresh = path.with_suffix(f"{path.suffix}.{os.getpid()}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
