"""Running means of what a method logs, kept on the device: the host reads them when it needs them, not at every step."""

from typing import Any

import torch
from torch import Tensor

from longtail.engine import distributed
from longtail.errors import RunError
from longtail.schema import count

NEVER = 2**62  # later than any step


class Meter:
    """Sums of the logged terms since the last reset, and for each term the first step at which it was not finite."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums = self.first_bad = torch.empty(0)
        self.count = 0

    def reset(self) -> None:
        """In place: a captured step goes on writing to the same tensors."""
        self.sums.zero_()
        self.first_bad.fill_(NEVER)
        self.count = 0

    def add(self, terms: dict[str, Tensor], step: Tensor) -> None:
        """Take in the terms of one batch; whoever calls counts the batches, as a captured step cannot."""
        values = torch.stack([t.detach().float() for t in terms.values()])
        if not self.names:
            self.names, self.sums = list(terms), torch.zeros_like(values)
            self.first_bad = torch.full_like(values, NEVER, dtype=torch.int64)
        self.sums += values
        finite = values * 0 == 0  # one kernel less than isfinite has
        torch.minimum(self.first_bad, torch.where(finite, NEVER, step), out=self.first_bad)

    def spoilt(self) -> bool:
        return bool((distributed.smallest(self.first_bad) != NEVER).any())

    def means(self) -> dict[str, float]:
        """The mean of each term, over all processes. A term that was ever not finite ends the run, in whichever process: the
        weights are spoilt from there on."""
        steps = distributed.smallest(self.first_bad).tolist()
        bad = {n: s for n, s in zip(self.names, steps, strict=True) if s != NEVER}
        if bad:
            step = min(bad.values())
            raise NonFinite(step, [name for name, s in bad.items() if s == step])
        sums = distributed.mean(self.sums)
        return dict(zip(self.names, (sums / max(self.count, 1)).tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        sums = distributed.of_each(self.sums)
        return {"names": self.names, "sums": sums, "first_bad": self.first_bad, "count": self.count}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; ValueError if its parts do not belong together."""
        names, sums, first_bad = state["names"], distributed.own(state["sums"]), state["first_bad"]
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
    """A logged term became infinite or NaN; `run` is whose, where it is one of several."""

    def __init__(self, step: int, terms: list[str]) -> None:
        super().__init__(f"step {step}: {', '.join(terms)} not finite")
        self.step, self.terms = step, terms
        self.run: Any = None
