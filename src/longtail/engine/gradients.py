"""The mean L2 norm of the gradient of each class's classifier weights in each epoch (Fig. 2 of the paper)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longtail import files
from longtail.errors import UserError, error_text
from longtail.methods import Method
from longtail.models.side_stream import SideStream

Norms = npt.NDArray[np.float32]


class Gradients:
    """The gradient norms summed over the steps of an epoch, on the device; the host reads them when the epoch ends.

    The gradient is the one that the optimizer gets: the mean over accumulated batches and over processes, without weight decay.
    In gradients.npz row e belongs to line e of log.jsonl. It is NaN where the classifier was not trained, or the norms were not
    recorded yet.
    """

    def __init__(self, on: bool, classes: int, stages: Sequence[str], device: torch.device) -> None:
        """Create empty sums.

        Args:
            on: Whether norms are recorded.
            classes: The number of classes.
            stages: The name of the stage of each epoch of the run.
            device: The device.
        """
        self.on, self.stages = on, list(stages)
        self.sums_C = torch.zeros(classes if on else 0, dtype=torch.float64, device=device)
        self.count = 0  # steps since the start of the epoch
        self.rows: list[Norms] = []

    def add(self, method: Method, side: SideStream) -> None:
        """Add the norms of a step. The caller counts steps, because a captured step cannot."""
        if self.on and method.class_weights.grad is not None:
            side.run(self._add, method.class_weights.grad)

    def _add(self, gradient: Tensor) -> None:
        self.sums_C += class_norms(gradient)

    def end_epoch(self, method: Method) -> None:
        """Store the mean norms of an epoch and clear the sums, in place because a captured step writes to the same tensor."""
        if self.on:
            mean_C = (self.sums_C.cpu().numpy() / max(self.count, 1)).astype(np.float32)
            self.rows.append(mean_C if method.class_weights.requires_grad else self._missing())
        self.sums_C.zero_()
        self.count = 0

    def write(self, path: Path) -> None:
        """Write the norms of all finished epochs."""
        if self.rows:
            files.write_arrays(path, {"norms": np.stack(self.rows), "stages": np.array(self.stages[: len(self.rows)])})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current epoch for a checkpoint; earlier epochs are in the file."""
        return {"sums": self.sums_C, "count": self.count} if self.on else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; ValueError if it is not one of these classes."""
        if self.on and state:
            sums_C = state["sums"]
            if not isinstance(sums_C, Tensor) or sums_C.shape != self.sums_C.shape or type(state["count"]) is not int:
                raise ValueError("the stored gradient norms are not those of these classes")
            self.sums_C.copy_(sums_C)
            self.count = state["count"]

    def read(self, path: Path, epochs: int) -> None:
        """Read the first `epochs` rows of the file; later ones were written after the last checkpoint and will come again."""
        if not self.on:
            return
        self.rows = stored_rows(path, len(self.sums_C))[:epochs] if os.path.lexists(path) else []
        self.rows += [self._missing()] * (epochs - len(self.rows))

    def _missing(self) -> Norms:
        return np.full(len(self.sums_C), np.nan, np.float32)


@torch.no_grad()
def class_norms(gradient: Tensor) -> Tensor:
    """Return the L2 norm of the gradient (…, C, F) of a classifier's weights for each class, (C,)."""
    within = [d for d in range(gradient.dim()) if d != gradient.dim() - 2]
    return torch.linalg.vector_norm(gradient, dim=within)


def stored_rows(path: Path, classes: int) -> list[Norms]:
    """Return the rows of gradients.npz; a UserError if they are not norms of so many classes."""
    try:
        norms_EC = files.read_arrays(path, folder=path.parent)["norms"]
        if norms_EC.ndim != 2 or norms_EC.shape[1] != classes or norms_EC.dtype.kind != "f":
            raise ValueError(f"norms is {norms_EC.dtype} {norms_EC.shape}")
        return list(norms_EC.astype(np.float32))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read {path} ({error_text(error)}): delete it, and its epochs so far are given up",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "damaged-file",
        ) from error
