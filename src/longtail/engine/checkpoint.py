"""The format of checkpoints, and how they are saved, loaded and validated.

A checkpoint is one file with the whole state of a trainer and a version. It is replaced atomically: a crash leaves the old
checkpoint or the new one, never a part.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import safetensors
import torch
from torch import Tensor

from longtail import files
from longtail.config.migrate import CHECKPOINT_VERSION, migrate_checkpoint
from longtail.errors import RunError, UserError, disk_full_text, error_text
from longtail.torch_pickle import STRUCTURE_LIMIT, check_checkpoint

SAFETENSORS_HEADER = 128 * 2**20
"""The largest size of a safetensors header in bytes; the library has a limit of 100 MB."""


class TrainerState(TypedDict):
    """The content of checkpoint/state.pt, apart from its `version`, which `CHECKPOINT_VERSION` describes."""

    stage: int
    """The index of the stage."""
    step: int
    """The number of completed steps of the stage."""
    seconds: float
    """The training time of the finished epochs."""
    epoch_seconds: float
    """The training time of the current epoch."""
    precision: str
    """"fp32" or "bf16"."""
    method: dict[str, Tensor]
    """The `state_dict` of the method."""
    optimizer: dict[str, Any]
    """The `state_dict` of the optimizer."""
    meter: dict[str, Any]
    """The sums of the logged terms in the current epoch."""
    gradients: dict[str, Any]
    """The sums of gradient norms in the current epoch (`--log.gradients`)."""
    rng: Tensor
    """The state of torch's CPU generator; with several processes, the states of all ranks."""
    checksum: str
    """The checksum of the images."""
    average: NotRequired[dict[str, Tensor]]
    """The averages of the weights of the deployed network (`--train.ema`)."""
    cuda_rng: NotRequired[Tensor]
    """The state of the GPU generator, like `rng`."""


def save(path: Path, state: TrainerState) -> None:
    """Write a state next to the old file, flush it to the disk, and rename it."""
    try:
        folder = path.parent.parent
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_file(path, folder, sync=True) as fresh, open(fresh, "wb") as file:
            torch.save({"version": CHECKPOINT_VERSION, **state}, file)
    except (OSError, RuntimeError, RunError) as error:  # torch reports a full disk as a RuntimeError
        before = "the previous checkpoint is intact" if path.is_file() else "there is no previous one"
        raise RunError(
            f"cannot save {path} ({error_text(error)}): {before}; free some space and continue with --resume",
            kind="disk-full" if disk_full_text(error) else "not-writable",
        ) from error


def load(path: Path, device: torch.device, expected: dict[str, Tensor] | None = None) -> TrainerState:
    """Return the stored state, which holds tensors and plain values only; no code is executed.

    Args:
        path: The file. Its own checksums are verified.
        device: The device of the tensors.
        expected: The `state_dict` of the method that will load the state. Names, shapes and file size are compared with it
            before memory is allocated.

    Raises:
        UserError: The file is refused, damaged, or the checkpoint of another method.
    """
    try:
        with files.open_regular(path, folder=path.parent.parent) as file:
            check_size(path, file.fileno(), expected)
            check_checkpoint(path, file, size_limit(expected))
            layout = torch.load(file, map_location="meta", weights_only=True)
            if expected is not None:
                check_shapes(layout, expected)
            file.seek(0)
            state = torch.load(file, map_location=device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__} instead of a dict")
        migrate_checkpoint(state)
        return cast(TrainerState, state)
    except Exception as error:  # a damaged file fails in many ways
        reason = f"cannot read the checkpoint {path} ({describe(error)})"
        raise UserError(
            f"{reason}: delete its run folder to start that seed again",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "damaged-file",
        ) from error


def size_limit(expected: dict[str, Tensor] | None) -> int:
    """Return the largest possible size of a checkpoint in bytes: weights, two optimizer averages in double, the rest."""
    if expected is None:
        return files.ARRAYS_LIMIT
    return 5 * sum(max(x.element_size(), 4) * x.numel() for x in expected.values()) + 2 * STRUCTURE_LIMIT


def check_size(path: Path, descriptor: int, expected: dict[str, Tensor] | None) -> None:
    """Raise RefusedFile if the file is larger than a checkpoint of this method can be."""
    size, limit = os.fstat(descriptor).st_size, size_limit(expected)
    if size > limit:
        raise files.RefusedFile(path, f"it has {size:,} bytes; a checkpoint of this method has at most {limit:,}")


def check_shapes(layout: Any, expected: dict[str, Tensor]) -> None:
    """Raise ValueError unless the stored method has exactly the expected tensors."""
    largest = max((tensor.numel() for tensor in expected.values()), default=0)
    for tensor in find_tensors(layout):
        is_too_large = tensor.numel() > max(largest, 2**20)
        if is_too_large or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ValueError(f"it has a tensor of the shape {tuple(tensor.shape)}")
    found = layout.get("method") if isinstance(layout, dict) else None
    if not isinstance(found, dict):
        raise ValueError("it holds no state of a method")
    if found.keys() != expected.keys():
        name = next(iter(map(str, found.keys() ^ expected.keys())))
        raise ValueError(f"{name!r} is missing in the stored state or in this method")
    for name, tensor in expected.items():
        stored = found[name]
        if not isinstance(stored, Tensor) or stored.shape != tensor.shape:
            shape = tuple(stored.shape) if isinstance(stored, Tensor) else type(stored).__name__
            raise ValueError(f"{name} is {shape} instead of {tuple(tensor.shape)}")


def find_tensors(tree: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield all tensors of a nested structure; ValueError if it is nested too deeply."""
    if depth > 20:
        raise ValueError("it is nested too deeply")
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from find_tensors(value, depth + 1)


def load_weights(
    path: Path, expected: dict[str, Tensor], device: torch.device, stored_name: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Args:
        path: The file.
        expected: The `state_dict` of the network that will load them. Names, kinds and shapes are compared with it before
            memory is allocated.
        device: The device of the tensors.
        stored_name: Maps the name of a tensor to its name in the file.

    Raises:
        UserError: The file is refused, damaged, or holds another network.
    """
    wanted = sum(max(x.element_size(), 4) * x.numel() for x in expected.values())
    try:
        with files.open_regular(path, 2 * wanted + SAFETENSORS_HEADER, folder=path.parent):
            pass
        with safetensors.safe_open(os.fspath(path), framework="pt", device=str(device)) as stored:
            stored_names = {name: stored_name(name) for name in expected}
            if differing := set(stored.keys()) ^ set(stored_names.values()):
                raise ValueError(f"{min(differing)!r} is missing in the file or in the network")
            for name, tensor in expected.items():
                shape = tuple(stored.get_slice(stored_names[name]).get_shape())
                if shape != tensor.shape:
                    raise ValueError(f"{name} is {shape} instead of {tuple(tensor.shape)}")
            found = {name: stored.get_tensor(stored_names[name]) for name in expected}
        for name, tensor in expected.items():
            if found[name].is_floating_point() != tensor.is_floating_point() or found[name].is_complex():
                raise ValueError(f"{name} is {found[name].dtype} instead of {tensor.dtype}")
        return found
    except (OSError, safetensors.SafetensorError, RuntimeError, ValueError, TypeError) as error:
        reason = describe(error)
        raise UserError(
            f"{path} does not hold the network of its configuration ({reason}): train it again",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "damaged-file",
        ) from error


def describe(error: Exception) -> str:
    """Return what is wrong with a file as one line, without the advice of torch to load it unsafely."""
    if isinstance(error, pickle.UnpicklingError):
        return "it contains objects other than tensors and numbers; none were executed"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
