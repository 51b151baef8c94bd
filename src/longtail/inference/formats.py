"""The network for export, as one module from pixels to probabilities, and the formats in which it is written and run."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from longtail import __version__
from longtail.config import to_dict
from longtail.errors import UserError
from longtail.inference.loading import METADATA_KEY, load_exported
from longtail.inference.model import Model
from longtail.inference.priors import describe_frequencies
from longtail.models.adapters import merge_lora
from longtail.models.backbones import FeatureMaps, Trunk, silence_exporters
from longtail.views import ops
from longtail.views.view import STATISTICS

INPUT, OUTPUTS = "images", ("logits", "probabilities")
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
    path.write_bytes(save(safetensors_weights(network), metadata={METADATA_KEY: json.dumps(facts)}))


def safetensors_weights(network: ExportModule) -> dict[str, Tensor]:
    """Return the weights of a network in the memory format that safetensors requires."""
    return {name: tensor.contiguous() for name, tensor in network.network.net.state_dict().items()}


def run_safetensors(path: Path) -> Runner:
    """Return a function that runs an exported safetensors file in PyTorch."""
    return eager(ExportModule(load_exported(path, torch.device("cpu"))))


FORMATS = {
    "onnx": Format(".onnx", write_onnx, run_onnx),
    "torch": Format(".pt2", write_torch, run_torch),
    "safetensors": Format(".safetensors", write_safetensors, run_safetensors),
}
