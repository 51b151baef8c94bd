"""Export formats: functions that write a network, and that run the file. They map uint8 images to logits and probabilities."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from longtail.errors import UserError
from longtail.inference.deployed import INPUT, OUTPUTS, Deployed
from longtail.inference.loading import METADATA_KEY, load_exported

Runner = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
OPSET = 18


class Format(NamedTuple):
    """An export format."""

    suffix: str
    write: Callable[[Deployed, dict[str, Any], Path], None]
    run: Callable[[Path], Runner]


def eager(network: Deployed) -> Runner:
    """Return a function that runs a network in PyTorch."""

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, probabilities = network(torch.from_numpy(images))
        return logits.numpy(), probabilities.numpy()

    return run


# torch.export, and ONNX based on it


def export_program(network: Deployed) -> torch.export.ExportedProgram:
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


def write_torch(network: Deployed, facts: dict[str, Any], path: Path) -> None:
    """Write a .pt2 file. It is created in memory first, because torch's writer terminates the process if the disk is full."""
    content = io.BytesIO()
    with silence_exporters():
        torch.export.save(export_program(network), content, extra_files={f"{METADATA_KEY}.json": json.dumps(facts)})
    path.write_bytes(content.getvalue())


def run_torch(path: Path) -> Runner:
    """Return a function that runs a .pt2 file."""
    with silence_exporters():
        return eager(torch.export.load(path).module())  # type: ignore[arg-type]


def write_onnx(network: Deployed, facts: dict[str, Any], path: Path) -> None:
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
            f"{error.name} is not installed: pip install 'longtail[export]'", kind="missing-package"
        ) from error


# safetensors


def write_safetensors(network: Deployed, facts: dict[str, Any], path: Path) -> None:
    """Write the weights with the description as metadata."""
    weights = {k: v.contiguous() for k, v in network.network.net.state_dict().items()}
    path.write_bytes(save(weights, metadata={METADATA_KEY: json.dumps(facts)}))


def run_safetensors(path: Path) -> Runner:
    """Return a function that runs an exported safetensors file in PyTorch."""
    return eager(Deployed(load_exported(path, torch.device("cpu"))))


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Suppress messages and warnings of exporters, which are not addressed to users. Errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


FORMATS = {
    "onnx": Format(".onnx", write_onnx, run_onnx),
    "torch": Format(".pt2", write_torch, run_torch),
    "safetensors": Format(".safetensors", write_safetensors, run_safetensors),
}
