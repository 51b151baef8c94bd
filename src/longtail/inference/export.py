"""Export of a network to a file or folder, with a model card. It is run and compared with the original before it is kept."""

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtail import files, run_folder
from longtail.errors import (
    RunError,
    UserError,
    disk_full_as_user_error,
    disk_full_text,
    error_text,
    file_error_kind,
    first_line,
    unknown_name,
)
from longtail.inference.card import make_card
from longtail.inference.formats import FORMATS, ExportModule, Format, Runner, describe_model, eager
from longtail.inference.hub import CARD, check_replaceable, is_for_timm, make_front_matter, run_hub, upload, write_hub
from longtail.inference.loading import load
from longtail.inference.model import Model
from longtail.progress import log_info
from longtail.text import pluralize

HUB = "hub"
EXPORTS = FORMATS | {HUB: Format("", write_hub, run_hub)}
"""All formats. That of the hub is a folder, the others are files."""
BATCH_SIZES = (1, 7)
"""Batch sizes of the comparison."""
TOLERANCE = 1e-4
"""Largest difference of probabilities, and of logits (relative to the largest logit if that is above 1)."""
MAX_SECONDS, MAX_PASSES = 0.3, 30
"""Limits of a latency measurement."""


@dataclass(frozen=True)
class ExportResult:
    """An exported network."""

    path: Path
    card: Path
    difference: float
    """Largest difference between its logits and those of the original."""
    latency: dict[int, tuple[float, float]]
    """Milliseconds per batch on the CPU, of the original and of the exported network, by batch size."""
    url: str | None = None
    """The address of the repository that the folder was uploaded to."""

    def summary(self) -> list[str]:
        """Return sentences about the result, for users."""
        times = (
            f"latency for {pluralize(n, 'image')} on this CPU: {old:.1f} ms in PyTorch, {new:.1f} ms exported"
            for n, (old, new) in self.latency.items()
        )
        sizes = " and ".join(map(str, BATCH_SIZES))
        checked = f"checked with {sizes} images: logits differ by at most {self.difference:.1e} from the original"
        where = (
            f"written to {self.path}" if self.card.parent == self.path else f"written to {self.path} and {self.card}"
        )
        return [checked, *times, where, *([f"uploaded to {self.url}"] if self.url else [])]


def export(
    run: Path | str | Model,
    to: str = "onnx",
    out: Path | str | None = None,
    prior: str | Path | Mapping[str, float] | None = None,
    repo: str | None = None,
) -> ExportResult:
    """Export a network. This function is the equivalent of `longtail export`.

    Args:
        run: A loaded model, or a path for `longtail.load`.
        to: The format: "onnx", "torch" (a .pt2 file of torch.export), "safetensors", or "hub" (a folder in the layout of the
            Hugging Face hub).
        out: The file or folder to write; by default in the folder export/ of the run.
        prior: Expected class frequencies; see `longtail.load`.
        repo: With "hub": the repository, USER/NAME, to which the folder is uploaded. A new repository is private.
    """
    if to not in EXPORTS:
        raise unknown_name("format", to, EXPORTS)
    if repo is not None and to != HUB:
        raise UserError("--repo uploads the format `hub`: add --to hub", kind="conflict")
    model = run if isinstance(run, Model) else load(run, "cpu")
    model = model if prior is None else model.with_prior(prior)
    if model.others or model.tta != "none":
        raise UserError("export takes one network, without test-time augmentation: load one seed", kind="unsupported")
    path, network = output_path(model, to, out), ExportModule(model)
    card_path = path / CARD if to == HUB else path.with_name(f"{path.name}.md")
    try:
        with disk_full_as_user_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if model.origin is not None and model.origin.is_dir() and path.parent == model.origin / "export":
            files.check_inside(path.parent, model.origin)
        write_to = files.replace_file if out is None else files.replace_output
        write_to = files.replace_folder if to == HUB else write_to
        with write_to(path) as fresh:
            log_info(f"1 of 3: writing the network ({to})")
            exported = write_and_load(model, network, to, fresh)
            log_info("2 of 3: comparing its outputs with the original")
            difference = compare_outputs(eager(network), exported, model.image_size)
            log_info("3 of 3: measuring the latency")
            latency = {n: compare_latency(eager(network), exported, model.image_size, n) for n in BATCH_SIZES}
            if to == HUB:
                for_timm = is_for_timm(fresh)
                code = "timm" if for_timm else "safetensors"
                card = make_front_matter(model, for_timm) + make_card(model, code, path.name, difference, latency)
                files.write_text(fresh / CARD, card)
            else:
                files.write_text(card_path, make_card(model, to, path.name, difference, latency))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error_text(error)}): choose a file in a writable folder",
            kind=file_error_kind(error, writing=True),
        ) from error
    return ExportResult(path, card_path, difference, latency, upload(path, repo) if repo is not None else None)


def write_and_load(model: Model, network: ExportModule, to: str, path: Path) -> Runner:
    """Write a network to a file, and return a function that runs the file.

    Args:
        model: The model.
        network: The network of the model, prepared for export.
        to: The format.
        path: The file.
    """
    try:
        EXPORTS[to].write(network, describe_model(model), path)
        return EXPORTS[to].run(path)
    except (UserError, OSError):
        raise
    except Exception as error:  # exporters raise many types of exceptions for unsupported networks
        if disk_full_text(error):
            raise
        raise RunError(
            f"{model.config.model.name} cannot be exported as {to} ({first_line(error)}): try --to safetensors",
            kind="unsupported",
        ) from error


def output_path(model: Model, to: str, out: Path | str | None) -> Path:
    """Return the path of the exported file; raise a UserError if it would replace the original."""
    suffix, origin = EXPORTS[to].suffix, model.origin or Path("model")
    folder = origin / "export" if origin.is_dir() else origin.parent
    name = "model" if origin.is_dir() else origin.name.split(".")[0]
    path = Path(out) if out else folder / (HUB if to == HUB else f"{name}{suffix}")
    if to == HUB:
        files.check_working_directory((path, origin))
        check_replaceable(path)
        return path
    if path.suffix != suffix:
        raise UserError(f"--out {path}: the name must end in {suffix}")
    files.check_working_directory((path, origin))
    if os.path.isdir(path) or os.path.realpath(path) in map(os.path.realpath, (origin, origin / run_folder.MODEL)):
        raise UserError(f"--out {path} would replace the original: choose another file", kind="exists")
    return path


def compare_outputs(ours: Runner, theirs: Runner, size: int) -> float:
    """Return the largest difference of logits between two networks; raise a RunError if it is too large.

    Args:
        ours: The original network.
        theirs: The exported network.
        size: Side length of the images.
    """
    largest = 0.0
    for n in BATCH_SIZES:
        wanted, found = ours(random_images(n, size)), theirs(random_images(n, size))
        if [part.shape for part in found] != [part.shape for part in wanted]:
            raise RunError(
                f"the exported network has outputs of the shapes {[part.shape for part in found]} for {n} images: "
                "nothing was written",
                kind="mismatch",
            )
        logits, probabilities = (float(np.abs(a - b).max()) for a, b in zip(wanted, found, strict=True))
        allowed = TOLERANCE * max(1.0, float(np.abs(wanted[0]).max()))
        if not (logits <= allowed and probabilities <= TOLERANCE):  # also fails for NaN
            differs = f"logits by {logits:.2g}, probabilities by {probabilities:.2g}"
            raise RunError(
                f"the exported network differs from the original ({differs}): nothing was written, try another format (--to)",
                kind="mismatch",
            )
        largest = max(largest, logits)
    return largest


def random_images(n: int, size: int) -> np.ndarray:
    """Return n random images; the same ones for every call."""
    return np.random.default_rng(n).integers(0, 256, (n, 3, size, size), np.uint8)


def compare_latency(ours: Runner, theirs: Runner, size: int, n: int) -> tuple[float, float]:
    """Return the latency in milliseconds of two networks for n images."""
    return measure_latency(ours, random_images(n, size)), measure_latency(theirs, random_images(n, size))


def measure_latency(runner: Runner, images: np.ndarray) -> float:
    """Return the latency of a network in milliseconds: the median of several passes after a warm-up."""
    runner(images)
    seconds: list[float] = []
    while len(seconds) < MAX_PASSES and (sum(seconds) < MAX_SECONDS or len(seconds) < 3):
        start = time.perf_counter()
        runner(images)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)
