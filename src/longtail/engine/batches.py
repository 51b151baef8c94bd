"""Batches as the networks take them: images from the loader, views of them, in the layout and precision of the run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.data.loader import Loader, StreamLoader
from longtail.data.samplers import derive_seed
from longtail.distributed import rank
from longtail.engine.capture import VIEWS, Captured, stream
from longtail.methods import Batch, Mixed, Stage
from longtail.views import Views
from longtail.views.mixup import mixup

# Views of so many pixels are made at once: on a GPU a hundred small kernels cost the same for thirty batches as for one.
PIXELS_AT_ONCE = 4096 * 32 * 32


class Batches:
    """Views are made for `ahead` steps at a time and kept on the device; a step takes its part of them.

    What is drawn depends on the seed, the stage and the first step of those `ahead`, and on nothing before it. Views of images
    that come from disk are made in a room of their own, while the device works on the step before.
    """

    def __init__(
        self, loader: Loader, views: Views, accumulate: int, layout: torch.memory_format, dtype: torch.dtype
    ) -> None:
        self.loader, self.views, self.accumulate = loader, views, accumulate
        self.layout, self.dtype, self.device = layout, dtype, loader.device
        self.steps_per_epoch = loader.num_batches // accumulate
        self.ahead = self._ahead()
        self._in_parts(loader)
        self.rng = torch.Generator(self.device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self.rows_B = torch.arange(loader.batch_size, device=self.device)
        self.partner: Loader | None = None
        beside = self.device.type == "cuda" and isinstance(loader, StreamLoader)
        self.side = stream(VIEWS) if beside else None

    def _ahead(self) -> int:
        """Steps; an epoch in equal parts. A CPU gains nothing by it: one step."""
        if self.device.type == "cpu":
            return 1
        step = self.accumulate * self.loader.batch_size * self.views.size**2
        parts = -(-self.steps_per_epoch // max(PIXELS_AT_ONCE // step, 1))
        return -(-self.steps_per_epoch // parts)

    def _in_parts(self, loader: Loader) -> None:
        loader.set_chunks(self.ahead * self.accumulate, self.steps_per_epoch * self.accumulate)

    def enter(self, index: int, stage: Stage, first_epoch: int, captured: bool) -> None:
        """Make room for the views of a stage, whose first epoch is the run's `first_epoch`."""
        self.stage, self.first = index, -1  # first: of the steps whose views are there
        self.loader.set_stage(stage.sampler, first_epoch, stage.epochs)
        self.close()
        self.partner = None
        kinds = [stage]
        if stage.partner:
            self.partner = self.loader.clone("partner")
            self._in_parts(self.partner)
            self.partner.set_stage(stage.partner, first_epoch, stage.epochs)
            kinds.append(Stage("partner", stage.epochs, stage.optim))
        self.rooms = [self._room(kind) for kind in kinds]
        self.made = [self._room(kind) for kind in kinds] if self.side else self.rooms
        self.make: Callable[[], None] = Captured(self._make, self.rng) if captured else self._make
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())

    def _room(self, stage: Stage) -> "ViewBuffers":
        n, size = self.ahead * self.accumulate * self.loader.batch_size, self.views.size
        shape = torch.empty(n, 3, size, size, device="meta").to(memory_format=self.layout)
        query = torch.empty_like(shape, dtype=self.dtype, device=self.device)
        y = torch.empty(n, dtype=torch.int64, device=self.device)
        mixed = (torch.empty_like(y), torch.empty(n // self.loader.batch_size, device=self.device))
        return ViewBuffers(
            query, torch.empty_like(query) if stage.two_views else None, y, stage.mixup, mixed if stage.mixup else None
        )

    def close(self) -> None:
        """What is read ahead is given up."""
        for loader in self._loaders():
            loader.close()

    def _loaders(self) -> list[Loader]:
        return [self.loader] if self.partner is None else [self.loader, self.partner]

    def prepare(self, epoch: int, step: int) -> None:
        """The host's part of a step of the stage: see that its views are there, and say where."""
        index = step % self.steps_per_epoch
        first = step - index % self.ahead
        if first != self.first:
            with self._beside_the_step():
                for loader in self._loaders():
                    loader.seek(epoch, (index - index % self.ahead) * self.accumulate)
                ranks = [rank()] if rank() else []  # each process has its own draws
                draws = derive_seed("views", self.loader.seed, self.stage, first, *ranks)
                self.rng.manual_seed(draws)
                self.make()
            self.first = first
        self.cursor.fill_((step - first) * self.accumulate)

    @contextlib.contextmanager
    def _beside_the_step(self) -> Iterator[None]:
        """The host is a step ahead of the device: what it starts here is at work when the step before it is."""
        if self.side is None:
            yield
            return
        here = torch.cuda.current_stream()
        with torch.cuda.stream(self.side):
            yield
        here.wait_stream(self.side)
        for room, made in zip(self.rooms, self.made, strict=True):
            for to, ready in zip(room.tensors(), made.tensors(), strict=True):
                to.copy_(ready)
        self.side.wait_stream(here)  # which has no more to do yet than these copies, and the step before

    def _make(self) -> None:
        for room, loader in zip(self.made, self._loaders(), strict=True):
            self._fill(room, loader)

    def _fill(self, room: "ViewBuffers", loader: Loader) -> None:
        (images, size_N2), y = loader.take(self.ahead * self.accumulate)
        room.y.copy_(y)
        if room.mixed is None:
            self.views.query(images, self.rng, size_N2, room.query)
        else:
            query = self.views.query(images, self.rng, size_N2)
            query, other, share = mixup(query, y, loader.batch_size, room.mixup, self.rng)
            for to, ready in zip((room.query, *room.mixed), (query, other, share), strict=True):
                to.copy_(ready)
        if room.key is not None:
            self.views.key(images, self.rng, size_N2, room.key)

    def next(self) -> Batch:
        """The batch at the cursor, which moves on."""
        at = self.cursor.clone()
        self.cursor += 1
        batch, *partner = (self._batch(room, at) for room in self.rooms)
        return batch._replace(partner=partner[0]) if partner else batch

    def _batch(self, room: "ViewBuffers", at: Tensor) -> Batch:
        rows = at * self.loader.batch_size + self.rows_B
        key = None if room.key is None else self._take(room.key, rows)
        batch = Batch(self._take(room.query, rows), key, room.y[rows])
        if room.mixed is None:
            return batch
        other, share = room.mixed
        return batch._replace(mixed=Mixed(other[rows], share.take(at)))

    def _take(self, views: Tensor, rows: Tensor) -> Tensor:
        return views if len(views) == len(rows) else views[rows].to(memory_format=self.layout)


class ViewBuffers(NamedTuple):
    """The views of `ahead` steps, which live where a captured step will look for them."""

    query: Tensor
    key: Tensor | None
    y: Tensor
    mixup: float
    mixed: tuple[Tensor, Tensor] | None  # labels of what was mixed in, and for each batch the share of the first

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.query, self.key, self.y, *(self.mixed or ())) if t is not None]
