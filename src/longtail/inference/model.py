"""A trained network with preprocessing, class names and calibration. N images, C classes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, Union, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longtail import methods
from longtail.config import Config
from longtail.data import decode
from longtail.data.decode import BadImage
from longtail.data.in_memory import to_pil_image
from longtail.data.lazy_images import ImageArray
from longtail.engine.evaluate import in_test_mode
from longtail.engine.failures import is_out_of_memory
from longtail.errors import UserError, unknown_name
from longtail.inference.priors import Prior, describe_frequencies, make_prior
from longtail.metrics import FloatArray, check_finite_logits
from longtail.views import Views
from longtail.views.view import STATISTICS

if TYPE_CHECKING:
    from PIL import Image


# Preprocessing


Picture: TypeAlias = Union[str, Path, "Image.Image", np.ndarray, Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of a network, identical to that of evaluation: decoding, resizing and cropping."""

    views: Views
    side: int = 0
    """Length in pixels to which the longer side is reduced; images are then cropped on the device. 0: the central square is
    resized to the input size of the network. A run uses one or the other, depending on --data.load."""

    def pixels(self, picture: Picture) -> ImageArray:
        """Return the pixels of an image with shape (3, height, width); raise a BadImage if it cannot be read."""
        if isinstance(picture, str | Path):
            return self.decode(decode.read_file(Path(picture)))
        image = to_pil_image(picture)
        with decode.decoding_error_as_bad_image():  # a PIL image of a file is decoded now
            if self.side:
                return decode.shrink_to_fit(image, self.side)
            return decode.crop_center_square(image, self.views.size).transpose(2, 0, 1)

    def decode(self, encoded: bytes) -> ImageArray:
        """Return the pixels of an encoded image file."""
        if self.side:
            return decode.decode_to_fit(encoded, self.side)
        return decode.decode_square(encoded, self.views.size).transpose(2, 0, 1)

    def squares(self, images: Sequence[ImageArray], device: torch.device) -> Tensor:
        """Return the input of the network before normalization, with type uint8 and shape (N, 3, size, size)."""
        if not self.side:
            return self.views.crop_for_test(torch.from_numpy(np.stack(images)).to(device))
        canvas = np.zeros((len(images), 3, self.side, self.side), np.uint8)
        for target, image in zip(canvas, images, strict=True):
            target[:, : image.shape[1], : image.shape[2]] = image
        size_N2 = torch.tensor([image.shape[1:] for image in images], device=device)
        return self.views.crop_for_test(torch.from_numpy(canvas).to(device), size_N2)

    def describe(self) -> dict[str, Any]:
        """Return a description of the preprocessing, for implementing it in another program."""
        size, share = self.views.size, self.views.config.test_crop
        mean, std = STATISTICS[self.views.config.normalize]
        first = (
            f"reduce the longer side to at most {self.side} pixels"
            if self.side
            else f"resize it to {size}x{size} pixels"
        )
        square = f"crop the central square with {share:g} of the shorter side"
        cut = [first, f"{square}, and resize it to {size}x{size} pixels"]
        if not self.side:
            cut = ["crop the central square", first, *([cut[1]] if share < 1 else [])]
        steps = ["rotate it according to its EXIF orientation", "convert it to RGB with 8 bits per channel", *cut]
        resampling = "bilinear, antialiased"
        if self.side or share < 1:
            is_bicubic = self.views.config.interpolation == "bicubic"
            resampling += f"; the last step is {'bicubic and ' if is_bicubic else ''}rounded once"
        return {"image_size": size, "steps": steps, "resampling": resampling, "mean": mean, "std": std}


# Predictions


MAX_BATCH = 64
"""Largest number of images in a batch."""
MAX_BATCH_VALUES = 2**28
"""Largest number of values in a batch: very large images are processed in smaller batches."""
Augmentation = Literal["none", "flip"]
"""Test-time augmentation: "flip" averages the probabilities of an image and of its mirror image."""


class ClassProbability(NamedTuple):
    """A predicted class with its probability."""

    name: str
    probability: float
    label: int
    """Index of the class."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The prediction for one image."""

    class_names: tuple[str, ...]
    probabilities: FloatArray
    """Probabilities from 0 to 1, with shape (C,)."""
    logits: FloatArray
    """Logits of the network, with shape (C,)."""

    def top(self, k: int = 5) -> list[ClassProbability]:
        """Return the k most probable classes. Equal probabilities are in the order of the classes."""
        best = np.argsort(-self.probabilities, kind="stable")[:k]
        return [ClassProbability(self.class_names[c], float(self.probabilities[c]), int(c)) for c in best]

    @property
    def name(self) -> str:
        """The name of the most probable class."""
        return self.top(1)[0].name

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.top(1)[0].probability

    def __repr__(self) -> str:
        return f"Prediction({', '.join(f'{guess.name} {100 * guess.probability:.1f} %' for guess in self.top(3))})"


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A trained network that can be called with images. `longtail.load` returns one.

    An image is a path, a PIL image, an array (height, width[, channels]) or a tensor ([channels,] height, width), with
    uint8 values or floats from 0 to 1.
    """

    method: methods.Method
    config: Config
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    counts: np.ndarray | None
    """Number of training images of each class, if known."""
    device: torch.device
    temperature: float | None = None
    """Calibration temperature, by which logits are divided; None if the run had neither a
    validation split nor cross-validation."""
    prior: Prior | None = None
    """Expected class frequencies; None stands for `implied_prior`."""
    origin: Path | None = None
    """The path that the network was loaded from."""
    tta: Augmentation = "none"
    """Test-time augmentation."""
    others: "tuple[Model, ...]" = ()
    """The other networks of an ensemble, whose probabilities are averaged with those of this one."""

    def __post_init__(self) -> None:
        if self.tta not in get_args(Augmentation):
            raise unknown_name("test-time augmentation", self.tta, get_args(Augmentation))

    @property
    def image_size(self) -> int:
        """Side length of the network's input, in pixels."""
        return self.preprocessing.views.size

    @property
    def batch(self) -> int:
        """The batch size; it is smaller for very large images."""
        side = max(self.preprocessing.side, self.image_size)
        return max(min(MAX_BATCH, MAX_BATCH_VALUES // (3 * side * side)), 1)

    @property
    def implied_prior(self) -> FloatArray:
        """The class frequencies that the logits of the method imply, with shape (C,)."""
        return self.method.prior().numpy()

    def with_prior(self, prior: str | Path | Mapping[str, float] | None) -> "Model":
        """Return the model for other class frequencies.

        Args:
            prior: "uniform", "train" (as in the training data), a CSV or JSON file, or a mapping of class names to weights.
                None stands for the frequencies that the logits imply.
        """
        made = None if prior is None else make_prior(prior, self.class_names, self.counts)
        return replace(self, prior=made, others=tuple(replace(other, prior=made) for other in self.others))

    def __call__(self, images: Any) -> Any:
        """Return the `Prediction` for an image, or a list of them for a list, array or tensor of several images."""
        found = self.predictions(list_images(images))
        return found if is_several(images) else found[0]

    def features(self, images: Any) -> npt.NDArray[np.float32]:
        """Return the features of the backbone for one or several images, as an array of shape (N, F) with type float32."""
        parts = [
            self._compute(self.method.features, [self._pixels(image) for image in batch])
            for batch in self._batches(list_images(images))
        ]
        return torch.cat(parts).numpy() if parts else np.empty((0, self.method.net.trunk.width), np.float32)

    def predictions(self, images: Sequence[Picture]) -> list[Prediction]:
        """Return the prediction for each image, in order."""
        found: list[Prediction] = []
        for batch in self._batches(images):
            logits_NC, p_NC = self.classify([self._pixels(image) for image in batch])
            each = zip(p_NC.numpy(), logits_NC.double().numpy(), strict=True)
            found += [Prediction(self.class_names, p_C, z_C) for p_C, z_C in each]
        return found

    def classify(self, pixels: Sequence[ImageArray]) -> tuple[Tensor, Tensor]:
        """Return logits and probabilities of shape (N, C), averaged over the networks of an ensemble and over mirror images.

        Args:
            pixels: The results of `preprocessing.pixels`.
        """
        views = [pixels] if self.tta == "none" else [pixels, [np.flip(image, 2).copy() for image in pixels]]
        logits = [(model, model.logits(view)) for model in (self, *self.others) for view in views]
        p_NC = torch.stack([model.probabilities(logits_NC) for model, logits_NC in logits]).mean(0)
        return torch.stack([logits_NC for _, logits_NC in logits]).mean(0), p_NC

    def logits(self, pixels: Sequence[ImageArray]) -> Tensor:
        """Return logits of shape (N, C) on the CPU for the results of `preprocessing.pixels`.

        Raises:
            UserError: A logit is not finite, or there is not enough memory.
        """
        logits_NC = self._compute(self.method, pixels)
        check_finite_logits((~logits_NC.isfinite().all(1)).numpy())
        return logits_NC

    def _batches(self, images: Sequence[Picture]) -> Iterator[Sequence[Picture]]:
        for first in range(0, len(images), self.batch):
            yield images[first : first + self.batch]

    def _compute(self, network: Callable[[Tensor], Tensor], pixels: Sequence[ImageArray]) -> Tensor:
        """Return what a part of the network computes from the results of `preprocessing.pixels`, on the CPU."""
        x = self.preprocessing.views.normalize(self.preprocessing.squares(pixels, self.device))
        try:
            with in_test_mode(self.method):
                return network(x).float().cpu()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"not enough memory for images of {self.image_size} pixels: use a smaller network", kind="out-of-memory"
            ) from error

    def probabilities(self, logits_NC: Tensor) -> Tensor:
        """Return probabilities of shape (N, C) in float64, with the temperature and the expected class frequencies."""
        return (logits_NC.double() / (self.temperature or 1.0) + self.shift()).softmax(1)

    def shift(self) -> Tensor:
        """Return the value that the expected class frequencies add to the logit of each class."""
        if self.prior is None:
            return torch.zeros(len(self.class_names), dtype=torch.float64)
        with np.errstate(divide="ignore"):  # a class with frequency 0 has the logit -inf
            return torch.from_numpy(np.log(self.prior.shares_C) - np.log(self.implied_prior))

    def notes(self) -> list[str]:
        """Return sentences about the meaning of the probabilities, for users."""
        calibration = (
            f"probabilities are calibrated: temperature {self.temperature:.3g}, fitted on predictions for held-out images"
            if self.temperature
            else UNCALIBRATED
        )
        averaged = [f"{1 + len(self.others)} networks"] if self.others else []
        averaged += ["each image and its mirror image"] if self.tta == "flip" else []
        mean = [f"probabilities are averages over {' and '.join(averaged)}"] if averaged else []
        assumed = describe_frequencies(self.implied_prior, self.counts)
        if self.prior is None:
            return [*mean, calibration, f"probabilities assume {assumed}. Use --prior to change that"]
        return [
            *mean,
            calibration,
            f"probabilities assume the class frequencies {self.prior.name!r} instead of {assumed}",
        ]

    def _pixels(self, image: Picture) -> ImageArray:
        try:
            return self.preprocessing.pixels(image)
        except BadImage as error:
            name = f" {image}" if isinstance(image, str | Path) else ""
            raise UserError(f"cannot read the image{name} ({error})", kind="bad-image") from error

    def __repr__(self) -> str:
        what = f"{self.config.method.label}, {self.config.model.name}, {len(self.class_names)} classes"
        return f"Model({what}, {self.image_size} pixels, {self.device.type})"


def is_several(images: Any) -> bool:
    """Return whether the argument of a model is a list, array or tensor of several images, and not a single image."""
    return isinstance(images, list | tuple) or (isinstance(images, np.ndarray | Tensor) and images.ndim == 4)


def list_images(images: Any) -> list[Picture]:
    """Return the argument of a model as a list of images."""
    return list(images) if is_several(images) else [images]


HOLD_OUT_COMMAND = "`longtail train --from RUN --data.val_fraction 0.2`"
UNCALIBRATED = (
    f"probabilities are not calibrated: no validation images were held out (to hold some out: {HOLD_OUT_COMMAND})"
)
