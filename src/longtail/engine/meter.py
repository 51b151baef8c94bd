"""Means over the steps of an epoch: of the logged terms, and of the gradient norms of the classifier (Fig. 2 of the paper).

Sums are on the device, and the host reads them only when it needs them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longtail import files
from longtail.distributed import all_mean, all_min, stack_ranks, take_own_rank
from longtail.errors import RunError, UserError, error_text
from longtail.methods import Method
from longtail.models.side_stream import SideStream
from longtail.schema import count

NormArray = npt.NDArray[np.float32]

NEVER = 2**62
"""A step number that is later than any step."""


class Meter:
    """The sums of the logged terms since the last reset, and for each term the first step at which it was not finite."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums = self.first_bad = torch.empty(0)
        self.count = 0

    def reset(self) -> None:
        """Set the sums to zero, in place because a captured step writes to the same tensors."""
        self.sums.zero_()
        self.first_bad.fill_(NEVER)
        self.count = 0

    def add(self, terms: dict[str, Tensor], step: Tensor) -> None:
        """Add the terms of one batch. The caller counts batches, because a captured step cannot."""
        values = torch.stack([t.detach().float() for t in terms.values()])
        if not self.names:
            self.names, self.sums = list(terms), torch.zeros_like(values)
            self.first_bad = torch.full_like(values, NEVER, dtype=torch.int64)
        self.sums += values
        finite = values * 0 == 0  # one kernel less than isfinite
        torch.minimum(self.first_bad, torch.where(finite, NEVER, step), out=self.first_bad)

    def has_non_finite(self) -> bool:
        """Return whether any term was not finite in any process."""
        return bool((all_min(self.first_bad) != NEVER).any())

    def means(self) -> dict[str, float]:
        """Return the mean of each term over all processes.

        Raises:
            NonFiniteError: A term was not finite at any step in any process, so that the weights are unusable from then on.
        """
        steps = all_min(self.first_bad).tolist()
        bad = {n: s for n, s in zip(self.names, steps, strict=True) if s != NEVER}
        if bad:
            step = min(bad.values())
            raise NonFiniteError(step, [name for name, s in bad.items() if s == step])
        sums = all_mean(self.sums)
        return dict(zip(self.names, (sums / max(self.count, 1)).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        sums = stack_ranks(self.sums)
        return {"names": self.names, "sums": sums, "first_bad": self.first_bad, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; raise ValueError if its parts do not fit together."""
        names, sums, first_bad = state["names"], take_own_rank(state["sums"]), state["first_bad"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not count(state["count"]):
            raise ValueError("the stored means have no names or no count")
        shapes = (sums.shape, first_bad.shape) if names else ()
        if any(shape != (len(names),) for shape in shapes):
            raise ValueError("the stored means do not have one value for each name")
        if names and (sums.dtype != torch.float32 or first_bad.dtype != torch.int64):
            raise ValueError("the stored means have another type")
        self.names, self.sums = names, sums
        self.first_bad, self.count = (
            first_bad.masked_fill(first_bad < 0, NEVER),
            state["count"],
        )  # older checkpoints have -1 for NEVER


class NonFiniteError(RunError):
    """Raised when a logged term became infinite or NaN. The training loop sets `trainer` to the trainer whose term it is."""

    def __init__(self, step: int, terms: list[str]) -> None:
        super().__init__(f"step {step}: {', '.join(terms)} not finite")
        self.step, self.terms = step, terms
        self.trainer: Any = None


# Gradient norms


class GradientNorms:
    """The mean L2 norm of the gradient of each class's classifier weights in each epoch.

    The gradient is the one that the optimizer gets: the mean over accumulated batches and over processes, without weight decay.
    In gradients.npz, row e belongs to line e of log.jsonl. It is NaN if the classifier was not trained in that epoch, or if the
    norms were not recorded yet.
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
        self.rows: list[NormArray] = []

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
        """Continue from a stored state; raise ValueError if it belongs to other classes."""
        if self.on and state:
            sums_C = state["sums"]
            if not isinstance(sums_C, Tensor) or sums_C.shape != self.sums_C.shape or not count(state["count"]):
                raise ValueError("the stored gradient norms belong to other classes")
            self.sums_C.copy_(sums_C)
            self.count = state["count"]

    def read(self, path: Path, epochs: int) -> None:
        """Read the first `epochs` rows of the file; later ones are newer than the checkpoint and will be written again."""
        if not self.on:
            return
        self.rows = read_norms(path, len(self.sums_C))[:epochs] if os.path.lexists(path) else []
        self.rows += [self._missing()] * (epochs - len(self.rows))

    def _missing(self) -> NormArray:
        return np.full(len(self.sums_C), np.nan, np.float32)


@torch.no_grad()
def class_norms(gradient: Tensor) -> Tensor:
    """Return the L2 norm of the gradient (…, C, F) of a classifier's weights for each class, (C,)."""
    within = [d for d in range(gradient.dim()) if d != gradient.dim() - 2]
    return torch.linalg.vector_norm(gradient, dim=within)


def read_norms(path: Path, classes: int) -> list[NormArray]:
    """Return the rows of gradients.npz; raise a UserError if they are not norms of this number of classes."""
    try:
        norms_EC = files.read_arrays(path, folder=path.parent)["norms"]
        if norms_EC.ndim != 2 or norms_EC.shape[1] != classes or norms_EC.dtype.kind != "f":
            raise ValueError(f"norms is {norms_EC.dtype} {norms_EC.shape}")
        return list(norms_EC.astype(np.float32))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read {path} ({error_text(error)}): delete it to continue without the norms of past epochs",
            kind="unsafe-file" if isinstance(error, files.RefusedFile) else "damaged-file",
        ) from error
