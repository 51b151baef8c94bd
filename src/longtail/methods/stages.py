"""What methods of two stages share."""

from dataclasses import replace
from typing import Any

from longtail.config import Config, LinearStage
from longtail.methods.base import Stage


def linear_stage(config: Config, **changes: Any) -> Stage:
    """The trunk is frozen and what stands on it learns, at a rate that falls along a cosine from the first step on."""
    c = config.method
    assert isinstance(c, LinearStage)
    optim = replace(config.optim, lr=c.linear_lr, schedule="cosine", warmup_epochs=0, weight_decay=c.linear_decay)
    return Stage("linear", c.linear_epochs, optim, rate="--method.linear_lr", frozen=True, **changes)
