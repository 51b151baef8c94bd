"""The resident loader: the whole set lives on the device as uint8, and taking images is a gather of its rows."""

import torch
from torch import Tensor

from longtail.config import Sampler
from longtail.data.samplers import epoch_order, place
from longtail.data.sources import Source


def put(source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images as N,3,H,W and labels, on the device."""
    images_N = torch.from_numpy(source.images).permute(0, 3, 1, 2).contiguous().to(device)
    return images_N, torch.from_numpy(source.labels).to(device)


class ResidentLoader:
    """Images and labels in an order that is a function of seed and epoch alone: nothing to save for a resume.

    `twin` is a loader of the same source, which shares its copy of the images: of a run side by side, or of the same run for
    another `purpose`.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        device: torch.device,
        twin: "ResidentLoader | None" = None,
        purpose: str = "order",
    ) -> None:
        self.images_N, self.y_N = twin.resident if twin else put(source, device)
        self.source, self.purpose = source, purpose
        self.rank, self.world = place()  # each process has its part of an epoch
        images = len(source.labels) // self.world
        # A smaller last batch is left out, so that every step has one shape; a set below one batch is one batch.
        self.batch_size = min(batch_size, images)
        self.batches = images // self.batch_size
        self.seed = seed
        # Where the next images lie is known to the device, so that captured work finds them without the host.
        self.order_N = torch.zeros_like(self.y_N[:images])
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.enter("uniform", 0, 1)

    @property
    def resident(self) -> tuple[Tensor, Tensor]:
        return self.images_N, self.y_N

    def beside(self, purpose: str) -> "ResidentLoader":
        """A second loader of the same images, which draws on its own."""
        return ResidentLoader(self.source, self.batch_size, self.seed, self.y_N.device, self, purpose)

    def enter(self, sampler: Sampler, first_epoch: int, epochs: int) -> None:
        """Begin a stage: how images are drawn in the epochs from `first_epoch` on."""
        self.sampler: Sampler = sampler
        self.first_epoch, self.epochs, self.epoch = first_epoch, epochs, -1

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch (counted over all stages)."""
        if epoch != self.epoch:
            self.order_N.copy_(self.order(epoch))
            self.epoch = epoch
        self.cursor.fill_(batch * self.batch_size)

    def take(self, batches: int) -> tuple[Tensor, Tensor]:
        """The next images, uint8 N,3,H,W, and their labels; past the end of the epoch come those of its beginning."""
        ahead = torch.arange(batches * self.batch_size, device=self.y_N.device)
        rows = self.order_N[(self.cursor + ahead) % len(self.order_N)]
        return self.images_N[rows], self.y_N[rows]

    def order(self, epoch: int) -> Tensor:
        done = (epoch - self.first_epoch) / max(self.epochs - 1, 1)  # 0 in a stage's first epoch, 1 in its last
        labels = torch.from_numpy(self.source.labels)
        return epoch_order(self.sampler, labels, self.seed, epoch, done, self.purpose, self.rank, self.world)
