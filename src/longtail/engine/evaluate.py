"""Evaluation of a trained network: predictions on the test set, metrics, k-NN on features, latency, and their files."""

import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail import files, methods, run_folder
from longtail.config import Config
from longtail.data.lazy_images import class_counts
from longtail.data.loader import iterate_frames
from longtail.data.sources import DataSet, Split, load
from longtail.distributed import all_gather, is_main_process, rank, run_on_main, world_size
from longtail.engine import checkpoint
from longtail.engine.device import choose_device, preserve_global_settings, to_device
from longtail.engine.examples import write_examples
from longtail.engine.predictions import LOGITS_AT_ONCE, Calibration, Predictions, calibrate, compute_logits, predict
from longtail.errors import RunError, UserError, check_is_path, disk_full_as_user_error, error_text
from longtail.metrics import TRAINING_COSTS, evaluate_predicted_classes, evenly_spaced
from longtail.models.adapters import frozen_checksum, trainable_tensors
from longtail.progress import log_info, open_progress
from longtail.suspects import (
    FEATURES,
    NO_SUSPECTS,
    PREDICTIONS,
    SUSPECTS,
    Suspects,
    find_suspects,
    read_splits,
    write_suspects,
)
from longtail.text import pluralize
from longtail.views import Views

KNN = 20
"""The number of neighbors."""
KNN_IMAGES = 100_000
"""The largest number of training images among which neighbors are searched; if there are more, evenly spaced ones are used."""
KNN_TAU = 0.07
"""A neighbor votes with the weight exp(cosine similarity / KNN_TAU)."""
MAX_STORED_FEATURES = 10_000
"""The largest number of test images whose features are stored."""
FROZEN_CHECKSUM = "frozen"
"""The key of the checksum of the frozen tensors in the metadata of adapter.safetensors."""
MAX_CHECKED_WITHOUT_FILES = 2_000
"""The largest test set that is checked for label errors and duplicates if its images are not files that a user can edit."""
LATENCY_BATCH = 64
LATENCY_FEW = 8
"""The number of images that the time of a slow network on the CPU is measured with."""
LATENCY_BLOCK = 20
"""The number of passes of which a median is computed, so that other work of the machine has little influence."""
LATENCY_SECONDS = 0.5
"""The total time after which no further pass is made; a network that takes longer for a batch is slow."""


class EvaluationFeatures(NamedTuple):
    """The features that a network is evaluated on: of the possible neighbors among the training images, and of the test set."""

    train_ND: Tensor
    y_N: Tensor
    test_MD: Tensor


class Evaluator:
    """Evaluates a method on a data set, with the views and batch size of its run."""

    def __init__(
        self,
        method: methods.Method,
        data: DataSet,
        views: Views,
        device: torch.device,
        batch: int,
        stored: Mapping[int, Tensor] | None = None,
        is_verbose: bool = False,
        latencies: dict[str, float] | None = None,
    ) -> None:
        """Create an evaluator.

        Args:
            method: The method.
            data: The images.
            views: Makes views without augmentation.
            device: The device of the method.
            batch: The number of images that are processed at a time.
            stored: Features that are known already, by the `id` of their split.
            is_verbose: Whether `finish` and `repeat` log what they do and display their progress.
            latencies: Latencies that are known already, by the structure of the network; a new one is added.
        """
        self.is_verbose = is_verbose
        self.method, self.data, self.views, self.device, self.batch = method, data, views, device, batch
        self.stored = stored or {}
        self.latencies = {} if latencies is None else latencies

    def features(self, source: Split, indices: np.ndarray | None = None, description: str | None = None) -> Tensor:
        """Return the features of images without augmentation. With several processes, each computes a part.

        Args:
            source: The split of the images.
            indices: The numbers of the images; None for all.
            description: The text of the progress display; None displays none.
        """
        every = np.arange(len(source.labels)) if indices is None else indices
        if id(source) in self.stored:
            return self.stored[id(source)][torch.from_numpy(every)]
        mine = every[rank_slice(len(every), rank(), world_size())]
        parts: list[Tensor] = []
        with in_test_mode(self.method), self._open_progress(len(mine), description) as advance:
            for images in iterate_frames(source, mine, self.batch, self.device):
                parts.append(self.method.features(self.views.plain(*images)))
                advance(len(parts[-1]))
        return all_gather(torch.cat(parts))[: len(every)]

    def _open_progress(
        self, images: int, description: str | None
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        if description is None or not self.is_verbose:
            return contextlib.nullcontext(lambda _: None)
        return open_progress(images, description, "images")

    def _log(self, message: str) -> None:
        if self.is_verbose and is_main_process():
            log_info(message)

    def balanced_accuracy(self, source: Split) -> float:
        """Return the mean accuracy of the classes in percent: validation splits are as long-tailed as the training images."""
        x_NF, classes = self.features(source), len(source.class_names)
        with in_test_mode(self.method):
            guess_N = torch.cat([logits.argmax(1) for logits in compute_logits(self.method.classify, x_NF, classes)])
        hits_C = class_counts(source.labels[guess_N.cpu().numpy() == source.labels], source.class_names)
        return float(np.mean((100 * (hits_C / np.maximum(source.counts, 1)))[source.counts > 0]))

    def evaluation_features(self) -> EvaluationFeatures:
        """Return the features of all test images, and of the training images that can be neighbors."""
        train = self.data.train
        known = evenly_spaced(len(train.labels), KNN_IMAGES)
        self._log(f"evaluating on {pluralize(len(self.data.test.labels), 'test image')}")
        train_ND = self.features(train, known, "features of the training images")
        y_N = torch.from_numpy(train.labels[known]).to(self.device)
        return EvaluationFeatures(train_ND, y_N, self.features(self.data.test, None, "evaluating the test images"))

    def measure(self, found: EvaluationFeatures) -> tuple[dict[str, Any], Predictions]:
        """Return the metrics, and the predictions on the test set that they are computed from."""
        method, data = self.method, self.data
        with in_test_mode(method):
            predictions = predict(method.classify, found.test_MD, len(data.counts))
            extra = method.extra_metrics(found.test_MD)
        truth = data.test.labels, data.counts, data.train.class_names
        metrics = evaluate_predicted_classes(predictions.guess_N, predictions.confidence_N, *truth)
        y_M = torch.from_numpy(data.test.labels).to(self.device)
        metrics["knn_top1"] = knn_top1(found.train_ND, found.y_N, found.test_MD, y_M)
        structure = repr(method.net)
        if structure not in self.latencies:
            self.latencies[structure] = latency(method, data.test, self.views, self.device)
        metrics["latency_b64"] = self.latencies[structure]
        return metrics | extra, predictions

    def finish(self, folder: Path, cost: dict[str, Any]) -> dict[str, Any]:
        """Evaluate the network of the last epoch and write the files of a finished run; return the metrics.

        Several processes compute the features, and the main process does the rest. metrics.json is written last and marks the
        run as finished.

        Args:
            folder: The run folder.
            cost: The cost of training: `seconds`, `setup_seconds` (compiling and capturing), `together` (the number of seeds
                that shared the device and these seconds), and `peak_memory` (in bytes, of all these seeds).
        """
        found, val_NF = self.evaluation_features(), self.validation_features()
        return run_on_main(self._write_finished, folder, cost, found, val_NF)

    def _write_finished(
        self, folder: Path, cost: dict[str, Any], found: EvaluationFeatures, val_NF: Tensor | None
    ) -> dict[str, Any]:
        weights = {name: tensor.contiguous() for name, tensor in self.method.net.state_dict().items()}
        files.write_bytes(folder / run_folder.MODEL, safetensors.torch.save(weights))
        if self.method.net.trunk.is_pretrained and self.method.net.trunk.frozen_params:
            trained = {name: weights[name] for name in trainable_tensors(self.method.net)}
            checksum = {FROZEN_CHECKSUM: frozen_checksum(self.method.net)}
            files.write_bytes(folder / run_folder.ADAPTER, safetensors.torch.save(trained, metadata=checksum))
        return self._write_results(folder, cost, found, val_NF)

    def _write_results(
        self, folder: Path, cost: dict[str, Any], found: EvaluationFeatures, val_NF: Tensor | None
    ) -> dict[str, Any]:
        metrics, predictions = self.measure(found)
        metrics |= cost
        self._log(f"writing the results to {folder}")
        self.write_calibration(folder, val_NF)
        write_results(folder, self.data, metrics, predictions, found.test_MD.cpu().numpy())
        return metrics

    def repeat(self, folder: Path, cost: dict[str, Any]) -> dict[str, Any]:
        """Evaluate a stored network again and replace its result files; return the metrics.

        Args:
            folder: The run folder.
            cost: The cost of training, as `finish` stored it.
        """
        return self._write_results(folder, cost, self.evaluation_features(), self.validation_features())

    def validation_features(self) -> Tensor | None:
        """Return the features of the validation images; None if there are none."""
        return self.features(self.data.val) if self.data.val else None

    def write_calibration(self, folder: Path, x_NF: Tensor | None) -> None:
        """Fit the temperature to the validation images and write it, if there are any. The test set is never used for this.

        Args:
            folder: The run folder.
            x_NF: The features of the validation images.
        """
        val = self.data.val
        if val is None or x_NF is None:
            return
        y_N = torch.from_numpy(val.labels).to(x_NF.device)
        with in_test_mode(self.method):
            found: Calibration = calibrate(
                lambda: compute_logits(self.method.classify, x_NF, len(val.class_names)), y_N, self.method.prior()
            )
        files.write_json(folder / run_folder.CALIBRATION, found._asdict())


@contextlib.contextmanager
def in_test_mode(method: methods.Method) -> Iterator[None]:
    """Switch to evaluation mode, without gradients and without torch.compile, which would take longer than it saves."""
    was_training = method.training
    method.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        method.train(was_training)


def rank_slice(n: int, rank: int, world: int) -> np.ndarray:
    """Return the rows of a rank. All ranks have the same number of rows, so the last row may be repeated.

    Args:
        n: The number of rows.
        rank: The rank.
        world: The number of ranks.
    """
    each = -(-n // world)
    return (rank * each + np.arange(each)).clip(max=n - 1)


@torch.no_grad()
def knn_top1(train_ND: Tensor, y_N: Tensor, test_MD: Tensor, y_M: Tensor, k: int = KNN) -> float:
    """Return the accuracy in percent of weighted nearest neighbors by cosine similarity.

    Args:
        train_ND: The features of the training images, among which neighbors are searched.
        y_N: Their labels.
        test_MD: The features of the test images.
        y_M: Their labels.
        k: The number of neighbors.
    """
    train_ND, test_MD = F.normalize(train_ND.float()), F.normalize(test_MD.float())
    k, right = min(k, len(y_N)), 0
    votes_C = torch.zeros(int(y_N.max()) + 1, device=y_N.device)
    rows = max(1, min(1024, LOGITS_AT_ONCE // max(len(votes_C), len(y_N))))
    for chunk_MD, y in zip(test_MD.split(rows), y_M.split(rows), strict=True):
        similarity, index = (chunk_MD @ train_ND.T).topk(k)
        votes_MC = votes_C.repeat(len(y), 1).scatter_add(1, y_N[index], (similarity / KNN_TAU).exp())
        right += int((votes_MC.argmax(1) == y).sum())
    return 100 * right / len(y_M)


def latency(method: methods.Method, source: Split, views: Views, device: torch.device, repeats: int = 100) -> float:
    """Return the milliseconds that the deployed network takes for 64 images on the device: the smallest median of a block.

    The images are taken from the whole set, because the time of a router depends on them. Nothing is compiled. The time of a
    network that is slow on the CPU is computed from that of a few images, because 64 would take seconds.

    Args:
        method: The method.
        source: The images.
        views: Makes views without augmentation.
        device: The device of the method.
        repeats: The largest number of passes.
    """
    if device.type == "cpu":
        few = time_passes(method, read_batch(source, LATENCY_FEW, views, device), 3, math.inf)
        seconds = min(few[1:]) * LATENCY_BATCH / LATENCY_FEW
        if seconds > LATENCY_SECONDS:
            return 1000 * seconds
    warm_up = 3 if device.type == "cuda" else 1  # passes in which kernels are chosen and caches filled
    x = read_batch(source, LATENCY_BATCH, views, device)
    steady = time_passes(method, x, repeats + warm_up, LATENCY_SECONDS, 2 * warm_up)[warm_up:]
    blocks = [steady[i : i + LATENCY_BLOCK] for i in range(0, len(steady), LATENCY_BLOCK)]
    return 1000 * min(statistics.median(block) for block in blocks if len(block) == LATENCY_BLOCK or len(blocks) == 1)


def read_batch(source: Split, images: int, views: Views, device: torch.device) -> Tensor:
    """Return the plain views of evenly spaced images, which are repeated if there are fewer.

    Args:
        source: The images.
        images: The size of the batch.
        views: Makes the views.
        device: The device of the result.
    """
    chosen = np.linspace(0, len(source.labels) - 1, images).round().astype(int)
    return views.plain(*next(iterate_frames(source, chosen, images, device)))


def time_passes(method: methods.Method, x: Tensor, most: int, seconds: float, fewest: int = 1) -> list[float]:
    """Return the seconds of each pass of a network.

    Args:
        method: The method.
        x: The input.
        most: The largest number of passes.
        seconds: The total time after which no further pass is made.
        fewest: The number of passes that are made in any case.
    """
    if any(p.is_contiguous(memory_format=torch.channels_last) for p in method.parameters() if p.dim() == 4):
        x = x.to(memory_format=torch.channels_last)
    times: list[float] = []
    with in_test_mode(method):
        while len(times) < most and (sum(times) < seconds or len(times) < fewest):
            start = time.perf_counter()
            method(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return times


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the GPU if there is one, otherwise of the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write_results(
    folder: Path, data: DataSet, metrics: dict[str, Any], predictions: Predictions, features: np.ndarray
) -> None:
    """Write the result files of a run, metrics.json last.

    Args:
        folder: The run folder.
        data: The images.
        metrics: The content of metrics.json.
        predictions: The predictions on the test set.
        features: The features of the test set.
    """
    labels, ids = data.test.labels, np.asarray(data.test.ids)
    files.write_arrays(folder / PREDICTIONS, predictions.kept | {"labels": labels, "ids": ids})
    chosen = evenly_spaced(len(labels), MAX_STORED_FEATURES)
    subset = to_float16(features[chosen])
    files.write_arrays(folder / FEATURES, {"features": subset, "labels": labels[chosen], "ids": ids[chosen]})
    write_examples(folder / "examples", data, predictions.guess_N, write_image_checks(folder, data))
    files.write_json(folder / run_folder.METRICS, metrics)


def to_float16(x: np.ndarray) -> np.ndarray:
    """Convert features to float16. Values from 65,520 become infinite; images with such features are not checked."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def write_image_checks(folder: Path, data: DataSet) -> Suspects:
    """Find suspected label errors and near-duplicates among the stored features, and write them to suspects.csv.

    Large data sets that do not consist of files, such as CIFAR, are left out.

    Args:
        folder: The run folder.
        data: The images.
    """
    names = data.train.class_names
    has_files = np.asarray(data.test.ids).dtype.kind == "U"
    if not has_files and len(data.test.labels) > MAX_CHECKED_WITHOUT_FILES:
        return NO_SUSPECTS
    suspects = find_suspects(read_splits(folder, len(names)))
    write_suspects(folder / SUSPECTS, suspects, names)
    return suspects


def evaluate(run: Path | str, data_root: Path | None = None, device: str = "auto") -> dict[Path, dict[str, Any]]:
    """Evaluate the stored network of each finished run again, as `longtail eval` does; return the metrics by run folder.

    Args:
        run: A run folder, or a folder above run folders.
        data_root: The folder of the images; None for the one in the configuration.
        device: "auto", "cuda" or "cpu".
    """
    check_is_path(run, "run")
    results = {}
    for record in run_folder.read_finished(run):
        if not os.access(record.folder, os.W_OK):
            raise UserError(
                f"cannot write to {record.folder}: copy the run to a folder where its new metrics can be written",
                kind="not-writable",
            )
        try:
            with disk_full_as_user_error(record.folder), preserve_global_settings():
                results[record.folder] = evaluate_one(record, data_root, device)
        except OSError as error:
            where = record.folder if error.filename is None else error.filename
            raise RunError(
                f"cannot evaluate {record.folder}: {where}: {error_text(error)}: check the disk",
                kind="unsafe-file" if isinstance(error, files.RefusedFile) else "not-writable",
            ) from error
    return results


def evaluate_one(record: run_folder.FinishedRun, data_root: Path | None, device_name: str) -> dict[str, Any]:
    """Evaluate the stored network of one run again; `evaluate` describes the arguments."""
    config, device = record.config, choose_device(device_name, "--device")
    fetch = (
        config.data.download and data_root is not None
    )  # never download into a folder that a stored configuration names
    data = load(replace(config.data, root=data_root or config.data.root, download=fetch))
    stored = record.environment["data"]["checksum"]
    if data.checksum != stored:
        raise UserError(
            f"{record.folder} was trained on other images (checksum {stored}): give their folder as --data-root",
            kind="mismatch",
        )
    method = load_stored_network(record.folder / run_folder.MODEL, config, data.train.counts, device)
    views = Views(config.views, config.data.image_size)
    cost = {key: record.metrics[key] for key in TRAINING_COSTS if key in record.metrics}
    return Evaluator(method, data, views, device, config.train.batch_size, is_verbose=True).repeat(record.folder, cost)


def load_stored_network(
    path: Path, config: Config, counts: Any, device: torch.device, stored_name: Callable[[str], str] = str
) -> methods.Method:
    """Return the method of a configuration with stored weights.

    If a run folder has only the small file of the trained tensors, the others are loaded as for a new run.

    Args:
        path: The safetensors file of the weights.
        config: The configuration.
        counts: The number of training images of each class.
        device: The device.
        stored_name: Maps the name of a tensor to its name in the file.
    """
    adapter = path.with_name(run_folder.ADAPTER)
    is_small = not os.path.lexists(path) and os.path.lexists(adapter)
    try:
        method = to_device(methods.make(config, counts, stored=not is_small), config, device)
    except (RuntimeError, MemoryError, ValueError, TypeError, AssertionError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot create the network of {path} ({reason}): check its configuration", kind="conflict"
        ) from error
    method.set_stage(method.stages[-1])
    if is_small:
        load_trained_tensors(adapter, method, device)
    else:
        method.net.load_state_dict(checkpoint.load_weights(path, method.net.state_dict(), device, stored_name))
    return method


def load_trained_tensors(path: Path, method: methods.Method, device: torch.device) -> None:
    """Load the trained tensors of a network, whose frozen tensors must be those that it was trained with.

    Args:
        path: The safetensors file.
        method: The method, with the frozen tensors.
        device: The device.
    """
    method.net.load_state_dict(checkpoint.load_weights(path, trainable_tensors(method.net), device), strict=False)
    with safetensors.safe_open(os.fspath(path), framework="pt") as stored:
        found = (stored.metadata() or {}).get(FROZEN_CHECKSUM)
    if found != frozen_checksum(method.net):
        raise UserError(
            f"{path} was trained with other pretrained weights: copy {run_folder.MODEL} of its run folder as well",
            kind="mismatch",
        )
