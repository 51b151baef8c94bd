"""What a trained network is worth: predictions on the test set, metrics, k-NN on features, latency; and the files of them."""

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail import files, methods, run_folder
from longtail.config import Config
from longtail.data import samplers
from longtail.data.lazy_images import class_counts
from longtail.data.loader import frames_of
from longtail.data.sources import DataSet, Split, load
from longtail.engine import checkpoint
from longtail.engine.calibrate import Calibration, calibrate
from longtail.engine.device import choose_device, to_device
from longtail.engine.distributed import by_first
from longtail.engine.examples import write_examples
from longtail.engine.predictions import LOGITS_AT_ONCE, Predictions, logits_of, predict
from longtail.errors import RunError, UserError, disk_full_as_user_error, error_text
from longtail.metrics import evaluate_guesses
from longtail.models.collective import gather
from longtail.views import Views

KNN = 20  # neighbors
KNN_IMAGES = 100_000  # training images that are neighbors, at most; of more, as many at equal distances
KNN_TAU = 0.07  # a neighbor votes with exp(cosine similarity / KNN_TAU)
FEATURES_KEPT = 10_000
LATENCY_BATCH = 64
LATENCY_BLOCK = 20  # passes: what else the machine does now and then is no part of the network
LATENCY_SECONDS = 0.5  # after so long fewer passes must do
COST = ("seconds", "setup_seconds", "together", "peak_memory")  # of training


@contextlib.contextmanager
def in_test_mode(method: methods.Method) -> Iterator[None]:
    """Batch norm by its averages, and heads as they deploy; without gradients. Compiling for it takes longer than it saves."""
    was_training = method.training
    method.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        method.train(was_training)


def features_of(
    method: methods.Method,
    source: Split,
    views: Views,
    device: torch.device,
    batch: int,
    chosen: np.ndarray | None = None,
) -> Tensor:
    """Trunk features of every image, or of the chosen ones, without augmentation. Several processes have a stretch each."""
    every = np.arange(len(source.labels)) if chosen is None else chosen
    mine = every[stretch(len(every), *samplers.place())]
    with in_test_mode(method):
        parts = [method.features(views.plain(*frames)) for frames in frames_of(source, mine, batch, device)]
    return gather(torch.cat(parts))[: len(every)]


def stretch(n: int, rank: int, world: int) -> np.ndarray:
    """The rows of process `rank`; all have equally many, so that behind the last row it stands again."""
    each = -(-n // world)
    return (rank * each + np.arange(each)).clip(max=n - 1)


def balanced_accuracy(method: methods.Method, source: Split, views: Views, device: torch.device, batch: int) -> float:
    """Mean over classes of the share of images recognized, in percent: validation splits are as long-tailed as the rest."""
    x_NF, classes = features_of(method, source, views, device, batch), len(source.class_names)
    with in_test_mode(method):
        guess_N = torch.cat([logits.argmax(1) for logits in logits_of(method.classify, x_NF, classes)])
    hits_C = class_counts(source.labels[guess_N.cpu().numpy() == source.labels], source.class_names)
    return float(np.mean((100 * (hits_C / np.maximum(source.counts, 1)))[source.counts > 0]))


@torch.no_grad()
def knn_top1(train_ND: Tensor, y_N: Tensor, test_MD: Tensor, y_M: Tensor, k: int = KNN) -> float:
    """Accuracy in percent of weighted nearest neighbors in cosine similarity, the training images as the memory."""
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
    """Milliseconds of the deployable network on 64 images already on the device: the median of the quietest passes in a row.

    They are real ones, spread over the set: how long a router takes depends on what it sees. Nothing is compiled, however the
    method was trained.
    """
    some = np.linspace(0, len(source.labels) - 1, LATENCY_BATCH).round().astype(int)  # fewer images come more than once
    x = views.plain(*next(frames_of(source, some, LATENCY_BATCH, device)))
    if any(p.is_contiguous(memory_format=torch.channels_last) for p in method.parameters() if p.dim() == 4):
        x = x.to(memory_format=torch.channels_last)
    times: list[float] = []
    with in_test_mode(method):
        while len(times) < repeats + 3 and (sum(times) < LATENCY_SECONDS or len(times) < 6):
            start = time.perf_counter()
            method(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    steady = times[3:]  # the first three choose kernels and fill caches
    blocks = [steady[i : i + LATENCY_BLOCK] for i in range(0, len(steady), LATENCY_BLOCK)]
    return 1000 * min(statistics.median(block) for block in blocks if len(block) == LATENCY_BLOCK or len(blocks) == 1)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU where there is one, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Seen(NamedTuple):
    """Features of the images that a network is measured by."""

    train_ND: Tensor
    y_N: Tensor
    test_MD: Tensor


def look(method: methods.Method, data: DataSet, views: Views, device: torch.device, batch: int) -> Seen:
    """At all test images, and at the training images that will be neighbors."""
    known = spread(len(data.train.labels), KNN_IMAGES)
    train_ND = features_of(method, data.train, views, device, batch, known)
    y_N = torch.from_numpy(data.train.labels[known]).to(device)
    return Seen(train_ND, y_N, features_of(method, data.test, views, device, batch))


def measure(
    method: methods.Method, data: DataSet, views: Views, device: torch.device, seen: Seen
) -> tuple[dict[str, Any], Predictions]:
    """The metrics, and the predictions on the test set they come from."""
    with in_test_mode(method):
        said, figures = predict(method.classify, seen.test_MD, len(data.counts)), method.figures(seen.test_MD)
    truth = data.test.labels, data.counts, data.train.class_names
    metrics = evaluate_guesses(said.guess_N, said.confidence_N, *truth)
    y_M = torch.from_numpy(data.test.labels).to(device)
    metrics["knn_top1"] = knn_top1(seen.train_ND, seen.y_N, seen.test_MD, y_M)
    metrics["latency_b64"] = latency(method, data.test, views, device)
    metrics |= figures
    return metrics, said


def finish(
    method: methods.Method,
    data: DataSet,
    views: Views,
    device: torch.device,
    batch: int,
    folder: Path,
    cost: dict[str, Any],
) -> dict[str, Any]:
    """Measure the last epoch's network and write the files of a finished run; metrics.json comes last and says so.

    `cost` is what training took: seconds, setup_seconds (compiling and capturing), together (the runs that shared the device
    and these seconds), peak_memory (bytes, of all of them). Several processes compute the features; the first does the rest.
    """
    seen = look(method, data, views, device, batch)
    val_NF = features_of(method, data.val, views, device, batch) if data.val else None

    def written() -> dict[str, Any]:
        weights = {name: tensor.contiguous() for name, tensor in method.net.state_dict().items()}
        files.write_bytes(folder / run_folder.MODEL, safetensors.torch.save(weights))
        metrics, said = measure(method, data, views, device, seen)
        metrics |= cost
        write_calibration(folder, method, data.val, val_NF)
        write_results(folder, data, metrics, said, seen.test_MD.cpu().numpy())
        return metrics

    return by_first(written)


def write_calibration(folder: Path, method: methods.Method, val: Split | None, x_NF: Tensor | None) -> None:
    """By the features of the validation images, where there are some; never by the test set."""
    if val is None or x_NF is None:
        return
    y_N = torch.from_numpy(val.labels).to(x_NF.device)
    with in_test_mode(method):
        found: Calibration = calibrate(
            lambda: logits_of(method.classify, x_NF, len(val.class_names)), y_N, method.prior()
        )
    files.write_json(folder / run_folder.CALIBRATION, found._asdict())


def write_results(
    folder: Path, data: DataSet, metrics: dict[str, Any], said: Predictions, features: np.ndarray
) -> None:
    labels, ids = data.test.labels, np.asarray(data.test.ids)
    files.write_arrays(folder / "predictions.npz", said.kept | {"labels": labels, "ids": ids})
    kept = spread(len(labels), FEATURES_KEPT)
    some = features[kept].astype(np.float16)
    files.write_arrays(folder / "features.npz", {"features": some, "labels": labels[kept], "ids": ids[kept]})
    write_examples(folder / "examples", data, said.guess_N)
    files.write_json(folder / run_folder.METRICS, metrics)


def spread(n: int, most: int) -> np.ndarray:
    """Of n items all, or so many of them at equal distances."""
    return np.linspace(0, n - 1, min(n, most)).round().astype(int)


def evaluate(run: Path | str, data_root: Path | None = None, device: str = "auto") -> dict[Path, dict[str, Any]]:
    """Measure the stored network of each finished run at or below `run` again; the twin of `longtail eval`."""
    results = {}
    for record in run_folder.read_finished([run]):
        if not os.access(record.folder, os.W_OK):
            raise UserError(
                f"cannot write to {record.folder}: copy the run to where its new figures can be written",
                kind="not-writable",
            )
        try:
            with disk_full_as_user_error(record.folder):
                results[record.folder] = evaluate_one(record, data_root, device)
        except OSError as error:
            where = record.folder if error.filename is None else error.filename
            raise RunError(
                f"cannot evaluate {record.folder}: {where}: {error_text(error)}: check the disk",
                kind="unsafe-file" if isinstance(error, files.RefusedFile) else "not-writable",
            ) from error
    return results


def evaluate_one(record: run_folder.FinishedRun, data_root: Path | None, device_name: str) -> dict[str, Any]:
    config, device = record.config, choose_device(device_name, "--device")
    fetch = config.data.download and data_root is not None  # never into a folder that a stored configuration names
    data = load(replace(config.data, root=data_root or config.data.root, download=fetch))
    stored = record.environment["data"]["checksum"]
    if data.checksum != stored:
        raise UserError(
            f"{record.folder} was trained on other images (checksum {stored}): name them with --data-root",
            kind="mismatch",
        )
    method = stored_network(record.folder / run_folder.MODEL, config, data.train.counts, device)
    views = Views(config.views, config.data.image_size)
    seen = look(method, data, views, device, config.train.batch_size)
    metrics, said = measure(method, data, views, device, seen)
    metrics |= {k: record.metrics[k] for k in COST if k in record.metrics}
    if data.val:
        val_NF = features_of(method, data.val, views, device, config.train.batch_size)
        write_calibration(record.folder, method, data.val, val_NF)
    write_results(record.folder, data, metrics, said, seen.test_MD.cpu().numpy())
    return metrics


def stored_network(path: Path, config: Config, counts: Any, device: torch.device) -> methods.Method:
    """The method of a configuration, for training data with these class counts, with the weights of a safetensors file."""
    try:
        method = to_device(methods.make(config, counts, stored=True), config, device)
    except (RuntimeError, MemoryError, ValueError, TypeError, AssertionError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the network of {path} cannot be made ({reason}): check its configuration", kind="conflict"
        ) from error
    method.enter(method.stages[-1])
    method.net.load_state_dict(checkpoint.load_weights(path, method.net.state_dict(), device))
    return method
