"""What a trained network is worth: predictions on the test set, metrics, k-NN on features, latency; and the files of them."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail import methods, runs
from longtail.data import samplers
from longtail.data.sources import DataSet, Source, load
from longtail.engine.device import choose_device, place
from longtail.engine.distributed import by_first
from longtail.engine.examples import write_examples
from longtail.errors import UserError
from longtail.metrics import evaluate_predictions
from longtail.models.collective import gather
from longtail.views import Views

KNN = 20  # neighbours
KNN_TAU = 0.07  # a neighbour votes with exp(cosine similarity / KNN_TAU)
FEATURES_KEPT = 10_000
LATENCY_BATCH = 64
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


def features_of(method: methods.Method, source: Source, views: Views, device: torch.device, batch: int) -> Tensor:
    """Trunk features of every image, without augmentation. Several processes have a stretch of them each."""
    parts, rows = [], stretch(len(source.labels), *samplers.place())
    with in_test_mode(method):
        for start in range(0, len(rows), batch):
            images = torch.from_numpy(source.images[rows[start : start + batch]]).permute(0, 3, 1, 2).to(device)
            parts.append(method.features(views.plain(images)))
    return gather(torch.cat(parts))[: len(source.labels)]


def stretch(n: int, rank: int, world: int) -> np.ndarray:
    """The rows of process `rank`; all have equally many, so that behind the last row it stands again."""
    each = -(-n // world)
    return (rank * each + np.arange(each)).clip(max=n - 1)


def balanced_accuracy(method: methods.Method, source: Source, views: Views, device: torch.device, batch: int) -> float:
    """Mean over classes of the share of images recognised, in percent: validation splits are as long-tailed as the rest."""
    with in_test_mode(method):
        logits = method.classify(features_of(method, source, views, device, batch))
    right = (logits.argmax(1).cpu().numpy() == source.labels).astype(np.float64)
    return float(np.mean([100 * right[source.labels == c].mean() for c in np.unique(source.labels)]))


@torch.no_grad()
def knn_top1(train_ND: Tensor, y_N: Tensor, test_MD: Tensor, y_M: Tensor, k: int = KNN) -> float:
    """Accuracy in percent of weighted nearest neighbours in cosine similarity, the training images as the memory."""
    train_ND, test_MD = F.normalize(train_ND.float()), F.normalize(test_MD.float())
    k, right = min(k, len(y_N)), 0
    votes_C = torch.zeros(int(y_N.max()) + 1, device=y_N.device)
    for chunk_MD, y in zip(test_MD.split(1024), y_M.split(1024), strict=True):
        similarity, index = (chunk_MD @ train_ND.T).topk(k)
        votes_MC = votes_C.repeat(len(y), 1).scatter_add(1, y_N[index], (similarity / KNN_TAU).exp())
        right += int((votes_MC.argmax(1) == y).sum())
    return 100 * right / len(y_M)


def latency(method: methods.Method, source: Source, views: Views, device: torch.device, repeats: int = 100) -> float:
    """Median milliseconds of the deployable network on 64 images already on the device.

    They are real ones, spread over the set: how long a router takes depends on what it sees. Nothing is compiled, however the
    method was trained.
    """
    some = np.linspace(0, len(source.labels) - 1, LATENCY_BATCH).round().astype(int)
    x = views.plain(torch.from_numpy(source.images[some]).permute(0, 3, 1, 2).to(device))
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
    return 1000 * statistics.median(times[3:])  # the first three choose kernels and fill caches


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU where there is one, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def features_of_both(
    method: methods.Method, data: DataSet, views: Views, device: torch.device, batch: int
) -> tuple[Tensor, Tensor]:
    """Of the training and of the test images."""
    train_ND, test_MD = (features_of(method, s, views, device, batch) for s in (data.train, data.test))
    return train_ND, test_MD


def measure(
    method: methods.Method, data: DataSet, views: Views, device: torch.device, train_ND: Tensor, test_MD: Tensor
) -> tuple[dict[str, Any], np.ndarray]:
    """The metrics, and the logits of the test set they come from."""
    with in_test_mode(method):
        logits, figures = method.classify(test_MD).float().cpu().numpy(), method.figures(test_MD)
    y_N, y_M = (torch.from_numpy(s.labels).to(device) for s in (data.train, data.test))
    metrics = evaluate_predictions(logits, data.test.labels, data.counts, data.train.class_names)
    metrics["knn_top1"] = knn_top1(train_ND, y_N, test_MD, y_M)
    metrics["latency_b64"] = latency(method, data.test, views, device)
    metrics |= figures
    return metrics, logits


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
    train_ND, test_MD = features_of_both(method, data, views, device, batch)

    def written() -> dict[str, Any]:
        save_file({k: v.contiguous() for k, v in method.net.state_dict().items()}, folder / runs.MODEL)
        metrics, logits = measure(method, data, views, device, train_ND, test_MD)
        metrics |= cost
        write_results(folder, data, metrics, logits, test_MD.cpu().numpy())
        return metrics

    return by_first(written)


def write_results(
    folder: Path, data: DataSet, metrics: dict[str, Any], logits: np.ndarray, features: np.ndarray
) -> None:
    labels, ids = data.test.labels, np.asarray(data.test.ids)
    save_arrays(folder / "predictions.npz", logits=logits, labels=labels, ids=ids)
    kept = np.linspace(0, len(labels) - 1, min(len(labels), FEATURES_KEPT)).round().astype(int)
    some = features[kept].astype(np.float16)
    save_arrays(folder / "features.npz", features=some, labels=labels[kept], ids=ids[kept])
    write_examples(folder / "examples", data, logits.argmax(1))
    runs.write_json(folder / runs.METRICS, metrics)


def save_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Atomically."""
    fresh = path.with_suffix(".tmp.npz")
    np.savez_compressed(fresh, **arrays)  # type: ignore[arg-type]
    fresh.replace(path)


def evaluate(run: Path | str, data_root: Path | None = None, device: str = "auto") -> dict[Path, dict[str, Any]]:
    """Measure the stored network of each finished run at or below `run` again; the twin of `longtail eval`."""
    results = {}
    for record in runs.finished([run]):
        results[record.folder] = evaluate_one(record, data_root, device)
    return results


def evaluate_one(record: runs.Run, data_root: Path | None, device_name: str) -> dict[str, Any]:
    config, device = record.config, choose_device(device_name, "--device")
    data = load(replace(config.data, root=data_root or config.data.root))
    stored = record.environment["data"]["checksum"]
    if data.checksum != stored:
        raise UserError(f"{record.folder} was trained on other images (checksum {stored}): name them with --data-root")
    method = place(methods.make(config, data.train.counts, stored=True), config, device)
    method.enter(method.stages[-1])
    path = record.folder / runs.MODEL
    try:
        method.net.load_state_dict(load_file(path, device=str(device)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} does not hold the network of config.json ({reason}): train it again") from error
    views = Views(config.views, config.data.image_size)
    train_ND, test_MD = features_of_both(method, data, views, device, config.train.batch_size)
    metrics, logits = measure(method, data, views, device, train_ND, test_MD)
    metrics |= {k: record.metrics[k] for k in COST if k in record.metrics}
    write_results(record.folder, data, metrics, logits, test_MD.cpu().numpy())
    return metrics
