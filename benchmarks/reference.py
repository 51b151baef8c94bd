"""PaCo on CIFAR-LT as in typical research code: the baseline of `step.py`, `views.py` and `loss.py`.

Worker processes make the views image by image with PIL and torchvision. The networks run in fp32 (torch's default: cuDNN may
use TF32), operation by operation. The key network is updated parameter by parameter, the loss uses matrices of masks, and the
host reads loss and accuracy at each step. The settings are those of our recipe, so that only the implementation differs.
"""

import copy
import random
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms as T

from longtail.data.sources import Split
from longtail.models.backbones import CifarResNet

BATCH, QUEUE, WIDTH = 128, 1024, 32
TAU, ALPHA, MOMENTUM = 0.05, 0.01, 0.999
STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class Cutout:
    """Paint a black square of `side` pixels around a random pixel, clipped at the border."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, x: Tensor) -> Tensor:
        top, left = (random.randrange(length) - self.side // 2 for length in x.shape[1:])
        x[:, max(top, 0) : top + self.side, max(left, 0) : left + self.side] = 0
        return x


class Blur:
    """Apply PIL's Gaussian blur with a random radius in pixels."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(self.low, self.high)))


def make_auto_view() -> T.Compose:
    """Return the query view: AutoAugment and Cutout."""
    policy = T.AutoAugment(T.AutoAugmentPolicy.CIFAR10, fill=(128, 128, 128))
    crop = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()]
    return T.Compose([*crop, policy, T.ToTensor(), Cutout(16), T.Normalize(*STATISTICS)])


def make_sim_view() -> T.Compose:
    """Return the key view: SimAugment."""
    crop = [T.RandomResizedCrop(32, scale=(0.2, 1.0)), T.RandomHorizontalFlip()]
    color = [T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), T.RandomGrayscale(0.2)]
    return T.Compose([*crop, *color, T.RandomApply([Blur(0.1, 2.0)], 0.5), T.ToTensor(), T.Normalize(*STATISTICS)])


class ViewSet(Dataset):
    """A data set whose items are the views of an image, and its label."""

    def __init__(self, source: Split, views: list[Callable[[Image.Image], Tensor]]) -> None:
        self.source, self.views = source, views

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        assert isinstance(self.source.images, np.ndarray)
        image = Image.fromarray(self.source.images[index])
        return [view(image) for view in self.views], int(self.source.labels[index])


class Network(nn.Module):
    """A network that returns logits and the normalized projection."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.trunk = CifarResNet(32, num_classes=0)
        self.head = nn.Linear(64, classes)
        self.projection = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.trunk(x)
        return self.head(f), F.normalize(self.projection(f))


def plain_paco_loss(
    center: Tensor,
    contrast: Tensor,
    y: Tensor,
    others: Tensor,
    drop: Tensor,
    log_prior: Tensor,
    alpha: float,
    tau: float,
) -> Tensor:
    """Return the PaCo loss, computed with matrices of masks over all logits and differentiated by autograd."""
    logits = torch.cat([center + log_prior, contrast / tau], 1)
    logits = logits - logits.max(1, keepdim=True).values.detach()
    kept = torch.cat([torch.ones_like(center), (~drop).float()], 1)
    positive = (y[:, None] == others[None]).float() * (~drop).float()
    weight = torch.cat([F.one_hot(y, center.shape[1]).float(), alpha * positive], 1)
    log_p = logits - torch.log((torch.exp(logits) * kept).sum(1, keepdim=True))
    return -((weight * log_p).sum(1) / weight.sum(1)).mean()


class Reference:
    """The networks, queue and optimizer of a plain PaCo training; `step` trains on a batch of the loader."""

    def __init__(self, counts: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.query = Network(len(counts)).to(device)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.log_prior = torch.tensor(counts / counts.sum(), dtype=torch.float32, device=device).log()
        self.queue = F.normalize(torch.randn(QUEUE, WIDTH, device=device))
        self.labels = torch.randint(len(counts), (QUEUE,), device=device)
        self.position = 0
        self.optimizer = torch.optim.SGD(self.query.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)

    def step(self, batch: Any) -> tuple[float, float]:
        (view, other), y = batch
        view, other, y = (x.to(self.device, non_blocking=True) for x in (view, other, y))
        logits, q = self.query(view)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data = slow.data * MOMENTUM + fast.data * (1 - MOMENTUM)
            _, k = self.key(other)
        contrast = q @ torch.cat([q, k, self.queue]).T
        drop = torch.zeros_like(contrast, dtype=torch.bool).fill_diagonal_(True)
        labels = torch.cat([y, y, self.labels])
        loss = plain_paco_loss(logits, contrast, y, labels, drop, self.log_prior, ALPHA, TAU)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        slots = slice(self.position, self.position + len(k))
        self.queue[slots], self.labels[slots] = k, y
        self.position = (self.position + len(k)) % QUEUE
        return loss.item(), (logits.argmax(1) == y).float().mean().item()


def iterate_batches(source: Split, workers: int, pinned: bool) -> Generator[Any]:
    """Yield batches of views without end, made by `workers` processes (0: by this process)."""
    views = ViewSet(source, [make_auto_view(), make_sim_view()])
    loader = DataLoader(
        views,
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
    )
    while True:
        yield from loader


def measure_loader(images: Dataset, batch: int, workers: int, seconds: float) -> float:
    """Return the images per second of a loader's worker processes, after the batches that were made in advance."""
    endless = RandomSampler(images, replacement=True, num_samples=2**31)  # type: ignore[arg-type]
    loader = iter(DataLoader(images, batch, sampler=endless, num_workers=workers))
    for _ in range(3 * workers):
        next(loader)
    batches, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or batches < 3:
        next(loader)
        batches += 1
    return batches * batch / (time.perf_counter() - start)
