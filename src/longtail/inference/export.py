"""A network as a file for use elsewhere. It is run and compared with the original before it is there, and has a card."""

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtail import files, run_folder
from longtail.errors import RunError, UserError, disk_full_as_user_error, disk_full_text, error_text, unknown_name
from longtail.inference.card import card
from longtail.inference.deployed import Deployed, facts
from longtail.inference.formats import FORMATS, Runner, eager
from longtail.inference.loading import load
from longtail.inference.model import Model

BATCHES = (1, 7)  # sizes at which both are run
TOLERANCE = 1e-4  # of logits, as a share of the largest where that is above 1; of probabilities
SECONDS, PASSES = 0.3, 30  # of timing one of them, at most


@dataclass(frozen=True)
class Exported:
    path: Path
    card: Path
    difference: float
    """The largest between its logits and the original's."""
    latency: dict[int, tuple[float, float]]
    """By batch size: milliseconds of a pass on the CPU, the original's and its own."""

    def words(self) -> list[str]:
        times = (f"batch {n}: {old:.1f} ms, exported {new:.1f} ms" for n, (old, new) in self.latency.items())
        checked = f"checked at batch {' and '.join(map(str, BATCHES))}: logits differ by {self.difference:.1e} at most"
        return [checked, *times, f"written to {self.path} and {self.card}"]


def export(
    run: Path | str | Model,
    to: str = "onnx",
    out: Path | str | None = None,
    prior: str | Path | Mapping[str, float] | None = None,
) -> Exported:
    """Write a network as `onnx`, `torch` (a .pt2 of torch.export) or `safetensors`; the twin of `longtail export`."""
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    model = run if isinstance(run, Model) else load(run, "cpu")
    model = model if prior is None else model.expecting(prior)
    path, network = output_path(model, to, out), Deployed(model)
    beside = path.with_name(f"{path.name}.md")
    try:
        with disk_full_as_user_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if model.origin is not None and model.origin.is_dir() and path.parent == model.origin / "export":
            files.check_inside(path.parent, model.origin)
        write_to = files.replace_file if out is None else files.replace_output
        with write_to(path) as fresh:
            theirs = written(model, network, to, fresh)
            difference = compared(eager(network), theirs, model.image_size)
            latency = {n: times(eager(network), theirs, model.image_size, n) for n in BATCHES}
            files.write_text(beside, card(model, to, path.name, difference, latency))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error_text(error)}): name a file in a folder that can be written",
            kind="not-writable",
        ) from error
    return Exported(path, beside, difference, latency)


def written(model: Model, network: Deployed, to: str, path: Path) -> Runner:
    """What runs the file, once it is there."""
    try:
        FORMATS[to].write(network, facts(model), path)
        return FORMATS[to].run(path)
    except (UserError, OSError):
        raise
    except Exception as error:  # what an exporter does not know of a network it says in its own way
        if disk_full_text(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"{model.config.model.name} cannot be written as {to} ({reason}): try --to safetensors", kind="unsupported"
        ) from error


def output_path(model: Model, to: str, out: Path | str | None) -> Path:
    """Where the file goes; never over what it is made from."""
    suffix, origin = FORMATS[to].suffix, model.origin or Path("model")
    folder = origin / "export" if origin.is_dir() else origin.parent
    path = Path(out) if out else folder / f"{'model' if origin.is_dir() else origin.name.split('.')[0]}{suffix}"
    if path.suffix != suffix:
        raise UserError(f"--out {path}: name it *{suffix}, by which others know what it is")
    files.check_working_directory((path, origin))
    if os.path.isdir(path) or os.path.realpath(path) in map(os.path.realpath, (origin, origin / run_folder.MODEL)):
        raise UserError(f"--out {path} would replace what is exported: name another file", kind="exists")
    return path


def compared(ours: Runner, theirs: Runner, size: int) -> float:
    """The largest difference of logits; too large a one is an error."""
    largest = 0.0
    for n in BATCHES:
        wanted, found = ours(noise(n, size)), theirs(noise(n, size))
        if [part.shape for part in found] != [part.shape for part in wanted]:
            raise RunError(
                f"the exported network gives {[part.shape for part in found]} for {n} images: it was not written",
                kind="mismatch",
            )
        logits, probabilities = (float(np.abs(a - b).max()) for a, b in zip(wanted, found, strict=True))
        allowed = TOLERANCE * max(1.0, float(np.abs(wanted[0]).max()))
        if not (logits <= allowed and probabilities <= TOLERANCE):  # NaN is no agreement
            differs = f"logits by {logits:.2g}, probabilities by {probabilities:.2g}"
            raise RunError(
                f"the exported network differs from the original ({differs}): it was not written, try another --to",
                kind="mismatch",
            )
        largest = max(largest, logits)
    return largest


def noise(n: int, size: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, 3, size, size), np.uint8)


def times(ours: Runner, theirs: Runner, size: int, n: int) -> tuple[float, float]:
    return milliseconds(ours, noise(n, size)), milliseconds(theirs, noise(n, size))


def milliseconds(runner: Runner, images: np.ndarray) -> float:
    """The median of some passes, after one that warms up."""
    runner(images)
    taken: list[float] = []
    while len(taken) < PASSES and (sum(taken) < SECONDS or len(taken) < 3):
        start = time.perf_counter()
        runner(images)
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)
