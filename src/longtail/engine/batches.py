"""Batches as the networks take them: images from the loader, views of them, in the layout and precision of the run."""

from collections.abc import Callable

import torch
from torch import Tensor

from longtail.data.loader import ResidentLoader, derive_seed
from longtail.engine.capture import Captured
from longtail.methods import Batch
from longtail.views import Views

# Views of so many pixels are made at once: on a GPU a hundred small kernels cost the same for thirty batches as for one.
PIXELS_AT_ONCE = 4096 * 32 * 32


class Batches:
    """Views are made for `ahead` steps at a time and kept on the device; a step takes its part of them.

    What is drawn depends on the seed, the stage and the first step of those `ahead`, and on nothing before it.
    """

    def __init__(
        self, loader: ResidentLoader, views: Views, accumulate: int, layout: torch.memory_format, dtype: torch.dtype
    ) -> None:
        self.loader, self.views, self.accumulate = loader, views, accumulate
        self.layout, self.dtype, self.device = layout, dtype, loader.y_N.device
        self.steps_per_epoch = loader.batches // accumulate
        self.ahead = self._ahead()
        self.rng = torch.Generator(self.device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self.rows_B = torch.arange(loader.batch_size, device=self.device)

    def _ahead(self) -> int:
        """Steps; an epoch in equal parts. A CPU gains nothing by it: one step."""
        if self.device.type == "cpu":
            return 1
        step = self.accumulate * self.loader.batch_size * self.views.size**2
        parts = -(-self.steps_per_epoch // max(PIXELS_AT_ONCE // step, 1))
        return -(-self.steps_per_epoch // parts)

    def enter(self, stage: int, two_views: bool, captured: bool) -> None:
        """Make room for the views of a stage."""
        n, size = self.ahead * self.accumulate * self.loader.batch_size, self.views.size
        shape = torch.empty(n, 3, size, size, device="meta").to(memory_format=self.layout)
        self.query = torch.empty_like(shape, dtype=self.dtype, device=self.device)
        self.key = torch.empty_like(self.query) if two_views else None
        self.y = torch.empty(n, dtype=torch.int64, device=self.device)
        self.stage, self.first = stage, -1  # first: of the steps whose views are there
        self.make: Callable[[], None] = Captured(self._make, self.rng) if captured else self._make

    def prepare(self, epoch: int, step: int) -> None:
        """The host's part of a step of the stage: see that its views are there, and say where."""
        index = step % self.steps_per_epoch
        first = step - index % self.ahead
        if first != self.first:
            self.loader.seek(epoch, (index - index % self.ahead) * self.accumulate)
            self.rng.manual_seed(derive_seed("views", self.loader.seed, self.stage, first))
            self.make()
            self.first = first
        self.cursor.fill_((step - first) * self.accumulate * self.loader.batch_size)

    def _make(self) -> None:
        images, y = self.loader.take(self.ahead * self.accumulate)
        self.y.copy_(y)
        self.query.copy_(self.views.query(images, self.rng))
        if self.key is not None:
            self.key.copy_(self.views.key(images, self.rng))

    def next(self) -> Batch:
        """The batch at the cursor, which moves on."""
        rows = self.cursor + self.rows_B
        self.cursor += self.loader.batch_size
        return Batch(
            self._take(self.query, rows), None if self.key is None else self._take(self.key, rows), self.y[rows]
        )

    def _take(self, views: Tensor, rows: Tensor) -> Tensor:
        return views[rows].to(memory_format=self.layout)
