"""PaCo as modules for other training loops. The methods of this package consist of the same parts.

    net = …                                          # maps images to features of some width
    criterion = PaCoLoss(width, class_counts)        # class centers, projection G, queue
    query = nn.Sequential(net, criterion.G)
    key = MomentumNetwork(query)                     # moving average of net and G
    …
    loss = criterion(net(view), key(other_view), y)  # two views of the same images
    loss.backward(); optimizer.step(); key.follow(query)

Shapes: B images, C classes, F features, D projected width.

Importing this module registers the CIFAR ResNets with timm, for example `timm.create_model("resnet32_cifar", num_classes=0)`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longtail.models.backbones  # noqa: F401  (registers the CIFAR ResNets with timm)
from longtail import config as cfg
from longtail import theory
from longtail.deprecated import accept_old_arguments, find_renamed
from longtail.errors import UserError
from longtail.losses import LossParams, paco_objective
from longtail.methods.base import log_frequencies
from longtail.methods.contrast import gather_contrast_set
from longtail.models.heads import make_linear_head, projection
from longtail.models.momentum import LabeledQueue, MomentumNetwork

__getattr__ = find_renamed(__name__, {"LabelledQueue": "LabeledQueue"})
__all__ = ["LabeledQueue", "MomentumNetwork", "PaCoLoss"]


class PaCoLoss(nn.Module):
    """The loss of PaCo (Eq. 8) with its learnable parts and state: class centers, projection G, labeled queue.

    In training mode a call pushes the keys into the queue, just as batch norm updates its averages; after `eval()` it does not.
    The loss is computed in float32 also under autocast. Under torch.distributed the queue has the keys of all processes.

    Args:
        width: The width of the features.
        class_counts: The number of training images of each class.
        alpha: The weight of a positive sample; "auto" computes it from `class_counts`, `queue` and `batch`.
        batch: The number of images in a step, for an alpha of "auto".
        tau: The temperature of the samples.
        center_tau: The temperature of the centers.
        rebalance: Whether the centers are rebalanced by class frequency (Eq. 8 instead of Eq. 4).
        smoothing: Label smoothing of the centers.
        queue: The length of the queue.
        projection_dim: The width of the projection.
        projection_hidden: The width of its hidden layer; 0 for `width`.
        projection_norm: Whether the projection has batch norm.
        contrast: With several processes, whether anchors are compared with the views of their own process ("local") or of all
            processes ("global").
        chunk: The number of centers and samples that are processed at a time; 0 chooses it by their number.
        centers: The linear classifier of the network, if it has one; otherwise a new one is created.
    """

    log_prior_C: Tensor

    @accept_old_arguments(centre_tau="center_tau", centres="centers")
    def __init__(
        self,
        width: int,
        class_counts: Sequence[int] | Tensor,
        *,
        alpha: float | Literal["auto"] = 0.05,
        batch: int | None = None,
        tau: float = 0.2,
        center_tau: float = 1.0,
        rebalance: bool = True,
        smoothing: float = 0.0,
        queue: int = 8192,
        projection_dim: int = 128,
        projection_hidden: int = 0,
        projection_norm: bool = True,
        contrast: Literal["local", "global"] = "local",
        chunk: int = 0,
        centers: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.config = c = cfg.PaCoSettings(
            alpha=alpha,
            tau=tau,
            center_tau=center_tau,
            rebalance=rebalance,
            smoothing=smoothing,
            queue=queue,
            projection_dim=projection_dim,
            projection_hidden=projection_hidden,
            projection_norm=projection_norm,
            contrast=contrast,
            chunk=chunk,
        )
        counts_C = check_counts(class_counts)
        self.alpha = resolve_alpha(c, counts_C, batch)
        self.centers = make_linear_head(width, len(counts_C)) if centers is None else centers
        check_centers(self.centers, width, len(counts_C))
        self.G = projection(width, c.projection_hidden or width, c.projection_dim, c.projection_norm)
        self.queue = LabeledQueue(c.queue, c.projection_dim)
        self.register_buffer("log_prior_C", log_frequencies(counts_C), persistent=False)

    def forward(self, features_BF: Tensor, keys_BD: Tensor, y_B: Tensor) -> Tensor:
        """Return the mean loss of B images.

        Args:
            features_BF: The features of one view of the images, from the network.
            keys_BD: The projections of the other view, from the key network.
            y_B: The labels, from 0 to C - 1; others raise an IndexError (on a GPU, a device assertion).
        """
        return self.terms(features_BF, keys_BD, y_B)["loss"]

    def terms(self, features_BF: Tensor, keys_BD: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """Return the "loss", and values for the log: the "accuracy" in percent, "P_sup" and the largest logits.

        `forward` describes the arguments.
        """
        self._check_shapes(features_BF, keys_BD, y_B)
        with torch.autocast(y_B.device.type, enabled=False):
            x_BF, dtype = features_BF.to(self.centers.weight.dtype), self.queue.keys_KD.dtype
            q_BD, k_BD = F.normalize(self.G(x_BF)), F.normalize(keys_BD.detach().to(dtype))
            contrast = gather_contrast_set(q_BD, k_BD, y_B, self.queue, self.config.contrast)
            log_prior_C = self.log_prior_C if self.config.rebalance else None
            params = LossParams(self.alpha, self.config.tau, self.config.center_tau, self.config.smoothing)
            terms = paco_objective(x_BF, y_B, contrast, self.centers, log_prior_C, params, self.config.chunk)
        if self.training:
            self.queue.push(k_BD, y_B)
        return terms

    def classify(self, features_BF: Tensor) -> Tensor:
        """Return the logits for deployment. They assume equal class frequencies, because only the loss contains the prior."""
        return self.centers(features_BF)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, tau={self.config.tau}, rebalance={self.config.rebalance}"

    def _check_shapes(self, features_BF: Tensor, keys_BD: Tensor, y_B: Tensor) -> None:
        B, F, D = len(y_B), self.centers.in_features, self.config.projection_dim
        found: dict[str, Any] = {"features": features_BF, "keys": keys_BD, "labels": y_B}
        wanted = {"features": (B, F), "keys": (B, D), "labels": (B,)}
        for name, shape in wanted.items():
            if tuple(found[name].shape) != shape:
                hint = "; make the key network from nn.Sequential(net, criterion.G)" * (name == "keys")
                raise UserError(
                    f"{name} has the shape {tuple(found[name].shape)} instead of {shape}{hint}", kind="mismatch"
                )


def check_counts(class_counts: Sequence[int] | Tensor) -> Tensor:
    counts_C = torch.as_tensor(class_counts).cpu()
    if counts_C.ndim != 1 or len(counts_C) < 2 or bool((counts_C < 0).any()) or not counts_C.any():
        raise UserError(
            f"class_counts {class_counts}: give the number of training images of each of at least two classes"
        )
    return counts_C


def resolve_alpha(config: cfg.PaCoSettings, counts_C: Tensor, batch: int | None) -> float:
    if config.alpha != "auto":
        return config.alpha
    if batch is None:
        raise UserError('alpha="auto" depends on the number of images in a step: add, for example, batch=128')
    return theory.auto_alpha(counts_C.numpy(), config.queue, batch)


def check_centers(centers: nn.Linear, width: int, classes: int) -> None:
    if (centers.in_features, centers.out_features) != (width, classes):
        has = f"{centers.in_features} features and {centers.out_features} classes"
        raise UserError(
            f"centers has {has}, but width is {width} and class_counts has {classes} classes", kind="mismatch"
        )
