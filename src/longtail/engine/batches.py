"""Batches as the networks take them: images from the loader, views of them, in the layout and precision of the run."""

import functools
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

    On CUDA the next ones are made on a stream of their own while the present ones are trained on. What is drawn depends on the
    seed, the stage and the first step of those `ahead`, and on nothing before it.
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
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _ahead(self) -> int:
        """Steps; an epoch in equal parts. A CPU gains nothing by it: one step."""
        if self.device.type == "cpu":
            return 1
        step = self.accumulate * self.loader.batch_size * self.views.size**2
        parts = -(-self.steps_per_epoch // max(PIXELS_AT_ONCE // step, 1))
        return -(-self.steps_per_epoch // parts)

    def enter(self, stage: int, two_views: bool, steps: int, captured: bool) -> None:
        """Make room for the views of a stage of so many steps."""
        n, size = self.ahead * self.accumulate * self.loader.batch_size, self.views.size
        room = 2 * n if self.stream else n  # the steps under way take one half while the other is being made
        shape = torch.empty(room, 3, size, size, device="meta").to(memory_format=self.layout)
        self.query = torch.empty_like(shape, dtype=self.dtype, device=self.device)
        self.key = torch.empty_like(self.query) if two_views else None
        self.y = torch.empty(room, dtype=torch.int64, device=self.device)
        self.stage, self.steps, self.half = stage, steps, n
        self.first = self.made = -1  # first step of the views in use, and of the newest
        makers = [functools.partial(self._make, slice(start, start + n)) for start in range(0, room, n)]
        self.makers: list[Callable[[], None]] = list(makers)
        if captured:
            self.makers[0] = one = Captured(makers[0], self.rng)
            self.makers[1:] = [Captured(make, self.rng, pool=one.graph.pool()) for make in makers[1:]]

    def prepare(self, epoch: int, step: int) -> None:
        """The host's part of a step of the stage: see that its views are there, ask for the next ones, and say where."""
        index = step % self.steps_per_epoch
        first = step - index % self.ahead
        if first != self.first:
            if self.stream:
                torch.cuda.current_stream().wait_stream(self.stream)
            if first != self.made:
                self.make(epoch, first)
            self.first = first
            if self.stream and (following := self._following(first)) < self.steps:
                self.stream.wait_stream(torch.cuda.current_stream())  # the steps that took that half are behind us
                with torch.cuda.stream(self.stream):
                    self.make(epoch + (following % self.steps_per_epoch == 0), following)
        self.cursor.fill_(self._part(first) * self.half + (step - first) * self.accumulate * self.loader.batch_size)

    def make(self, epoch: int, first: int) -> None:
        """The views of the steps from `first` on."""
        self.loader.seek(epoch, first % self.steps_per_epoch * self.accumulate)
        self.rng.manual_seed(derive_seed("views", self.loader.seed, self.stage, first))
        self.makers[self._part(first)]()
        self.made = first

    def _following(self, first: int) -> int:
        """Where the next views begin: an epoch's last may serve fewer steps."""
        in_epoch = first % self.steps_per_epoch
        return first - in_epoch + min(in_epoch + self.ahead, self.steps_per_epoch)

    def _part(self, first: int) -> int:
        """The half where the views from `first` on lie: they take turns."""
        epoch, index = divmod(first, self.steps_per_epoch)
        turns = -(-self.steps_per_epoch // self.ahead)
        return (epoch * turns + index // self.ahead) % len(self.makers)

    def _make(self, to: slice) -> None:
        images, y = self.loader.take(self.ahead * self.accumulate)
        self.y[to].copy_(y)
        self.query[to].copy_(self.views.query(images, self.rng))
        if self.key is not None:
            self.key[to].copy_(self.views.key(images, self.rng))

    def next(self) -> Batch:
        """The batch at the cursor, which moves on."""
        rows = self.cursor + self.rows_B
        self.cursor += self.loader.batch_size
        return Batch(
            self._take(self.query, rows), None if self.key is None else self._take(self.key, rows), self.y[rows]
        )

    def _take(self, views: Tensor, rows: Tensor) -> Tensor:
        return views[rows].to(memory_format=self.layout)
