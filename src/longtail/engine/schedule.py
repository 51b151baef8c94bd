"""The learning rate as a pure function of the step: a resumed run needs no scheduler state."""

import bisect
import math

from longtail.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The rate of optimizer step `step` (from 0) in a stage of `epochs` epochs."""
    return optim.lr * warmup(optim, step, steps_per_epoch) * decay(optim, step, steps_per_epoch, epochs)


def warmup(optim: OptimConfig, step: int, steps_per_epoch: int) -> float:
    """The share of the peak rate reached so far; the released PaCo's epoch n of n runs at (n+1)/n."""
    n = optim.warmup_epochs
    if n == 0:
        return 1.0
    if optim.warmup_by == "step":
        done = min(step / (n * steps_per_epoch), 1.0)
    else:
        epoch = step // steps_per_epoch
        rising = epoch < n or (optim.warmup_by == "epoch-overshoot" and epoch == n)
        done = (epoch + 1) / n if rising else 1.0
    return optim.warmup_start + (1 - optim.warmup_start) * done


def decay(optim: OptimConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Step: gamma to the number of milestones passed. Cosine: half a wave from the end of the warm-up to the last step."""
    if optim.schedule == "step":
        # below 1 a milestone is a share of the training, from 1 up an epoch
        at = [round(m * steps_per_epoch * (epochs if m < 1 else 1)) for m in optim.milestones]
        return optim.gamma ** bisect.bisect_right(at, step)
    if optim.schedule == "cosine":
        start, end = optim.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
        done = min(max(step - start, 0) / max(end - start, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
