"""Running means of the values that a method logs. They are on the device, and the host reads them only when it needs them."""

from typing import Any

import torch
from torch import Tensor

from longtail.distributed import all_mean, all_min, stack_ranks, take_own_rank
from longtail.errors import RunError
from longtail.schema import count

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
            NonFinite: A term was not finite at any step in any process, so that the weights are unusable from then on.
        """
        steps = all_min(self.first_bad).tolist()
        bad = {n: s for n, s in zip(self.names, steps, strict=True) if s != NEVER}
        if bad:
            step = min(bad.values())
            raise NonFinite(step, [name for name, s in bad.items() if s == step])
        sums = all_mean(self.sums)
        return dict(zip(self.names, (sums / max(self.count, 1)).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        sums = stack_ranks(self.sums)
        return {"names": self.names, "sums": sums, "first_bad": self.first_bad, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; ValueError if its parts do not belong together."""
        names, sums, first_bad = state["names"], take_own_rank(state["sums"]), state["first_bad"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not count(state["count"]):
            raise ValueError("the stored means have no names or no count")
        shapes = (sums.shape, first_bad.shape) if names else ()
        if any(shape != (len(names),) for shape in shapes):
            raise ValueError("the stored means do not have one value for each name")
        if names and (sums.dtype != torch.float32 or first_bad.dtype != torch.int64):
            raise ValueError("the stored means are of another type")
        self.names, self.sums = names, sums
        self.first_bad, self.count = first_bad.masked_fill(first_bad < 0, NEVER), state["count"]  # once NEVER was -1


class NonFinite(RunError):
    """Raised when a logged term became infinite or NaN; `trainer` is the trainer that it belongs to, once it is known."""

    def __init__(self, step: int, terms: list[str]) -> None:
        super().__init__(f"step {step}: {', '.join(terms)} not finite")
        self.step, self.terms = step, terms
        self.trainer: Any = None
