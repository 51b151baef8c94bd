"""The state of one run (one seed), what a checkpoint holds of it, and how a step finds its batch."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail import methods, run_folder
from longtail.config import Config, OptimConfig
from longtail.data.loader import Loader, make_loader
from longtail.data.samplers import derive_seed
from longtail.data.sources import DataSet, Split
from longtail.engine import checkpoint, distributed, log
from longtail.engine.batches import Batches
from longtail.engine.device import (
    check_step,
    compile_networks,
    compiling_pays,
    is_fused,
    memory_format,
    precision,
    to_device,
    uses_kernels,
)
from longtail.engine.evaluate import balanced_accuracy, features_of
from longtail.engine.gradients import Gradients
from longtail.engine.meter import Meter
from longtail.engine.schedule import learning_rate
from longtail.errors import UserError
from longtail.kernels import sgd
from longtail.methods import Stage, Start
from longtail.models.groups import refined
from longtail.schema import amount, count, find_error
from longtail.views import Views


class Run:
    """Method, optimizer, batches, and the two counters that say where training stands: the stage, and the step in it.

    `twin` is a run of another seed on the same data, which shares its images.
    """

    def __init__(
        self, config: Config, seed: int, data: DataSet, folder: Path, device: torch.device, twin: "Run | None" = None
    ) -> None:
        self.config, self.seed, self.data, self.folder, self.device = config, seed, data, folder, device
        check_step(config.train, device)
        self.seconds = 0.0  # of finished epochs, over all resumes
        self.setup_seconds = 0.0  # spent on making views and step: capture and compilation, in this process
        self.epoch_seconds = 0.0  # of the epoch under way, before the clock was last started
        torch.manual_seed(seed)  # initial weights, and what a network draws itself (dropout)
        stored = os.path.lexists(folder / run_folder.CHECKPOINT)
        self.method: methods.Method = to_device(methods.make(config, data.train.counts, stored), config, device)
        self.method.check(data.val is not None)
        distributed.part(self.method, seed)
        self.views = Views(config.views, config.data.image_size, uses_kernels(config.train, device))
        self.loader: Loader = make_loader(
            data.train, config.train.batch_size, seed, device, twin.loader if twin else None
        )
        self.accumulate = config.train.accumulate
        if self.accumulate > self.loader.batches:
            raise UserError(
                f"--train.accumulate {self.accumulate}: an epoch has only {self.loader.batches} batches",
                kind="conflict",
            )
        low = device.type == "cuda" and precision(config.train, device) == "bf16"
        self.batches = Batches(
            self.loader,
            self.views,
            self.accumulate,
            memory_format(config.train),
            torch.bfloat16 if low else torch.float32,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        names = [stage.name for stage in self.method.stages for _ in range(stage.epochs)]
        self.gradients = Gradients(config.log.gradients, len(data.train.counts), names, device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # the step under way, for the meter
        self.captured = device.type == "cuda" and config.train.execution != "eager" and not distributed.several()
        steps, fused = config.train.epochs * self.steps_per_epoch, is_fused(self.method)
        self.compiled = compiling_pays(config.train, device, steps, fused)
        if self.compiled:
            compile_networks(self.method)
        self.start_clock()
        self.enter(0)

    def enter(self, stage_index: int) -> None:
        """Begin a stage: its objective, its optimizer, step 0."""
        self.stage_index, self.step = stage_index, 0
        self.stage: Stage = self.method.stages[stage_index]
        self.epoch = -1  # of the stage, that the method was last told of
        self.method.enter(self.stage)
        self.method.train()
        self.meter = Meter()
        if not self.stage.epochs:
            return
        start = time.perf_counter()
        self.batches.enter(stage_index, self.stage, self.epochs_before(), self.captured)
        self.setup_seconds += time.perf_counter() - start
        self.optimizer = self.make_optimizer(self.stage.optim)

    @property
    def how(self) -> str:
        """How its steps are made: what `auto` came to."""
        if is_fused(self.method):
            return "fused"
        return "compiled" if self.compiled else "captured" if self.captured else "eager"

    def start_clock(self) -> None:
        self._since = time.perf_counter()

    def stages_left(self) -> Iterator[Stage]:
        """The stage the run stands in, then those after it."""
        for index in range(self.stage_index, len(self.method.stages)):
            if index != self.stage_index:
                self.enter(index)
            if self.step == 0:
                self.method.begin(self.start())
                distributed.make_alike(self.method)
                self.method.train()
            yield self.stage

    def start(self) -> Start:
        """What a method may look at when a stage begins."""

        def look(source: Split) -> tuple[Tensor, Tensor]:
            features = features_of(self.method, source, self.views, self.device, self.config.train.batch_size)
            return features, torch.from_numpy(source.labels).to(self.device)

        val, rng = self.data.val, torch.Generator().manual_seed(derive_seed("begin", self.seed, self.stage_index))
        return Start(lambda: look(self.data.train), None if val is None else lambda: look(val), rng)

    def steps_left(self) -> range:
        return range(self.step, self.stage.epochs * self.steps_per_epoch)

    def make_optimizer(self, o: OptimConfig) -> torch.optim.Optimizer:
        """Over what learns in this stage; on CUDA its rates are on the device, where a captured step finds them."""
        groups = refined(self.method.groups(), self.method.net.trunk, o)
        kind: Any = torch.optim.SGD
        options: dict[str, Any] = {"momentum": o.momentum, "nesterov": o.nesterov, "weight_decay": o.weight_decay}
        if o.name == "adamw":
            kind, options = torch.optim.AdamW, {"betas": o.betas, "weight_decay": o.weight_decay}
        if self.device.type != "cuda":
            return kind(groups, lr=o.lr, **options)
        groups = [{"lr": torch.tensor(o.lr, device=self.device), **group} for group in groups]
        if o.name == "adamw":
            options["capturable"] = True
        elif is_fused(self.method):
            return sgd.SGD(groups, **options)
        return kind(groups, fused=True, **options)

    def clip(self) -> None:
        """Shorten the gradient of a step where it is longer than asked for."""
        if self.stage.optim.clip:
            learning = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(learning, self.stage.optim.clip)

    def prepare(self, step: int) -> None:
        """The host's part of a step: its views and where they lie, and the rate, all functions of `step`."""
        epoch = step // self.steps_per_epoch
        if epoch != self.epoch:
            self.method.start_epoch(epoch, self.stage.epochs)
            self.epoch = epoch
        self.batches.prepare(self.epochs_before() + epoch, step)
        self.clock.fill_(self.steps_done())
        self.rate = learning_rate(self.stage.optim, step, self.steps_per_epoch, self.stage.epochs)
        for group in self.optimizer.param_groups:
            rate = self.rate * group.get("lr_scale", 1)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate

    def finished(self, step: int) -> None:
        """Count the step, and the batches whose terms the meter has."""
        self.step = step + 1
        self.meter.count += self.accumulate
        self.gradients.count += 1

    def epochs_before(self) -> int:
        """Epochs of the finished stages."""
        return sum(stage.epochs for stage in self.method.stages[: self.stage_index])

    def total_steps(self) -> int:
        return sum(stage.epochs for stage in self.method.stages) * self.steps_per_epoch

    def steps_done(self) -> int:
        return self.epochs_before() * self.steps_per_epoch + self.step

    def seconds_left(self, since: float = 0.0) -> float:
        """At the pace so far; `since` the last epoch ended so many seconds have passed."""
        return (self.seconds + since) / self.steps_done() * (self.total_steps() - self.steps_done())

    def row(self, now: float | None = None) -> dict[str, Any]:
        """The log line of the epoch so far; reading the means waits for the device. `now` is the clock's end."""
        means = self.meter.means()
        images = self.meter.count * self.loader.batch_size * self.config.train.processes
        seconds = self.epoch_seconds + (now or time.perf_counter()) - self._since
        epoch = (self.step - 1) // self.steps_per_epoch
        where = {"stage": self.stage.name, "epoch": epoch, "epochs": self.stage.epochs}
        return {**where, **means, "lr": self.rate, "seconds": seconds, "images_per_second": images / max(seconds, 1e-9)}

    def end_epoch(self, journal: log.Log, now: float | None = None) -> None:
        """Log line, validation and checkpoint, where due; `now` is when the epoch ended."""
        row, train = self.row(now), self.config.train
        epoch, last = row["epoch"] + 1, row["epoch"] + 1 == self.stage.epochs
        self.seconds, self.epoch_seconds = self.seconds + row["seconds"], 0.0
        self.meter.reset()
        self.gradients.end_epoch(self.method)
        scored = "accuracy" in row  # SupCon's first stage has no classifier to score
        if self.data.val is not None and scored and (epoch % train.validate_every == 0 or last):
            row["val_accuracy"] = balanced_accuracy(
                self.method, self.data.val, self.views, self.device, train.batch_size
            )
        journal.epoch(self.steps_done(), row, self.seconds_left())
        if epoch % train.checkpoint_every == 0 or last:
            self.save()
        self.start_clock()

    def save(self) -> None:
        """Everything that the next step depends on."""
        if self.meter.count:
            self.meter.means()  # never replaces a good checkpoint by a spoilt one
        state = {
            "stage": self.stage_index,
            "step": self.step,
            "seconds": self.seconds,
            "epoch_seconds": self.epoch_seconds + (time.perf_counter() - self._since if self.meter.count else 0.0),
            "precision": precision(self.config.train, self.device),
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "meter": self.meter.state(),
            "gradients": self.gradients.state(),
            "rng": distributed.of_each(torch.get_rng_state()),
            "checksum": self.data.checksum,
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = distributed.of_each(torch.cuda.get_rng_state())
        distributed.by_first(self._write, state)

    def _write(self, state: dict[str, Any]) -> None:
        """The checkpoint last: files of epochs may be ahead of it, and are then cut, but never behind."""
        self.gradients.write(self.folder / run_folder.GRADIENTS)
        checkpoint.save(self.folder / run_folder.CHECKPOINT, state)

    def restore(self) -> bool:
        """Go to where the checkpoint stands, if there is one."""
        path = self.folder / run_folder.CHECKPOINT
        found = os.path.lexists(path)
        if found:
            state = checkpoint.load(path, self.device, self.method.state_dict())
            try:
                self._restore(state, path)
            except UserError:
                raise
            except Exception as error:  # values of other kinds fail in many ways
                raise UserError(
                    f"{path} is no checkpoint of this run: delete its run folder to start anew", kind="damaged-file"
                ) from error
        distributed.by_first(self._cut, self.epochs_before() + self.step // self.steps_per_epoch)
        return found

    def _cut(self, epochs: int) -> None:
        """What was written of later epochs will be written again."""
        log.truncate(self.folder / run_folder.LOG, epochs)
        self.gradients.read(self.folder / run_folder.GRADIENTS, epochs)

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        if state["checksum"] != self.data.checksum:
            raise UserError(
                f"{path} was trained on other images (checksum {state['checksum']}): use its --data.root",
                kind="mismatch",
            )
        if state["precision"] != precision(self.config.train, self.device):
            raise UserError(
                f"{path} was trained in {state['precision']}: add --train.precision {state['precision']}",
                kind="mismatch",
            )
        if wrong := find_error(state, {"stage": count, "step": count, "seconds": amount, "epoch_seconds": amount}):
            raise ValueError(wrong)
        self.enter(state["stage"])
        if not 0 <= state["step"] <= self.steps_left().stop:
            raise ValueError("no such step")
        self.step, self.seconds, self.epoch_seconds = state["step"], state["seconds"], state["epoch_seconds"]
        self.method.load_state_dict(state["method"])
        # The rate and the kernel are this device's, whatever the checkpoint came from.
        here = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": here})
        check_optimizer(self.optimizer)
        self.meter.restore(state["meter"])
        self.gradients.restore(state.get("gradients", {}))
        torch.set_rng_state(distributed.own(state["rng"]).cpu())
        if "cuda_rng" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(distributed.own(state["cuda_rng"]).cpu())


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless every stored average has the shape of its parameter; `step` is a number or a single value."""
    for parameter, averages in optimizer.state.items():
        for name, value in averages.items():
            if name == "step":
                fits = type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
            else:
                fits = value is None or (isinstance(value, Tensor) and value.shape == parameter.shape)
            if not fits:
                raise ValueError(f"{name} of the optimizer does not fit its parameter")
