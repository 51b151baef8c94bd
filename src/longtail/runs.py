"""Run folders as they lie on the disk: who reads them needs neither torch nor the code that wrote them.

config.json  environment.json     written when the run starts; with skipped.jsonl, where images could not be read
log.jsonl                         a line an epoch; with gradients.npz, where asked for
checkpoint/state.pt               all state, for --resume
model.safetensors  predictions.npz  features.npz  examples/  calibration.json  and last metrics.json: the run has finished
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
GRADIENTS = "gradients.npz"  # norms (epochs, classes) and stages (epochs,), where --log.gradients asked for it
TENSORBOARD, WANDB = "tensorboard", "wandb.json"  # of --log.to: event files; id and epochs of the run there
CALIBRATION = "calibration.json"  # the temperature, where there were validation images
SKIPPED = "skipped.jsonl"  # images that were left out as they could not be read: id, reason


@dataclass(frozen=True)
class Begun:
    """A run that has begun: what was asked, where it runs."""

    folder: Path
    config: Config
    environment: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.environment["seed"])


@dataclass(frozen=True)
class Run(Begun):
    """A finished run: also what came out."""

    metrics: dict[str, Any]


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


def divided(paths: Iterable[Path | str] | Path | str) -> tuple[list[Path], list[Path]]:
    """The folders of finished runs at or below the given path or paths, and those of the others."""
    done: list[Path] = []
    others: list[Path] = []
    for folder in find(paths):
        (done if (folder / METRICS).exists() else others).append(folder)
    return done, others


def read(folder: Path) -> Run:
    """A finished run."""
    begun = read_begun(folder)
    return Run(folder, begun.config, begun.environment, _tree(folder / METRICS, METRICS_KEYS))


def read_begun(folder: Path) -> Begun:
    """A run, whether it has finished or not."""
    return Begun(folder, load_config(folder), _tree(folder / ENVIRONMENT, ENVIRONMENT_KEYS))


def _tree(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    tree = read_json(path)
    missing = [key for key in keys if not isinstance(tree, dict) or key not in tree]
    if missing:
        raise UserError(f"{path} has no {missing[0]!r}: is it a run folder of longtail?")
    return tree


def finished(paths: Iterable[Path | str] | Path | str) -> list[Run]:
    """The finished runs at or below the given path or paths; an error where there is none."""
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    done, others = divided(paths)
    if not done:
        where = ", ".join(map(str, paths))
        advice = f"{len(others)} unfinished, continue with --resume" if others else "train first, e.g. `longtail demo`"
        raise UserError(f"no finished run below {where or 'nothing'}: {advice}")
    return [read(folder) for folder in done]


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
    with replaced(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside it to be written, which takes its place in the end; where something fails it is gone, and the old one is
    as it was."""
    fresh = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
