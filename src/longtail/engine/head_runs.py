"""Runs whose backbone is frozen and whose features are stored (`--data.cached_views`): select settings, train heads, evaluate.

The features of all images are computed once. Cross-validation on the training images selects one of several configurations and
calibrates the probabilities. Then a head is trained for each seed on all training images, and evaluated on the test images like
any other network. A head takes seconds, so these runs have no checkpoints: an interrupted run is trained again from its start,
with the same result.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail import files, methods, run_folder
from longtail.config import Config, DistillationSettings, differences, to_dict
from longtail.data.sources import DataSet
from longtail.distributed import is_distributed
from longtail.engine.cross_validation import OutOfFold, Selection, calibrate_out_of_fold, select_config
from longtail.engine.device import to_device
from longtail.engine.environment import describe_model, write_start_files
from longtail.engine.evaluate import Evaluator, peak_memory, to_float16
from longtail.engine.features import Extraction, FrozenFeatures
from longtail.engine.fit_head import check_supports_features, count_epochs, fit_head, make_feature_method
from longtail.engine.loggers import Log, Loggers, truncate_log
from longtail.engine.run_lock import contains_run
from longtail.engine.signals import StopSignals
from longtail.engine.teachers import stored_teacher_logits
from longtail.errors import Interrupted, UserError
from longtail.losses.numerics import percent_correct
from longtail.models.backbones import Trunk
from longtail.models.logistic import fit_logistic_regression
from longtail.progress import log_info, open_progress
from longtail.suspects import TRAINING_FEATURES
from longtail.text import pluralize
from longtail.views import Views


@dataclass
class HeadRun:
    """The run of one seed. It has the attributes of a `Trainer` that describe a run."""

    config: Config
    seed: int
    data: DataSet
    folder: Path
    device: torch.device
    method: methods.Method
    step_mode: str = "cached"


class FrozenBackbone:
    """A frozen backbone and its features of a data set, which the heads of several methods and seeds share."""

    def __init__(self, config: Config, data: DataSet, device: torch.device) -> None:
        """Create the backbone. The features are computed when they are needed.

        Args:
            config: The configuration; the settings of method and head are not used.
            data: The images.
            device: The device for the features and the heads.
        """
        check_config(config)
        self.data, self.device = data, device
        start = time.perf_counter()
        self.trunk = make_frozen_trunk(config, data, device)
        self.extraction = Extraction(config, self.trunk, device)
        self.y_N = torch.from_numpy(data.train.labels).to(device)
        self.latencies: dict[str, float] = {}  # see Evaluator
        self.seconds = time.perf_counter() - start
        self._features: FrozenFeatures | None = None

    def compute_features(self, num_views: int, show: bool) -> FrozenFeatures:
        """Return the features on the device. They are computed, or read from the cache, at the first call.

        Args:
            num_views: Number of augmented views of each training image.
            show: Display the progress.
        """
        if self._features is None or len(self._features.train_VNF) != 1 + num_views:
            start = time.perf_counter()
            train_VNF, val_NF, test_NF = self.extraction.run_data_set(self.data, num_views, show)
            val_NF = None if val_NF is None else val_NF.to(self.device)
            self._features = FrozenFeatures(train_VNF.to(self.device), val_NF, test_NF.to(self.device))
            self.seconds += time.perf_counter() - start
        return self._features

    @functools.cached_property
    def logistic_top1(self) -> float:
        """The test accuracy in percent of a logistic regression on the features of the plain images."""
        assert self._features is not None
        x_NF, test_NF = self._features.train_VNF[0], self._features.test_NF
        weight_CF, bias_C = fit_logistic_regression(x_NF, self.y_N, len(self.data.train.counts))
        guess_M = (test_NF @ weight_CF.T + bias_C).argmax(1)
        return percent_correct(guess_M, torch.from_numpy(self.data.test.labels).to(self.device)).item()


class Backbones:
    """The frozen backbones of several runs, by the settings of data, views and network on which their features depend."""

    def __init__(self) -> None:
        self.made: dict[str, FrozenBackbone] = {}

    def find(self, config: Config, data: DataSet, device: torch.device) -> FrozenBackbone:
        """Return the backbone of a configuration. It is created at the first call.

        Args:
            config: The configuration.
            data: The images.
            device: The device for the features and the heads.
        """
        check_config(config)
        settings = to_dict(config)
        ignored = {"cached_views", "folds"}  # a backbone has features of any number of views
        parts = {key: value for key, value in settings["data"].items() if key not in ignored}
        seed = config.train.seeds[0]
        key = json.dumps([parts, settings["views"], settings["model"], seed, str(device)], sort_keys=True, default=str)
        if key not in self.made:
            self.made[key] = FrozenBackbone(config, data, device)
        return self.made[key]


class HeadTrainer:
    """Trains the heads of all seeds of a configuration on features that are computed once."""

    def __init__(self, config: Config, backbone: FrozenBackbone, is_verbose: bool = False) -> None:
        """Compute the features, or read them from the cache.

        Args:
            config: The configuration.
            backbone: The frozen backbone with the images.
            is_verbose: Whether messages are printed.
        """
        check_config(config)
        self.config, self.backbone, self.is_verbose = config, backbone, is_verbose
        self.data, self.device, self.trunk, self.y_N = backbone.data, backbone.device, backbone.trunk, backbone.y_N
        self.selection: Selection | None = None
        self.features = backbone.compute_features(config.data.cached_views, is_verbose)
        self.selection_seconds, self.teaching_seconds = 0.0, 0.0
        self.teacher_VNC: Tensor | None = None
        """The logits of the teachers of a distillation for the stored views."""
        if isinstance(config.method, DistillationSettings):
            start = time.perf_counter()
            views = config.data.cached_views
            self.teacher_VNC = stored_teacher_logits(config, self.data, self.device, views, is_verbose)
            self.teaching_seconds = time.perf_counter() - start

    def select(self, candidates: Sequence[Config]) -> None:
        """Select a configuration by cross-validation, and show the results.

        Args:
            candidates: The configurations, in the order of preference. They differ in the settings of the head only.
        """
        folds = self.config.data.folds
        if not folds or int(self.data.train.counts.max()) < 2:
            return
        start = time.perf_counter()
        if self.is_verbose:
            log_info(f"cross-validation: {pluralize(len(candidates), 'candidate')}, {folds} folds")
        y_N, counts_C, seed = self.y_N, self.data.train.counts, self.config.train.seeds[0]
        with self._show_epochs(candidates, folds) as advance:
            self.selection = select_config(self.features.train_VNF, y_N, candidates, counts_C, folds, seed, advance)
        self.config = candidates[self.selection.selected]
        self.selection_seconds = time.perf_counter() - start
        if self.is_verbose:
            for line in describe_selection(self.selection):
                log_info(line)

    def _show_epochs(
        self, candidates: Sequence[Config], folds: int
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Return the progress display of a cross-validation, which counts the epochs of all fits."""
        counts_C = torch.from_numpy(self.data.train.counts)
        heads = [make_feature_method(config, counts_C, self.trunk.width) for config in candidates]
        epochs = folds * sum(max(count_epochs(method), 1) for method in heads)
        return open_progress(epochs, "cross-validation", "epochs", self.is_verbose)

    def train(self, seed: int, folder: Path) -> None:
        """Train and evaluate the head of one seed in a locked folder.

        Args:
            seed: The seed.
            folder: The run folder.
        """
        config, counts_C = self.config, torch.from_numpy(self.data.train.counts)
        run = HeadRun(
            config, seed, self.data, folder, self.device, make_feature_method(config, counts_C, self.trunk.width)
        )
        run.method.net.trunk = self.trunk
        if contains_run(folder):  # an interrupted run starts again
            truncate_log(folder / run_folder.LOG, 0)
        write_start_files(run)
        if self.is_verbose:
            log_info(f"{folder}: {describe_model(run)}")
        with Loggers(folder, config, seed) as loggers, StopSignals() as stop:
            start = time.perf_counter()
            epochs = count_epochs(run.method)
            with Log(
                folder / run_folder.LOG,
                epochs,
                config.log.progress,
                f"{config.method.label}, seed {seed}",
                loggers.send_rows,
            ) as log:
                rows = EpochRows(log, len(self.y_N), epochs, stop, folder)
                run.method = self.fit(seed, rows)
            cost = {
                "seconds": time.perf_counter() - start,
                "setup_seconds": self.backbone.seconds + self.selection_seconds + self.teaching_seconds,
                "together": 1,
                "peak_memory": peak_memory(self.device),
            }
            loggers.send_metrics(self.evaluate(run, cost))

    def fit(self, seed: int, rows: "EpochRows") -> methods.Method:
        """Return the trained method, with the real backbone.

        Args:
            seed: The seed.
            rows: Writes the log.
        """
        val = None
        if self.data.val is not None and self.features.val_NF is not None:
            val = self.features.val_NF, torch.from_numpy(self.data.val.labels).to(self.device)
        x_VNF, classes = self.features.train_VNF, len(self.data.train.counts)
        method = fit_head(x_VNF, self.y_N, self.config, classes, seed, val, rows.write, stored_VNC=self.teacher_VNC)
        method.net.trunk = self.trunk
        return method

    def evaluate(self, run: HeadRun, cost: dict[str, Any]) -> dict[str, Any]:
        """Write the files of a finished run, and return its metrics.

        Args:
            run: The run.
            cost: The cost of training; see `Evaluator.finish`.
        """
        stored = {id(self.data.train): self.features.train_VNF[0], id(self.data.test): self.features.test_NF}
        if self.data.val is not None and self.features.val_NF is not None:
            stored[id(self.data.val)] = self.features.val_NF
        views = Views(self.config.views, self.config.data.image_size)
        batch = self.config.train.batch_size
        latencies = self.backbone.latencies
        evaluator = Evaluator(run.method, self.data, views, self.device, batch, stored, self.is_verbose, latencies)
        if self.selection is not None:
            files.write_json(run.folder / run_folder.CROSS_VALIDATION, self.selection.to_dict())
            write_training_features(run.folder, self.data, self.features.train_VNF[0], self.selection.out_of_fold)
            if self.data.val is None:
                files.write_json(run.folder / run_folder.CALIBRATION, calibrate_out_of_fold(self.selection.out_of_fold))
        return evaluator.finish(run.folder, cost | {"logistic_top1": self.backbone.logistic_top1})


class EpochRows:
    """Completes the rows of `fit_head` by times, writes them, and stops the training at a signal."""

    def __init__(self, log: Log, images: int, epochs: int, stop: StopSignals, folder: Path) -> None:
        """Create a writer.

        Args:
            log: The log.
            images: The number of training images.
            epochs: The number of epochs of all stages.
            stop: Records the signal that requests to stop.
            folder: The run folder, for messages.
        """
        self.log, self.images, self.epochs, self.stop, self.folder = log, images, epochs, stop, folder
        self.done = 0
        self.start = self.since = time.perf_counter()

    def write(self, row: dict[str, Any]) -> None:
        """Write the row of an epoch."""
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        self.done += 1
        row |= {"seconds": seconds, "images_per_second": self.images / max(seconds, 1e-9)}
        left = (now - self.start) / self.done * (self.epochs - self.done)
        self.log.epoch(self.done, row, left)
        if self.stop.signum:
            raise Interrupted(f"stopped in {self.folder}; continue with --resume", self.stop.signum)


def check_config(config: Config) -> None:
    """Raise a UserError if a configuration cannot be trained on stored features."""
    if config.model.trainable != "head":
        raise UserError(
            f"--data.cached_views {config.data.cached_views} requires a frozen backbone: add --model.trainable head, or use "
            "--data.cached_views 0",
            kind="conflict",
        )
    if is_distributed():
        raise UserError(
            "--data.cached_views requires a single process: start without torchrun, or use --data.cached_views 0",
            kind="conflict",
        )
    if config.log.gradients:
        raise UserError(
            "--log.gradients is not available with --data.cached_views: use --log.no_gradients, or --data.cached_views 0",
            kind="conflict",
        )
    check_supports_features(methods.find_method(config.method))
    if isinstance(config.method, DistillationSettings):
        check_distillation(config.method, config.data.folds)


def check_distillation(settings: DistillationSettings, folds: int) -> None:
    """Raise a UserError for settings of a distillation that stored features do not allow.

    Args:
        settings: The settings.
        folds: The value of `--data.folds`.
    """
    if settings.mixture != "none":
        raise UserError(
            f"--method.mixture {settings.mixture} mixes images, and the features of the images are stored: add "
            "--data.cached_views 0",
            kind="conflict",
        )
    if settings.contrast:
        raise UserError(
            f"--method.contrast {settings.contrast:g} needs the teachers in each step: add --data.cached_views 0",
            kind="conflict",
        )
    if folds:
        raise UserError(
            f"--data.folds {folds}: the teachers were trained on the images of every fold, so that cross-validation would be "
            "biased: use --data.folds 0",
            kind="conflict",
        )


def make_frozen_trunk(config: Config, data: DataSet, device: torch.device) -> Trunk:
    """Return the backbone of a configuration on its device, in evaluation mode.

    Args:
        config: The configuration.
        data: The images.
        device: The device.
    """
    torch.manual_seed(config.train.seeds[0])  # for a backbone with random weights
    method = to_device(methods.make(config, data.train.counts), config, device)
    return method.net.trunk.eval()


def find_stored_candidate(candidates: Sequence[Config], folders: Sequence[Path]) -> Config | None:
    """Return the candidate with which existing runs were started; None if there are no runs or none matches.

    Args:
        candidates: The configurations.
        folders: The run folders of all seeds.
    """
    stored = [run_folder.load_config(folder).identity() for folder in folders if contains_run(folder)]
    matches = (c for c in candidates if all(not differences(one, c.identity()) for one in stored))
    return next(matches, None) if stored else None


def describe_selection(selection: Selection) -> list[str]:
    """Return the lines of the cross-validation table."""
    lines = []
    for number, result in enumerate(selection.results):
        groups = "  ".join(
            f"{name} {'–' if value is None else f'{value:.1f}'}"
            for name, value in (("many", result.many), ("medium", result.medium), ("few", result.few))
        )
        settings = ", ".join(
            f"{key.split('.')[-1]} {value}" for key, value in result.settings.items() if key != "method"
        )
        mark = "  selected" if number == selection.selected else ""
        if result.folds < selection.folds and not mark:
            mark = f"  dropped after {result.folds} of {selection.folds} folds"
        title = f"{result.label}{f' ({settings})' if settings else ''}"
        lines.append(f"  {title:45} {result.accuracy:5.1f} ± {result.standard_error:.1f}  {groups}{mark}")
    if selection.single_image_classes:
        lines.append(
            f"  {pluralize(selection.single_image_classes, 'class')} with a single image: used for training, not included in "
            "these accuracies"
        )
    return [
        f"balanced accuracy in {selection.folds}-fold cross-validation of the training images (± standard error):",
        *lines,
    ]


def write_training_features(folder: Path, data: DataSet, x_NF: Tensor, found: OutOfFold) -> None:
    """Write the features of the training images and their out-of-fold predictions, from which suspected label errors are found.

    Args:
        folder: The run folder.
        data: The images.
        x_NF: The features of the plain images.
        found: The predictions.
    """
    p_NC = found.logits_NC.double().softmax(1)
    rows = found.rows_N.cpu().numpy()
    files.write_arrays(
        folder / TRAINING_FEATURES,
        {
            "features": to_float16(x_NF[found.rows_N].cpu().numpy()),
            "labels": data.train.labels[rows],
            "ids": np.asarray(data.train.ids)[rows],
            "probabilities_label": p_NC.gather(1, found.y_N[:, None])[:, 0].cpu().numpy().astype(np.float16),
            "suggested": found.logits_NC.argmax(1).cpu().numpy(),
        },
    )
