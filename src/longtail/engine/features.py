"""Features of a frozen backbone: of the plain image and of augmented views, computed once and stored in the feature cache.

Images are processed in blocks. A block of one view is a file of the cache, so an interrupted extraction continues after its
last block, and a larger number of views reuses those that are stored. The random numbers of an augmented view depend on its
index and on the images of the block only: runs, methods, seeds and folds share the features.
"""

import contextlib
import dataclasses
import hashlib
import math
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail.config import Config
from longtail.data.decode import available_cores, bad_image_as_error
from longtail.data.lazy_images import StreamedImages
from longtail.data.loader import Frames, iterate_frames
from longtail.data.samplers import derive_seed
from longtail.data.sources import DataSet, Split
from longtail.engine.device import matmul_precision, preserve_global_settings, uses_kernels
from longtail.feature_cache import FeatureCache, hash_blocks, make_key
from longtail.models import backbones
from longtail.models.backbones import Forward, Trunk, make_fast_forward, make_plain_forward
from longtail.progress import format_duration, is_bar_shown, log_info, open_progress
from longtail.views import Views

FORMAT_VERSION = 2
"""Part of each key: increase it when the same settings give other features."""
BATCH = 32
"""Images per forward pass. The random numbers of a view depend on it."""
BLOCK = 4 * BATCH
"""Images per file of the cache."""
OUTPUT_STEP = 0.02
"""Numbers of about 1 that describe the output of a network are rounded to multiples of this."""
MIN_PIXELS = 10_000_000
"""Number of pixels, of all views together, from which `make_fast_forward` saves more time than it takes."""
PROBE_IMAGES = 8
"""The largest number of images of a batch that is timed for an estimate."""
PASSES_PER_PROBE_IMAGE = 300
"""Forward passes to estimate for each image of a batch that is timed, so that an estimate takes at most 2 % of the time."""
MIN_REPORTED = 10.0
"""Seconds from which the estimated time is logged."""


class FrozenFeatures(NamedTuple):
    """The features of a data set, in float32 on the CPU."""

    train_VNF: Tensor
    """View 0 is the plain image; `data.cached_views` augmented views follow."""
    val_NF: Tensor | None
    test_NF: Tensor


def cached_features(
    config: Config, data: DataSet, trunk: Trunk, device: torch.device, show: bool = True
) -> FrozenFeatures:
    """Return the features of a data set from the cache. What is missing is computed and stored.

    Args:
        config: The configuration of the run; `data.cached_views` is the number of augmented views of each training image.
        data: The images.
        trunk: The frozen backbone, which is not changed.
        device: The device that computes views and features.
        show: Display the progress and the estimated time.
    """
    return Extraction(config, trunk, device).run_data_set(data, config.data.cached_views, show)


def split_features(
    config: Config,
    split: Split,
    views: Views,
    trunk: Trunk,
    device: torch.device,
    num_views: int = 0,
    show: bool = True,
) -> Tensor:
    """Return the features of the images of a split from the cache, (1 + num_views, N, F), in float32 on the CPU.

    Args:
        config: The configuration of the run.
        split: The images.
        views: Makes the views.
        trunk: The frozen backbone, which is not changed.
        device: The device that computes views and features.
        num_views: Number of augmented views in addition to the plain image, which is the first.
        show: Display the progress and the estimated time.
    """
    extraction = Extraction(config, trunk, device, views)
    plan = extraction.plan(split, num_views)
    extraction.run([plan], show)
    return plan.x_VNF


def estimate_seconds(config: Config, data: DataSet, trunk: Trunk, device: torch.device) -> float:
    """Return the estimated time of `cached_features` in seconds, from three timed batches of a few images after a warm-up.

    Args:
        config: The configuration of the run.
        data: The images.
        trunk: The frozen backbone.
        device: The device that computes views and features.
    """
    extraction = Extraction(config, trunk, device)
    plans = extraction.plan_data_set(data, config.data.cached_views)
    if not any(plan.missing for plan in plans):
        return 0.0
    return extraction.time_passes(data.train, plans).estimate(plans, config.data.cached_views)


class PassTimes(NamedTuple):
    """Measured times of a forward pass."""

    plain: float
    """Seconds to read an image and compute the features of its plain view."""
    query: float
    """Seconds to compute the features of another view of it."""

    def estimate(self, plans: "list[SplitPlan]", num_views: int) -> float:
        """Return the seconds to compute what is missing of the plain images and of some augmented views.

        Args:
            plans: What has to be computed.
            num_views: The number of augmented views, at most that of the plans.
        """
        missing = [
            (plan.num_images(block), sum(view <= num_views for view in views))
            for plan in plans
            for block, views in plan.missing.items()
        ]
        read = sum(images for images, views in missing if views)
        return read * self.plain + (sum(images * views for images, views in missing) - read) * self.query


class SplitPlan:
    """A plan for the features of a split: which are in the cache, and which have to be computed.

    Args:
        split: The images.
        keys: The keys in the cache, by block and view.
        x_VNF: The features. Those that are not stored have no values yet.
    """

    def __init__(self, split: Split, keys: list[list[str]], x_VNF: Tensor) -> None:
        self.split, self.keys, self.x_VNF = split, keys, x_VNF
        self.digests: list[str] = []  # of the images of each block
        self.missing: dict[int, list[int]] = {}  # views to compute, by block

    @property
    def num_passes(self) -> int:
        """The number of forward passes of single images."""
        return sum(self.num_images(block) * len(views) for block, views in self.missing.items())

    def rows(self, block: int) -> slice:
        """Return which images belong to a block."""
        return slice(block * BLOCK, min((block + 1) * BLOCK, len(self.split.labels)))

    def num_images(self, block: int) -> int:
        """Return the number of images of a block."""
        rows = self.rows(block)
        return rows.stop - rows.start


class Extraction:
    """Computes the features of splits with a copy of a backbone.

    Args:
        config: The configuration of the run.
        trunk: The frozen backbone.
        device: The device that computes views and features.
        views: Makes the views; None: those of the configuration.
    """

    def __init__(self, config: Config, trunk: Trunk, device: torch.device, views: Views | None = None) -> None:
        size, kernels = config.data.image_size, uses_kernels(config.train, device)
        self.config, self.trunk, self.device = config, trunk, device
        self.views = Views(config.views, size, kernels) if views is None else views
        self.weights = hash_weights(trunk.body)
        self.output = summarize_output(trunk.body, self.views.size, device)
        self.cache = FeatureCache()
        self._digests: dict[int, list[str]] = {}  # hashes of the blocks of images, by the `id` of their split

    # Planning

    def plan_data_set(self, data: DataSet, num_views: int) -> list[SplitPlan]:
        """Return the plans of the training images with augmented views, the test and the validation images, in this order."""
        splits = [(data.train, num_views), (data.test, 0), *([(data.val, 0)] if data.val else [])]
        return [self.plan(split, num_views) for split, num_views in splits]

    def plan(self, split: Split, num_views: int) -> SplitPlan:
        """Read the stored features of a split, and return what has to be computed."""
        if id(split) not in self._digests:
            self._digests[id(split)] = hash_images(split)
        digests = self._digests[id(split)]
        keys = [[self.make_key(split, digest, view) for view in range(1 + num_views)] for digest in digests]
        plan = SplitPlan(split, keys, torch.empty(1 + num_views, len(split.labels), self.trunk.width))
        plan.digests = digests
        for block, of_views in enumerate(keys):
            for view, key in enumerate(of_views):
                stored = self.cache.read(key, (plan.num_images(block), self.trunk.width))
                if stored is None:
                    plan.missing.setdefault(block, []).append(view)
                else:
                    plan.x_VNF[view, plan.rows(block)] = torch.from_numpy(stored)
        return plan

    def make_key(self, split: Split, digest: str, view: int) -> str:
        """Return the key of the features of a block.

        Args:
            split: The images.
            digest: The hash of the images of the block.
            view: The number of the view; 0 is the plain image.
        """
        images, settings = split.images, self.views.config
        parts: dict[str, Any] = {
            "version": [FORMAT_VERSION, BATCH, "float32"],
            "images": digest,
            "input": ["files", images.side] if isinstance(images, StreamedImages) else list(images.shape[1:]),
            "backbone": self.config.model.name,
            "weights": self.weights,
            "image_size": self.views.size,
            "normalize": settings.normalize,
            "interpolation": settings.interpolation,
            "output": self.output,
        }
        if view == 0:
            parts["test_crop"] = settings.test_crop
        else:  # generators of the CPU and of CUDA draw different numbers
            parts |= {"query": dataclasses.asdict(settings.query), "index": view, "generator": self.device.type}
        return make_key(parts)

    # Computing

    def make_forward(self, plans: list[SplitPlan]) -> Forward:
        """Return the function that computes features. Small amounts of work are not worth optimizing the network."""
        size, body = self.views.size, self.trunk.body
        if sum(math.prod(plan.x_VNF.shape[:2]) for plan in plans) * size**2 < MIN_PIXELS:
            return make_plain_forward(body, self.device)
        return _reuse_fast_forward(body, self.weights, size, self.device)

    def run_data_set(self, data: DataSet, num_views: int, show: bool) -> FrozenFeatures:
        """Return the features of a data set. What is missing is computed and stored.

        Args:
            data: The images.
            num_views: Number of augmented views of each training image.
            show: Display the progress and the estimated time.
        """
        plans = self.plan_data_set(data, num_views)
        self.run(plans, show)
        train, test, *val = (plan.x_VNF for plan in plans)
        return FrozenFeatures(train, val[0][0] if val else None, test[0])

    def run(self, plans: list[SplitPlan], show: bool) -> None:
        """Compute and store what is missing. Blocks that are finished are kept if this is interrupted.

        Args:
            plans: What has to be computed.
            show: Display the progress and the estimated time.
        """
        total, done, history = sum(plan.num_passes for plan in plans), 0, list[tuple[float, int]]()
        if not total:
            return
        with open_progress(total, "computing features", "views of images", show) as advance, exact_float32(self.device):
            forward = self.make_forward(plans)
            for plan in plans:
                for passes in self._run_split(plan, forward):
                    advance(passes)
                    done += passes
                    history.append((time.monotonic(), done))
                    if show and not is_bar_shown() and len(history) == 3:  # the first batch is a warm-up
                        (start, before), _, (now, _) = history
                        seconds = (now - start) / (done - before) * (total - done)
                        if seconds > MIN_REPORTED:
                            log_info(f"computing {total:,} feature vectors: about {format_duration(seconds)} left")

    def _run_split(self, plan: SplitPlan, forward: Forward) -> Iterator[int]:
        """Compute and store what is missing of a split; yield the number of forward passes after each batch."""
        numbers = np.arange(len(plan.split.labels))
        indices = np.concatenate([numbers[:0], *(numbers[plan.rows(block)] for block in plan.missing)])
        with contextlib.closing(iterate_frames(plan.split, indices, BATCH, self.device)) as frames:
            for block, views in plan.missing.items():
                rows = plan.rows(block)
                rngs = [self.make_generator(plan.digests[block], view) for view in views]
                for first in range(rows.start, rows.stop, BATCH):
                    batch = next(frames)
                    for view, rng in zip(views, rngs, strict=True):
                        x_NF = forward(self.make_view(batch, view, rng))
                        plan.x_VNF[view, first : first + len(x_NF)] = x_NF.cpu()
                    yield len(batch.images) * len(views)
                for view in views:
                    self.cache.write(plan.keys[block][view], plan.x_VNF[view, rows].numpy())

    def make_generator(self, digest: str, view: int) -> torch.Generator:
        """Return the random generator of a view of a block of images."""
        return torch.Generator(self.device).manual_seed(derive_seed(f"cached view {digest}", view))

    def make_view(self, batch: Frames, view: int, rng: torch.Generator) -> Tensor:
        """Return a view of a batch of images; 0 is the plain image."""
        if view == 0:
            return self.views.plain(*batch)
        return self.views.query(batch.images, rng, batch.size_N2)

    def time_passes(self, split: Split, plans: list[SplitPlan]) -> PassTimes:
        """Return the times of a forward pass, the shortest of three timed batches after a warm-up.

        A batch has at most `PROBE_IMAGES` images, and fewer if little is to be computed.

        Args:
            split: The images that are used.
            plans: What has to be computed.
        """
        images = min(max(sum(plan.num_passes for plan in plans) // PASSES_PER_PROBE_IMAGE, 1), PROBE_IMAGES)
        is_stored = not any(plan.missing for plan in plans)
        forward = make_plain_forward(self.trunk.body, self.device) if is_stored else self.make_forward(plans)
        self.time_batch(split, forward, images)
        timed = [self.time_batch(split, forward, images) for _ in range(3)]
        return PassTimes(*map(min, zip(*timed, strict=True)))  # other processes can only slow down a batch

    def time_batch(self, split: Split, forward: Forward, images: int) -> tuple[float, float]:
        """Return the seconds per image to read it and compute the features of the plain view, and those of another view.

        Args:
            split: The images.
            forward: Computes features.
            images: The number of images of the batch.
        """
        indices = np.linspace(0, len(split.labels) - 1, images).astype(np.int64)
        rng, times = torch.Generator(self.device).manual_seed(0), [time.perf_counter()]
        with exact_float32(self.device):
            (batch,) = iterate_frames(split, indices, images, self.device)
            for view in range(2):
                forward(self.make_view(batch, view, rng)).cpu()
                times.append(time.perf_counter())
        return (times[1] - times[0]) / images, (times[2] - times[1]) / images


_fast_forwards: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Forward]]" = weakref.WeakKeyDictionary()


def _reuse_fast_forward(body: nn.Module, weights: str, size: int, device: torch.device) -> Forward:
    """Return the result of `make_fast_forward`; that of the last call for this network is reused, if nothing has changed."""
    key = weights, size, device, torch.get_num_threads()
    last = _fast_forwards.get(body)
    if last is None or last[0] != key:
        last = _fast_forwards[body] = key, make_fast_forward(body, size, device)
    return last[1]


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Compute convolutions and matrix products on CUDA in float32, without TF32."""
    with preserve_global_settings(), matmul_precision("fp32", device):
        torch.backends.cudnn.allow_tf32 = False
        yield


def hash_weights(body: nn.Module) -> str:
    """Return a hash of the layers of a network, of their settings, and of all parameters and buffers."""
    digest = hashlib.sha256(repr(body).encode())
    for name, tensor in body.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def summarize_output(body: nn.Module, size: int, device: torch.device) -> list[int]:
    """Return eight rounded numbers that describe the features of a fixed random image.

    They differ if the code of a network has changed, for example in another version of timm, which `hash_weights` does not
    notice.

    Args:
        body: The network.
        size: Height and width of its images in pixels.
        device: Its device.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, size, size, generator=rng).to(device)
    with exact_float32(device):
        y_1F = F.normalize(backbones.make_plain_forward(body, device)(x).double().cpu())
    z_18 = y_1F @ torch.randn(y_1F.shape[1], 8, generator=rng, dtype=torch.float64)
    return (z_18[0].nan_to_num() / OUTPUT_STEP).round().long().tolist()


def hash_images(split: Split) -> list[str]:
    """Return a hash of the content of each block of images: of the encoded files, or of the pixels of images in memory."""

    def read(index: int) -> bytes:
        if not isinstance(split.images, StreamedImages):
            return split.images[index].tobytes()
        with bad_image_as_error(split.images, index):
            return split.images.read_encoded(index)

    n, threads = len(split.labels), getattr(split.images, "workers", 0) or available_cores()
    return hash_blocks([map(read, range(first, min(first + BLOCK, n))) for first in range(0, n, BLOCK)], threads)
