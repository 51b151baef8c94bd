"""The views of a run, each from uint8 images to what a network takes: crop, policy, normalized."""

import functools

import torch
from torch import Tensor

from longtail.config import ViewConfig, ViewsConfig
from longtail.kernels import views
from longtail.views import ops
from longtail.views.crops import crop, resize
from longtail.views.policies import POLICIES, jitter, random_cutout, random_rotate


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
    """One view of uint8 images N,3,H,W: crop, mirror, turn, jitter, policy, Cutout, normalize; N,3,size,size, float32 or `out`.

    `size_N2`: height and width of each, where they do not fill H and W. `kernels`: by our own where there are some for such
    images, equal to the operations up to the rounding of sums.
    """
    with torch.autocast(x.device.type, enabled=False):  # eight bits of mantissa would blur the resampling weights
        x = crop(x, size_N2, view, size, rng, kernels)
        if view.rotate:
            x = random_rotate(x, view.rotate, rng, kernels)
        if view.jitter:
            x = jitter(x, view.jitter, rng, kernels)
        x = POLICIES[view.policy](x, view, rng, kernels)
        if view.cutout:
            x = random_cutout(x, view.cutout, rng)
        if kernels and out is not None and views.can_write_into(x, out):
            return views.finish(x, mean_C11, std_C11, out)
        x = ops.normalize(ops.to_float(x), mean_C11, std_C11)
        return x if out is None else out.copy_(x)


STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inaturalist": ((0.466, 0.471, 0.380), (0.195, 0.194, 0.192)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@functools.cache
def statistics(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (3, 1, 1) each; made once per device."""
    mean, std = torch.tensor(STATISTICS[name], device=device)[..., None, None]
    return mean, std


class Views:
    """The views of a run: `query` and `key` are drawn, `plain` is what the network sees at test time.

    Of images x, uint8 N,3,H,W, with the height and width of each where they do not fill H and W. `out`: where to put them, in
    its type and layout; else they are float32.
    """

    def __init__(self, config: ViewsConfig, size: int, kernels: bool = False) -> None:
        self.config, self.size, self.kernels = config, size, kernels

    def query(
        self, x: Tensor, rng: torch.Generator, size_N2: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._make(x, size_N2, self.config.query, rng, out)

    def key(self, x: Tensor, rng: torch.Generator, size_N2: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self._make(x, size_N2, self.config.key, rng, out)

    def plain(self, x: Tensor, size_N2: Tensor | None = None) -> Tensor:
        return self.normalized(self.square(x, size_N2))

    def square(self, x: Tensor, size_N2: Tensor | None = None) -> Tensor:
        """The part that is tested on: uint8 N,3,size,size."""
        return resize(x, self.size, size_N2, self.config.test_crop, self.kernels)

    def normalized(self, x: Tensor) -> Tensor:
        return ops.normalize(ops.to_float(x), *statistics(self.config.normalize, x.device))

    def _make(
        self, x: Tensor, size_N2: Tensor | None, view: ViewConfig, rng: torch.Generator, out: Tensor | None
    ) -> Tensor:
        scale = statistics(self.config.normalize, x.device)
        return make_view(x, view, self.size, rng, *scale, self.kernels, size_N2, out)
