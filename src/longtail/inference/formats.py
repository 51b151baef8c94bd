"""The ways to write a deployable network, and to run what was written: each maps uint8 images to logits and probabilities."""

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
from longtail.inference.loading import METADATA, load_exported

Runner = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
OPSET = 18


class Format(NamedTuple):
    suffix: str
    write: Callable[[Deployed, dict[str, Any], Path], None]
    run: Callable[[Path], Runner]


def eager(network: Deployed) -> Runner:
    """The network itself."""

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            logits, probabilities = network(torch.from_numpy(images))
        return logits.numpy(), probabilities.numpy()

    return run


# torch.export, and from it ONNX


def program_of(network: Deployed) -> torch.export.ExportedProgram:
    """For any batch; two images to trace by, as one would be taken for a constant."""
    images = torch.zeros(2, 3, network.size, network.size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad(), quietly():
        program = torch.export.export(network, (images,), dynamic_shapes=({0: batch},))
    for graph in (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in graph.graph.nodes:
            node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


def write_torch(network: Deployed, facts: dict[str, Any], path: Path) -> None:
    """By way of memory: torch's writer ends the process where the disk is full."""
    content = io.BytesIO()
    with quietly():
        torch.export.save(program_of(network), content, extra_files={f"{METADATA}.json": json.dumps(facts)})
    path.write_bytes(content.getvalue())


def run_torch(path: Path) -> Runner:
    with quietly():
        return eager(torch.export.load(path).module())  # type: ignore[arg-type]


def write_onnx(network: Deployed, facts: dict[str, Any], path: Path) -> None:
    """The facts are metadata properties: all of them under `longtail`, and those that are asked for most by themselves."""
    needed("onnx", "onnxscript")
    program = program_of(network)
    with quietly():
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, opset_version=OPSET, input_names=[INPUT], output_names=[*OUTPUTS]
        )
        assert made is not None
        for value in (*made.model.graph.inputs, *made.model.graph.outputs):
            assert value.shape is not None
            value.shape[0] = "batch"
        often = ("class_names", "preprocessing", "temperature", "logits_stand_for")
        made.model.metadata_props.update({key: json.dumps(facts[key]) for key in often} | {METADATA: json.dumps(facts)})
        made.save(path, external_data=False)


def run_onnx(path: Path) -> Runner:
    (runtime,) = needed("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: tuple(session.run([*OUTPUTS], {INPUT: images}))


def needed(*names: str) -> list[Any]:
    import importlib

    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: pip install 'longtail[export]'", kind="missing-package"
        ) from error


# Weights alone


def write_safetensors(network: Deployed, facts: dict[str, Any], path: Path) -> None:
    weights = {k: v.contiguous() for k, v in network.network.net.state_dict().items()}
    path.write_bytes(save(weights, metadata={METADATA: json.dumps(facts)}))


def run_safetensors(path: Path) -> Runner:
    return eager(Deployed(load_exported(path, torch.device("cpu"))))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Exporters talk to their authors; what goes wrong is raised."""
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
