"""The state of one run (one seed), what a checkpoint holds of it, and how a step finds its batch."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from longtail import methods, runs
from longtail.config import Config
from longtail.data.loader import ResidentLoader, derive_seed
from longtail.data.sources import DataSet
from longtail.engine import checkpoint, log
from longtail.engine.device import memory_format, place
from longtail.engine.evaluate import balanced_accuracy
from longtail.engine.meter import Meter
from longtail.errors import UserError
from longtail.methods import Batch, Stage
from longtail.views import Views


class Run:
    """Method, optimiser, loader, and the two counters that say where training stands: the stage, and the step in it."""

    def __init__(self, config: Config, seed: int, data: DataSet, folder: Path, device: torch.device) -> None:
        self.config, self.seed, self.data, self.folder, self.device = config, seed, data, folder, device
        torch.manual_seed(seed)  # initial weights, and what a network draws itself (dropout)
        self.method = place(methods.make(config, data.train.counts), config.train, device)
        self.views = Views(config.views, config.data.image_size)
        self.loader = ResidentLoader(data.train, config.train.batch_size, seed, device)
        self.accumulate = min(config.train.accumulate, self.loader.batches)
        self.steps_per_epoch = self.loader.batches // self.accumulate
        self.rng = torch.Generator(device)
        self.layout = memory_format(config.train)
        self.meter = Meter()
        self.seconds = 0.0  # of training, over all resumes
        self._since = time.perf_counter()
        self.enter(0)

    def enter(self, stage_index: int) -> None:
        """Begin a stage: its objective, its optimiser, step 0."""
        self.stage_index, self.step = stage_index, 0
        self.stage: Stage = self.method.stages[stage_index]
        self.method.enter(self.stage)
        self.method.train()
        o = self.stage.optim
        learning = [p for p in self.method.parameters() if p.requires_grad]
        self.optimiser = torch.optim.SGD(
            learning, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay
        )

    def stages_left(self) -> Iterator[Stage]:
        """The stage the run stands in, then those after it."""
        yield self.stage
        for index in range(self.stage_index + 1, len(self.method.stages)):
            self.enter(index)
            yield self.stage

    def steps_left(self) -> range:
        return range(self.step, self.stage.epochs * self.steps_per_epoch)

    def batches(self, step: int) -> Iterator[Batch]:
        """The batches of one optimiser step; order and views are functions of seed, stage and step alone."""
        epoch, first = divmod(step, self.steps_per_epoch)
        for part in range(self.accumulate):
            images, y_B = self.loader.batch(self.epochs_before() + epoch, first * self.accumulate + part)
            self.rng.manual_seed(derive_seed("views", self.seed, self.stage_index, step, part))
            query = self.views.query(images, self.rng).to(memory_format=self.layout)
            key = self.views.key(images, self.rng).to(memory_format=self.layout) if self.stage.two_views else None
            yield Batch(query, key, y_B)

    def epochs_before(self) -> int:
        """Epochs of the finished stages."""
        return sum(stage.epochs for stage in self.method.stages[: self.stage_index])

    def total_steps(self) -> int:
        return sum(stage.epochs for stage in self.method.stages) * self.steps_per_epoch

    def steps_done(self) -> int:
        return self.epochs_before() * self.steps_per_epoch + self.step

    def row(self) -> dict[str, Any]:
        """The log line of the epoch so far; reading the means waits for the device."""
        means = self.meter.means()
        images = self.meter.count * self.loader.batch_size
        rate, seconds = self.optimiser.param_groups[0]["lr"], time.perf_counter() - self._since
        epoch = (self.step - 1) // self.steps_per_epoch
        where = {"stage": self.stage.name, "epoch": epoch, "epochs": self.stage.epochs}
        return {**where, **means, "lr": rate, "seconds": seconds, "images_per_second": images / max(seconds, 1e-9)}

    def end_epoch(self, journal: log.Log) -> None:
        """Log line, validation and checkpoint, where due."""
        row, train = self.row(), self.config.train
        epoch, last = row["epoch"] + 1, row["epoch"] + 1 == self.stage.epochs
        self.seconds += row["seconds"]
        self.meter.reset()
        if self.data.val is not None and (epoch % train.validate_every == 0 or last):
            row["val_accuracy"] = balanced_accuracy(
                self.method, self.data.val, self.views, self.device, train.batch_size
            )
        left = self.seconds / self.steps_done() * (self.total_steps() - self.steps_done())
        journal.epoch(self.steps_done(), row, left)
        if epoch % train.checkpoint_every == 0 or last:
            self.save()
        self._since = time.perf_counter()

    def save(self) -> None:
        """Everything that the next step depends on."""
        if self.meter.count:
            self.meter.means()  # never replaces a good checkpoint by a spoilt one
        state = {
            "stage": self.stage_index,
            "step": self.step,
            "seconds": self.seconds,
            "method": self.method.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "meter": self.meter.state(),
            "rng": torch.get_rng_state(),
            "checksum": self.data.checksum,
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state()
        checkpoint.save(self.folder / runs.CHECKPOINT, state)

    def restore(self) -> bool:
        """Go to where the checkpoint stands, if there is one."""
        path = self.folder / runs.CHECKPOINT
        found = path.exists()
        if found:
            self._restore(checkpoint.load(path, self.device), path)
        log.truncate(self.folder / runs.LOG, self.epochs_before() + self.step // self.steps_per_epoch)
        return found

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        if state["checksum"] != self.data.checksum:
            raise UserError(f"{path} was trained on other images (checksum {state['checksum']}): use its --data.root")
        self.enter(state["stage"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.method.load_state_dict(state["method"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.meter.restore(state["meter"])
        torch.set_rng_state(state["rng"].cpu())
        if "cuda_rng" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())
