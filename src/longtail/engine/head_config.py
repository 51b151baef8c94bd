"""The default configuration for training a head on stored features."""

from dataclasses import replace
from typing import Any

from longtail.config import Config, LinearStageSettings, OptimConfig, TrainConfig
from longtail.recipes import find_preset

MAX_QUEUE = 1024


def head_config(
    method: str,
    images: int,
    epochs: int = 60,
    learning_rate: float = 0.1,
    weight_decay: float = 5e-4,
    batch_size: int = 64,
    **settings: Any,
) -> Config:
    """Return the configuration for training a head on stored features with `fit_head`: SGD with a cosine schedule.

    Args:
        method: The name of the method, one of `longtail.recipes.METHODS`.
        images: The number of training images; batch and queue are not longer.
        epochs: The number of epochs of each stage.
        learning_rate: The learning rate of each stage, for features that are scaled to a mean square of 1.
        weight_decay: The weight decay of each stage.
        batch_size: The batch size.
        settings: Settings of the method, with the names of their flags.
    """
    preset, batch_size = find_preset(method), min(batch_size, images)
    # A training has some hundred steps, which is too short for a momentum of 0.999.
    defaults: dict[str, Any] = {"tau": 0.1, "alpha": "auto", "queue": min(MAX_QUEUE, images), "momentum": 0.99}
    linear: dict[str, Any] = {"linear_epochs": epochs, "linear_lr": learning_rate, "linear_decay": weight_decay}
    config = Config(
        recipe="features",
        method=preset.make_settings(batch_size, **defaults),
        optim=OptimConfig(lr=learning_rate, weight_decay=weight_decay),
        train=TrainConfig(epochs=epochs, batch_size=batch_size),
    )
    if issubclass(preset.settings_class, LinearStageSettings):
        settings = linear | settings  # some presets have a rate of their own for images
    return replace(config, method=replace(config.method, **settings))
