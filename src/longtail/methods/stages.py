"""What methods of two stages share."""

from dataclasses import replace
from typing import Any

from longtail.config import Config, LinearStage
from longtail.methods.base import Stage


def second_stage(config: Config, name: str, rate_field: str, decay: float | None = None, **changes: Any) -> Stage:
    """A stage at a rate that falls along a cosine from its first step on; the method's settings hold rate and length.

    Such rates are SGD's, whatever the first stage was trained by.
    """
    c, weight_decay = config.method, config.optim.weight_decay if decay is None else decay
    optim = replace(
        config.optim,
        name="sgd",
        lr=getattr(c, rate_field),
        head_lr=1,
        layer_decay=1,
        schedule="cosine",
        warmup_epochs=0,
        weight_decay=weight_decay,
    )
    return Stage(name, c.second_epochs, optim, lr_flag=f"--method.{rate_field}", **changes)


def linear_stage(config: Config, **changes: Any) -> Stage:
    """The trunk is frozen and what stands on it learns; where the method names milestones, in steps."""
    assert isinstance(config.method, LinearStage)
    stage = second_stage(config, "linear", "linear_lr", config.method.linear_decay, frozen=True, **changes)
    if not config.method.linear_milestones:
        return stage
    return replace(
        stage, optim=replace(stage.optim, schedule="step", milestones=config.method.linear_milestones, gamma=0.1)
    )
