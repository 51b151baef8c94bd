"""Parts that the contrastive methods share.

Shapes: B images or anchors, M samples, D projected width, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longtail.data.samplers import class_shares
from longtail.distributed import all_gather, gather_with_grad, rank
from longtail.losses.contrast_set import ContrastSet
from longtail.losses.paco import LossParams

if TYPE_CHECKING:
    from longtail.config import Config
    from longtail.models.momentum import LabeledQueue


class LabeledSamples(NamedTuple):
    """Samples that are the same in all processes, with their labels. They take the place of a queue."""

    keys_KD: Tensor
    labels_K: Tensor


def gather_contrast_set(
    q_BD: Tensor, k_BD: Tensor, y_B: Tensor, queue: LabeledQueue | LabeledSamples, contrast: str
) -> ContrastSet:
    """Return the samples that the anchors of a step are compared with: queries, keys, and the queue.

    The queue must not contain the keys of this step yet, or they would be in A(i) twice.

    Args:
        q_BD: The projected query views, which are the anchors.
        k_BD: The projected key views; no rows if all views are among the queries.
        y_B: The labels of the anchors; the keys have those of the first anchors.
        queue: The keys of past steps, or other samples.
        contrast: With several processes, whether queries and keys are those of this process ("local") or of all ("global"). In
            "global" the gradient also flows through the samples that were sent to other processes.
    """
    samples, labels, first = [q_BD, k_BD], [y_B, y_B[: len(k_BD)]], 0
    if contrast == "global":
        first = rank() * (len(q_BD) + len(k_BD))
        samples, labels = [gather_with_grad(torch.cat(samples))], [all_gather(torch.cat(labels))]
    itself_B = first + torch.arange(len(q_BD), device=y_B.device)
    return ContrastSet(q_BD, torch.cat([*samples, queue.keys_KD]), torch.cat([*labels, queue.labels_K]), itself_B)


def make_loss_params(config: Config, counts_C: Tensor) -> LossParams:
    """Return the parameters of the loss of PaCo and GPaCo; an alpha of "auto" is computed from the paper's theory.

    Args:
        config: The configuration of the run.
        counts_C: The number of training images of each class.
    """
    c: Any = config.method
    train = config.train
    alpha = c.alpha
    if alpha == "auto":
        from longtail import theory

        shares_C = class_shares(train.sampler, counts_C, done=0.5)  # if they change: those halfway through
        batch = train.batch_size * (train.processes if c.contrast == "global" else 1)
        alpha = theory.auto_alpha(shares_C, c.queue, batch)
    return LossParams(alpha, c.tau, c.center_tau, c.smoothing)
