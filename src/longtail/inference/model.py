"""A trained network to be asked about images. N images, C classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail import methods
from longtail.config import Config
from longtail.data.decode import BadImage
from longtail.data.lazy_images import ImageArray
from longtail.engine.evaluate import in_test_mode
from longtail.engine.failures import is_out_of_memory
from longtail.errors import UserError
from longtail.inference.preprocessing import Picture, Preprocessing
from longtail.inference.priors import Prior, make_prior, named
from longtail.metrics import FloatArray, refuse_broken

BATCH = 64  # images that go through the network at once
BATCH_PIXELS = 2**28  # color values of a batch, at most: large images go through in smaller batches


class Guess(NamedTuple):
    name: str
    probability: float
    label: int
    """The number of the class."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What a network says of one image."""

    class_names: tuple[str, ...]
    probabilities: FloatArray
    """(C,), from 0 to 1."""
    logits: FloatArray
    """(C,), as the network gives them."""

    def top(self, k: int = 5) -> list[Guess]:
        """The k likeliest classes; of equals the first."""
        best = np.argsort(-self.probabilities, kind="stable")[:k]
        return [Guess(self.class_names[c], float(self.probabilities[c]), int(c)) for c in best]

    @property
    def name(self) -> str:
        """Of the likeliest class."""
        return self.top(1)[0].name

    @property
    def probability(self) -> float:
        """Of the likeliest class."""
        return self.top(1)[0].probability

    def __repr__(self) -> str:
        return f"Prediction({', '.join(f'{guess.name} {100 * guess.probability:.1f} %' for guess in self.top(3))})"


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """Call it on an image or a list of them: a path, a PIL image, an array (height, width[, channels]) or a tensor
    ([channels,] height, width), of uint8 or of floats from 0 to 1. `longtail.load` makes one."""

    method: methods.Method
    config: Config
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    counts: np.ndarray | None
    """Training images of each class, where they are known."""
    device: torch.device
    temperature: float | None = None
    """What logits are divided by to make probabilities honest; None: it was never found, which takes validation images."""
    prior: Prior | None = None
    """Class frequencies expected in use; None: those that the logits stand for, `meant`."""
    origin: Path | None = None
    """Where it was loaded from."""

    @property
    def image_size(self) -> int:
        """Side in pixels of what the network sees."""
        return self.preprocessing.views.size

    @property
    def batch(self) -> int:
        """Number of images that go through the network at once; fewer where images are very large."""
        side = max(self.preprocessing.side, self.image_size)
        return max(min(BATCH, BATCH_PIXELS // (3 * side * side)), 1)

    @property
    def meant(self) -> FloatArray:
        """The class frequencies that its logits stand for, (C,)."""
        return self.method.prior().numpy()

    def expecting(self, prior: str | Path | Mapping[str, float] | None) -> "Model":
        """The same for other class frequencies: `uniform`, `train`, a file, or a mapping of class names to weights."""
        return replace(self, prior=None if prior is None else make_prior(prior, self.class_names, self.counts))

    def __call__(self, images: Any) -> Any:
        """A Prediction; of a list, or of an array or tensor of several images, a list of them."""
        several = isinstance(images, list | tuple) or (isinstance(images, np.ndarray | Tensor) and images.ndim == 4)
        found = self.predictions(list(images) if several else [images])
        return found if several else found[0]

    def predictions(self, images: Sequence[Picture]) -> list[Prediction]:
        """Of each image, in order."""
        found: list[Prediction] = []
        for first in range(0, len(images), self.batch):
            logits_NC = self.logits([self._pixels(image) for image in images[first : first + self.batch]])
            each = zip(self.probabilities(logits_NC).numpy(), logits_NC.double().numpy(), strict=True)
            found += [Prediction(self.class_names, p_C, z_C) for p_C, z_C in each]
        return found

    def logits(self, pixels: Sequence[ImageArray]) -> Tensor:
        """(N, C) on the CPU, from what `preprocessing.pixels` gives; not finite, it is a UserError."""
        x = self.preprocessing.views.normalized(self.preprocessing.squares(pixels, self.device))
        try:
            with in_test_mode(self.method):
                logits_NC = self.method(x).float().cpu()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"not enough memory for images of {self.image_size} pixels: use a smaller network", kind="out-of-memory"
            ) from error
        refuse_broken((~logits_NC.isfinite().all(1)).numpy())
        return logits_NC

    def probabilities(self, logits_NC: Tensor) -> Tensor:
        """(N, C) in float64: at the temperature, and for the class frequencies expected in use."""
        return (logits_NC.double() / (self.temperature or 1.0) + self.shift()).softmax(1)

    def shift(self) -> Tensor:
        """What the frequencies expected in use add to each class's logit."""
        if self.prior is None:
            return torch.zeros(len(self.class_names), dtype=torch.float64)
        with np.errstate(divide="ignore"):  # a class that is never expected has the logit -inf
            return torch.from_numpy(np.log(self.prior.shares_C) - np.log(self.meant))

    def notes(self) -> list[str]:
        """What probabilities mean, for people."""
        said = f"temperature {self.temperature:.3g}, found on validation images" if self.temperature else UNCALIBRATED
        meant = named(self.meant, self.counts)
        if self.prior is None:
            return [
                said,
                f"class frequencies: {meant}, as the method has it (--prior uniform|train|FILE expects others)",
            ]
        return [said, f"class frequencies: {self.prior.name}, in place of {meant}"]

    def _pixels(self, image: Picture) -> ImageArray:
        try:
            return self.preprocessing.pixels(image)
        except BadImage as error:
            which = image if isinstance(image, str | Path) else "that was given"
            raise UserError(f"cannot read the image {which} ({error})", kind="bad-image") from error

    def __repr__(self) -> str:
        what = f"{self.config.method.label}, {self.config.model.name}, {len(self.class_names)} classes"
        return f"Model({what}, {self.image_size} pixels, {self.device.type})"


HOLD_OUT = "`longtail train --from RUN --data.val_fraction 0.2` does"
UNCALIBRATED = f"probabilities are not calibrated: no images were held out for it ({HOLD_OUT})"
