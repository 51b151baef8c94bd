"""Export of a network to a file, with a model card. The exported network is run and compared with the original first."""

import copy
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from longtail import __version__, files, run_folder
from longtail.config import to_dict
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
from longtail.inference.card import INPUT, make_card
from longtail.inference.loading import METADATA_KEY, load, load_exported
from longtail.inference.model import Model
from longtail.inference.priors import describe_frequencies
from longtail.models.adapters import merge_lora
from longtail.models.backbones import FeatureMaps, Trunk, silence_exporters
from longtail.progress import log_info
from longtail.views import ops
from longtail.views.view import STATISTICS

OUTPUTS = ("logits", "probabilities")
INPUT_WORDS = (
    "RGB images after cropping and resizing, uint8 (batch, 3, {size}, {size}); normalization is part of the network"
)
LOGITS_WORDS = "float32 (batch, {classes}), the output of the trained network"
PROBABILITIES_WORDS = "float32 (batch, {classes}), with the temperature and the class frequencies below"


class ExportModule(nn.Module):
    """Module that maps uint8 images (B, 3, size, size) to logits and probabilities (B, C), in float32 on the CPU."""

    shift_C: Tensor
    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.method).cpu().float().eval()
        merge_lora(self.network)
        for module in self.network.modules():
            if isinstance(module, Trunk):
                module.precision = torch.float32
            if isinstance(module, Trunk | FeatureMaps):
                module.fused = False
        self.size, self.temperature = model.image_size, model.temperature or 1.0
        self.register_buffer("shift_C", model.shift().float())
        for name, numbers in zip(("mean_C11", "std_C11"), STATISTICS[model.config.views.normalize], strict=True):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.normalize(ops.to_float(images), self.mean_C11, self.std_C11)
        logits_BC = self.network.classify(self.network.features(x))
        return logits_BC, (logits_BC / self.temperature + self.shift_C).softmax(1)


def describe_model(model: Model) -> dict[str, Any]:
    """Return the description that an exported file contains, as plain JSON without the paths of the training data."""
    config = to_dict(model.config)
    config["data"] |= {"root": None, "train_list": None, "test_list": None}
    if model.config.model.trainable == "lora":  # its updates are merged
        config["model"] |= {"trainable": "all"}
    size, classes = {"size": model.image_size}, {"classes": len(model.class_names)}
    words = (LOGITS_WORDS.format(**classes), PROBABILITIES_WORDS.format(**classes))
    return {
        "longtail": __version__,
        "method": model.config.method.label,
        "network": model.config.model.name,
        "input": {INPUT: INPUT_WORDS.format(**size)},
        "outputs": dict(zip(OUTPUTS, words, strict=True)),
        "class_names": list(model.class_names),
        "counts": None if model.counts is None else model.counts.tolist(),
        "preprocessing": model.preprocessing.describe() | {"side": model.preprocessing.side},
        "temperature": model.temperature,
        "logits_stand_for": describe_frequencies(model.implied_prior, model.counts),
        "prior": None if model.prior is None else {"name": model.prior.name, "shares": model.prior.shares_C.tolist()},
        "config": config,
    }


# Formats: functions that write a network, and functions that run the file.

Runner = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
OPSET = 18


class Format(NamedTuple):
    """An export format."""

    suffix: str
    write: Callable[[ExportModule, dict[str, Any], Path], None]
    run: Callable[[Path], Runner]


def eager(network: ExportModule) -> Runner:
    """Return a function that runs a network in PyTorch."""

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, probabilities = network(torch.from_numpy(images))
        return logits.numpy(), probabilities.numpy()

    return run


# torch.export, and ONNX based on it


def export_program(network: ExportModule) -> torch.export.ExportedProgram:
    """Export a network with torch.export, for any batch size.

    It is traced with two images, because a batch size of one would become a constant.
    """
    images = torch.zeros(2, 3, network.size, network.size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad(), silence_exporters():
        program = torch.export.export(network, (images,), dynamic_shapes=({0: batch},))
    for graph in (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in graph.graph.nodes:
            node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


def write_torch(network: ExportModule, facts: dict[str, Any], path: Path) -> None:
    """Write a .pt2 file. It is created in memory first, because torch's writer terminates the process if the disk is full."""
    content = io.BytesIO()
    with silence_exporters():
        torch.export.save(export_program(network), content, extra_files={f"{METADATA_KEY}.json": json.dumps(facts)})
    path.write_bytes(content.getvalue())


def run_torch(path: Path) -> Runner:
    """Return a function that runs a .pt2 file."""
    with silence_exporters():
        return eager(torch.export.load(path).module())  # type: ignore[arg-type]


def write_onnx(network: ExportModule, facts: dict[str, Any], path: Path) -> None:
    """Write an ONNX file. Its metadata contain the whole description as `longtail`, and the most important entries
    separately."""
    import_packages("onnx", "onnxscript")
    program = export_program(network)
    with silence_exporters():
        exported = torch.onnx.export(
            program, dynamo=True, verbose=False, opset_version=OPSET, input_names=[INPUT], output_names=[*OUTPUTS]
        )
        assert exported is not None
        for value in (*exported.model.graph.inputs, *exported.model.graph.outputs):
            assert value.shape is not None
            value.shape[0] = "batch"
        separate = ("class_names", "preprocessing", "temperature", "logits_stand_for")
        exported.model.metadata_props.update(
            {key: json.dumps(facts[key]) for key in separate} | {METADATA_KEY: json.dumps(facts)}
        )
        exported.save(path, external_data=False)


def run_onnx(path: Path) -> Runner:
    """Return a function that runs an ONNX file on the CPU."""
    (runtime,) = import_packages("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: tuple(session.run([*OUTPUTS], {INPUT: images}))


def import_packages(*names: str) -> list[Any]:
    """Import optional packages; raise a UserError that says how to install them if one is missing."""
    import importlib

    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: pip install onnx onnxruntime onnxscript", kind="missing-package"
        ) from error


# safetensors


def write_safetensors(network: ExportModule, facts: dict[str, Any], path: Path) -> None:
    """Write the weights with the description as metadata."""
    weights = {k: v.contiguous() for k, v in network.network.net.state_dict().items()}
    path.write_bytes(save(weights, metadata={METADATA_KEY: json.dumps(facts)}))


def run_safetensors(path: Path) -> Runner:
    """Return a function that runs an exported safetensors file in PyTorch."""
    return eager(ExportModule(load_exported(path, torch.device("cpu"))))


FORMATS = {
    "onnx": Format(".onnx", write_onnx, run_onnx),
    "torch": Format(".pt2", write_torch, run_torch),
    "safetensors": Format(".safetensors", write_safetensors, run_safetensors),
}


# Export


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

    def summary(self) -> list[str]:
        """Return sentences about the result, for users."""
        times = (f"batch {n}: {old:.1f} ms, exported {new:.1f} ms" for n, (old, new) in self.latency.items())
        checked = (
            f"checked at batch {' and '.join(map(str, BATCH_SIZES))}: logits differ by at most {self.difference:.1e}"
        )
        return [checked, *times, f"written to {self.path} and {self.card}"]


def export(
    run: Path | str | Model,
    to: str = "onnx",
    out: Path | str | None = None,
    prior: str | Path | Mapping[str, float] | None = None,
) -> ExportResult:
    """Export a network. This function is the equivalent of `longtail export`.

    Args:
        run: A loaded model, or a path for `longtail.load`.
        to: The format: "onnx", "torch" (a .pt2 file of torch.export) or "safetensors".
        out: The file to write; by default in the folder export/ of the run.
        prior: Expected class frequencies; see `longtail.load`.
    """
    if to not in FORMATS:
        raise unknown_name("format", to, FORMATS)
    model = run if isinstance(run, Model) else load(run, "cpu")
    model = model if prior is None else model.expecting(prior)
    if model.others or model.tta != "none":
        raise UserError("export takes one network, without test-time augmentation: load one seed", kind="unsupported")
    path, network = output_path(model, to, out), ExportModule(model)
    card_path = path.with_name(f"{path.name}.md")
    try:
        with disk_full_as_user_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if model.origin is not None and model.origin.is_dir() and path.parent == model.origin / "export":
            files.check_inside(path.parent, model.origin)
        write_to = files.replace_file if out is None else files.replace_output
        with write_to(path) as fresh:
            log_info(f"1 of 3: converting the network to {to}")
            exported = write_and_load(model, network, to, fresh)
            log_info("2 of 3: comparing its outputs with the original")
            difference = compare_outputs(eager(network), exported, model.image_size)
            log_info("3 of 3: measuring the latency")
            latency = {n: compare_latency(eager(network), exported, model.image_size, n) for n in BATCH_SIZES}
            files.write_text(card_path, make_card(model, describe_model(model), to, path.name, difference, latency))
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error_text(error)}): choose a file in a writable folder",
            kind=file_error_kind(error, writing=True),
        ) from error
    return ExportResult(path, card_path, difference, latency)


def write_and_load(model: Model, network: ExportModule, to: str, path: Path) -> Runner:
    """Write a network to a file, and return a function that runs the file.

    Args:
        model: The model.
        network: The network of the model, prepared for export.
        to: The format.
        path: The file.
    """
    try:
        FORMATS[to].write(network, describe_model(model), path)
        return FORMATS[to].run(path)
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
    suffix, origin = FORMATS[to].suffix, model.origin or Path("model")
    folder = origin / "export" if origin.is_dir() else origin.parent
    path = Path(out) if out else folder / f"{'model' if origin.is_dir() else origin.name.split('.')[0]}{suffix}"
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
