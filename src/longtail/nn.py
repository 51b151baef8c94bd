"""The paper's parts as modules for training loops of your own; the methods of this package are made of the same.

    net = …                                                    # yours: images -> features of some width
    criterion = PaCoLoss(width, class_counts)                  # centres, projection G and queue
    query = nn.Sequential(net, criterion.G)
    key = MomentumNetwork(query)                               # follows net and G slowly
    …
    loss = criterion(net(view), key(other_view), y)            # two views of the same images
    loss.backward(); optimiser.step(); key.follow(query)

B images, C classes, F features, D projected width.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtail import config as cfg
from longtail import theory
from longtail.errors import UserError
from longtail.methods.base import log_frequencies
from longtail.methods.contrast import meet
from longtail.methods.paco import Numbers, loss_terms
from longtail.models.heads import linear_head, projection
from longtail.models.momentum import LabelledQueue, MomentumNetwork

__all__ = ["LabelledQueue", "MomentumNetwork", "PaCoLoss"]


class PaCoLoss(nn.Module):
    """Eq. 8 with what learns or is remembered beside a network: the class centres, the projection G, the labelled queue.

    `width` is that of the network's features, `class_counts` the training images of each class. `centres`, where the network
    has a linear classifier of its own, is that one; else one is made, and `classify` gives its logits. Called in training, it
    puts the keys away for later steps, as batch norm keeps its averages; after `eval()` it only looks. It works in float32
    whatever autocast says. With torch.distributed the queue has the keys of all processes.
    """

    log_prior_C: Tensor

    def __init__(
        self,
        width: int,
        class_counts: Sequence[int] | Tensor,
        *,
        alpha: float | Literal["auto"] = 0.05,
        batch: int | None = None,
        tau: float = 0.2,
        centre_tau: float = 1.0,
        rebalance: bool = True,
        smoothing: float = 0.0,
        queue: int = 8192,
        centres: nn.Linear | None = None,
        bias: bool = True,
        **projected: Any,
    ) -> None:
        """The numbers are those of `longtail train --method.…`, and so are those of `projected`: `projection_dim` 128,
        `projection_hidden` (0: the width), `projection_norm`, `contrast`, `chunk`. `batch`: images of a step, for alpha "auto".
        """
        super().__init__()
        chosen: dict[str, Any] = {"alpha": alpha, "tau": tau, "centre_tau": centre_tau, "rebalance": rebalance}
        self.config = c = cfg.PaCo(**chosen, smoothing=smoothing, queue=queue, **projected)
        counts_C = checked_counts(class_counts)
        self.alpha = chosen_alpha(c, counts_C, batch)
        self.centres = linear_head(width, len(counts_C), bias) if centres is None else centres
        if tuple(self.centres.weight.shape) != (len(counts_C), width):
            there = f"{self.centres.in_features} features and {self.centres.out_features} classes"
            raise UserError(f"centres has {there}, and width {width} and {len(counts_C)} counts were given: make them agree")
        self.G = projection(width, c.projection_hidden or width, c.projection_dim, c.projection_norm)
        self.queue = LabelledQueue(c.queue, c.projection_dim)
        self.register_buffer("log_prior_C", log_frequencies(counts_C), persistent=False)

    def forward(self, features_BF: Tensor, keys_BD: Tensor, y_B: Tensor) -> Tensor:
        """The loss of images whose one view has these features, and whose other went through the key network and its G."""
        return self.terms(features_BF, keys_BD, y_B)["loss"]
