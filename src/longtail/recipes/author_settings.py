"""How the authors of other methods ran them on large images, where their released configurations say it.

Sizes of groups for batch norm are not among what they say: here it sees the whole batch.
"""

from typing import Any

from longtail.config import OptimConfig, ViewConfig
from longtail.recipes.method_presets import AuthorSettings

PLAIN = ViewConfig(crop="resized", jitter=0.4)  # as in the code of OLTR, which those of the field come from


def _decoupling(epochs: int, retraining: int, decay: float) -> dict[str, AuthorSettings]:
    """Kang et al.: 512 images at 0.2, along a cosine; the classifier learns again at the same rate."""
    optim = OptimConfig(lr=0.2, weight_decay=decay)
    plain = AuthorSettings(optim, epochs, 512, view=PLAIN)

    def again(length: int) -> AuthorSettings:
        values = {"linear_epochs": length, "linear_lr": 0.2, "linear_decay": decay}
        return AuthorSettings(optim, epochs, 512, view=PLAIN, values=values)

    return {"ce": plain, "tau-norm": plain, "ncm": plain, "crt": again(retraining), "lws": again(5)}


def _ride(batch_size: int, lr: float) -> dict[str, AuthorSettings]:
    """Wang et al.: 100 epochs in steps; the figures of their README are not those of the PaCo paper, which are at 400."""
    optim = OptimConfig(
        lr=lr,
        weight_decay=2e-4,
        nesterov=True,
        schedule="step",
        milestones=(0.6, 0.8),
        warmup_epochs=5,
        warmup_by="epoch",
    )
    return {f"ride-{n}": AuthorSettings(optim, 100, batch_size, view=PLAIN) for n in (1, 2, 3, 4)}


def _mislas(epochs: int, decay: float, **values: Any) -> dict[str, AuthorSettings]:
    """Zhong et al.: 256 images at 0.1, along a cosine, in both stages."""
    optim = OptimConfig(lr=0.1, weight_decay=decay)
    return {"mislas": AuthorSettings(optim, epochs, 256, view=PLAIN, values=values | {"linear_decay": decay})}


AUTHORS: dict[str, dict[str, AuthorSettings]] = {
    "imagenet-lt": {
        **_decoupling(90, 10, 5e-4),
        "causal-norm": AuthorSettings(OptimConfig(lr=0.2), 90, 512, view=PLAIN, values={"removal": 3.0}),
        "reslt": AuthorSettings(OptimConfig(lr=0.1), 180, 256, view=PLAIN),  # its schedule is not known: a cosine
        **_mislas(180, 5e-4),
        **_ride(256, 0.1),
    },
    "inat2018": {
        **_decoupling(200, 30, 1e-4),
        "bbn": AuthorSettings(
            OptimConfig(lr=0.05, weight_decay=1e-4, schedule="step", milestones=(119 / 180, 159 / 180)),
            180,
            128,
            view=ViewConfig(crop="resized"),
        ),
        **_mislas(200, 1e-4),
        **_ride(512, 0.2),
    },
    "places-lt": _mislas(90, 5e-4, smooth_head=0.4, smooth_tail=0.1),
}
