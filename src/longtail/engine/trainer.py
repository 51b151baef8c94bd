"""The trainer of one seed: its state, what a checkpoint stores of it, and the host's part of a step."""

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Optional

import torch

from longtail import methods, run_folder
from longtail.config import Config
from longtail.data.loader import Loader, make_loader
from longtail.data.samplers import derive_seed
from longtail.data.sources import DataSet, Split
from longtail.distributed import is_distributed, run_on_main, stack_ranks, take_own_rank
from longtail.engine import checkpoint
from longtail.engine.batches import Batches
from longtail.engine.checkpoint import TrainerState
from longtail.engine.device import (
    check_execution,
    compile_networks,
    is_fused,
    matmul_precision,
    memory_format,
    resolve_precision,
    should_compile,
    to_device,
    uses_kernels,
)
from longtail.engine.distributed import broadcast_state, seed_per_rank
from longtail.engine.evaluate import Evaluator
from longtail.engine.loggers import Log, truncate_log
from longtail.engine.meter import GradientNorms, Meter
from longtail.engine.optim import check_optimizer, learning_rate, make_optimizer, set_learning_rate
from longtail.engine.teachers import set_teachers
from longtail.errors import UserError
from longtail.methods import Batch, Stage, StageData
from longtail.models.head_init import initialize_head
from longtail.models.weight_average import WeightAverage
from longtail.schema import amount, count, find_error
from longtail.views import Views


class Trainer:
    """Method, optimizer and batches of one seed, and the position in training: the stage, and the step in it."""

    def __init__(
        self,
        config: Config,
        seed: int,
        data: DataSet,
        folder: Path,
        device: torch.device,
        sibling: Optional["Trainer"] = None,
    ) -> None:
        """Create a trainer at the first step of the first stage.

        Args:
            config: The configuration of the run.
            seed: The seed.
            data: The images.
            folder: The run folder of the seed.
            device: The device to train on.
            sibling: A trainer of another seed on the same data, whose images in memory are shared.
        """
        self.config, self.seed, self.data, self.folder, self.device = config, seed, data, folder, device
        check_execution(config.train, device)
        self.seconds = 0.0  # training time of finished epochs, over all resumes
        self.setup_seconds = 0.0  # time for compiling and capturing in this process
        self.epoch_seconds = 0.0  # training time of the current epoch before the clock was last started
        torch.manual_seed(seed)  # for initial weights and dropout
        stored = os.path.lexists(folder / run_folder.CHECKPOINT)
        self.method: methods.Method = to_device(methods.make(config, data.train.counts, stored), config, device)
        self.method.check(data.val is not None)
        set_teachers(self.method, config, data, device, sibling.method if sibling else None)
        seed_per_rank(self.method, seed)
        self.views = Views(config.views, config.data.image_size, uses_kernels(config.train, device))
        self.evaluator = Evaluator(
            self.method,
            data,
            self.views,
            device,
            config.train.batch_size,
            is_verbose=config.log.progress != "none",
        )
        self.loader: Loader = make_loader(
            data.train,
            config.train.batch_size,
            config.train.seed_of_views(seed),
            device,
            sibling.loader if sibling else None,
        )
        self.accumulate = config.train.accumulate
        if self.accumulate > self.loader.num_batches:
            raise UserError(
                f"--train.accumulate {self.accumulate}: use at most {self.loader.num_batches}, the batches of an epoch",
                kind="conflict",
            )
        is_low = device.type == "cuda" and resolve_precision(config.train, device) == "bf16"
        self.batches = Batches(
            self.loader,
            self.views,
            self.accumulate,
            memory_format(config.train),
            torch.bfloat16 if is_low else torch.float32,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.shared: list[Batch] = []  # the batches of a step, if seeds in parallel share them (`share_batches`)
        names = [stage.name for stage in self.method.stages for _ in range(stage.epochs)]
        self.gradients = GradientNorms(config.log.gradients, len(data.train.counts), names, device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # the current step, read by the meter
        self.is_captured = device.type == "cuda" and config.train.execution != "eager" and not is_distributed()
        steps, fused = config.train.epochs * self.steps_per_epoch, is_fused(self.method)
        self.is_compiled = should_compile(config.train, device, steps, fused)
        if self.is_compiled:
            compile_networks(self.method)
        self.average = WeightAverage(self.method.net, 0)
        self.start_clock()
        self.set_stage(0)

    # Stages and steps

    def set_stage(self, stage_index: int) -> None:
        """Go to step 0 of a stage: set its trainable parameters, batches and optimizer."""
        self.stage_index, self.step = stage_index, 0
        self.stage: Stage = self.method.stages[stage_index]
        self.epoch = -1  # the last epoch that was announced to the method
        self.method.set_stage(self.stage)
        self.method.train()
        self.meter = Meter()
        if not self.stage.epochs:
            return
        start = time.perf_counter()
        self.batches.start_stage(stage_index, self.stage, self.epochs_before(), self.is_captured)
        self.setup_seconds += time.perf_counter() - start
        groups, trunk = self.method.param_groups(), self.method.net.trunk
        self.optimizer = make_optimizer(self.stage.optim, groups, trunk, self.device, is_fused(self.method))
        self.average = WeightAverage(self.method.net, self.config.train.ema)

    def start_stage(self) -> None:
        """Let the method prepare the stage. This is not repeated when a run is resumed within the stage."""
        data, model = self.stage_data(), self.config.model
        if model.head_init != "random" and self.stage is self.method.head_stage:
            initialize_head(self.method.net.head, model, data.train, self.data.train.class_names)
        self.method.on_stage_start(data)
        broadcast_state(self.method)
        self.method.train()
        self.average = WeightAverage(self.method.net, self.config.train.ema)

    def end_stage(self) -> None:
        """Deploy the averaged weights (`--train.ema`), with which the next stage or the evaluation begins."""
        self.average.deploy()

    def stage_data(self) -> StageData:
        """Return the data that a method may use at the start of a stage."""

        def features(source: Split) -> tuple[torch.Tensor, torch.Tensor]:
            return self.evaluator.features(source), torch.from_numpy(source.labels).to(self.device)

        val, rng = self.data.val, torch.Generator().manual_seed(derive_seed("begin", self.seed, self.stage_index))
        return StageData(lambda: features(self.data.train), None if val is None else lambda: features(val), rng)

    def prepare(self, step: int) -> None:
        """Do the host's part of a step: set its views and its learning rate, which depend on `step` only."""
        epoch = step // self.steps_per_epoch
        if epoch != self.epoch:
            self.method.on_epoch_start(epoch, self.stage.epochs)
            self.epoch = epoch
        self.batches.prepare(self.epochs_before() + epoch, step)
        self.clock.fill_(self.steps_done())
        self.average.set_step(step)
        self.rate = learning_rate(self.stage.optim, step, self.steps_per_epoch, self.stage.epochs)
        set_learning_rate(self.optimizer, self.rate)

    def matmul_precision(self) -> AbstractContextManager[None]:
        """Return a context that sets the precision of matrix products."""
        return matmul_precision(resolve_precision(self.config.train, self.device), self.device)

    def clip_gradients(self) -> None:
        """Scale the gradient down to the norm `--optim.clip` if it is larger."""
        if self.stage.optim.clip:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self.stage.optim.clip)

    def count_step(self) -> None:
        """Count a step, and the batches whose terms are in the meter."""
        self.step += 1
        self.meter.count += self.accumulate
        self.gradients.count += 1

    def is_stage_done(self) -> bool:
        """Return whether all steps of the stage are done."""
        return self.step >= self.stage.epochs * self.steps_per_epoch

    def epochs_before(self) -> int:
        """Return the number of epochs of the finished stages."""
        return sum(stage.epochs for stage in self.method.stages[: self.stage_index])

    def total_steps(self) -> int:
        """Return the number of steps of all stages."""
        return sum(stage.epochs for stage in self.method.stages) * self.steps_per_epoch

    def steps_done(self) -> int:
        """Return the number of completed steps of all stages."""
        return self.epochs_before() * self.steps_per_epoch + self.step

    @property
    def step_mode(self) -> str:
        """The mode in which steps are executed: "fused", "compiled", "captured" or "eager"."""
        if is_fused(self.method):
            return "fused"
        return "compiled" if self.is_compiled else "captured" if self.is_captured else "eager"

    # Time and log

    def now(self) -> float:
        """Return the time of the clock."""
        return time.perf_counter()

    def start_clock(self) -> None:
        """Measure the time of the current epoch from now on."""
        self._since = self.now()

    def seconds_left(self, since: float = 0.0) -> float:
        """Return the estimated time of the remaining steps in seconds, `since` seconds after the last epoch."""
        return (self.seconds + since) / self.steps_done() * (self.total_steps() - self.steps_done())

    def log_row(self, now: float | None = None) -> dict[str, Any]:
        """Return the log line of the current epoch up to the time `now`. Reading the means waits for the device."""
        means = self.meter.means()
        images = self.meter.count * self.loader.batch_size * self.config.train.processes
        seconds = self.epoch_seconds + (now or self.now()) - self._since
        epoch = (self.step - 1) // self.steps_per_epoch
        where = {"stage": self.stage.name, "epoch": epoch, "epochs": self.stage.epochs}
        return {**where, **means, "lr": self.rate, "seconds": seconds, "images_per_second": images / max(seconds, 1e-9)}

    def end_epoch(self, log: Log, now: float | None = None) -> None:
        """Write the log line of an epoch that ended at the time `now`, and validate and save a checkpoint if they are due."""
        row, train = self.log_row(now), self.config.train
        epoch, last = row["epoch"] + 1, row["epoch"] + 1 == self.stage.epochs
        self.seconds, self.epoch_seconds = self.seconds + row["seconds"], 0.0
        self.meter.reset()
        self.gradients.end_epoch(self.method)
        has_classifier = "accuracy" in row  # not in the first stage of SupCon
        if self.data.val is not None and has_classifier and (epoch % train.validate_every == 0 or last):
            with self.average.applied():
                row["val_accuracy"] = self.evaluator.balanced_accuracy(self.data.val)
        log.epoch(self.steps_done(), row, self.seconds_left())
        if epoch % train.checkpoint_every == 0 or last:
            self.save()
        self.start_clock()

    # Checkpoints

    def state_dict(self) -> TrainerState:
        """Return all that the next step depends on."""
        state: TrainerState = {
            "stage": self.stage_index,
            "step": self.step,
            "seconds": self.seconds,
            "epoch_seconds": self.epoch_seconds + (self.now() - self._since if self.meter.count else 0.0),
            "precision": resolve_precision(self.config.train, self.device),
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "meter": self.meter.state_dict(),
            "gradients": self.gradients.state_dict(),
            "rng": stack_ranks(torch.get_rng_state()),
            "checksum": self.data.checksum,
        }
        if self.average.decay:
            state["average"] = self.average.state_dict()
        if self.device.type == "cuda":
            state["cuda_rng"] = stack_ranks(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: TrainerState) -> None:
        """Go to the position of a stored state; raise ValueError or another error if its values do not fit."""
        if wrong := find_error(
            dict(state), {"stage": count, "step": count, "seconds": amount, "epoch_seconds": amount}
        ):
            raise ValueError(wrong)
        self.set_stage(state["stage"])
        if not 0 <= state["step"] <= self.stage.epochs * self.steps_per_epoch:
            raise ValueError("the stage does not have this step")
        self.step, self.seconds, self.epoch_seconds = state["step"], state["seconds"], state["epoch_seconds"]
        self.method.load_state_dict(state["method"])
        # Learning rate and implementation depend on this device, not on the one that wrote the checkpoint.
        here = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": here})
        check_optimizer(self.optimizer)
        self.average.load_state_dict(state.get("average", {}))
        self.meter.load_state_dict(state["meter"])
        self.gradients.load_state_dict(state.get("gradients", {}))
        torch.set_rng_state(take_own_rank(state["rng"]).cpu())
        if "cuda_rng" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(take_own_rank(state["cuda_rng"]).cpu())

    def save(self) -> None:
        """Write a checkpoint. A non-finite loss is an error, so that it does not replace a good checkpoint."""
        if self.meter.count:
            self.meter.means()
        run_on_main(self._write, self.state_dict())

    def _write(self, state: TrainerState) -> None:
        """Write the checkpoint last: the files of epochs may be ahead of it, and are then truncated, but never behind."""
        self.gradients.write(self.folder / run_folder.GRADIENTS)
        checkpoint.save(self.folder / run_folder.CHECKPOINT, state)

    def resume(self) -> bool:
        """Go to the position of the checkpoint; return whether there is one."""
        path = self.folder / run_folder.CHECKPOINT
        found = os.path.lexists(path)
        if found:
            state = checkpoint.load(path, self.device, self.method.state_dict())
            try:
                self._check_origin(state, path)
                self.load_state_dict(state)
            except UserError:
                raise
            except Exception as error:  # values of wrong types fail in many ways
                raise UserError(
                    f"{path} is not a checkpoint of this run: delete its run folder to start again", kind="damaged-file"
                ) from error
        run_on_main(self._truncate, self.epochs_before() + self.step // self.steps_per_epoch)
        return found

    def _check_origin(self, state: TrainerState, path: Path) -> None:
        """Raise a UserError if the checkpoint is from training on other images or in another precision."""
        if state["checksum"] != self.data.checksum:
            raise UserError(
                f"{path} was trained on other images (checksum {state['checksum']}): use its --data.root",
                kind="mismatch",
            )
        if state["precision"] != resolve_precision(self.config.train, self.device):
            raise UserError(
                f"{path} was trained in {state['precision']}: add --train.precision {state['precision']}",
                kind="mismatch",
            )

    def _truncate(self, epochs: int) -> None:
        """Remove the log lines and gradient norms of later epochs, which will be written again."""
        truncate_log(self.folder / run_folder.LOG, epochs)
        self.gradients.read(self.folder / run_folder.GRADIENTS, epochs)
