"""Views: functions from uint8 images to the normalized input of a network (crop, policy, normalization)."""

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longtail.config import ViewConfig, ViewsConfig
from longtail.errors import UserError
from longtail.kernels import views
from longtail.views import ops
from longtail.views.ops import bernoulli, randint, uniform
from longtail.views.policies import POLICIES, random_color_jitter, random_cutout, random_rotate

MixtureKind = Literal["mixup", "cutmix", "both"]

# Crops: the part of each image that a view shows, resized to the input size of the network; uint8 to uint8


class Box(NamedTuple):
    """A box of pixels for each sample; the fields are int64 (N,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


MAX_TRIES = 10
ASPECT_RATIO = (3 / 4, 4 / 3)  # minimum and maximum of width / height


def draw_box(size_N2: Tensor, scale: tuple[float, float], rng: torch.Generator) -> Box:
    """Draw boxes as torchvision's RandomResizedCrop: the first of ten candidates that fits the image, or the central box.

    Args:
        size_N2: Height and width of each image.
        scale: Minimum and maximum area of a box as a fraction of the image.
        rng: The random generator.
    """
    n, (height, width) = len(size_N2), size_N2.float().unbind(1)
    area = (height * width)[:, None] * uniform((n, MAX_TRIES), *scale, rng)
    ratio = uniform((n, MAX_TRIES), math.log(ASPECT_RATIO[0]), math.log(ASPECT_RATIO[1]), rng).exp()
    box_h, box_w = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])
    first = fits.int().argmax(1, keepdim=True)
    found = fits.any(1)
    central_h, central_w = _central_box_size(height, width)
    box_h = torch.where(found, box_h.gather(1, first)[:, 0], central_h)
    box_w = torch.where(found, box_w.gather(1, first)[:, 0], central_w)
    # A candidate has a random position, the central box does not.
    position_h, position_w = uniform((n, 2), 0, 1, rng).unbind(1)
    top = torch.where(found, position_h * (height - box_h + 1), (height - box_h) / 2)
    left = torch.where(found, position_w * (width - box_w + 1), (width - box_w) / 2)
    return Box(top.long(), left.long(), box_h.long(), box_w.long())


def _central_box_size(height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return height and width of the largest box with an allowed aspect ratio."""
    low, high = ASPECT_RATIO
    return torch.minimum(height, (width / low).round()), torch.minimum(width, (height * high).round())


def _image_sizes(x: Tensor) -> Tensor:
    """Return height and width of each image, (N, 2), for images that fill the tensor."""
    sides = [torch.full((len(x),), side, device=x.device) for side in x.shape[2:]]
    return torch.stack(sides, 1)


def resized_crop(
    x: Tensor,
    box: Box,
    size: int,
    flip_N: Tensor,
    kernels: bool = False,
    interpolation: ops.Interpolation = "bilinear",
) -> Tensor:
    """Crop a box of each image and resize it to uint8 of size x size.

    Args:
        x: uint8 images.
        box: The boxes.
        size: Height and width of the result.
        flip_N: Which results to flip horizontally.
        kernels: Use the CUDA kernels if they support the images. They have no bicubic interpolation.
        interpolation: The interpolation.
    """
    if kernels and interpolation == "bilinear" and views.supports(x):
        return views.crop(x, *box, size, flip_N)
    return ops.to_uint8(ops.resized_crop(x, *box, size, flip_N, interpolation))


def center_crop_resize(
    x: Tensor,
    size: int,
    size_N2: Tensor | None = None,
    fraction: float = 1.0,
    kernels: bool = False,
    interpolation: ops.Interpolation = "bilinear",
) -> Tensor:
    """Crop the central square of each image and resize it to uint8 of size x size.

    Args:
        x: uint8 images.
        size: Height and width of the result.
        size_N2: Height and width of each image, if the images do not fill the tensor.
        fraction: Side of the square as a fraction of the shorter side of the image.
        kernels: Use the CUDA kernels if they support the images.
        interpolation: The interpolation.

    Returns:
        The crops. Images that have this size already are returned as they are.
    """
    if size_N2 is None:
        if x.shape[2:] == (size, size) and fraction == 1:
            return x
        size_N2 = _image_sizes(x)
    side_N = (size_N2.amin(1) * fraction).round().long().clamp(min=1)
    top_N, left_N = ((size_N2 - side_N[:, None]) // 2).unbind(1)
    box, flip_N = Box(top_N, left_N, side_N, side_N), torch.zeros_like(side_N).bool()
    return resized_crop(x, box, size, flip_N, kernels, interpolation)


def crop_view(
    x: Tensor,
    size_N2: Tensor | None,
    view: ViewConfig,
    size: int,
    rng: torch.Generator,
    kernels: bool,
    interpolation: ops.Interpolation,
) -> Tensor:
    """Crop and flip each image at random as the settings of a view say; return uint8 of size x size.

    Args:
        x: uint8 images.
        size_N2: Height and width of each image, if the images do not fill the tensor.
        view: The settings.
        size: Height and width of the result.
        rng: The random generator.
        kernels: Use the CUDA kernels if they support the images.
        interpolation: The interpolation.
    """
    flip_N = bernoulli((len(x),), 0.5 if view.flip else 0.0, rng)
    if view.crop == "resized":
        box = draw_box(_image_sizes(x) if size_N2 is None else size_N2, view.crop_scale, rng)
        return resized_crop(x, box, size, flip_N, kernels, interpolation)
    if size_N2 is not None or view.crop == "none":
        x = center_crop_resize(x, size, size_N2, 1.0, kernels, interpolation)
    return ops.flip(_pad_crop(x, size, rng) if view.crop == "pad" else x, flip_N)


def _pad_crop(x: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Pad the images by an eighth of their size and crop them at a random position."""
    if x.shape[2:] != (size, size):
        raise UserError(
            f"the crop 'pad' does not resize, but the images have {x.shape[2]}x{x.shape[3]} pixels and the network needs "
            f"{size}x{size}: set --views.query.crop resized and --views.key.crop resized",
            kind="conflict",
        )
    pad = size // 8
    top_N, left_N = randint((2, len(x)), 2 * pad + 1, rng)
    return ops.padded_crop(x, top_N, left_N, pad)


# Mixtures of images


class Mixture(NamedTuple):
    """A mixture of every image with another one of its batch, for one or more batches of N images in all."""

    partner_N: Tensor
    """The index of the image that is mixed in."""
    share: Tensor
    """The share of the first image in each batch, and of its label."""
    weight: Tensor
    """The weight of the first image in each pixel, in a shape that broadcasts with the images."""

    def apply(self, images_N: Tensor) -> Tensor:
        """Return the mixed images, or features."""
        weight = self.weight.view(*self.weight.shape, *[1] * (images_N.ndim - self.weight.ndim))
        return torch.lerp(images_N[self.partner_N], images_N, weight.to(images_N.dtype))


def draw_mixture(kind: MixtureKind, images: int, batch: int, side: int, alpha: float, rng: torch.Generator) -> Mixture:
    """Draw how images are mixed. All images of a batch have the same share, and for CutMix the same box.

    Args:
        kind: "mixup": the mean of two images with the weights `share` and 1 - `share` (Zhang et al., 2018); "cutmix": a box
            of the area 1 - `share` is from the second image (Yun et al., 2019); "both": one of the two for each batch.
        images: Number of images of all batches.
        batch: Number of images per batch.
        side: Height and width of the images in pixels; used by CutMix only.
        alpha: Parameter of the Beta(alpha, alpha) distribution, from which each batch draws its share.
        rng: The random generator, which also determines the device.
    """
    batches, device = images // batch, rng.device
    gamma = torch._standard_gamma(torch.full((2, batches), alpha, device=device), generator=rng)
    share = gamma[0] / gamma.sum(0).clamp(min=1e-30)
    partner = torch.rand(batches, batch, device=device, generator=rng).argsort(1)
    partner_N = (partner + batch * torch.arange(batches, device=device)[:, None]).flatten()
    if kind == "mixup":
        return Mixture(partner_N, share, share.repeat_interleave(batch, output_size=images))
    is_outside = _draw_outside_of_box(share, side, rng)
    is_cut = torch.rand(batches, device=device, generator=rng) < (0.5 if kind == "both" else 1.0)
    # The box may extend beyond the image: the share is the area that remains.
    weight = torch.where(is_cut[:, None, None], is_outside.to(share.dtype), share[:, None, None])
    share = torch.where(is_cut, is_outside.to(share.dtype).mean((1, 2)), share)
    weight_N11S = weight[:, None].repeat_interleave(batch, 0, output_size=images)
    return Mixture(partner_N, share, weight_N11S)


def _draw_outside_of_box(share: Tensor, side: int, rng: torch.Generator) -> Tensor:
    """Return which pixels (batches, side, side) are outside of a square of the area 1 - share around a random point."""
    length = side * (1 - share).sqrt()
    center = uniform((2, len(share)), 0, side, rng)
    low, high = (center - length / 2).round(), (center + length / 2).round()
    position = torch.arange(side, device=share.device)
    is_inside = (position >= low[..., None]) & (position < high[..., None])  # rows, and columns
    return ~(is_inside[0][:, :, None] & is_inside[1][:, None, :])


def mixup(
    images_N: Tensor, y_N: Tensor, batch: int, alpha: float, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix every image with a random one of its batch (Zhang et al., 2018).

    The losses of both labels are combined with the same weights.

    Args:
        images_N: Images, or features, of one or more batches.
        y_N: Their labels.
        batch: Number of images per batch.
        alpha: Parameter of the Beta(alpha, alpha) distribution, from which each batch draws the weight of the first images.
        rng: The random generator.

    Returns:
        The mixed images, the labels of the second images, and the weight of the first images for each batch.
    """
    mixture = draw_mixture("mixup", len(y_N), batch, images_N.shape[-1], alpha, rng)
    return mixture.apply(images_N), y_N[mixture.partner_N], mixture.share


# Views


def make_view(
    x: Tensor,
    view: ViewConfig,
    size: int,
    rng: torch.Generator,
    mean_C11: Tensor,
    std_C11: Tensor,
    kernels: bool = False,
    size_N2: Tensor | None = None,
    out: Tensor | None = None,
    interpolation: ops.Interpolation = "bilinear",
) -> Tensor:
    """Compute one random view of each image: crop, flip, rotation, color jitter, policy, Cutout, normalization, in this order.

    Args:
        x: uint8 images N,3,H,W.
        view: The settings of the view.
        size: Height and width of the result.
        rng: The random generator.
        mean_C11: Mean of each channel for the normalization.
        std_C11: Standard deviation of each channel.
        kernels: Use the CUDA kernels if they support the images. Their results differ only by rounding.
        size_N2: Height and width of each image, if the images do not fill H and W.
        out: Where to write the result, in its dtype and memory format. By default, a new float32 tensor is returned.
        interpolation: The interpolation of crops.

    Returns:
        The views, N,3,size,size.
    """
    with torch.autocast(x.device.type, enabled=False):  # bf16 is too coarse for the weights of resampling
        x = crop_view(x, size_N2, view, size, rng, kernels, interpolation)
        if view.rotate:
            x = random_rotate(x, view.rotate, rng, kernels)
        if view.jitter:
            x = random_color_jitter(x, view.jitter, rng, kernels)
        x = POLICIES[view.policy](x, view, rng, kernels)
        if view.cutout:
            x = random_cutout(x, view.cutout, rng)
        if kernels and out is not None and views.can_normalize_into(x, out):
            return views.normalize_into(x, mean_C11, std_C11, out)
        x = ops.normalize(ops.to_float(x), mean_C11, std_C11)
        return x if out is None else out.copy_(x)


STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inaturalist": ((0.466, 0.471, 0.380), (0.195, 0.194, 0.192)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "dpn": ((124 / 255, 117 / 255, 104 / 255), (1 / (0.0167 * 255),) * 3),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
}


@functools.cache
def normalization_tensors(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, (3, 1, 1) each; cached, to copy them to the device only once."""
    mean, std = torch.tensor(STATISTICS[name], device=device)[..., None, None]
    return mean, std


class Views:
    """The views of a run: random `query` and `key` views for training, and the deterministic `plain` view for evaluation.

    All methods take uint8 images `x` (N,3,H,W) and, if the images do not fill H and W, the height and width of each
    (`size_N2`). `rng` is the random generator. Results are float32, or are written to `out` in its dtype and memory format.

    Args:
        config: The settings of the views.
        size: Height and width of the results.
        kernels: Use the CUDA kernels if they support the images.
    """

    def __init__(self, config: ViewsConfig, size: int, kernels: bool = False) -> None:
        self.config, self.size, self.kernels = config, size, kernels

    def query(
        self, x: Tensor, rng: torch.Generator, size_N2: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return random query views."""
        return self._make(x, size_N2, self.config.query, rng, out)

    def key(self, x: Tensor, rng: torch.Generator, size_N2: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return random key views."""
        return self._make(x, size_N2, self.config.key, rng, out)

    def plain(self, x: Tensor, size_N2: Tensor | None = None) -> Tensor:
        """Return the view for evaluation: a central crop, normalized."""
        return self.normalize(self.crop_for_test(x, size_N2))

    def crop_for_test(self, x: Tensor, size_N2: Tensor | None = None) -> Tensor:
        """Return the part of each image that is used for evaluation, uint8 N,3,size,size, not normalized."""
        config = self.config
        return center_crop_resize(x, self.size, size_N2, config.test_crop, self.kernels, config.interpolation)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize uint8 images, or floats in [0, 1]."""
        return ops.normalize(ops.to_float(x), *normalization_tensors(self.config.normalize, x.device))

    def _make(
        self, x: Tensor, size_N2: Tensor | None, view: ViewConfig, rng: torch.Generator, out: Tensor | None
    ) -> Tensor:
        scale = normalization_tensors(self.config.normalize, x.device)
        return make_view(x, view, self.size, rng, *scale, self.kernels, size_N2, out, self.config.interpolation)
