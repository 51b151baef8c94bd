"""Batches for the training step: views of the loader's images, in the memory format and precision of the run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longtail.data.loader import Loader, StreamLoader
from longtail.data.samplers import derive_seed
from longtail.distributed import rank
from longtail.engine.cuda_graph import VIEW_STREAM, CapturedFunction, get_stream
from longtail.methods import Batch, Mixed, Stage
from longtail.views import Views
from longtail.views.view import draw_mixture

MAX_PIXELS = 4096 * 32 * 32
"""Pixels of which views are made at once: on a GPU a hundred small kernels take as long for thirty batches as for one."""


class Batches:
    """Makes the views of several steps at a time and keeps them on the device; each step takes its part of them.

    The random numbers of views depend on the seed, the stage and the first of these steps, and on nothing before. Views of
    streamed images are made in separate buffers, while the device works on the previous step.
    """

    def __init__(
        self, loader: Loader, views: Views, accumulate: int, layout: torch.memory_format, dtype: torch.dtype
    ) -> None:
        """Create batches; `start_stage` allocates the buffers.

        Args:
            loader: The loader of the images.
            views: Makes views of images.
            accumulate: The number of batches in a step.
            layout: The memory format of the views.
            dtype: The type of the views.
        """
        self.loader, self.views, self.accumulate = loader, views, accumulate
        self.layout, self.dtype, self.device = layout, dtype, loader.device
        self.steps_per_epoch = loader.num_batches // accumulate
        self.steps_ahead = self._choose_steps_ahead()
        self._set_parts(loader)
        self.rng = torch.Generator(self.device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)
        self.rows_B = torch.arange(loader.batch_size, device=self.device)
        self.partner: Loader | None = None
        overlaps = self.device.type == "cuda" and isinstance(loader, StreamLoader)
        self.side = get_stream(VIEW_STREAM) if overlaps else None

    def _choose_steps_ahead(self) -> int:
        """Return for how many steps views are made at once: equal parts of an epoch on a GPU, one step on a CPU."""
        if self.device.type == "cpu":
            return 1
        step = self.accumulate * self.loader.batch_size * self.views.size**2
        parts = -(-self.steps_per_epoch // max(MAX_PIXELS // step, 1))
        return -(-self.steps_per_epoch // parts)

    def _set_parts(self, loader: Loader) -> None:
        loader.set_chunks(self.steps_ahead * self.accumulate, self.steps_per_epoch * self.accumulate)

    def start_stage(self, index: int, stage: Stage, first_epoch: int, captured: bool) -> None:
        """Allocate the buffers for the views of a stage.

        Args:
            index: The index of the stage.
            stage: The stage.
            first_epoch: The number of the stage's first epoch in the whole run.
            captured: Whether making views is captured as a CUDA graph.
        """
        self.stage, self.first = index, -1  # `first` is the first step whose views are in the buffers
        self.loader.set_stage(stage.sampler, first_epoch, stage.epochs)
        self.close()
        self.partner = None
        stages = [stage]
        if stage.partner:
            self.partner = self.loader.clone("partner")
            self._set_parts(self.partner)
            self.partner.set_stage(stage.partner, first_epoch, stage.epochs)
            stages.append(Stage("partner", stage.epochs, stage.optim))
        self.buffers = [self._make_buffers(each) for each in stages]
        self.staging = [self._make_buffers(each) for each in stages] if self.side else self.buffers
        self.make_views: Callable[[], None] = (
            CapturedFunction(self._make_views, self.rng) if captured else self._make_views
        )
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())

    def _make_buffers(self, stage: Stage) -> "ViewBuffers":
        n, size = self.steps_ahead * self.accumulate * self.loader.batch_size, self.views.size
        shape = torch.empty(n, 3, size, size, device="meta").to(memory_format=self.layout)
        query = torch.empty_like(shape, dtype=self.dtype, device=self.device)
        y = torch.empty(n, dtype=torch.int64, device=self.device)
        mixed = (torch.empty_like(y), torch.empty(n // self.loader.batch_size, device=self.device))
        key = torch.empty_like(query) if stage.two_views else None
        extra = tuple((name, torch.empty_like(query)) for name in stage.extra_views)
        return ViewBuffers(query, key, extra, y, stage, mixed if stage.mixup else None)

    def close(self) -> None:
        """Discard the images that were read ahead."""
        for loader in self._loaders():
            loader.close()

    def _loaders(self) -> list[Loader]:
        return [self.loader] if self.partner is None else [self.loader, self.partner]

    def prepare(self, epoch: int, step: int) -> None:
        """Do the host's part of a step: make its views unless they are in the buffers, and set the cursor.

        Args:
            epoch: The number of the epoch in the whole run.
            step: The number of the step in the stage.
        """
        index = step % self.steps_per_epoch
        first = step - index % self.steps_ahead
        if first != self.first:
            with self._overlap_with_step():
                for loader in self._loaders():
                    loader.seek(epoch, (index - index % self.steps_ahead) * self.accumulate)
                ranks = [rank()] if rank() else []  # each process has its own random numbers
                self.rng.manual_seed(derive_seed("views", self.loader.seed, self.stage, first, *ranks))
                self.make_views()
            self.first = first
        self.cursor.fill_((step - first) * self.accumulate)

    @contextlib.contextmanager
    def _overlap_with_step(self) -> Iterator[None]:
        """Run the device work of the context in parallel to the previous step, if views have separate buffers.

        The host is one step ahead of the device, so that the device gets this work while it makes the previous step.
        """
        if self.side is None:
            yield
            return
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self.side):
            yield
        main.wait_stream(self.side)
        for buffers, staging in zip(self.buffers, self.staging, strict=True):
            for target, source in zip(buffers.tensors(), staging.tensors(), strict=True):
                target.copy_(source)
        self.side.wait_stream(main)  # which has only these copies and the previous step to do yet

    def _make_views(self) -> None:
        for buffers, loader in zip(self.staging, self._loaders(), strict=True):
            self._fill(buffers, loader)

    def _fill(self, buffers: "ViewBuffers", loader: Loader) -> None:
        (images, size_N2), y = loader.take(self.steps_ahead * self.accumulate)
        buffers.y.copy_(y)
        stage, mixture = buffers.stage, None
        if buffers.mixed is None:
            self.views.query(images, self.rng, size_N2, buffers.query)
        else:
            query, size = self.views.query(images, self.rng, size_N2), self.views.size
            mixture = draw_mixture(stage.mixture, len(y), self.loader.batch_size, size, stage.mixup, self.rng)
            mixed = mixture.apply(query), y[mixture.partner_N], mixture.share
            for target, source in zip((buffers.query, *buffers.mixed), mixed, strict=True):
                target.copy_(source)
        if buffers.key is not None:
            self.views.key(images, self.rng, size_N2, buffers.key)
        for name, out in buffers.extra:
            make_view = self.views.query if name == "query" else self.views.key
            if mixture is not None and stage.mixes_extra:
                out.copy_(mixture.apply(make_view(images, self.rng, size_N2)))
            else:
                make_view(images, self.rng, size_N2, out)

    def next(self) -> Batch:
        """Return the batch at the cursor, and advance the cursor."""
        at = self.cursor.clone()
        self.cursor += 1
        batch, *partner = (self._batch(buffers, at) for buffers in self.buffers)
        return batch._replace(partner=partner[0]) if partner else batch

    def _batch(self, buffers: "ViewBuffers", at: Tensor) -> Batch:
        rows = at * self.loader.batch_size + self.rows_B
        key = None if buffers.key is None else self._take(buffers.key, rows)
        extra = tuple(self._take(views, rows) for _, views in buffers.extra)
        batch = Batch(self._take(buffers.query, rows), key, buffers.y[rows], extra=extra)
        if buffers.mixed is None:
            return batch
        other, share = buffers.mixed
        return batch._replace(mixed=Mixed(other[rows], share.take(at)))

    def _take(self, views: Tensor, rows: Tensor) -> Tensor:
        return views if len(views) == len(rows) else views[rows].to(memory_format=self.layout)


class ViewBuffers(NamedTuple):
    """The views of some steps, at fixed addresses where a captured step reads them."""

    query: Tensor
    key: Tensor | None
    extra: tuple[tuple[str, Tensor], ...]
    """The kinds of the further views, and the views."""
    y: Tensor
    stage: Stage
    mixed: tuple[Tensor, Tensor] | None
    """The labels of the images that were mixed in, and for each batch the share of the original images."""

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        extra = (views for _, views in self.extra)
        return [t for t in (self.query, self.key, *extra, self.y, *(self.mixed or ())) if t is not None]
