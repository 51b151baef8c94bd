"""Views: functions from uint8 images to the normalized input of a network (crop, policy, normalization)."""

import functools

import torch
from torch import Tensor

from longtail.config import ViewConfig, ViewsConfig
from longtail.kernels import views
from longtail.views import ops
from longtail.views.crops import center_crop_resize, crop_view
from longtail.views.policies import POLICIES, random_color_jitter, random_cutout, random_rotate


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

    Returns:
        The views, N,3,size,size.
    """
    with torch.autocast(x.device.type, enabled=False):  # bf16 is too coarse for the weights of resampling
        x = crop_view(x, size_N2, view, size, rng, kernels)
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
        return center_crop_resize(x, self.size, size_N2, self.config.test_crop, self.kernels)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize uint8 images, or floats in [0, 1]."""
        return ops.normalize(ops.to_float(x), *normalization_tensors(self.config.normalize, x.device))

    def _make(
        self, x: Tensor, size_N2: Tensor | None, view: ViewConfig, rng: torch.Generator, out: Tensor | None
    ) -> Tensor:
        scale = normalization_tensors(self.config.normalize, x.device)
        return make_view(x, view, self.size, rng, *scale, self.kernels, size_N2, out)
