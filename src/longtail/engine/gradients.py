"""How hard each class pulls at the classifier: the mean L2 norm of its weights' gradient, epoch by epoch (Fig. 2)."""

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

Row = npt.NDArray[np.float32]


class Gradients:
    """Norms summed up over the steps of an epoch, on the device; the host reads them when the epoch ends.

    What is measured is the gradient that the optimizer takes: the mean over accumulated batches and over processes, without
    weight decay. In gradients.npz row e belongs to line e of log.jsonl; it is NaN where the classifier did not learn, or was
    not watched yet. `stages` names the stage of every epoch of the run.
    """

    def __init__(self, on: bool, classes: int, stages: Sequence[str], device: torch.device) -> None:
        self.on, self.stages = on, list(stages)
        self.sums_C = torch.zeros(classes if on else 0, dtype=torch.float64, device=device)
        self.count = 0  # steps since the epoch began
        self.rows: list[Row] = []

    def add(self, method: Method, beside: SideStream) -> None:
        """The norms of this step; whoever calls counts the steps, as a captured one cannot."""
        if self.on and method.class_weights.grad is not None:
            beside.run(self._add, method.class_weights.grad)

    def _add(self, gradient: Tensor) -> None:
        self.sums_C += class_norms(gradient)

    def end_epoch(self, method: Method) -> None:
        """In place: a captured step goes on writing to the same tensor."""
        if self.on:
            mean_C = (self.sums_C.cpu().numpy() / max(self.count, 1)).astype(np.float32)
            self.rows.append(mean_C if method.class_weights.requires_grad else self._nothing())
        self.sums_C.zero_()
        self.count = 0

    def write(self, path: Path) -> None:
        if self.rows:
            files.write_arrays(path, {"norms": np.stack(self.rows), "stages": np.array(self.stages[: len(self.rows)])})

    def state(self) -> dict[str, Any]:
        """Of the epoch under way; those before it are in the file."""
        return {"sums": self.sums_C, "count": self.count} if self.on else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; ValueError if it is not one of these classes."""
        if self.on and state:
            sums_C = state["sums"]
            if not isinstance(sums_C, Tensor) or sums_C.shape != self.sums_C.shape or type(state["count"]) is not int:
                raise ValueError("the stored gradient norms are not those of these classes")
            self.sums_C.copy_(sums_C)
            self.count = state["count"]

    def read(self, path: Path, epochs: int) -> None:
        """The first `epochs` rows: what a killed run wrote after its last checkpoint will be written again."""
        if not self.on:
            return
        self.rows = stored_rows(path, len(self.sums_C))[:epochs] if os.path.lexists(path) else []
        self.rows += [self._nothing()] * (epochs - len(self.rows))

    def _nothing(self) -> Row:
        return np.full(len(self.sums_C), np.nan, np.float32)


@torch.no_grad()
def class_norms(gradient: Tensor) -> Tensor:
    """Of a classifier's weights (…, C, F) the L2 norm of what belongs to each class (C,)."""
    within = [d for d in range(gradient.dim()) if d != gradient.dim() - 2]
    return torch.linalg.vector_norm(gradient, dim=within)


def stored_rows(path: Path, classes: int) -> list[Row]:
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
